"""The measuring harness without a GPU: sources, line tables, reports, results, and the measured data itself."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from simgpu.errors import SimError
from validation import measure, ncu
from validation.ncu import COLUMNS, Instruction, Launch, by_site, folder_sites, line_table, read_launch

MEASURED = sorted((Path(measure.__file__).parent / "measured").glob("*/*.json"))
TWINS = [path for path in MEASURED if path.stem in measure.KERNELS]


# ---- sources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transpose.cu", "hgemm_ladder.cu", "smem_to_reg.cu", "gemm_tile.cuh"])
def test_every_memory_instruction_of_a_twin_carries_a_site(name):
    text = (measure.SOURCES / name).read_text()
    used = re.compile(r"\b(LDG|STG|LDS|STS|LDSM_|CP_ASYNC_CG)\w*\(")
    bare = [line.strip() for line in text.splitlines() if used.search(line) and not ncu.SITE.search(line)]
    assert used.search(text) and not bare


def test_sites_are_found_by_file_and_line():
    sites = folder_sites(measure.SOURCES)
    lines = (measure.SOURCES / "transpose.cu").read_text().splitlines()
    at = {site: lines[line - 1] for (name, line), site in sites.items() if name == "transpose.cu"}
    assert set(at) == {"src.load", "tile.store", "tile.load", "dst.store"}
    assert all(site in text for site, text in at.items())


def test_the_innermost_line_before_an_instruction_is_its_line():
    listing = """
\t.section\t.text._Z1aPf,"ax",@progbits
.text._Z1aPf:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/src/a.cu", line 30
\t//## File "/src/tile.cuh", line 7
        /*0010*/              @!P1 LDG.E R11, desc[UR6][R12.64] ;
        /*0020*/                   EXIT ;
.text._Z1bPf:
        /*0000*/                   NOP ;
"""
    assert line_table(listing) == {"_Z1aPf": {0x10: ("/src/tile.cuh", 7), 0x20: ("/src/tile.cuh", 7)}, "_Z1bPf": {}}


# ---- instructions to sites -----------------------------------------------------------------------------------------

SASS = {
    "LDS R1, [R2]": "LDS", "@P0 STS.128 [R12], R4": "STS.128", "@!P1 LDG.E R1, desc[UR6][R12.64]": "LDG.E",
    "LDSM.16.MT88.2 R4, [R6]": "LDSM.16.MT88.2", "LDGSTS.E.BYPASS.128 [R7], desc[UR12][R4.64]": "LDGSTS.E.BYPASS.128",
    "STL [R1+0x8], R17": "STL", "@P0 REDG.E.ADD.STRONG.GPU desc[UR6][R4.64], R9": "REDG.E.ADD.STRONG.GPU",
    "LDGDEPBAR": None, "LDC R1, c[0x0][0x28]": None, "HMMA.16816.F32.BF16 R4, R8, R12, R4": None,
    "LEA R4, R120, UR8, 0x1": None, "ULDC.64 UR4, c[0x0][0x208]": None, "STAGE R1": None,
}


@pytest.mark.parametrize(("sass", "spelled"), SASS.items())
def test_memory_instructions_are_told_by_their_spelling(sass, spelled):
    rows = by_site([Instruction(0, sass, "a.cu", 1, {"executed": 1})], {("a.cu", 1): "x"}).sites
    assert [list(row["sass"]) for row in rows.values()] == ([[spelled]] if spelled else [])


@given(st.lists(st.tuples(st.sampled_from([*SASS, "@!PT LDS RZ, [RZ]"]), st.integers(1, 4), st.integers(0, 99),
                          st.integers(0, 9))))
def test_no_count_is_lost_or_invented(rows):
    instructions = [Instruction(16 * i, sass, "/x/a.cu", line, {"executed": executed, "l1_wavefronts_shared": waves})
                    for i, (sass, line, executed, waves) in enumerate(rows)]
    found = by_site(instructions, {("a.cu", 1): "one", ("a.cu", 2): "two", ("a.cu", 3): "two"})
    groups = (found.sites, found.no_site, found.never_active)
    for name in ("executed", "l1_wavefronts_shared"):
        assert sum(row[name] for group in groups for row in group.values()) == sum(
            i.counters[name] for i in instructions if ncu.MEMORY.match(i.sass))
    assert set(found.sites) <= {"one", "two"} and set(found.no_site) <= {"a.cu:4"}
    assert all(set(row["sass"]) == {"LDS"} for row in found.never_active.values())


# ---- a report ------------------------------------------------------------------------------------------------------


def metric(value, by_address=None):
    """What ncu_report's IMetric offers of itself here."""
    addresses, counts = list(by_address or {}), list((by_address or {}).values())
    return SimpleNamespace(value=lambda: value, num_instances=lambda: len(counts), as_uint64=counts.__getitem__,
                           correlation_ids=lambda: SimpleNamespace(as_uint64=addresses.__getitem__))


def test_a_launch_joins_counters_text_and_lines_by_address():
    metrics = {"inst_executed": metric(96, {0xB00: 32, 0xB10: 64, 0xB20: 0}),
               "memory_l1_wavefronts_shared": metric(128, {0xB10: 128, 0xB20: 0}),
               "smsp__inst_executed.sum": metric(96.0)}
    sass = {0xB00: "MOV R1, c[0x0][0x28] ; ", 0xB10: "      LDS R1, [R2] ;", 0xB20: "EXIT ;"}
    action = SimpleNamespace(NameBase_MANGLED=1, name=lambda base: "_Z1kPf", metric_names=lambda: list(metrics),
                             metric_by_name=metrics.get, sass_by_pc=sass.get)
    launch = read_launch(action, {"_Z1kPf": {0x10: ("/src/a.cu", 7)}})
    assert launch.kernel == "_Z1kPf" and launch.totals == {"smsp__inst_executed.sum": 96.0}
    assert launch.instructions == (
        Instruction(0x00, "MOV R1, c[0x0][0x28]", "?", 0, {"executed": 32}),
        Instruction(0x10, "LDS R1, [R2]", "/src/a.cu", 7, {"executed": 64, "l1_wavefronts_shared": 128}),
        Instruction(0x20, "EXIT", "?", 0, {"executed": 0}))


def test_without_nsight_compute_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ncu.shutil, "which", lambda tool: None)
    monkeypatch.setattr(ncu.Path, "glob", lambda *_: [])
    with pytest.raises(SimError, match=r"ncu_report not found: install Nsight Compute"):
        ncu.report_module()


# ---- results -------------------------------------------------------------------------------------------------------


def test_a_run_joins_its_four_sources():
    load = Instruction(0x10, "LDS R1, [R2]", "/src/a.cu", 7, {"executed": 64, "l1_wavefronts_shared": 128})
    launch = Launch("_Z1kPf", (load,), {measure.ACHIEVED: 41.5, "dram__bytes_read.sum": 5.0, "not asked": 1.0})
    line = {"case": "pad1,rows=3", "variant": "pad1", "check": "ok"}
    run, = measure.merge(["pad1,rows=3"], [line], [line | {"time": {"median_us": 2.5}}], [launch], {("a.cu", 7): "x"})
    assert run["time"] == {"median_us": 2.5} and run["achieved_occupancy_pct"] == 41.5
    assert run["sites"]["x"]["l1_wavefronts_shared"] == 128 and "not asked" not in run["totals"]


@pytest.mark.parametrize(("checked", "launches"), [(0, 1), (1, 0), (1, 2)])
def test_a_lost_case_or_launch_is_an_error(checked, launches):
    line = {"case": "a", "time": {}}
    with pytest.raises(SimError, match=r"not 1|of 1"):
        measure.merge(["a"], [line] * checked, [line], [Launch("k", (), {})] * launches, {})


def test_a_result_replaces_the_old_one_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "a.json"
    measure.write_atomically(path, {"kernel": "a", "runs": [{"n": 1}, {"n": 2}]})
    assert json.loads(path.read_text()) == {"kernel": "a", "runs": [{"n": 1}, {"n": 2}]}
    with pytest.raises(TypeError):
        measure.write_atomically(path, {"kernel": "a", "runs": [object()]})
    assert json.loads(path.read_text())["runs"][1] == {"n": 2} and list(path.parent.iterdir()) == [path]


def test_cases_are_distinct_and_parse():
    for cases in (make() for make in measure.KERNELS.values()):
        assert len(set(cases)) == len(cases)
        assert all(re.fullmatch(r"\w+(,\w+=\d+)*", case) for case in cases)


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "message"), [
    (["transpose"], "error: nvidia-smi not found: install the NVIDIA driver"),
    (["transpos"], "error: unknown kernel 'transpos' (known: transpose, hgemm_ladder, smem_to_reg, kda_b1"),
    (["transpose", "--only", "("], "error: --only '(' is not a regular expression"),
    (["transpose", "--only", "pad9"], "error: --only 'pad9' matches no case of transpose, such as 'plain,rows=2048"),
    (["transpose", "smem_to_reg", "--only", "1"], "error: "),
])
def test_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "smem_to_reg.json").write_text("{}")
    result = CliRunner().invoke(measure.main, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2 and result.output.startswith(message) and result.output.count("\n") == 1
    assert (tmp_path / "smem_to_reg.json").read_text() == "{}"


# ---- the measured data ---------------------------------------------------------------------------------------------


def test_all_twins_are_measured():
    assert {path.stem for path in TWINS if path.parent.name == "h200"} == set(measure.KERNELS)


WAVES = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_"
SECTORS = "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_"


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.stem)
def test_sites_add_up_to_the_totals(path):
    document = json.loads(path.read_text())
    assert [run["case"] for run in document["runs"]] == measure.KERNELS[path.stem]()
    for run in document["runs"]:
        totals, sums = run["totals"], Counter()
        assert not run["no_site"] and all(set(row["sass"]) == {"LDS"} for row in run["never_active"].values())
        for row in run["sites"].values():
            (family,) = {spelled.split(".")[0] for spelled in row["sass"]}
            sums[family, "executed"] += row["executed"]
            sums[family, "waves"] += row.get("l1_wavefronts_shared", 0)
            sums[family, "sectors"] += row.get("l2_theoretical_sectors_global", 0)
        assert sums["LDS", "waves"] + sums["LDSM", "waves"] == totals[f"{WAVES}ld.sum"] + totals[f"{WAVES}ldsm.sum"]
        assert sums["STS", "waves"] == totals[f"{WAVES}st.sum"]
        assert sums["LDGSTS", "waves"] == totals[f"{WAVES}ldgsts.sum"]
        assert sums["LDG", "sectors"] == totals[f"{SECTORS}ld.sum"]
        assert sums["STG", "sectors"] == totals[f"{SECTORS}st.sum"]
        assert sums["LDGSTS", "sectors"] == totals[f"{SECTORS}ldgsts.sum"]
        assert sums["LDGSTS", "executed"] == totals["smsp__sass_inst_executed_op_ldgsts.sum"]


def test_columns_have_distinct_names():
    assert len(set(COLUMNS.values())) == len(COLUMNS)
