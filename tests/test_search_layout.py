"""simgpu search --tensor: layouts of one tensor, priced as the emulator counts them, and what the best of them are."""

import functools
import json
import random

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py import find
from simgpu.cli import main
from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.layout import cosize, tabulate
from simgpu.run import simulate
from simgpu.search_layout import Candidate, Found, price, search_layout, space
from simgpu.search_record import record
from simgpu.tensor import GlobalTensor, bfloat16, float32


def launch(name, **parameters):
    kernel, variant = find(name)
    return kernel.launch(variant, **parameters)


def invoke(*arguments):
    return CliRunner().invoke(main, ["search", *arguments])


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


def test_the_command_tells_the_best_layout_and_the_kernels_own():
    run = invoke("transpose", "--tensor", "tile", "--set", "rows=64", "--set", "cols=64", "--top", "2")
    assert run.exit_code == 0, run.output
    assert "Swizzle<5,0,5> o row(32,32)" in run.output and "the kernel's own" in run.output
    assert "takes these wavefronts and computes the same bytes" in run.output
    run = invoke("transpose@xor", "--tensor", "tile", "--set", "rows=64", "--ctas", "all", "--format", "json")
    document = json.loads(run.output)
    assert document["layouts"][0]["layout"] == "the kernel's own" and document["tensors"] == ["tile"]
    assert document["tried"] == len(document["layouts"]) - 1 + sum(document["dropped"].values())
