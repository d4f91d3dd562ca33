"""``simgpu validate``: what agrees, what differs, what is explained and what is refused.

The fixture is one real run, transpose@plain of 1000 x 1500 on an H200, with two numbers falsified (EXECUTED for 48,128)
so that there is a difference to explain.
"""

import copy
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py import registered
from simgpu.cli import main
from simgpu.cli.validate import SHIPPED
from simgpu.errors import SimError
from validation.compare import VERDICTS, Comparison, Outcome, Run, compare_run, read_runs
from validation.compare_access import compare_occupancy, compare_patterns
from validation.exceptions import Explained, explain, read_exceptions

QUICK = 1_000_000  # executed instructions of a run that the tests re-emulate; the 4096^3 GEMMs have tens of millions
EXECUTED = 49000
SITES = {
    "src.load": {"sass": {"LDG.E": 4}, "executed": EXECUTED, "l2_theoretical_sectors_global": 211000,
                 "l2_theoretical_sectors_global_ideal": 188000, "l1_tag_requests_global": 88000,
                 "active_lanes": 1500000},
    "tile.store": {"sass": {"STS": 4}, "executed": EXECUTED, "l1_wavefronts_shared": 47000,
                   "l1_wavefronts_shared_ideal": 47000, "l1_wavefronts_shared_excessive": 0},
    "tile.load": {"sass": {"LDS": 4}, "executed": 48000, "l1_wavefronts_shared": 1500000,
                  "l1_wavefronts_shared_ideal": 48000, "l1_wavefronts_shared_excessive": 1452000},
    "dst.store": {"sass": {"STG.E": 4}, "executed": 48000, "l2_theoretical_sectors_global": 187500,
                  "l2_theoretical_sectors_global_ideal": 187500, "l1_tag_requests_global": 82875},
}
TOTALS = {
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": 1500000.0,
    "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ld.sum": 211000.0,
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": 1464865.0,
    "gpu__time_duration.sum": 10016.0,
}
RUN = {"case": "plain,rows=1000,cols=1500", "variant": "plain", "params": {"rows": 1000, "cols": 1500},
       "sites": SITES, "no_site": {}, "never_active": {}, "totals": TOTALS}
EXCEPTION = """[[exception]]
gpu = "h200"
kernel = "transpose"
case = "*,rows=1000,*"
site = "{}"
column = "executed"
why = "predicated edge"
"""
BOTH = EXCEPTION.format("src.load") + EXCEPTION.format("tile.store")


@pytest.fixture
def validate(tmp_path):
    """Runs the command on a folder of its own: ``runs`` of transpose (or text), and an exceptions file."""

    def run(*options, runs=(RUN,), text=None, exceptions=BOTH, files=None, kernel="transpose"):
        folder = tmp_path / "measured" / "h200"
        folder.mkdir(parents=True, exist_ok=True)
        document = json.dumps({"kernel": "transpose", "provenance": {}, "runs": list(runs)})
        (folder / f"{kernel}.json").write_text(document if text is None else text)
        for name, content in (files or {}).items():
            (folder / name).write_text(content)
        (tmp_path / "exceptions.toml").write_text(exceptions)
        (tmp_path / "published").mkdir(exist_ok=True)
        folders = ("--measured", tmp_path / "measured", "--published", tmp_path / "published",
                   "--exceptions", tmp_path / "exceptions.toml")
        return CliRunner().invoke(main, ["validate", *options, *map(str, folders)])

    return run


def altered(path, value):
    """RUN with the entry at ``path`` replaced, or removed where ``value`` is None."""
    run = copy.deepcopy(RUN)
    *way, last = path
    place = run
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return run


def refused(result, *words):
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


# ---- agreement and difference ----------------------------------------------------------------------------------------


def test_equal_but_for_what_is_explained(validate):
    result = validate("--format", "json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["total"] | {"sites": 5, "equal": 3, "explained": 2, "different": 0} == document["total"]
    listed = document["cases"][0]["comparisons"]
    assert {(row["site"], row["predicted"], row["measured"]) for row in listed} == {
        ("src.load", 48128, EXECUTED), ("tile.store", 48128, EXECUTED)}
    assert "explained: predicated edge" in validate().stdout


def test_all_sites_lists_every_number_and_hardware_counters_do_not_decide(validate):
    every = validate("--all-sites", "--format", "csv").stdout.splitlines()
    assert len(every) == 1 + 16 + 2  # the header, four sites, two totals that are exact
    shown = validate("--hardware", "--format", "csv")
    assert shown.exit_code == 0
    name = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
    assert f'{name},hardware,1452000,1464865,"shown: +12,865 of arbitration"' in shown.stdout


NUMBERS = [("sites", site, name) for site, row in SITES.items() for name in row if name not in ("sass", "active_lanes")]
NUMBERS += [("totals", name) for name in TOTALS if name.startswith("smsp__sass")]


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: " ".join(path[1:]))
def test_every_measured_number_decides(validate, path):
    value = RUN
    for key in path:
        value = value[key]
    result = validate(runs=[altered(path, value + 1)], exceptions="")
    assert result.exit_code == 1 and f"{value + 1:,.0f}" in result.stdout


@pytest.mark.parametrize("run, name", [
    (altered(("sites", "tile.load"), None), "tile.load"),
    (altered(("sites", "extra.load"), {"executed": 7}), "extra.load"),
    (altered(("no_site", "transpose.cu:55"), {"executed": 7}), "(no site at transpose.cu:55)"),
])
def test_a_site_that_only_one_side_has_is_a_difference(validate, run, name):
    result = validate("--format", "csv", runs=[run])
    assert result.exit_code == 1 and [line for line in result.stdout.splitlines() if name in line and "differ" in line]


def test_a_site_that_was_never_executed_is_no_site(validate):
    assert validate(runs=[altered(("sites", "extra.load"), {"sass": {"LDS": 1}, "executed": 0})]).exit_code == 0


def test_an_unmodelled_number_is_neither_equal_nor_different():
    unknown = Comparison("a", "wavefronts", None, 3, unmodelled=True)
    outcome = Outcome("h200", "k", "c", (unknown, Comparison("a", "executed", 1, 1)))
    assert outcome.tally() | {"sites": 1, "unmodelled": 1, "equal": 0} == outcome.tally() and not outcome.different


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 2))))
def test_a_site_counts_as_its_worst_number(rows):
    outcome = Outcome("h200", "k", "c", tuple(Comparison(site, "executed", *numbers) for site, *numbers in rows))
    wrong = {site for site, mine, theirs in rows if mine != theirs}
    tally = outcome.tally()
    assert tally["different"] == len(wrong) and outcome.different == bool(wrong)
    assert tally["sites"] == sum(tally[verdict] for verdict in VERDICTS) == len({site for site, _, _ in rows})


# ---- exceptions ------------------------------------------------------------------------------------------------------


def test_an_exception_that_explains_nothing_is_refused(validate):
    refused(validate(exceptions=BOTH + EXCEPTION.format("tile.load")), "tile.load", "explains no difference")
    assert validate("--case", "*rows=1000*", exceptions=BOTH + EXCEPTION.format("tile.load")).exit_code == 0


@pytest.mark.parametrize("field", ("gpu", "kernel", "column"))
def test_an_exception_of_something_else_explains_nothing(field):
    wrong = Comparison("src.load", "executed", 1, 2)
    right = Explained("h200", "transpose", "*", "src.*", "executed", "why")
    other = Explained(**{**vars(right), field: "other"})
    outcome = Outcome("h200", "transpose", "plain", (wrong,))
    assert not explain([outcome], [right])[0].different
    assert explain([outcome], [other], complete=False)[0].different


@pytest.mark.parametrize("text", ("[[exception]]\ngpu = 'h200'", "[exceptions]", "exception = 3", "[[exception"))
def test_a_damaged_exceptions_file_is_refused(validate, text):
    refused(validate(exceptions=text), "exceptions.toml")


# ---- files that are refused ------------------------------------------------------------------------------------------


def test_half_a_file_is_refused(validate):
    text = json.dumps({"kernel": "transpose", "runs": [RUN]})
    refused(validate(text=text[: len(text) // 2]), "transpose.json", "not a measured file")


@pytest.mark.parametrize("run, words", [
    (altered(("sites",), None), ("run 1", "sites is missing")),
    (altered(("sites", "tile.load", "executed"), 1.5), ("run 1", "tile.load", "not a row of counts")),
    (altered(("sites", "tile.load"), {"sass": {}}), ("tile.load", "not a row of counts")),
    (altered(("sites", "tile.load"), 3), ("tile.load", "not a row of counts")),
    (altered(("totals", NUMBERS[-1][1]), "many"), ("'many'", "not a number")),
    (altered(("variant",), "zigzag"), ("plain,rows=1000,cols=1500", "no variant 'zigzag'")),
    (altered(("params", "rows"), [1000]), ("run 1", "rows", "[1000]")),
    (altered(("params", "depth"), 3), ("plain,rows=1000,cols=1500", "no parameter 'depth'")),
])
def test_a_foreign_run_is_refused(validate, run, words):
    refused(validate(runs=[run]), *words)


def test_a_file_of_another_kernel_or_without_runs_is_refused(validate):
    refused(validate(runs=[]), "holds no runs")
    refused(validate(text="[1, 2]"), "holds no runs")
    refused(validate(kernel="matmul", text=json.dumps({"kernel": "gemm", "runs": [RUN]})), "'gemm', not 'matmul'")


def test_names_that_are_not_there_are_refused(validate):
    refused(validate("transposed"), "'transposed'", "did you mean 'transpose'")
    refused(validate("--gpu", "h2000"), "unknown GPU 'h2000'")
    refused(validate("--gpu", "h100"), "nothing was measured or published for h100")
    refused(validate("--case", "zigzag"), "no case matches 'zigzag'")


def test_a_kernel_without_a_twin_is_noted_and_refused_when_asked_for(validate):
    foreign = {"matmul.json": json.dumps({"kernel": "matmul", "runs": [RUN]})}
    result = validate(files=foreign)
    assert result.exit_code == 0 and "h200 matmul: not compared: no Python twin" in result.stdout
    refused(validate("matmul", files=foreign), "no Python twin")


# ---- accesses and occupancy ------------------------------------------------------------------------------------------

ACCESS = {"op": "lds", "bytes_per_lane": 4, "active_mask": "0xffffffff",
          "shared_byte_offset": [128 * lane for lane in range(32)],
          "counters": {"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld": 32,
                       "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld": 31}}


@pytest.mark.parametrize("name, value, status", [
    (None, 0, 0),
    ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld", 31, 1),
    ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld", 30, 1),
    ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld", "32", 2),
])
def test_a_measured_access(validate, name, value, status):
    line = copy.deepcopy(ACCESS)
    if name:
        line["counters"][name] = value
    result = validate("access-patterns", files={"patterns.jsonl": json.dumps(line) + "\n"})
    assert result.exit_code == status, result.output


@pytest.mark.parametrize("line", ("{", "3", '{"op": "lds"}', json.dumps(ACCESS | {"counters": {}}),
                                  json.dumps(ACCESS | {"bytes_per_lane": 3}), json.dumps(ACCESS | {"active_mask": "x"}),
                                  json.dumps(ACCESS | {"shared_byte_offset": [1, 2]}), json.dumps(ACCESS)[:200]))
def test_a_line_that_is_no_measured_access_is_refused(validate, line):
    refused(validate("access-patterns", files={"patterns.jsonl": line + "\n"}), "patterns.jsonl", "line 1")


def test_an_access_without_a_rule_is_unmodelled(tmp_path):
    path = tmp_path / "patterns.jsonl"
    unheard = ACCESS | {"op": "atom.shared.unheard.of"}
    filled = ACCESS | {"op": "cp.async.ca", "global_byte_offset": [0] * 32, "source_bytes": [2] * 32}
    path.write_text(json.dumps(unheard) + "\n" + json.dumps(filled) + "\n")
    assert [outcome.tally()["unmodelled"] for outcome in compare_patterns("h200", path)] == [1, 1]


QUERIES = "registers_per_thread,static_shared_bytes,threads_per_block,dynamic_shared_bytes,max_active_blocks_per_sm\n"


@pytest.mark.parametrize("line, status", (("80,0,256,76800,3", 0), ("80,0,256,76801,3", 1), ("80,0,256,76800", 2),
                                          ("80,0,256,many,3", 2), ("", 2)))
def test_a_measured_occupancy_query(validate, line, status):
    result = validate("occupancy", files={"occupancy.csv": QUERIES + line + "\n" * bool(line)})
    assert result.exit_code == status, result.output


# ---- everything that ships -------------------------------------------------------------------------------------------


def shipped(pattern):
    return sorted((SHIPPED / "measured").glob(f"*/{pattern}"))


@pytest.mark.parametrize("path", shipped("patterns.jsonl"), ids=lambda path: path.parent.name)
def test_shipped_accesses_are_equal(path):
    outcomes = compare_patterns(path.parent.name, path)
    wrong = [(outcome.case, row) for outcome in outcomes for row in outcome.comparisons if row.verdict == "different"]
    assert not wrong and sum(outcome.tally()["equal"] for outcome in outcomes) > 1000


@pytest.mark.parametrize("path", shipped("occupancy.csv"), ids=lambda path: path.parent.name)
def test_shipped_occupancy_queries_are_equal(path):
    outcome = compare_occupancy(path.parent.name, path)
    assert outcome.tally()["equal"] == outcome.tally()["sites"] > 3000


def quick(run: Run) -> bool:
    return sum(row["executed"] for row in run.sites.values()) <= QUICK


@pytest.mark.parametrize("path", [path for path in shipped("*.json") if path.stem in registered()],
                         ids=lambda path: path.stem)
def test_shipped_runs_are_equal_or_explained(path: Path):
    """Those of up to :data:`QUICK` instructions; ``simgpu validate`` compares the others too."""
    runs = [run for run in read_runs(path) if quick(run)]
    outcomes = [compare_run(path.parent.name, run) for run in runs]
    outcomes = explain(outcomes, read_exceptions(SHIPPED / "exceptions.toml"), complete=False)
    wrong = [(outcome.case, row.as_dict()) for outcome in outcomes for row in outcome.comparisons
             if row.verdict not in ("equal", "explained")]
    assert not wrong


@settings(max_examples=20, deadline=None)
@given(st.text())
def test_any_text_is_refused_as_a_measured_file(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "transpose.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SimError):
        read_runs(path)
