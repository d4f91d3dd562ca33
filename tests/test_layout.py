"""Layouts: the tabulation equals the package's own evaluation, and the atoms are the documents'."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_layouts import ComposedLayout, Layout, Swizzle, compose, product_each
from tensor_layouts.layout_utils import tile_to_shape

from simgpu.errors import SimError
from simgpu.instructions import FULL_MASK, instruction
from simgpu.layout import bank_map, cosize, gmma_atom, is_injective, parse_layout, tabulate
from simgpu.rules import cost

ATOMS = [f"{major}-{kind}" for major in ("K", "MN") for kind in ("INTER", "SW32", "SW64", "SW128")]

# ---- tabulation against one call per coordinate --------------------------------------------------------------

trees = st.recursive(st.integers(1, 5), lambda inner: st.lists(inner, min_size=2, max_size=3).map(tuple), max_leaves=4)


def with_strides(shape, draw):
    return draw(st.integers(0, 40)) if isinstance(shape, int) else tuple(with_strides(s, draw) for s in shape)


def few(shape) -> bool:
    """Whether a test may call the package once for every element."""
    return math.prod(product_each(shape)) <= 2000


@st.composite
def affine_layouts(draw):
    shape = draw(st.lists(trees, min_size=1, max_size=3).map(tuple).filter(few))
    return Layout(shape, with_strides(shape, draw))


@st.composite
def swizzles(draw):
    bits, base = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    return Swizzle(bits, base, draw(st.integers(bits, 5)) * draw(st.sampled_from((1, -1))))


@st.composite
def layouts(draw):
    """Affine, swizzled, swizzled past an offset (a slice of a swizzled layout), and a layout of a layout."""
    inner = draw(affine_layouts())
    kind = draw(st.sampled_from(("affine", "swizzled", "offset", "nested", "outer")))
    if kind == "affine":
        return inner
    if kind == "swizzled":
        return compose(draw(swizzles()), inner)
    swizzled = ComposedLayout(draw(swizzles()), inner, offset=draw(st.integers(0, 100)))
    if kind == "offset":
        return swizzled
    outer = draw(swizzles()) if kind == "nested" else draw(affine_layouts())
    return ComposedLayout(outer, swizzled, offset=draw(st.integers(0, 9)))


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_the_table_is_the_packages_own_evaluation_over_the_whole_domain(layout):
    table = tabulate(layout)
    assert table.dtype == np.int64
    assert table.shape == product_each(layout.shape)
    for where in itertools.product(*map(range, table.shape)):
        assert table[where] == layout(*where)
    flat = tabulate(layout, math.prod(table.shape))
    assert flat.tolist() == [layout(i) for i in range(flat.size)]
    assert cosize(table) == 1 + max(layout(i) for i in range(flat.size))


@settings(max_examples=50, deadline=None)
@given(layouts(), st.data())
def test_a_smaller_shape_is_a_corner_of_the_table(layout, data):
    table = tabulate(layout)
    shape = tuple(data.draw(st.integers(1, extent)) for extent in table.shape)
    if len(shape) > 1:
        assert np.array_equal(tabulate(layout, shape), table[tuple(map(slice, shape))])


@settings(max_examples=30, deadline=None)
@given(affine_layouts(), swizzles())
def test_a_callable_gives_the_table_of_the_layout_it_wraps(layout, swizzle):
    composed = compose(swizzle, layout)
    table = tabulate(composed)
    assert np.array_equal(tabulate(lambda *where: composed(*where), table.shape), table)


def test_callables_that_only_understand_integers_are_called_one_by_one():
    def folded(row, column):
        if row < 3:
            return row * 8 + column
        return 100 + max(row, column)

    expected = [[folded(row, column) for column in range(8)] for row in range(5)]
    assert tabulate(folded, (5, 8)).tolist() == expected
    assert tabulate(lambda row, column: expected[row][column], (5, 8)).tolist() == expected


def test_a_callable_that_answers_arrays_differently_is_not_believed():
    assert tabulate(lambda i: 7 if isinstance(i, int) else i, 40).tolist() == [7] * 40
    assert tabulate(lambda i, j: 3, (2, 3)).tolist() == [[3] * 3] * 2


def test_a_mode_of_one_element_may_have_any_stride():
    assert tabulate(Layout((1, 4), (2**70, 1))).tolist() == [[0, 1, 2, 3]]


def test_no_layout_is_row_major():
    assert np.array_equal(tabulate(None, (3, 4, 5)), tabulate(Layout((3, 4, 5), (20, 5, 1))))


@pytest.mark.parametrize(("layout", "shape", "message"), [
    (Layout((4, 8), (8, 1)), (4, 9), r"shape \(4, 9\) exceeds the domain \(4, 8\)"),
    (Layout((4, 8), (8, 1)), 33, r"shape \(33,\) exceeds the domain \(32,\)"),
    (Layout((4, 8), (8, 1)), (2, 2, 2), "has 3 modes, the layout 2"),
    (Layout((4, 8), (8, -1)), (4, 8), r"negative offset -7 at \(0,7\)"),
    (Layout((4, 8), (2**50, 1)), (4, 8), "past 2.48"),
    (ComposedLayout(Layout(4, 1), Layout(4, 1), offset=-2), 4, r"negative offset -2 at \(0\)"),
    (ComposedLayout(Swizzle(3, 60, -3), Layout(4, 1)), 4, "past 62 bits"),
    (lambda i, j: i * 8 - j, (4, 8), r"negative offset -7 at \(0,7\)"),
    (lambda i, j: i * 8 + j / 2, (4, 8), r"layout gives 0.0 at \(0,0\), not an integer"),
    (lambda i: [0, 1, 2][i], 4, r"layout fails at \(3\): IndexError"),
    (ComposedLayout(Swizzle(1, 1, 1), Layout(4, 1), offset=2**70), 4, "past 2.48"),
    (lambda i, j: i * 2**60 + (j == 20) * 0, (4, 40), r"layout gives 3458764513820540928 at \(3,0\), past 2.48"),
    (lambda i: 2**70 * i, 2, r"layout gives 1180591620717411303424 at \(1\), past"),
    (lambda i: i, None, "give the shape"),
    (None, None, "give the shape"),
    (None, (4, 2.5), "a shape is one integer or several"),
    (None, (4, -1), "negative extent"),
    ("row", (4, 4), "not str"),
])
def test_bad_layouts_are_refused_with_the_coordinate(layout, shape, message):
    with pytest.raises(SimError, match=message):
        tabulate(layout, shape)


# ---- GMMA atoms ----------------------------------------------------------------------------------------------


def test_the_tiled_inter_layouts_of_the_documents():
    k = tabulate(tile_to_shape(gmma_atom("K-INTER", 2), (16, 16), (0, 1)))
    mn = tabulate(tile_to_shape(gmma_atom("MN-INTER", 2), (16, 16), (1, 0)))
    assert (k[0, 8], k[8, 0], k[8, 8]) == (128, 64, 192)
    assert (mn[0, 8], mn[8, 0], mn[8, 8]) == (64, 128, 192)
    assert np.array_equal(k, mn.T)
    assert cosize(k) == cosize(mn) == 256
    assert is_injective(k)
    assert np.array_equal(k, tabulate(parse_layout("K-INTER(16,16):col")))
    assert np.array_equal(mn, tabulate(parse_layout("MN-INTER(16,16):row")))


def test_the_inter_atoms_are_plain():
    row, column = np.indices((8, 8))
    assert np.array_equal(tabulate(gmma_atom("K-INTER", 2)), 8 * row + column)
    assert np.array_equal(tabulate(gmma_atom("MN-INTER", 2)), row + 8 * column)


def test_k_sw128_row_1_starts_with_its_second_vector():
    assert tabulate(gmma_atom("K-SW128", 2))[1, :16].tolist() == [*range(72, 80), *range(64, 72)]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ATOMS)
def test_an_atom_swizzles_byte_addresses(name, itemsize):
    major, kind = name.split("-")
    row_bytes = {"INTER": 16, "SW32": 32, "SW64": 64, "SW128": 128}[kind]
    bits = {"INTER": 0, "SW32": 1, "SW64": 2, "SW128": 3}[kind]
    row, column = np.indices((8, row_bytes // itemsize))
    plain = row * row_bytes + column * itemsize
    swizzled = plain ^ ((plain >> 7 & (1 << bits) - 1) << 4)
    table = tabulate(gmma_atom(name, itemsize))
    assert np.array_equal((table if major == "K" else table.T) * itemsize, swizzled)


@pytest.mark.parametrize(("name", "itemsize"), [("K-SW256", 2), ("N-SW128", 2), ("K-SW128", 3), ("K-SW128", 16)])
def test_unknown_atoms_are_refused(name, itemsize):
    with pytest.raises(SimError, match="GMMA atom"):
        gmma_atom(name, itemsize)


# ---- published arithmetic ------------------------------------------------------------------------------------


def ldmatrix_ways(layout, itemsize=2):
    """Wavefronts of reading the first eight rows of column 0."""
    rows = tabulate(layout)[:8, 0] * itemsize
    return cost(instruction("ldmatrix.x1"), 16, FULL_MASK, shared=[*rows.tolist(), *[0] * 24]).wavefronts


@pytest.mark.parametrize(("spec", "ways"), [
    ("(8,128):(128,1)", 8),  # a slab of pitch 256 bytes, unswizzled
    ("Swizzle<3,3,3> o (8,128):(128,1)", 2),  # the XOR takes (element >> 6) & 7: the atom's shift
    ("Swizzle<3,3,4> o (8,128):(128,1)", 1),  # (element >> 7) & 7: the row's shift
])
def test_published_case_I10(spec, ways):
    assert ldmatrix_ways(parse_layout(spec)) == ways


@pytest.mark.parametrize(("spec", "ways"), [
    ("32:32", 32), ("32:64", 32), ("32:16", 16), ("32:33", 1),
    ("Swizzle<5,0,5> o 32:32", 1), ("Swizzle<3,0,5> o 32:32", 4), ("Swizzle<2,0,5> o 32:32", 8),
])
def test_published_case_I21(spec, ways):
    words = tabulate(parse_layout(spec, itemsize=4))
    assert cost(instruction("lds"), 4, FULL_MASK, shared=(words * 4).tolist()).wavefronts == ways
    assert np.bincount(bank_map(words, 4), minlength=32).max() == ways


# ---- banks and other readings --------------------------------------------------------------------------------


@given(st.integers(1, 16), st.integers(0, 10**6))
def test_the_bank_of_an_elements_first_byte(itemsize, offset):
    assert bank_map(np.array([offset]), itemsize)[0] == offset * itemsize % 128 // 4


def test_readings_of_a_table():
    assert cosize(np.zeros((0, 3), np.int64)) == 0
    assert not is_injective(tabulate(Layout((4, 2), (1, 0))))
    with pytest.raises(SimError, match="0 bytes"):
        bank_map(np.arange(4), 0)


# ---- the notation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "layout"), [
    ("(16,128):(128,1)", Layout((16, 128), (128, 1))),
    (" ( _16 , ( _2 , 64 ) ) : ( 128 , ( 1 , 2 ) ) ", Layout((16, (2, 64)), (128, (1, 2)))),
    ("32:4", Layout(32, 4)),
    ("((4,8)):((1,4))", Layout(((4, 8),), ((1, 4),))),
    ("row(16,128)", Layout((16, 128), (128, 1))),
    ("row(2,16,128,pad=4)", Layout((2, 16, 128), (16 * 132, 132, 1))),
    ("col(16,128,pad=4)", Layout((16, 128), (1, 20))),
    ("row(64)", Layout(64, 1)),
    ("K-SW128", gmma_atom("K-SW128", 2)),
    ("K-SW128(64,64)", tile_to_shape(gmma_atom("K-SW128", 2), (64, 64))),
    ("MN-SW64(64,64):row", tile_to_shape(gmma_atom("MN-SW64", 2), (64, 64), (1, 0))),
    ("Sw<3,3,3> ∘ (8,64):(64,1)", compose(Swizzle(3, 3, 3), Layout((8, 64), (64, 1)))),
    ("Sw<3,3,3> o _0 o (8,64):(64,1)", compose(Swizzle(3, 3, 3), Layout((8, 64), (64, 1)))),
    ("Sw<3,3,3> o 72 o row(8,64)", ComposedLayout(Swizzle(3, 3, 3), Layout((8, 64), (64, 1)), offset=72)),
    ("Swizzle<0,4,3> o row(8,64)", Layout((8, 64), (64, 1))),
])
def test_specs(spec, layout):
    parsed = parse_layout(spec)
    assert product_each(parsed.shape) == product_each(layout.shape)
    assert np.array_equal(tabulate(parsed), tabulate(layout))


@settings(max_examples=50, deadline=None)
@given(affine_layouts())
def test_what_the_package_prints_can_be_read_back(layout):
    assert np.array_equal(tabulate(parse_layout(str(layout))), tabulate(layout))


def test_atoms_in_specs_follow_the_element_size():
    assert parse_layout("K-SW128", itemsize=4).shape == (8, 32)


@pytest.mark.parametrize(("spec", "message"), [
    ("", "column 1: expected row.*found the end"),
    ("(16,128)", "column 9: expected :, found the end"),
    ("(16,128):", "column 10: expected an integer, found the end"),
    ("(16,128):(128,x)", "column 15: expected an integer, found x"),
    ("(16,128):(128,1", r"column 16: expected \), found the end"),
    ("(16,128):(128,1))", r"column 17: expected the end, found \)"),
    ("(16,128):(128,-1)", "column 15: '-' has no meaning here"),
    ("(16,128):(128)", "not congruent"),
    ("row(16;128)", "column 7: ';' has no meaning here"),
    ("row(16,128,pad)", "column 15: expected =, found"),
    ("rows(16,128)", r"column 1: expected row\(...\).*found rows"),
    ("K-SW128(60,64)", r"column 8: \(60, 64\) is not a whole number of atoms of \(8, 64\)"),
    ("K-SW128(0,64)", "column 8"),
    ("K-SW128(64,64):up", "column 16: expected col or row, found up"),
    ("K-SW96(64,64)", "column 1: expected row.*found K-SW96"),
    ("Swizzle<3,3> o row(8,8)", "column 12: expected ,, found >"),
    ("Swizzle<3,3,2> o row(8,8)", "column 1: Swizzle<3,3,2>: B must not exceed S"),
    ("Swizzle<3,40,3> o row(8,8)", "B . M . S exceed 32"),
    ("Swizzle<3,3,3> row(8,8)", "column 16: expected o or ∘, found row"),
    ("row(0,8)", "has 0 elements"),
    ("row(100000,100000)", "has 10000000000 elements"),
    ("(" * 400, "400 characters is too long"),
    ("(" * 300, "column 301: expected an integer"),
])
def test_a_bad_spec_is_refused_where_it_goes_wrong(spec, message):
    with pytest.raises(SimError, match=message):
        parse_layout(spec)


PIECES = ["(", ")", ",", ":", "<", ">", "=", "o", "0", "1", "8", "64", "_8", "99999999999999999999", "row",
          "col", "pad",
          "Swizzle", "Sw<3,3,3> o ", "K-SW128", "MN-INTER(16,16)", "row(8,8)", "x", " ", "-", "(8,64):(64,1)"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_a_layout_or_one_clear_line(text):
    try:
        table = tabulate(parse_layout(text))
    except SimError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert table.min() >= 0
