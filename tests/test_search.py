"""simgpu search: parameters explored, ranked, resumed and spread; and what the command refuses."""

import csv
import functools
import io

import joblib
import pytest
from click.testing import CliRunner

import simgpu.search
from kernels_py import find
from simgpu.cli import main
from simgpu.cli.search import launch_of
from simgpu.errors import SimError
from simgpu.launch import Kernel, Launch
from simgpu.run import simulate
from simgpu.search import Journal, Outcome, axis, evaluate, explore, fingerprint, product, rank
from simgpu.search_layout import search_layout
from simgpu.tensor import float32


def invoke(*arguments):
    return CliRunner().invoke(main, ["search", *arguments])


# ---- the space of parameters -----------------------------------------------------------------------------------------

HOST = Kernel("host", lambda *, pad=0, scale=1.0, fast=False, layout="row": None)


@pytest.mark.parametrize(
    "text, values",
    [
        ("pad=3", [3]),
        ("pad=4,0x10,1", [4, 16, 1]),
        ("pad=0:3", [0, 1, 2, 3]),
        ("pad=-4:8:5", [-4, 1, 6]),
        ("scale=0.5,2", [0.5, 2.0]),
        ("fast=no,yes", [False, True]),
        ("layout=Swizzle<2,3,3>,row(8,8,pad=1)", ["Swizzle<2,3,3>", "row(8,8,pad=1)"]),
        ("layout=1:4", ["1:4"]),
    ],
)
def test_an_axis_has_the_type_of_its_parameter(text, values):
    name, found = axis(HOST, None, text)
    assert (name, found) == (text.partition("=")[0], values)
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize(
    "text",
    ["pad", "pad=", "=1", "pat=1", "pad=x", "pad=3:1", "pad=1:3:0", "pad=1,2,1", "pad=0x:2", "pad=0:99999999"],
)
def test_what_is_no_axis_is_refused(text):
    with pytest.raises(SimError):
        axis(HOST, None, text)


def test_a_product_runs_through_its_last_axis_first():
    assert product({"a": [1, 2], "b": "xy"}) == [{"a": a, "b": b} for a in (1, 2) for b in "xy"]
    with pytest.raises(SimError, match="too many"):
        product({"a": range(2000), "b": range(2000)})


# ---- exploring -------------------------------------------------------------------------------------------------------

TILES = product({"layout": ["plain", "nonsense", "pad1", "xor", "vec4"], "rows": [32, 34]})
TRANSPOSE = functools.partial(launch_of, "transpose", (("cols", 64),))


def test_every_combination_has_an_outcome_in_order_and_refusals_say_why():
    outcomes = explore(TRANSPOSE, TILES)
    assert [outcome.parameters for outcome in outcomes] == TILES
    assert [bool(outcome.refusal) for outcome in outcomes] == [
        each["layout"] == "nonsense" or (each["layout"], each["rows"]) == ("vec4", 34) for each in TILES
    ]
    for outcome in outcomes:
        if outcome.refusal:
            assert outcome.wavefronts is None and "transpose: " in outcome.refusal
        else:
            result = simulate(TRANSPOSE(**outcome.parameters))
            total = result.table.total()
            assert (outcome.wavefronts, outcome.ideal, outcome.sectors, outcome.shared_bytes) == (
                total.wavefronts, total.ideal, total.sectors, result.shared_bytes)


def test_parameters_may_be_anything_the_host_takes():
    def host(layout):
        def body(cta):
            tile = cta.shared("tile", float32, (32, 32), layout)
            cta.store(tile[cta.lane, 0], 1.0)

        return Launch(body, 1, 32)

    seen = []
    layouts = [None, lambda row, column: 33 * row + column]
    outcomes = explore(host, product({"layout": layouts}), progress=lambda *counts: seen.append(counts))
    assert [outcome.wavefronts for outcome in outcomes] == [32, 1]
    assert seen == [(1, 2), (2, 2)]


def test_outcomes_do_not_depend_on_who_runs_them():
    assert explore(TRANSPOSE, TILES, jobs=2) == explore(TRANSPOSE, TILES)


def test_a_dask_cluster_gives_the_same():
    distributed = pytest.importorskip("distributed", reason="dask[distributed] is not installed")
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with distributed.Client(**options), joblib.parallel_config(backend="dask"):
        spread = explore(TRANSPOSE, TILES)
    assert spread == explore(TRANSPOSE, TILES)


def outcome(number, wavefronts, shared_bytes, **more):
    return Outcome({"number": number}, None, wavefronts, 0, 0, shared_bytes=shared_bytes, threads=32, **more)


def test_rank_is_by_wavefronts_then_bytes_then_blocks_and_ties_stay():
    blocks = {1: 4, 2: 4, 3: 8, 4: 1, 5: 1, 6: 8}
    made = [outcome(1, 9, 64), outcome(2, 9, 64), outcome(3, 9, 64), outcome(4, 9, 32), outcome(5, 8, 99),
            outcome(6, 9, 64, unmodelled=3), Outcome({"number": 7}, "no"), outcome(8, 1, 1)]

    def blocks_of(each):
        if each.parameters["number"] == 8:
            raise SimError("too many registers")
        return blocks[each.parameters["number"]]

    ranked, refused = rank(made, blocks_of)
    assert [each.parameters["number"] for each in ranked] == [5, 4, 3, 1, 2]
    assert [each.parameters["number"] for each in refused] == [6, 7, 8]
    assert "no proven rule" in refused[0].refusal and refused[2].refusal == "too many registers"
    ranked, _ = rank(made, blocks_of, allow_unmodelled=True)
    assert [each.parameters["number"] for each in ranked] == [5, 4, 3, 6, 1, 2]


def test_parts_of_grids_of_different_sizes_do_not_compare():
    with pytest.raises(SimError, match="do not compare"):
        explore(TRANSPOSE, product({"rows": [32, 64]}), ctas=1)
    assert len(explore(TRANSPOSE, product({"rows": [32, 64]}))) == 2


def test_unproven_accesses_are_told():
    def body(cta):
        bins = cta.shared("bins", float32, (32,))
        cta.store(bins[cta.lane], 0.0)
        cta.atomic_add(bins[cta.lane], 1.0)

    assert evaluate(lambda: Launch(body, 1, 32), {}).unmodelled == 1
    with pytest.raises(SimError, match="no proven rule"):
        search_layout(Launch(body, 1, 32), "bins")


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_finished_combinations_are_not_run_again(tmp_path, monkeypatch):
    file = tmp_path / "journal"
    whole = explore(TRANSPOSE, TILES, journal=Journal(file, "f"))
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + len(TILES)
    file.write_text("".join(lines[:4]) + lines[4][:20])  # a crash within a line
    runs = []
    monkeypatch.setattr(simgpu.search, "evaluate", lambda *given: runs.append(given[1]) or evaluate(*given))
    assert explore(TRANSPOSE, TILES, journal=Journal(file, "f")) == whole
    assert runs == TILES[3:]
    assert file.read_text() == "".join(lines)
    assert explore(TRANSPOSE, TILES, journal=Journal(file, "f")) == whole and runs == TILES[3:]


@pytest.mark.parametrize(
    "content", ["no newline", "text\n", '{"a": 1}\n', "[1]\n", '{"simgpu search": 1, "fingerprint": "g"}\n']
)
def test_a_file_of_something_else_is_refused_and_kept(content, tmp_path):
    file = tmp_path / "precious"
    file.write_text(content)
    with pytest.raises(SimError, match="precious"):
        Journal(file, "f")
    assert file.read_text() == content


def test_a_line_that_is_no_outcome_is_named(tmp_path):
    file = tmp_path / "journal"
    Journal(file, "f")
    file.write_text(file.read_text() + '{"parameters": {}, "colour": 3}\n')
    with pytest.raises(SimError, match="line 2: not an outcome"):
        Journal(file, "f")
    with pytest.raises(SimError, match="directory"):
        Journal(tmp_path, "f")


def test_the_fingerprint_follows_the_kernels_source_and_the_space(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def own(*, n=1): pass\n")
    kernel, _ = find(f"{file}:own")
    first = fingerprint(kernel, {"n": [1]})
    assert first == fingerprint(kernel, {"n": [1]}) != fingerprint(kernel, {"n": [2]})
    file.write_text("def own(*, n=1): return n\n")
    assert fingerprint(kernel, {"n": [1]}) != first
    with pytest.raises(SimError, match="no source file"):
        fingerprint(Kernel("made", functools.partial(print)))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_explores_a_kernel_of_the_users_own_in_processes(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import numpy as np\nfrom simgpu import Launch, SimError, float32\n"
        "def own(*, pad=0, vec=1):\n"
        "    if pad % vec: raise SimError(f'pad {pad} splits vectors of {vec}')\n"
        "    return Launch(body, grid=2, block=32, args=(pad, vec), registers=40)\n"
        "def body(cta, pad, vec):\n"
        "    tile = cta.shared('tile', float32, (32, 32 + pad))\n"
        "    value = np.ones((1, 1, 1, vec), 'f')\n"
        "    cta.store(tile[cta.lane, 0], value if vec > 1 else value[..., 0], vec=vec, site='column')\n"
    )
    options = [f"{file}:own", "--over", "pad=0:4", "--over", "vec=1,4", "--resume", str(tmp_path / "journal")]
    first = invoke(*options, "--jobs", "2", "--format", "csv")
    assert first.exit_code == 0, first.output
    rows = list(csv.DictReader(io.StringIO(first.output)))
    assert [(row["set.pad"], row["set.vec"], row["wavefronts"]) for row in rows[:4]] == [
        ("1", "1", "2"), ("3", "1", "2"), ("2", "1", "4"), ("4", "1", "8")]
    assert [row["refusal"] for row in rows if row["refusal"]] == [f"pad {pad} splits vectors of 4" for pad in (1, 2, 3)]
    assert invoke(*options, "--format", "csv").output == first.output
    table = invoke(*options, "--top", "1").output
    assert "7 ranked" in table and "3 refused" in table and "refused: pad=2 vec=4: pad 2 splits" in table
    assert "--regs" not in table
    file.write_text(file.read_text() + "# changed\n")
    assert "holds another search" in invoke(*options).output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["transpose"], "--over NAME=VALUES or --tensor NAME"),
        (["transpose", "--tensor", "tile", "--over", "rows=32"], "and not both"),
        (["transpose", "--tensor", "tile", "--resume", "x"], "--resume belongs to --over"),
        (["transpose", "--over", "rows=32", "--max-pad", "0"], "--max-pad belongs to --tensor"),
        (["transpose", "--over", "rows=32", "--over", "rows=64"], "set elsewhere too"),
        (["transpose", "--over", "rows=32", "--set", "rows=64"], "set elsewhere too"),
        (["transpose", "--over", "layout=a,b"], "all 2 combinations are refused; layout=a: transpose:"),
        (["transpose", "--over", "cows=32"], "did you mean 'rows'"),
        (["transpose", "--set", "rows=64", "--tensor", "til"], "did you mean 'tile'"),
        (["transpose", "--over", "rows=32", "--set", "cols"], "is not NAME=VALUE"),
    ],
)
def test_mistakes_are_refused_in_one_line(arguments, message):
    run = invoke(*arguments)
    assert run.exit_code == 2
    assert message in run.output and run.output.count("\n") == 1
