"""The transpose and pattern kernels: right results, and counters against arithmetic one can do on paper."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py import find, registered
from kernels_py.patterns import patterns
from kernels_py.transpose import transpose
from simgpu.errors import SimError
from simgpu.run import simulate

TRANSPOSE_WAYS = {"plain": 32, "pad1": 1, "xor": 1, "vec4": 1}  # wavefronts per column read of the tile


def counted(kernel, variant=None, mode="addresses", **parameters):
    return simulate(kernel.launch(variant, **parameters), mode=mode).table


# ---- transpose --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", transpose.variants)
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 40), cols=st.integers(1, 40), offset=st.integers(0, 3))
def test_transpose_is_right_for_any_matrix(variant, rows, cols, offset):
    if variant == "vec4":
        rows, cols, offset = 4 * rows, 4 * cols, 4 * offset
    launch = transpose.launch(variant, rows=rows, cols=cols, src_offset=offset)
    found = simulate(launch, mode="values")
    assert np.array_equal(found.arrays["dst"], np.arange(rows * cols, dtype=np.float32).reshape(rows, cols).T)
    assert simulate(launch, mode="addresses").table == found.table


@pytest.mark.parametrize("variant", transpose.variants)
def test_transpose_conflicts_are_those_of_its_layout(variant):
    table = counted(transpose, variant, rows=256, cols=128)
    load = table["tile.load"]
    assert load.executed == 256 * 128 // 32
    assert load.wavefronts == TRANSPOSE_WAYS[variant] * load.executed
    assert load.ideal == load.executed and load.excessive == load.wavefronts - load.ideal
    assert table["tile.store"].excessive == 0
    for site in ("src.load", "dst.store"):  # whole 128-byte lines: 4 bytes an element, 32 a sector
        assert table[site].sectors == table[site].ideal_sectors == 256 * 128 * 4 // 32
        assert table[site].bytes == 256 * 128 * 4
    assert load.bytes == table["tile.store"].bytes == 256 * 128 * 4


def test_transpose_counts_what_ncu_measured_for_2048_x_2048():
    """H200, smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld of the tile with pitch 32: 4,194,304."""
    load = counted(transpose, "plain", rows=2048, cols=2048)["tile.load"]
    assert (load.wavefronts, load.executed) == (4_194_304, 131_072)


def test_a_displaced_source_takes_a_sector_more_per_row():
    aligned, displaced = (counted(transpose, "pad1", rows=64, cols=64, src_offset=n)["src.load"] for n in (0, 1))
    assert (aligned.sectors_per_request, displaced.sectors_per_request) == (4.0, 5.0)
    assert displaced.ideal_sectors == aligned.ideal_sectors


def test_vectors_move_a_quarter_of_the_instructions():
    scalar, vector = counted(transpose, "xor", rows=64, cols=64), counted(transpose, "vec4", rows=64, cols=64)
    for site in ("src.load", "tile.store", "dst.store"):
        assert scalar[site].executed == 4 * vector[site].executed
        assert scalar[site].bytes == vector[site].bytes


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"layout": "pad2"}, "layout 'pad2' is none of plain, pad1, xor, vec4"),
     ({"layout": "vec4", "rows": 6}, "multiples of 4, not 6 x 4096")],
)
def test_transposes_that_do_not_exist(parameters, words):
    with pytest.raises(SimError, match=words):
        transpose.launch(**parameters)


# ---- patterns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", patterns.variants)
def test_every_pattern_runs_with_values_and_counts_the_same_without(variant):
    values, addresses = counted(patterns, variant, "values", ctas=3), counted(patterns, variant, ctas=3)
    assert values == addresses
    assert all(row.excessive == 0 for row in values.sites if row.site == "fill")
    assert values["read"].executed == 3


@given(stride=st.integers(0, 130))
@settings(max_examples=30, deadline=None)
def test_a_stride_conflicts_by_its_common_divisor_with_the_banks(stride):
    read = counted(patterns, stride=stride)["read"]
    assert read.wavefronts == (1 if stride == 0 else gcd(stride, 32))
    assert read.ideal == 1


@given(stride=st.integers(1, 130), share=st.sampled_from((1, 2, 4, 8, 16, 32)))
@settings(max_examples=30, deadline=None)
def test_lanes_on_one_word_merge(stride, share):
    """32 / share words over the 32 / gcd(stride, 32) banks that the stride visits."""
    read = counted(patterns, stride=stride, share=share)["read"]
    assert read.wavefronts == -(-(32 // share) // (32 // gcd(stride, 32)))


@pytest.mark.parametrize("share", [1, 2, 3, 8, 32])
def test_atomics_on_one_word_take_turns(share):
    assert counted(patterns, pattern="histogram", share=share)["read"].wavefronts == share


@pytest.mark.parametrize(
    ("variant", "wavefronts", "ideal"),
    [
        ("stride1", 1, 1),
        ("broadcast", 1, 1),
        ("pairs", 1, 1),
        ("vec2", 2, 2),  # 256 bytes through 128 a wavefront
        ("vec4", 4, 4),
        ("vec4_stride8", 8, 4),  # eight lanes a group, 32 bytes apart: two on every bank
        ("vec4_same_banks", 32, 4),
        ("column", 32, 1),
        ("column_pad1", 1, 1),
        ("column_vec4", 32, 4),
        ("column_vec4_pad4", 4, 4),
        ("ldmatrix16", 8, 4),  # rows 32 bytes apart: two of eight on every bank
        ("ldmatrix32", 16, 4),
        ("ldmatrix64", 32, 4),
        ("ldmatrix64_pad8", 4, 4),
        ("ldmatrix64_trans", 32, 4),
        ("histogram", 1, 1),
        ("histogram_pairs", 2, 1),
    ],
)
def test_textbook_patterns(variant, wavefronts, ideal):
    read = counted(patterns, variant)["read"]
    assert (read.wavefronts, read.ideal) == (wavefronts, ideal)


@pytest.mark.parametrize(
    ("variant", "sectors", "ideal"),
    [("gather", 4, 4), ("gather_stride2", 8, 4), ("gather_vec4", 16, 16), ("gather_misaligned", 5, 4)],
)
def test_textbook_gathers(variant, sectors, ideal):
    read = counted(patterns, variant)["read"]
    assert (read.sectors, read.ideal_sectors, read.wavefronts) == (sectors, ideal, None)


@pytest.mark.parametrize("parameters", [{"pattern": "zigzag"}, {"share": 0}, {"stride": -1}, {"width": 12}])
def test_patterns_that_do_not_exist(parameters):
    with pytest.raises(SimError, match=r"^patterns: "):
        patterns.launch(**parameters)


# ---- finding them -----------------------------------------------------------------------------------------


def test_kernels_are_found_by_name_and_variant():
    assert {"transpose", "patterns"} <= set(registered())
    kernel, variant = find("patterns@vec4")
    assert (kernel.name, variant) == ("patterns", "vec4")
    assert find("transpose")[1] is None
    with pytest.raises(SimError, match="unknown kernel 'transpos'; did you mean 'transpose'"):
        find("transpos")
    with pytest.raises(SimError, match="has no variant 'pad2'; did you mean 'pad1'"):
        find("transpose@pad2")
