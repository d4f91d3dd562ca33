"""What a layout can be called: the GMMA atoms of Hopper's shared-memory operands, and the command line's notation.

``tensor-layouts`` has shapes, strides, swizzles and the algebra over them; this module adds the named atoms
and a reader for one line of text such as ``K-SW128(64,64)`` or ``Swizzle<3,3,3> o (8,64):(64,1)``.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from tensor_layouts import ComposedLayout, Layout, LayoutError, Swizzle, compose, product_each, size
from tensor_layouts.layout_utils import tile_to_shape

from simgpu.errors import SimError

# ---- the atoms of Hopper's shared-memory operands ------------------------------------------------------------

SWIZZLE_BITS = {"INTER": 0, "SW32": 1, "SW64": 2, "SW128": 3}  # the B of Swizzle<B,4,3> on byte addresses
ATOM_NAME = re.compile(rf"(K|MN)-({'|'.join(SWIZZLE_BITS)})")
TILE_ORDER = {"col": (0, 1), "row": (1, 0)}  # which mode of the grid of atoms runs fastest


def gmma_atom(name: str, itemsize: int) -> Layout | ComposedLayout:
    """The GMMA shared-memory atom ``name`` for elements of ``itemsize`` bytes (1, 2, 4 or 8).

    ``K-...`` atoms are 8 rows of 16, 32, 64 or 128 contiguous bytes (``INTER``, ``SW32``, ``SW64``, ``SW128``),
    ``MN-...`` atoms their transposes. CuTe defines the swizzle on byte addresses as ``Swizzle<B,4,3>``; on
    elements that is ``Swizzle<B, 4 - log2(itemsize), 3>``, and nothing for ``INTER``, whose B is 0. Source: CUTLASS
    ``cute/atom/mma_traits_sm90_gmma.hpp``.
    Raises :class:`SimError` for an unknown name or element size.

    >>> atom = gmma_atom("K-SW128", itemsize=2)
    >>> [atom(1, column) for column in (0, 7, 8, 15)]
    [72, 79, 64, 71]
    >>> print(gmma_atom("MN-INTER", itemsize=2))
    (8, 8) : (1, 8)
    """
    match = ATOM_NAME.fullmatch(name)
    if not match:
        raise SimError(f"unknown GMMA atom {name!r} (K or MN, then one of -INTER, -SW32, -SW64, -SW128)")
    if itemsize not in (1, 2, 4, 8):
        raise SimError(f"GMMA atom {name} has no form for elements of {itemsize!r} bytes (1, 2, 4 or 8)")
    major, kind = match.groups()
    bits = SWIZZLE_BITS[kind]
    contiguous = (16 << bits) // itemsize
    lines = Layout((8, contiguous), (contiguous, 1)) if major == "K" else Layout((contiguous, 8), (1, contiguous))
    return compose(Swizzle(bits, 5 - itemsize.bit_length(), 3), lines)


# ---- the notation of the command line ------------------------------------------------------------------------

LONGEST_SPEC = 300  # characters
MOST_ELEMENTS = 2**22
COMPOSE = ("o", "∘")
INTEGER = re.compile(r"_?[0-9]+")
MEANT = re.compile(r"_?[0-9]+|[A-Za-z]+(?:-[A-Za-z0-9]+)?|[(),:<>=∘]")
TOKEN = re.compile(MEANT.pattern + r"|\S")  # any other character is a token too, to be refused by name


def parse_layout(spec: str, itemsize: int = 2) -> Layout | ComposedLayout:
    """The layout a line of text describes; ``itemsize`` (bytes) is what the GMMA atoms depend on.

    ::

        spec    = [ swizzle "o" [ offset "o" ] ] layout
        swizzle = ( "Swizzle" | "Sw" ) "<" B "," M "," S ">"
        layout  = tree ":" tree                                      shape : stride, as CuTe prints it
                | ( "row" | "col" ) "(" extents [ ", pad=" N ] ")"   contiguous rows/columns, N spare elements each
                | atom [ "(" extents ")" [ ":" ( "col" | "row" ) ] ] a GMMA atom, tiled over a shape with the grid
                                                                     of atoms column-first (as CuTe does) or row-first
        tree    = integer | "(" tree { "," tree } ")"                ``_8``, as CuTe prints constants, is 8

    Raises :class:`SimError` with the column of the first thing it cannot read.

    >>> print(parse_layout("(128,32):(36,1)"))
    (128, 32) : (36, 1)
    >>> print(parse_layout("row(16,128,pad=4)"))
    (16, 128) : (132, 1)
    >>> parse_layout("K-INTER(16,16):col")(0, 8), parse_layout("MN-INTER(16,16):row")(0, 8)
    (128, 64)
    >>> print(parse_layout("Swizzle<3,3,3> o (_8,_64):(_64,_1)"))
    (Swizzle(3, 3, 3)) o ((8, 64) : (64, 1))
    >>> parse_layout("row(16;128)")
    Traceback (most recent call last):
    simgpu.errors.SimError: layout 'row(16;128)', column 7: ';' has no meaning here
    """
    if len(spec) > LONGEST_SPEC:
        raise SimError(f"a layout of {len(spec)} characters is too long (at most {LONGEST_SPEC})")
    reader = _Reader(spec)
    try:
        layout = reader.spec(itemsize)
    except (LayoutError, ValueError) as error:
        raise SimError(f"layout {spec!r}: {error}") from None
    if not 0 < size(layout) <= MOST_ELEMENTS:
        raise SimError(f"layout {spec!r} has {size(layout)} elements (1 to {MOST_ELEMENTS})")
    return layout


class _Reader:
    """Recursive descent over the tokens of one spec; every method reads one rule of the grammar."""

    def __init__(self, text: str):
        self.text, self.position = text, 0
        self.tokens = [(match[0], match.start()) for match in TOKEN.finditer(text)]
        for token, at in self.tokens:
            if not MEANT.fullmatch(token):
                self.fail(f"{token!r} has no meaning here", at)

    def fail(self, why: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        raise SimError(f"layout {self.text!r}, column {at + 1}: {why}")

    @property
    def token(self) -> str:
        """The next token; an empty string at the end."""
        return self.peek(0)

    @property
    def at(self) -> int:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else len(self.text)

    def peek(self, ahead: int) -> str:
        return self.tokens[self.position + ahead][0] if self.position + ahead < len(self.tokens) else ""

    def accept(self, *wanted: str) -> str:
        """The next token if it is one of ``wanted``, else an empty string and nothing is read."""
        token = self.token
        if token not in wanted:
            return ""
        self.position += 1
        return token

    def expect(self, *wanted: str) -> str:
        found = self.token or "the end"
        return self.accept(*wanted) or self.fail(f"expected {' or '.join(wanted)}, found {found}")

    def integer(self) -> int:
        token = self.token
        if not INTEGER.fullmatch(token):
            self.fail(f"expected an integer, found {token or 'the end'}")
        self.position += 1
        return int(token.lstrip("_"))

    def integer_after(self, mark: str) -> int:
        self.expect(mark)
        return self.integer()

    def spec(self, itemsize: int) -> Layout | ComposedLayout:
        swizzle, offset = None, 0
        if self.token in ("Swizzle", "Sw"):
            swizzle = self.swizzle()
            self.expect(*COMPOSE)
            if self.peek(1) in COMPOSE:
                offset = self.integer()
                self.expect(*COMPOSE)
        layout = self.layout(itemsize)
        if self.token:
            self.fail(f"expected the end, found {self.token}")
        if swizzle is None:
            return layout
        return ComposedLayout(swizzle, layout, offset=offset) if offset else compose(swizzle, layout)

    def swizzle(self) -> Swizzle:
        at = self.at
        self.expect("Swizzle", "Sw")
        bits, base, shift = (self.integer_after(mark) for mark in "<,,")
        self.expect(">")
        if shift < bits or bits + base + shift > 32:
            self.fail(f"Swizzle<{bits},{base},{shift}>: B must not exceed S, nor B + M + S exceed 32", at)
        return Swizzle(bits, base, shift)

    def layout(self, itemsize: int) -> Layout | ComposedLayout:
        if order := self.accept(*TILE_ORDER):
            return self.padded(order)
        if ATOM_NAME.fullmatch(self.token):
            return self.tiled(gmma_atom(self.accept(self.token), itemsize))
        if self.token != "(" and not INTEGER.fullmatch(self.token):
            known = "row(...), col(...), shape:stride or an atom such as K-SW128"
            self.fail(f"expected {known}, found {self.token or 'the end'}")
        shape = self.tree()
        self.expect(":")
        return Layout(shape, self.tree())

    def tree(self) -> Any:
        if not self.accept("("):
            return self.integer()
        branches = [self.tree()]
        while self.accept(","):
            branches.append(self.tree())
        self.expect(")")
        return tuple(branches)

    def padded(self, order: str) -> Layout:
        extents, pad = [self.integer_after("(")], 0
        while self.accept(","):
            if self.accept("pad"):
                pad = self.integer_after("=")
                break
            extents.append(self.integer())
        self.expect(")")
        strides = [1]
        for mode, extent in enumerate((extents if order == "col" else extents[::-1])[:-1]):
            strides.append(strides[-1] * extent + (pad if mode == 0 else 0))
        return Layout(tuple(extents), tuple(strides if order == "col" else strides[::-1]))

    def tiled(self, atom: Layout | ComposedLayout) -> Layout | ComposedLayout:
        at = self.at
        if self.token != "(":
            return atom
        shape = (self.integer_after("("), self.integer_after(","))
        self.expect(")")
        lines = product_each(atom.shape)
        if any(extent == 0 or extent % line for extent, line in zip(shape, lines, strict=True)):
            self.fail(f"{shape} is not a whole number of atoms of {lines}", at)
        return tile_to_shape(atom, shape, TILE_ORDER[self.expect(*TILE_ORDER) if self.accept(":") else "col"])
