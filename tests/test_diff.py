"""simgpu diff: what changes site by site, the verdict, the formats, and the gates."""

import csv
import io
import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from models.gpu import load_gpu
from simgpu.cli import main
from simgpu.counters import SiteCounters
from simgpu.diff import LAUNCH_COLUMNS, SITE_COLUMNS, Change, Gate, compare, side, verdict
from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.tensor import float32

# One site gets 31 of 32 wavefronts better, another 1 worse.
OWN = """
from simgpu.launch import Launch
from simgpu.tensor import GlobalTensor, float32

def traded(*, pad: int = 0, swap: int = 0) -> Launch:
    out = GlobalTensor("out", float32, (64,))
    return Launch(read, grid=2, block=32, args=(out, pad, swap), registers=40)

def read(cta, out, pad, swap):
    words = cta.shared("words", float32, (2080,))
    for i in range(65):
        cta.store(words[32 * i + cta.lane], 1.0, site="fill")
    cta.load(words[cta.lane * (32 + pad)], site="column")
    cta.load(words[cta.lane * (1 + pad)], site="row")
    cta.store(out[32 * cta.bx + cta.lane], 0.0, site="new.out" if swap else "out")

def adding(*, stride: int = 1) -> Launch:
    def body(cta):
        words = cta.shared("words", float32, (64,))
        for i in range(2):
            cta.store(words[32 * i + cta.lane], 0.0, site="fill")
        cta.atomic_add(words[stride * cta.lane], 1.0, site="add")
    return Launch(body, grid=1, block=32)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def run(*arguments):
    return CliRunner().invoke(main, ["diff", *arguments])


def table(text: str) -> dict[str, list[str]]:
    """The first table of a printed comparison by site."""
    lines = text.splitlines()
    return {line.split()[0]: line.split() for line in lines if line and not line.startswith("─")}


# ---- rows ------------------------------------------------------------------------------------------------------------


def row(site="x", executed=4, wavefronts=8, ideal=4, unmodelled=0) -> SiteCounters:
    return SiteCounters(site, "k.py", 1, "lds", 4, executed, None, wavefronts, ideal, None, None, None, 512, unmodelled)


def test_the_status_of_a_row():
    assert Change("x", row(), row(wavefronts=4)).status == "better"
    assert Change("x", row(), row(executed=5)).status == "worse"
    assert Change("x", row(), row(executed=5, wavefronts=4)).status == "mixed"
    assert Change("x", row(), None).status == "gone"
    assert Change("x", None, row()).status == "new"
    assert Change("x", row(), row(wavefronts=None, unmodelled=4)).status == "unknown wavefronts, excessive"


def test_a_new_site_counts_from_zero_and_is_worse_only_by_its_conflicts():
    new = Change("x", None, row())
    assert new.pair("wavefronts") == (0, 8) and new.delta("wavefronts") == 8
    assert new.pair("sectors") == (None, None)  # it has none, before or after
    assert new.worsened == ["excessive"]
    assert Change("x", None, row(wavefronts=4)).worsened == []


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_worse_means_that_a_counted_column_grew(before, after, executed, more):
    change = Change("x", row(executed=executed, wavefronts=before, ideal=0),
                    row(executed=executed + more, wavefronts=after, ideal=0))
    assert ("wavefronts" in change.worsened) == (after > before)
    assert ("executed" in change.worsened) == (more > 0)
    assert bool(change.worsened) == (change.status in ("worse", "mixed"))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_variant_against_another():
    done = run("transpose", "transpose@pad1", "--gpu", "h200", "--set", "rows=256", "--set", "cols=256")
    assert done.exit_code == 0, done.output
    rows = table(done.output)
    assert rows["tile.load"][-1] == "better" and "src.load" not in rows
    assert "65,536 -> 2,048" in done.output  # 64 tiles x 32 loads of a warp, 32 wavefronts each before
    assert "3 sites do not change" in done.output and "registers unknown (--regs N)" in done.output


def test_the_time_of_a_transpose_goes_from_the_data_pipe_to_dram():
    done = run("transpose", "transpose@pad1", "--gpu", "h200", "--format", "json", "--ctas", "64")
    found = json.loads(done.output)
    assert found["before"]["estimate"]["binding"] == "data pipe" and found["after"]["estimate"]["binding"] == "DRAM"
    assert found["time_change"] == pytest.approx(39.6 / 81.7 - 1, abs=0.05)  # measured medians on an H200


def test_one_kernel_with_another_setting(own):
    done = run(own("traded"), "--vs", "pad=1", "--format", "json")
    found = json.loads(done.output)
    sites = {entry["site"]: entry for entry in found["sites"]}
    assert (sites["column"]["wavefronts_before"], sites["column"]["wavefronts_after"]) == (64, 2)
    assert (sites["row"]["wavefronts_before"], sites["row"]["wavefronts_delta"]) == (2, 2)
    assert found["before"]["registers"] == found["after"]["registers"] == 40
    assert sites["fill"]["status"] == "same"


def test_the_last_setting_of_a_name_holds(own):
    done = run(own("traded"), "--set", "pad=1", "--vs", "pad=0")
    assert done.output.splitlines()[0].endswith("own.py:traded pad=0 on h20")
    assert "2 -> 64" in done.output


def test_what_got_worse_is_never_hidden_by_the_total(own):
    done = run(own("traded"), "--vs", "pad=1")
    rows = table(done.output)
    assert rows["total"][-1] == "better" and rows["column"][-1] == "better" and rows["row"][-1] == "worse"
    assert "worse at row (wavefronts 2 -> 4, excessive 0 -> 2)" in done.output


def test_sites_that_appear_and_disappear(own):
    rows = table(run(own("traded"), "--vs", "swap=1").output)
    assert rows["new.out"][-1] == "new" and rows["out"][-1] == "gone" and rows["total"][-1] == "same"


def test_all_sites_are_shown_when_asked_for(own):
    assert table(run(own("traded"), "--vs", "pad=1", "--all-sites").output)["fill"][-1] == "same"


def test_registers_decide_the_blocks(own):
    found = json.loads(run(own("traded"), "--regs", "32", "--vs-regs", "255", "--format", "json").output)
    assert [found[part]["registers"] for part in ("before", "after")] == [32, 255]
    assert found["after"]["occupancy"]["blocks_per_sm"] < found["before"]["occupancy"]["blocks_per_sm"]
    assert "blocks/SM" in found["verdict"][0]


def test_a_grid_that_never_fills_an_sm_gains_nothing_from_more_blocks():
    small = run("kda_b2@noalias", "kda_b2@kdsunion", "--gpu", "h200", "--ctas", "1").output
    assert "holds 2 -> 3 blocks/SM" in small and "expect about 0% time" in small
    assert "puts 2 CTAs on an SM at most" in small
    large = run("kda_b2@noalias", "kda_b2@kdsunion", "--gpu", "h200", "--ctas", "1", "--set", "tokens=4000").output
    assert "CTAs on an SM at most" not in large


def test_rules_are_drawn_in_ascii_where_the_encoding_asks(own):
    printed = CliRunner(charset="ascii").invoke(main, ["diff", own("traded"), "--vs", "pad=1"]).stdout
    assert printed.isascii() and "\n-----" in printed and "\\u" not in printed


def test_a_part_of_the_grid_says_so(own):
    arguments = own("traded"), "--vs", "pad=1"
    assert "counted 1 of 2 CTAs; the times below are for all" in run(*arguments, "--ctas", "1").output
    assert "counted" not in run(*arguments).output


def test_csv_has_every_column_and_the_total(own):
    rows = list(csv.DictReader(io.StringIO(run(own("traded"), "--vs", "pad=1", "--format", "csv").output)))
    assert [entry["site"] for entry in rows] == ["fill", "column", "row", "out", "total"]
    assert set(rows[0]) == {"site", "status", "instruction"} | {
        f"{column}_{part}" for column in SITE_COLUMNS for part in ("before", "after", "delta")}
    assert rows[-1]["excessive_delta"] == str(-62 + 2)


def test_markdown_has_a_title_and_two_tables(own):
    text = run(own("traded"), "--vs", "pad=1", "--format", "md").output
    assert text.startswith("**") and text.count("| --- |") >= 2


def test_atomics_of_one_address_bind():
    size = ["--set", "tokens=256", "--set", "heads=2", "--gpu", "h200"]
    found = json.loads(run("kda_b3@l8", "kda_b3@atomics", *size, "--format", "json").output)
    assert found["before"]["estimate"]["binding"] == "atomics"
    assert "updates of the most wanted sector from 8,192 to 256" in found["verdict"][0]  # 32 CTAs x 256, x 8
    assert found["time_change"] < -0.4


def test_an_unchanged_kernel_is_expected_to_take_as_long():
    launch = Launch(lambda cta: cta.store(cta.shared("w", float32, (32,))[cta.lane], 1.0, site="w"), grid=1, block=32)
    same = side("same", launch, load_gpu("h20"))
    found = compare(same, same)
    assert found.time_change == 0 and "expect about 0% time" in verdict(found)[0]
    assert "SMs' time is idle" in verdict(found)[1]  # one CTA, 78 SMs


def test_a_kernel_without_memory_accesses_has_no_time():
    idle = side("idle", Launch(lambda cta: cta.sync(), grid=1, block=32), load_gpu("h20"))
    assert compare(idle, idle).time_change is None and idle.estimate.binding == "nothing"
    assert "an unknown change" in verdict(compare(idle, idle))[0]


# ---- gates -----------------------------------------------------------------------------------------------------------

GATES = [  # on traded, pad 0 -> 1: column 64 -> 2 wavefronts, row 2 -> 4, registers 40
    ("excessive>0", ["site row: excessive 0 -> 2"]),
    ("column:excessive>0", []),
    ("wavefronts increased", ["site row: wavefronts 2 -> 4"]),
    ("total:wavefronts increased", []),
    ("total:wavefronts decreased", ["total: wavefronts 196 -> 136"]),
    ("c*: wavefronts decreased by 96%", ["site column: wavefronts 64 -> 2"]),
    ("wavefronts increased by 1", ["site row: wavefronts 2 -> 4"]),
    ("wavefronts increased by 2", []),
    ("row:wavefronts increased by 100%", []),
    ("row:wavefronts increased by 99 %", ["site row: wavefronts 2 -> 4"]),
    ("n_way >= 2", ["site row: n_way 1 -> 2"]),
    ("column:n_way == 1", ["site column: n_way 32 -> 1"]),
    ("sectors_per_request != 4", []),
    ("sectors<=8", ["site out: sectors 8"]),
    ("registers > 39", ["registers 40"]),
    ("registers < 40", []),
    ("blocks_per_sm decreased", []),
    ("us increased", []),
]


@pytest.mark.parametrize("condition, failures", GATES, ids=[condition for condition, _ in GATES])
def test_gates(own, condition, failures):
    done = run(own("traded"), "--vs", "pad=1", "--fail-if", condition)
    assert done.stderr.splitlines() == [f"gate {condition!r}: {failure}" for failure in failures]
    assert done.exit_code == (1 if failures else 0)


def test_json_lists_the_gates_that_failed(own):
    done = run(own("traded"), "--vs", "pad=1", "--fail-if", "excessive>0", "--fail-if", "executed>999",
               "--format", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["failed"] == ["gate 'excessive>0': site row: excessive 0 -> 2"]


@pytest.mark.parametrize("column", [*SITE_COLUMNS, *LAUNCH_COLUMNS])
def test_every_column_can_be_a_gate(column):
    assert Gate.parse(f" {column}  >= 1_000 ").number == 1000
    assert Gate.parse(f"{column} increased by 2.5 %") == Gate(f"{column} increased by 2.5 %", None, column, "increased",
                                                              2.5, True)


def test_a_site_name_may_hold_a_colon():
    gate = Gate.parse("tile.load:75:excessive>0")
    assert (gate.site, gate.column) == ("tile.load:75", "excessive")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition, message", [
    ("excessive", "gate 'excessive' is not [SITE:]COLUMN OP NUMBER"),
    ("excessive>x", "is not [SITE:]COLUMN"),
    ("excesive>0", "no column 'excesive'; did you mean 'excessive'?"),
    ("tile:registers>0", "registers belongs to the launch, not to site 'tile'"),
    ("colum:excessive>0", "no site 'colum'; did you mean 'column'?"),
])
def test_a_bad_gate_is_refused(own, condition, message):
    done = run(own("traded"), "--vs", "pad=1", "--fail-if", condition)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_gate_does_not_pass_by_not_knowing(own):
    arguments = [own("adding"), "--vs", "stride=2", "--fail-if"]
    for condition in ("excessive>0", "total:wavefronts increased", "add:n_way>1"):
        done = run(*arguments, condition)
        assert done.exit_code == 2 and "unknown: accesses without a rule" in done.stderr, condition
    assert run(*arguments, "fill:excessive>0").exit_code == 0
    assert run(*arguments, "executed increased").exit_code == 0
    done = run(*arguments, "registers>64")
    assert done.exit_code == 2 and "registers unknown (--regs N" in done.stderr


@pytest.mark.parametrize("arguments, message", [
    (["transpose"], "nothing to compare transpose with"),
    (["transpose", "transpos"], "unknown kernel 'transpos'; did you mean 'transpose'?"),
    (["transpose", "--vs", "pad=1"], "no parameter 'pad'"),
    (["transpose", "--vs", "rows"], "--vs 'rows' is not NAME=VALUE"),
    (["transpose", "transpose@pad1", "--set", "rows=64", "--set", "cols=32", "--ctas", "3"], "grid (1, 2, 1) has 2"),
])
def test_bad_input_is_refused_in_one_line(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_side_refuses_more_shared_memory_than_the_gpu_has():
    def body(cta):
        cta.store(cta.shared("w", float32, (50000,))[cta.lane], 1.0)

    with pytest.raises(SimError, match=r"200000|200,000"):
        side("large", Launch(body, grid=1, block=32), load_gpu("a100-80g"))
