"""simgpu search: parameters explored, ranked, resumed and spread; layouts priced as the emulator counts them."""

import csv
import functools
import io
import json
import random

import joblib
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import simgpu.search
from kernels_py import find
from simgpu.cli import main
from simgpu.cli.search import launch_of
from simgpu.errors import SimError
from simgpu.launch import Kernel, Launch
from simgpu.layout import cosize, tabulate
from simgpu.run import simulate
from simgpu.search import Journal, Outcome, axis, evaluate, explore, fingerprint, product, rank
from simgpu.search_layout import Candidate, Found, price, search_layout, space
from simgpu.search_record import record
from simgpu.tensor import GlobalTensor, bfloat16, float32


def launch(name, **parameters):
    kernel, variant = find(name)
    return kernel.launch(variant, **parameters)


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


# ---- putting another layout in the place of a tensor's own -----------------------------------------------------------


def test_a_substituted_layout_is_what_the_kernel_runs_under():
    plain = launch("transpose@plain", rows=64, cols=64)
    padded = simulate(launch("transpose@pad1", rows=64, cols=64))
    result = simulate(plain, layouts={"tile": lambda row, column: 33 * row + column})
    assert result.table == padded.table or result.table["tile.load"].wavefronts == padded.table["tile.load"].wavefronts
    assert result.shared_bytes == padded.shared_bytes == 4220
    assert [tensor.name for tensor in result.shared_tensors] == ["tile"]


def test_a_layout_that_loses_data_gives_a_wrong_result():
    with pytest.raises(SimError, match="the result is wrong"):
        simulate(launch("transpose@plain", rows=64, cols=64), layouts={"tile": lambda row, column: 16 * row + column})


def test_a_layout_of_an_unknown_tensor_is_refused():
    with pytest.raises(SimError, match="no shared tensor 'tyle'; did you mean 'tile'"):
        simulate(launch("transpose@plain", rows=64, cols=64), layouts={"tyle": None})


# ---- pricing layouts without running the kernel ----------------------------------------------------------------------

HGEMM = {"m": 128, "n": 128, "k": 64, "stages": 2, "swizzle": 0}
RECORDED = {  # name: (kernel, parameters, pattern, views)
    "elements": ("transpose@plain", {"rows": 64, "cols": 64}, "tile", ()),
    "vectors": ("transpose@vec4", {"rows": 64, "cols": 64}, "tile", ()),
    "edges": ("transpose@plain", {"rows": 50, "cols": 39}, "tile", ()),
    "three dimensions": ("kda_b1@float2", {"tokens": 24, "heads": 1, "stage_stride": 128}, "stage", ()),
    "views": ("kda_b1@float2", {"tokens": 24, "heads": 1}, "dS", ("dS_t",)),
    "cp.async.ca": ("kda_b1@diagonal", {"tokens": 24, "heads": 1}, "dS", ("dS_t",)),
    "cp.async.cg": ("hgemm_ladder@A3", HGEMM, "As*", ()),
    "ldmatrix": ("hgemm_ladder@A3", HGEMM, "Bs*", ()),
    "one dimension": ("patterns@stride2", {}, "words", ()),
}


@functools.cache
def recorded(name):
    kernel, parameters, pattern, views = RECORDED[name]
    made = launch(kernel, **parameters)
    return made, *record(made, pattern, views, ctas=None, mode="values")


@functools.cache
def candidates(name):
    _, recording, _ = recorded(name)
    return list(space(recording.tensor.shape, recording.tensor.dtype.itemsize, column_major=True))


def counted(table, sites):
    return {site: (table[site].wavefronts, table[site].ideal) for site in sites}


@pytest.mark.parametrize("name", RECORDED)
def test_the_recording_holds_what_the_emulator_counted(name):
    _, recording, result = recorded(name)
    found = price(recording, recording.own_table)
    assert found.sites == counted(result.table, found.sites)


@pytest.mark.parametrize("name", RECORDED)
def test_prices_are_what_the_emulator_counts_and_split_vectors_are_what_it_refuses(name):
    made, recording, _ = recorded(name)
    shuffled = random.Random(name).sample(candidates(name), min(400, len(candidates(name))))
    seen = {"found": 0, "split": 0}
    for candidate in shuffled:
        found = price(recording, candidate.table, candidate)
        kind = found if isinstance(found, str) else "found"
        assert kind in seen
        seen[kind] += 1
        if seen[kind] > 6:
            continue
        layouts = recording.substitutes(candidate.layout)
        if kind == "split":
            with pytest.raises(SimError):
                simulate(made, mode="values", layouts=layouts)
        else:
            table = simulate(made, mode="values", layouts=layouts).table
            assert found.sites == counted(table, found.sites)
    assert seen["found"] >= 3
    assert (seen["split"] > 0) == (len(recording.vectors) > 0)


def test_the_winner_is_that_of_running_the_kernel_under_every_layout():
    made = launch("transpose@plain", rows=32, cols=32)
    options = {"max_pad": 2, "column_major": True}
    costs = [(simulate(made, layouts={"tile": each.layout}).table.total().wavefronts, cosize(each.table) * 4,
              each.swizzle[0] if each.swizzle else 0) for each in space((32, 32), 4, **options)]
    found = search_layout(made, "tile", **options)
    best = found.best
    assert found.tried == len(costs)
    assert (best.wavefronts, best.nbytes, best.candidate.swizzle[0]) == min(costs)
    assert [each.rank for each in found.ranked] == sorted(each.rank for each in found.ranked)


@pytest.mark.parametrize("name", ["elements", "three dimensions", "cp.async.cg", "one dimension"])
def test_a_candidates_table_is_its_layouts(name):
    shape = recorded(name)[1].tensor.shape
    for candidate in candidates(name)[::97]:
        assert np.array_equal(candidate.table, tabulate(candidate.layout, shape))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5).flatmap(lambda b: st.tuples(st.just(b), st.integers(0, 8), st.integers(b, 8))),
       st.integers(0, 40))
def test_a_swizzle_outside_the_space_costs_what_one_inside_does(swizzle, pad):
    _, recording, _ = recorded("elements")
    known = {candidate.swizzle for candidate in candidates("elements")}
    (b, m, s), within = swizzle, 5
    inside = (min(b, within - m), m, s) if m < within else None
    assert inside is None or inside in known or m + s >= 11  # a line of 72 elements: offsets have 12 bits
    shape, costs = (32, 32), []
    for each in (swizzle, inside):
        candidate = Candidate(shape, "row", pad, each)
        costs.append(price(recording, candidate.table, candidate).sites)
    assert costs[0] == costs[1]


# ---- what the search finds -------------------------------------------------------------------------------------------


def test_transpose_needs_no_padding():
    found = search_layout(launch("transpose@plain"), "tile")  # 4096 x 4096, of which one CTA is emulated
    free = [each for each in found.ranked if not each.excessive]
    assert (found.best.name, found.best.nbytes) == ("Swizzle<5,0,5> o row(32,32)", 4096)
    assert (free[1].name, free[1].nbytes) == ("row(32,32,pad=1)", 4220)
    assert found.values and not found.refused
    assert found.statement == (f"all {found.tried:,} layouts tried: none below 64 wavefronts, nor with as few in fewer "
                               "bytes than Swizzle<5,0,5> o row(32,32), which is free of conflicts")


def test_nothing_beats_the_swizzles_of_the_gemm():
    hand_made = {"As*": "Swizzle<2,3,3> o row(128,32)", "Bs*": "Swizzle<3,3,4> o row(32,128)"}
    for pattern, name in hand_made.items():
        found = search_layout(launch("hgemm_ladder@A3", **HGEMM), pattern)
        assert found.best.name == name
        same = search_layout(launch("hgemm_ladder@A3", **HGEMM | {"swizzle": 1}), pattern)
        assert same.best is same.own
        assert same.best.sites == found.best.sites


def test_the_staging_of_b1_is_free_at_a_stride_of_136():
    found = search_layout(launch("kda_b1@float2", tokens=16, heads=1, stage_stride=128), "stage")
    padded = [each for each in found.ranked if each.candidate and not each.candidate.swizzle]
    assert padded[0].name == "row(3,16,128,pad=8)" and not padded[0].excessive
    assert found.best.nbytes == 4 * 3 * 16 * 128 and not found.best.excessive


def test_a_state_read_both_ways_needs_its_view():
    made = launch("kda_b1@float2", tokens=16, heads=1)
    with pytest.raises(SimError, match=r"refuses the best 8 layouts \(dS_t lies over its bytes"):
        search_layout(made, "dS")
    found = search_layout(made, "dS", ["dS_t"])
    assert not found.best.excessive and found.own.excessive
    with pytest.raises(SimError, match="no view"):
        search_layout(made, "dS", ["U"])
    with pytest.raises(SimError, match="its own view"):
        search_layout(made, "dS", ["dS"])


def test_a_size_that_nothing_fits_is_refused_and_one_that_a_few_fit_is_kept():
    made = launch("transpose@pad1", rows=64, cols=64)
    found = search_layout(made, "tile", max_bytes=4096)
    assert found.own.nbytes == 4220 and found.own not in found.ranked
    assert {each.nbytes for each in found.ranked} == {4096}
    with pytest.raises(SimError, match="in 4,095 bytes"):
        search_layout(made, "tile", max_bytes=4095)


def test_when_nothing_is_free_of_conflicts_the_statement_says_where():
    found = search_layout(launch("transpose@plain", rows=64, cols=64), "tile", max_pad=0, max_bytes=4096)
    assert not found.best.excessive

    def body(cta):
        words = cta.shared("words", float32, (32, 32))
        cta.store(words[cta.lane, 0], 1.0, site="column")
        cta.store(words[cta.lane, 2 * cta.lane % 32], 1.0, site="steep")
        cta.store(words[cta.lane, 3 * cta.lane % 32], 1.0, site="steeper")
        cta.store(words[cta.lane ^ 5, cta.lane * 7 % 32], 1.0, site="skew")

    found = search_layout(Launch(body, 1, 32), "words", max_pad=0)
    assert found.best.excessive
    assert f"which has {found.best.excessive} excessive (" in found.statement


def test_a_vector_into_the_padding_is_refused():
    def body(cta, pitch):
        rows = cta.shared("rows", float32, (8, 6), lambda row, column: pitch * row + column)
        cta.store(rows[cta.lane % 7, 4], np.ones((1, 1, 1, 4), np.float32), vec=4, site="wide")

    with pytest.raises(SimError, match=r"site 'wide' moves 16 bytes from element \(0,4\) into the padding"):
        search_layout(Launch(body, 1, 32, (8,)), "rows")


def test_a_union_that_the_winner_does_not_fit_is_listed():
    def body(cta, out):
        small = cta.shared("small", float32, (32 * 32,))
        tile = cta.shared("tile", bfloat16, (32, 64), lambda row, column: 64 * row + column, alias_of=small)
        cta.store(tile[cta.lane, 0], bfloat16.type(1), site="column")
        cta.store(out[cta.lane], cta.load(tile[cta.lane, 0], site="read"), site="out")

    found = search_layout(Launch(body, 1, 32, (GlobalTensor("out", bfloat16, (32,)),)), "tile", max_pad=2)
    assert isinstance(found.best, Found) and found.best.nbytes == 4096
    assert not found.best.excessive


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


def test_the_command_tells_the_best_layout_and_the_kernels_own():
    run = invoke("transpose", "--tensor", "tile", "--set", "rows=64", "--set", "cols=64", "--top", "2")
    assert run.exit_code == 0, run.output
    assert "Swizzle<5,0,5> o row(32,32)" in run.output and "the kernel's own" in run.output
    assert "takes these wavefronts and computes the same bytes" in run.output
    run = invoke("transpose@xor", "--tensor", "tile", "--set", "rows=64", "--ctas", "all", "--format", "json")
    document = json.loads(run.output)
    assert document["layouts"][0]["layout"] == "the kernel's own" and document["tensors"] == ["tile"]
    assert document["tried"] == len(document["layouts"]) - 1 + sum(document["dropped"].values())


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
