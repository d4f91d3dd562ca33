"""simgpu check: every barrier of every shipped kernel, seeded bugs, and random programs against all pairs."""

import itertools
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py import registered
from simgpu import GlobalTensor, Launch, float32, uint32
from simgpu.cli import main
from simgpu.cta import CTA
from simgpu.errors import SimError
from simgpu.races import check, gates, needed

SMALL = {
    "transpose": {"rows": 36, "cols": 68},
    "hgemm_ladder": {"m": 128, "n": 128, "k": 96},
    "smem_to_reg": {"iterations": 4, "sms": 1},
    "kda_b0": {"tokens": 5, "heads": 1},
    "kda_b1": {"tokens": 21, "heads": 1},
    "kda_b2": {"tokens": 21, "heads": 1},
    "kda_b3": {"tokens": 21, "heads": 1},
}
VARIANTS = [f"{name}@{variant}" for name, kernel in registered().items() for variant in kernel.variants]


def launch_of(text: str) -> Launch:
    name, variant = text.split("@")
    return registered()[name].launch(variant, **SMALL.get(name, {}))


def site(description: str) -> str:
    return description.split(" (")[0]


def pairs(findings) -> set[tuple[str, str]]:
    return {(site(finding.first), site(finding.second)) for finding in findings}


@pytest.mark.parametrize("kernel", VARIANTS)
def test_shipped_kernels_are_clean(kernel):
    assert check(launch_of(kernel)).findings == ()


# What each barrier of a variant is for: a pair of sites that race without it, None where nothing does.
REFILL, ARRIVE = ("A.{read}", "A.{write}"), ("A.{write}", "A.{read}")
TRANSPOSED = [("tile.store", "tile.load")]
B1 = [("dS.cp", "dS.ldsm"), ("stage.store", "stage.load")]
B2 = [("S_in.cp", "S.base.ldsm"), ("stage.store", "stage.load")]
KDS = [B2[0], ("do.ldsm", "stage.store"), B2[1]]
B3 = [("do.cp", "A.ldsm"), ("product.sts", "beta.dL.lds"), ("beta.dF.sts", "E.dF.row.lds")]
FOLDED = [B3[0], ("A.ldsm", "R1b.qd.sts"), B3[2], ("E.dki.sts", "K1.dki.lds"), ("K1.moved.sts", "dg.moved.lds")]
# The epilogue and the pass that ends dkd give a thread the same elements.
UNFOLDED = [None, ("dkd.sts", "K1.dkd.lds"), FOLDED[4]]
PURPOSE = {
    **{f"transpose@{variant}": TRANSPOSED for variant in ("plain", "pad1", "xor", "vec4")},
    **{f"hgemm_ladder@{variant}": [("A.cp", read)] * 3
       for variant, read in {"A1": "A.lds", "A2": "A.lds", "A2L": "A.ldsm", "A3": "A.ldsm"}.items()},
    # Before the first k-tile is stored nobody has read one.
    **{f"hgemm_ladder@{variant}": [None, ("A.sts", "A.lds"), *[("A.lds", "A.sts"), ("A.sts", "A.lds")] * 2]
       for variant in ("naive", "bcf")},
    "hgemm_ladder@bcf_dbf": [("A.sts", "A.lds")] * 3,
    "hgemm_ladder@bcf_dbf_rw": [*[("A.sts", "A.lds")] * 3, ("A.lds", "C.sts"), ("C.sts", "C.lds")],
    **{f"smem_to_reg@{variant}": [("A.cp", read), None]  # the second is there for the clocks
       for variant, read in {"A1": "A.lds", "A2": "A.lds", "A2L": "A.ldsm", "A3": "A.ldsm"}.items()},
    **{f"kda_b0@{variant}": [("S_in.cp", "p.S.load")] for variant in ("b0alone", "l13", "l13_16bytes")},
    "kda_b0@l12": [("dS.cp", "p.dS.load")],
    **{f"kda_b1@{variant}": B1 for variant in ("roundtrip", "movm", "pad132", "float2", "sw128", "diagonal", "l12")},
    **{f"kda_b1@{variant}": [B1[0], ("dS.ldsm", "stage.store"), B1[1]] for variant in ("union", "union_sw128")},
    **{f"kda_b2@{variant}": B2 for variant in ("sinbug", "sinfix", "noalias")},
    **{f"kda_b2@{variant}": KDS
       for variant in ("scalar", "kdsunion", "vec", "nob0", "l13", "l13_16bytes", "frag", "pad136", "sw128")},
    "kda_b2@sunion": [B2[0], ("S.base.ldsm", "stage.store"), B2[1]],
    **{f"kda_b3@{variant}": [*B3, *UNFOLDED] for variant in ("l6", "opt2")},
    "kda_b3@l7": [*FOLDED[:3], *UNFOLDED],
    **{f"kda_b3@{variant}": FOLDED for variant in ("fold", "vec8", "l7c", "l8", "atomics", "a1d")},
}


def without_sync(monkeypatch, number: int) -> None:
    """Make the ``number``-th barrier that runs do nothing."""
    real, count = CTA.sync, itertools.count()
    monkeypatch.setattr(CTA, "sync", lambda cta: None if next(count) == number else real(cta))


def test_the_purposes_cover_every_kernel():
    assert set(PURPOSE) == {kernel for kernel in VARIANTS if not kernel.startswith("patterns")}


@pytest.mark.parametrize("kernel", PURPOSE)
def test_every_barrier_that_is_removed_is_missed_where_it_is_needed(kernel, monkeypatch):
    launch = launch_of(kernel)
    executed = sum(check(launch).barriers.values())
    assert executed == len(PURPOSE[kernel])
    for number, purpose in enumerate(PURPOSE[kernel]):
        with monkeypatch.context() as patch:
            without_sync(patch, number)
            found = check(launch).findings
        assert (purpose in pairs(found)) if purpose else not found, (number, found)


@pytest.mark.parametrize("kernel", ["hgemm_ladder@bcf_dbf_rw", "kda_b3@l7"])
def test_overlooking_a_barrier_is_removing_it(kernel, monkeypatch):
    launch = launch_of(kernel)
    for number, findings in needed(launch, each=True).items():
        with monkeypatch.context() as patch:
            without_sync(patch, number)
            removed = check(launch).findings
        assert pairs(findings) == pairs(removed)
        assert [finding.bytes for finding in findings] == [finding.bytes for finding in removed]


# ---- seeded bugs -----------------------------------------------------------------------------------------------------


def run(body, *, block: int = 64, grid: int = 1, **options):
    x = GlobalTensor("x", float32, (4096,), init=lambda: np.arange(4096, dtype=np.float32))
    return check(Launch(body, grid=grid, block=block, args=(x,)), **options).findings


def shared(cta, n: int = 256):
    return cta.shared("s", float32, (n,))


def test_a_finding_names_sites_lanes_bytes_and_the_epoch():
    def body(cta, x):
        s = shared(cta)
        cta.sync()
        cta.store(s[cta.tid], 1.0, site="put")
        cta.load(s[63 - cta.tid], site="get")
        cta.sync()

    (finding,) = run(body)
    assert (finding.kind, finding.tensor, finding.bytes, finding.cta) == ("write-read", "s", 256, 0)
    assert re.fullmatch(r"put \(test_check\.py:\d+\)", finding.first)
    assert re.fullmatch(r"get \(test_check\.py:\d+\)", finding.second)
    assert (finding.byte, finding.first_lane, finding.second_lane) == (252, "warp 1 lane 31", "warp 0 lane 0")
    start = int(re.search(r":(\d+)", finding.first)[1])
    assert finding.interval == f"test_check.py:{start - 1} .. test_check.py:{start + 2}"


def test_a_warp_follows_itself():
    def body(cta, x):
        s = shared(cta)
        cta.store(s[cta.tid], 1.0)
        cta.load(s[cta.tid ^ 31])
        cta.store(s[cta.tid ^ 1], 2.0)

    assert run(body) == ()


def test_two_warps_in_one_instruction_race():
    def body(cta, x):
        cta.store(shared(cta)[cta.lane], 1.0, site="put")

    (finding,) = run(body)
    assert (finding.kind, finding.bytes, finding.first_lane, finding.second_lane) == (
        "write-write", 128, "warp 0 lane 0", "warp 1 lane 0")


def test_lanes_that_disagree_in_one_instruction():
    def body(cta, x):
        s = shared(cta)
        with cta.where(cta.warp == 0):
            cta.store(s[cta.lane // 2], 1.0, site="same")
            cta.store(s[cta.lane // 2], (cta.lane // 4).astype(np.float32), site="pairs of one value")
            cta.store(s[64 + cta.lane // 2], cta.lane.astype(np.float32), site="other")

    (finding,) = run(body)
    assert (finding.kind, site(finding.second), finding.byte // 4) == ("same-instruction", "other", 64)


def test_lanes_that_copy_different_sources_to_one_place():
    def body(cta, x):
        s = shared(cta)
        with cta.where(cta.warp == 0):
            cta.cp_async(s[cta.lane // 2], x[cta.lane // 2], 4, cache="ca", site="same")
            cta.cp_async(s[64 + cta.lane // 2], x[cta.lane], 4, cache="ca", site="other")

    assert [(f.kind, site(f.second)) for f in run(body)] == [("same-instruction", "other")]


def copying(wait: bool, barrier: bool, own: bool = False):
    def body(cta, x):
        s = shared(cta)
        cta.cp_async(s[4 * cta.tid], x[4 * cta.tid], site="copy")
        cta.cp_async_commit()
        if wait:
            cta.cp_async_wait()
        if barrier:
            cta.sync()
        cta.load(s[4 * (cta.tid if own else 63 - cta.tid)], vec=4, site="get")

    return body


@pytest.mark.parametrize("wait, barrier, own, kinds", [
    (True, True, False, set()),
    (True, False, True, set()),
    (True, False, False, {"write-read"}),
    (False, True, False, {"in-flight"}),
    (False, False, True, {"in-flight"}),
])
def test_a_copy_needs_its_wait_and_then_a_barrier(wait, barrier, own, kinds):
    findings = run(copying(wait, barrier, own))
    assert {finding.kind for finding in findings} == kinds
    assert pairs(findings) == ({("copy", "get")} if kinds else set())


def test_a_wait_that_leaves_the_group_pending_and_a_copy_without_commit():
    def body(cta, x):
        s = shared(cta, 1024)
        for i in range(2):
            cta.cp_async(s[4 * cta.tid + 256 * i], x[4 * cta.tid], site=f"copy {i}")
            cta.cp_async_commit()
        cta.cp_async(s[4 * cta.tid + 512], x[4 * cta.tid], site="loose")
        cta.cp_async_wait(1)
        cta.sync()
        for i in range(3):
            cta.load(s[4 * cta.tid + 256 * i], site=f"get {i}")

    assert {(f.kind, site(f.first), site(f.second)) for f in run(body)} == {
        ("in-flight", "copy 1", "get 1"), ("in-flight", "loose", "get 2")}


def test_refilling_what_another_warp_still_reads():
    def body(cta, x):
        s = shared(cta)
        cta.store(s[4 * cta.tid], np.zeros(4, np.float32), vec=4, site="put")
        cta.sync()
        cta.load(s[4 * (63 - cta.tid)], vec=4, site="get")
        cta.cp_async(s[4 * cta.tid], x[4 * cta.tid], site="refill")

    assert [(f.kind, site(f.first), site(f.second)) for f in run(body)] == [("read-write", "get", "refill")]


def test_storing_over_a_copy_in_flight():
    def body(cta, x):
        s = shared(cta)
        cta.cp_async(s[4 * cta.tid], x[4 * cta.tid], site="copy")
        cta.sync()
        cta.store(s[cta.tid], 0.0, site="put")

    assert [(f.kind, site(f.first), site(f.second)) for f in run(body)] == [("in-flight", "copy", "put")]


def test_two_warps_copy_to_one_place():
    def body(cta, x):
        cta.cp_async(shared(cta)[4 * cta.lane], x[4 * cta.lane], site="copy")

    assert [(f.kind, site(f.first), site(f.second)) for f in run(body)] == [("write-write", "copy", "copy")]


def test_reading_what_nobody_wrote():
    def body(cta, x):
        s = shared(cta)
        cta.store(s[cta.tid], 1.0)
        cta.sync()
        cta.load(s[cta.tid + 1], site="get")

    (finding,) = run(body)
    assert (finding.kind, finding.byte, finding.bytes, finding.second_lane, finding.first) == (
        "unwritten", 256, 4, "warp 1 lane 31", "")


def test_atomics_race_with_stores_only():
    def body(plain):
        def atomics(cta, x):
            s = cta.shared("s", uint32, (64,))
            cta.store(s[cta.tid], 0, site="zero")
            if not plain:
                cta.sync()
            cta.red_add(s[cta.lane], 1, site="add")
            cta.red_add(s[cta.lane], 1, site="again")
            cta.sync()
            cta.load(s[cta.lane])

        return atomics

    assert run(body(plain=False)) == ()
    # warp 0 zeroes words 0 to 31 and adds to them, warp 1 adds to them too
    assert pairs(run(body(plain=True))) == {("zero", "add")}


def test_a_fault_ends_its_cta_and_the_others_are_checked():
    def body(cta, x):
        s = shared(cta)
        cta.store(s[cta.tid + 200 * cta.bx], 1.0, site="put")
        cta.load(s[63 - cta.tid], site="get")

    findings = run(body, grid=2)
    assert [finding.kind for finding in findings] == ["write-read", "fault"]
    assert findings[0].cta == 0 and findings[1].cta == 1
    assert "lane 24: index 0 of 's' is 256, outside 0..255" in findings[1].detail
    assert site(findings[1].second) == "put"


def test_a_barrier_in_divergent_code_is_a_fault():
    def body(cta, x):
        with cta.where(cta.lane == 0):
            cta.sync()

    (finding,) = run(body)
    assert finding.kind == "fault" and "divergent" in finding.detail


def test_a_barrier_concerns_the_ctas_that_reach_it():
    def body(cta, x):
        s = shared(cta)
        cta.store(s[cta.tid], 1.0, site="put")
        with cta.where(cta.bx == 0):
            cta.sync()
        cta.load(s[63 - cta.tid], site="get")

    (finding,) = run(body, grid=2)
    assert (finding.kind, finding.cta, finding.bytes) == ("write-read", 1, 256)


def test_a_mistake_is_no_finding():
    with pytest.raises(SimError, match="takes one value per lane"):
        run(lambda cta, x: cta.where(np.zeros(7, bool)).__enter__())


def test_chosen_ctas():
    launch = launch_of("transpose@pad1")
    assert check(launch).ctas == (0, 1, launch.ctas - 1)
    assert check(launch, ctas=[3, 1]).ctas == (1, 3)
    with pytest.raises(SimError, match="the grid"):
        check(launch, ctas=[launch.ctas])


def test_gates():
    table = check(launch_of("transpose@plain")).table
    assert gates(table, None, None) == gates(table, 10**6, 32) == ()
    excessive = sum(row.excessive or 0 for row in table.sites)
    assert excessive > 0 and gates(table, excessive, None) == ()
    (total,) = gates(table, excessive - 1, None)
    (site_gate,) = gates(table, None, 2)
    assert f"{excessive:,} excessive" in total.detail and "tile.load" in site_gate.second


# ---- random programs -------------------------------------------------------------------------------------------------

WARPS, WORDS = 3, 2
STEP = st.one_of(
    st.just("sync"),
    st.tuples(st.sampled_from(["load", "store", "add"]), st.integers(0, WARPS - 1), st.integers(0, WORDS - 1)),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(STEP, max_size=14))
def test_random_programs_against_all_pairs(program):
    def body(cta, x):
        s = cta.shared("s", uint32, (WORDS,))
        for number, step in enumerate(program):
            if step == "sync":
                cta.sync()
                continue
            verb, warp, word = step
            with cta.where((cta.warp == warp) & (cta.lane == 5)):
                at = s[np.full(cta.shape, word)]
                if verb == "store":
                    cta.store(at, 1, site=f"store {number}")
                elif verb == "load":
                    cta.load(at, site=f"load {number}")
                else:
                    cta.red_add(at, 1, site=f"add {number}")

    expected, unwritten = set(), set()
    for later, step in enumerate(program):
        if step == "sync":
            continue
        verb, warp, word = step
        if verb != "store" and not any(s[0] != "load" and s[2] == word for s in program[:later] if s != "sync"):
            unwritten.add(later)
        for earlier in range(later - 1, -1, -1):
            if program[earlier] == "sync":
                break
            verb0, warp0, word0 = program[earlier]
            if warp0 != warp and word0 == word and {verb0, verb} not in ({"load"}, {"add"}):
                expected.add((earlier, later))

    found = run(body, block=32 * WARPS)

    def number(text: str) -> int:
        return int(text.split()[1])

    races = {(number(f.first), number(f.second)) for f in found if f.kind != "unwritten"}
    assert races <= expected
    assert bool(races) == bool(expected)
    assert {number(f.second) for f in found if f.kind == "unwritten"} == unwritten
    if all(step == "sync" or step[0] != "add" for step in program):
        assert {later for _, later in races} == {later for _, later in expected}


# ---- the command -----------------------------------------------------------------------------------------------------

RACY = """
from simgpu import GlobalTensor, Launch, float32

def racy():
    def body(cta):
        s = cta.shared("s", float32, (64,))
        cta.store(s[cta.tid], 1.0, site="put")
        cta.load(s[63 - cta.tid], site="get")
    return Launch(body, grid=2, block=64)
"""


def command(*arguments: str):
    return CliRunner().invoke(main, ["check", *arguments])


def test_command_clean():
    result = command("transpose@pad1", "--set", "rows=64", "--set", "cols=64", "--max-excessive", "0")
    assert result.exit_code == 0
    assert result.output == "transpose@pad1: clean (3 of 4 CTAs, with values; 1 barrier executed)\n"


def test_command_finding(tmp_path):
    (tmp_path / "racy.py").write_text(RACY)
    result = command(f"{tmp_path}/racy.py:racy")
    assert result.exit_code == 1
    assert "write-read" in result.output and "put (racy.py:7)" in result.output and "get (racy.py:8)" in result.output
    document = json.loads(command(f"{tmp_path}/racy.py:racy", "--format", "json").output)
    assert [finding["bytes"] for finding in document["findings"]] == [512]


def test_command_gate():
    result = command("transpose", "--set", "rows=64", "--set", "cols=64", "--max-n-way", "4", "--format", "csv")
    assert result.exit_code == 1
    assert "32-way, more than 4" in result.output


def test_command_barriers():
    result = command("kda_b3@l6", "--barriers", "--set", "tokens=20", "--set", "heads=1")
    assert result.exit_code == 0
    (idle,) = re.findall(r"orders nothing, if the others stay: (.*)", result.output)
    assert idle.startswith("kda_b3_chunk.py:") and "," not in idle
    document = json.loads(command("transpose", "--set", "rows=64", "--set", "cols=64", "--barriers",
                                  "--format", "json").output)
    ((reason,),) = document["needed"].values()
    assert reason["kind"] == "write-read"


@pytest.mark.parametrize("arguments", [("transpose", "--ctas", "0"), ("transpose@none",), ("transpose", "--ctas", "x")])
def test_command_refuses(arguments):
    result = command(*arguments)
    assert result.exit_code == 2 and result.output.count("\n") == 1
