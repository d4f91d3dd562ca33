"""`simgpu report`: what the page holds, that text is escaped, and that the page works in a browser."""

import functools
import html
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kernels_py import find
from kernels_py.transpose import transpose
from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.cli import main
from simgpu.diff import compare, side, verdict
from simgpu.events import AccessEvent, Site
from simgpu.instructions import FULL_MASK, INSTRUCTIONS
from simgpu.page import _embedded, view
from simgpu.replay import replay
from simgpu.run import simulate
from simgpu.staircase import steps
from simgpu.worst import WorstSink

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SMALL = ["--set", "rows=64", "--set", "cols=64"]


@functools.cache
def report(*args: str) -> str:
    run = CliRunner().invoke(main, ["report", *args, "-o", "-"])
    assert run.exit_code == 0, run.output
    return run.output


def embedded(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


class Balance(HTMLParser):
    """Refuses an element that closes another than the one open."""

    VOID = ("meta", "link", "br")

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(page: str) -> Balance:
    found = Balance()
    found.feed(page)
    found.close()
    assert not found.open
    return found


# ---- the worst access ---------------------------------------------------------------------------------------------


def event(name: str, masks, offsets, ctas=(0, 1)) -> AccessEvent:
    """Every CTA and warp with an address of its own."""
    masks = np.array(masks, np.uint32)
    lanes = np.arange(32, dtype=np.int32)
    side = np.array(offsets, np.int32)[..., None] * lanes
    executed = INSTRUCTIONS[name]
    site = Site("s", "f.py", 1, executed, 4)
    issued = np.ones(masks.shape, bool)
    shared, global_ = (side, None) if executed.shared else (None, side.astype(np.int64))
    return AccessEvent(site, masks, issued, shared, global_, np.array(ctas), masks.shape[1], 0)


@given(
    masks=st.lists(st.integers(0, FULL_MASK), min_size=6, max_size=6),
    strides=st.lists(st.sampled_from([0, 4, 8, 16, 64, 128]), min_size=6, max_size=6),
    name=st.sampled_from(["lds", "ldg"]),
)
def test_no_access_of_a_site_is_worse_than_the_one_kept(masks, strides, name):
    sink = WorstSink()
    heard = event(name, np.reshape(masks, (2, 3)), np.reshape(strides, (2, 3)), ctas=(5, 9))
    sink.access(heard)
    if not any(masks):
        assert not sink.found
        return
    kept = sink.found["s"]
    side = (heard.shared if name == "lds" else heard.global_).reshape(6, 32)
    costs = replay(INSTRUCTIONS[name], 4, np.array(masks), **{"shared" if name == "lds" else "global_": side})
    prices = (costs.wavefronts if name == "lds" else costs.sectors).tolist()
    mine = kept.cost().wavefronts if name == "lds" else kept.cost().sectors
    assert mine == max(price for price, mask in zip(prices, masks, strict=True) if mask)
    k = [5, 9].index(kept.cta) * 3 + kept.warp
    assert (prices[k], masks[k]) == (mine, kept.mask)


def test_an_address_all_ctas_share_is_of_the_first_and_a_worse_one_replaces_it():
    sink = WorstSink()
    sink.access(event("lds", [[FULL_MASK]], [[4]], ctas=(7,)))
    sink.access(event("lds", [[FULL_MASK]], [[8]], ctas=(8,)))
    sink.access(event("lds", [[FULL_MASK]], [[8]], ctas=(9,)))
    assert (sink.found["s"].cta, sink.found["s"].cost().wavefronts) == (8, 2)
    sink.restart()
    assert not sink.found


def test_an_unmodelled_access_is_shown_too():
    sink = WorstSink()
    sink.access(event("atom.shared.add.f32", [[FULL_MASK]], [[4]], ctas=(0,)))
    assert sink.found["s"].cost().unmodelled


# ---- the page -----------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_outside_and_is_the_same_every_time():
    page = report("transpose", *SMALL)
    parsed(page)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)
    again = CliRunner().invoke(main, ["report", "transpose", *SMALL, "-o", "-"]).output
    assert again == page


def test_the_table_and_the_margin_say_what_conflicts_says():
    page = report("transpose", *SMALL)
    found = json.loads(CliRunner().invoke(main, ["conflicts", "transpose", *SMALL, "--format", "json"]).output)
    for row in found["sites"]:
        line = re.search(rf'<tr data-site="{row["site"]}" tabindex.*?</tr>', page)[0]
        for key in ("executed", "wavefronts", "sectors"):
            assert row[key] is None or f'data-value="{row[key]}"' in line
        margin = re.search(rf'<tr data-site="{row["site"]}" title=.*?</tr>', page)[0]
        assert f'<td class="no">{row["line"]}</td>' in margin
        assert f">{row['wavefronts'] or row['sectors']:,}</td>" in margin
        assert f"site=&quot;{row['site']}&quot;" in margin
    assert '<option value="tile.load" selected>' in page  # 32-way


def test_the_map_draws_every_wavefront_and_lane():
    (shown,) = embedded(report("transpose", *SMALL))["tile.load"]
    (banks,) = shown["maps"]
    assert "32 wavefronts (ideal 1" in shown["text"]
    assert [row["heat"] for row in banks["rows"]] == list(range(32))
    assert sorted(int(cell[1]) for row in banks["rows"] for cell in row["cells"]) == list(range(32))
    (lines,) = embedded(report("transpose", *SMALL))["src.load"][0]["maps"]
    assert [cell[1] for cell in lines["rows"][0]["cells"]] == ["0-7: 32 B", "8-15: 32 B", "16-23: 32 B", "24-31: 32 B"]


def test_every_site_of_a_large_kernel_has_a_view():
    kernel, variant = find("kda_b2")
    sink = WorstSink()
    result = simulate(kernel.launch(variant), ctas=2, sinks=[sink])
    run = type("Run", (), {"worst": sink.found, "label": "kda_b2"})
    for row in result.table.sites:
        shown = view(run, row.site)
        assert len(shown["maps"]) == (row.wavefronts is not None) + (row.sectors is not None), row.site


def test_two_runs_side_by_side():
    page = report("transpose", "--vs", "transpose@pad1", *SMALL)
    parsed(page)
    views = embedded(page)["tile.load"]
    assert [len(shown["maps"][0]["rows"]) for shown in views] == [32, 1]
    line = re.search(r'<tr data-site="tile.load" tabindex.*?</tr>', page)[0]
    assert re.findall(r'data-value="([\d.]+)"', line) == ["4096", "128", "3968", "0", "32.0", "1.0"]
    same = report("transpose", "--vs-set", "layout=pad1", *SMALL)
    assert [len(shown["maps"][0]["rows"]) for shown in embedded(same)["tile.load"]] == [32, 1]


def test_another_kernel_may_have_other_sites_and_other_parameters():
    views = embedded(report("transpose", "--vs", "patterns@stride2", *SMALL))
    assert [view is None for view in views["tile.load"]] == [False, True]
    assert any(view[0] is None and view[1] for view in views.values())


KERNEL = """
from simgpu import GlobalTensor, Launch, float32

def evil(*, note: str = "") -> Launch:
    x = GlobalTensor("x", float32, (32,))
    return Launch(body, grid=1, block=32, args=(x,))

def body(cta, x):
    cta.load(x[cta.tx], site="</script><script>alert(1)</script>&\\"'<!--")  # <b>bold</b>
"""


def test_names_and_source_are_escaped(tmp_path):
    file = tmp_path / "<i>k&.py"
    file.write_text(KERNEL)
    page = report(f"{file}:evil", "--set", "note=<img src=x onerror=alert(1)>")
    assert page.count("<script") == 2 and page.count("</script") == 2
    assert "<img" not in page and "<b>bold" not in page and "<i>k" not in page
    text = "".join(parsed(page).texts)
    assert "# <b>bold</b>" in text and "note=<img src=x onerror=alert(1)>" in text
    assert list(embedded(page)) == ["</script><script>alert(1)</script>&\"'<!--"]


@given(st.text())
def test_embedded_json_cannot_leave_its_element(text):
    written = _embedded({"k": text})
    assert not set("<>&") & set(written) and json.loads(written) == {"k": text}


def test_markdown_for_pull_requests():
    text = report("transpose", "--vs", "transpose@pad1", "--format", "md", *SMALL)
    assert "| tile.load | lds | 4,096 | 128 | 3,968 | 0 | 32 | 1 | - | - |" in text
    assert text.startswith("**transpose rows=64 cols=64 → transpose@pad1 rows=64 cols=64 on h20**\n")
    assert "<" not in text


def test_two_kernels_are_told_what_the_change_does_to_the_time():
    changed = ("transpose", "--vs", "transpose@pad1", "--regs", "23", *SMALL)
    small = {"rows": 64, "cols": 64}
    kernels = ("transpose", transpose.launch("plain", **small)), ("transpose@pad1", transpose.launch("pad1", **small))
    said = verdict(compare(*(side(*kernel, load_gpu("h20"), registers=23) for kernel in kernels)))
    assert said and said[0].startswith("removes 94% of shared wavefronts")
    text, page = report(*changed, "--format", "md"), "".join(parsed(report(*changed)).texts)
    assert all(line in text and line in page for line in said)
    assert "shared wavefronts;" not in report("transpose", "--format", "md", *SMALL)


@pytest.mark.parametrize(
    "args, message",
    [
        (["transpose", "--vs-set", "nothing=1"], "no parameter 'nothing'"),
        (["transpose", "--vs", "transpos"], "did you mean 'transpose'"),
        (["transpose", "--ctas", "0"], "--ctas"),
        (["transpose", *SMALL, "-o", "/nowhere/r.html"], "cannot write '/nowhere/r.html'"),
    ],
)
def test_refusals(args, message):
    run = CliRunner().invoke(main, ["report", *args])
    assert (run.exit_code, run.output.count("\n")) == (2, 1)
    assert message in run.output


def test_the_file_is_written_where_asked(tmp_path):
    target = tmp_path / "r.html"
    run = CliRunner().invoke(main, ["report", "transpose", *SMALL, "-o", str(target)])
    assert run.output.startswith(f"wrote {target} (")
    assert target.read_text(encoding="utf-8") == report("transpose", *SMALL)


# ---- occupancy ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_steps_tell_every_sample_again(counts):
    found = steps(list(enumerate(counts)))
    assert [count for first, last, count in found for _ in range(first, last + 1)] == counts
    assert all(a[2] != b[2] for a, b in itertools.pairwise(found))


def test_the_kernel_and_the_next_step_are_marked():
    page = report("kda_b1", "--ctas", "1", "--gpu", "h200")
    kernel, variant = find("kda_b1")
    launch = kernel.launch(variant)
    shared = simulate(launch, ctas=1).shared_bytes
    fit = occupancy(load_gpu("h200"), threads=launch.threads, registers=launch.registers, shared_bytes=shared)
    assert f"this kernel: {fit.blocks_per_sm}" in page
    assert fit.next_step.shared_less and not fit.next_step.registers_less
    assert f"{fit.next_step.blocks} blocks: at most {fit.next_step.shared_bytes:,} B" in page
    assert page.count('<line class="next"') == 1 and page.count('<circle class="here"') == 2
    unknown = report("transpose", *SMALL)
    assert unknown.count('<circle class="here"') == 1 and "(unknown: --regs N)" in unknown


# ---- in a browser ---------------------------------------------------------------------------------------------------

CLICKS = """
const log = [];
const order = () => [...document.querySelectorAll("#sites tbody tr")].map(row => row.dataset.site);
const rects = () => document.querySelectorAll("#access rect:not(.none)").length;
const head = name => [...document.querySelectorAll("#sites th")].find(th => th.textContent.trim() === name);
const maps = document.querySelectorAll("#access svg").length;
log.push(["start", order(), document.querySelector("#site").value, rects(), maps]);
head("wavefronts").querySelector("button").click();
log.push(["descending", order()]);
head("wavefronts").querySelector("button").click();
log.push(["ascending", order()]);
head("site").querySelector("button").click();
log.push(["by name", order()]);
document.querySelector('#sites tr[data-site="src.load"]').click();
log.push(["row", document.querySelector("#site").value, rects(), document.querySelector("#access").textContent]);
const select = document.querySelector("#site");
select.value = "tile.store"; select.dispatchEvent(new Event("change"));
log.push(["select", rects(), [...document.querySelectorAll("tr.chosen")].map(row => row.dataset.site)]);
log.push(["wide", document.documentElement.scrollWidth - document.documentElement.clientWidth]);
document.body.setAttribute("data-log", JSON.stringify(log));
"""


@functools.cache
def browsed(page: str, folder: str, width: int) -> tuple[dict, str]:
    """What CLICKS saw, and what the browser wrote on its console."""
    file = f"{folder}/page.html"
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(page.replace("</body>", f"<script>{CLICKS}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += [f"--user-data-dir={folder}/profile", f"--window-size={width},900"]
    flags += ["--enable-logging=stderr", "--v=0", "--dump-dom", f"file://{file}"]
    ran = subprocess.run([CHROMIUM, *flags], capture_output=True, text=True, timeout=100, encoding="utf-8")
    log = re.search(r'data-log="(.*?)"', ran.stdout)
    assert log, ran.stderr[-2000:]
    return {entry[0]: entry[1:] for entry in json.loads(html.unescape(log[1]))}, ran.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: the page's script is not run")
@pytest.mark.parametrize("width", [1280, 500])  # a headless window is at least 500 wide
def test_in_a_browser_it_sorts_and_shows_the_site_chosen(tmp_path, width):
    seen, console = browsed(report("transpose", *SMALL), str(tmp_path), width)
    assert "CONSOLE" not in console
    assert seen["start"] == [["src.load", "tile.store", "tile.load", "dst.store"], "tile.load", 32, 1]
    assert seen["descending"] == [["tile.load", "tile.store", "src.load", "dst.store"]]  # sites without a number last
    assert seen["ascending"] == [["tile.store", "tile.load", "src.load", "dst.store"]]
    assert seen["by name"] == [["dst.store", "src.load", "tile.load", "tile.store"]]
    site, cells, text = seen["row"]
    assert (site, cells) == ("src.load", 4) and "ldg, 4 B a lane" in text
    assert seen["select"] == [32, ["tile.store", "tile.store"]]  # in the table and in the source
    assert seen["wide"] == [0]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: the page's script is not run")
def test_a_browser_reports_the_error_of_a_broken_page(tmp_path):
    broken = report("transpose", *SMALL).replace('"use strict";', '"use strict"; console.error("broken");')
    assert "CONSOLE" in browsed(broken, str(tmp_path), 1280)[1]
