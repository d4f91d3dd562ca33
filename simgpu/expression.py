"""Per-lane integers from one line of text: ``(lane % 8) * 132 + 4 * (lane // 8)``.

The text is Python's own expression syntax, parsed with :mod:`ast` and walked over a short list of allowed
nodes, so nothing in it can call, look up or import anything. Arithmetic is exact: 32 lanes are few enough to
evaluate one by one in Python integers, and every step that leaves 64 bits is refused.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from simgpu.errors import SimError
from simgpu.instructions import LANES

LONGEST = 500  # characters: far more than a layout needs, and shallow enough to walk recursively
WORST = 2**63  # results and every step on the way lie in [-2^63, 2^63)
ALLOWED = "+ - * // % & | ^ ~ << >>, comparisons, and/or/not, a if c else b, parentheses and integers"

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.Invert: operator.invert, ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}
GRAMMAR = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.IfExp, ast.Name,
           ast.Load, *OPERATORS)
SYMBOLS = {ast.Div: "/ (write //)", ast.Pow: "**", ast.MatMult: "@", ast.In: "in", ast.NotIn: "not in",
           ast.Is: "is (write ==)", ast.IsNot: "is not (write !=)"}


def lane_expression(text: str, names: Mapping[str, Sequence[int]] | None = None) -> np.ndarray:
    """The value of ``text`` on every lane: an int64 array of 32.

    ``names`` maps each name the text may use to its 32 values; left out, there is ``lane``, 0 to 31. Allowed are
    + - * // % & | ^ ~ << >>, comparisons (which give 1 or 0), ``and``/``or``/``not``, ``a if c else b``, parentheses
    and decimal, hexadecimal or binary integers, all as in Python: ``//`` and ``%`` round down, ``and``, ``or`` and
    ``if`` evaluate only the side they take.

    Raises :class:`SimError` with the column of anything else, and with the lane where a step divides by zero, shifts
    by a count outside 0..63 or leaves 64 bits.

    >>> lane_expression("lane % 4 * 2 + (lane // 4 if lane < 8 else 0x10)")[:12].tolist()
    [0, 2, 4, 6, 1, 3, 5, 7, 16, 18, 20, 22]
    >>> lane_expression("4 * open(lane)")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    simgpu.errors.SimError: expression '4 * open(lane)', column 5: no call is allowed (allowed: + - * ...
    """
    if names is None:
        names = {"lane": range(LANES)}
    for name, values in names.items():
        if len(values) != LANES:
            raise SimError(f"name {name!r} has {len(values)} values, not one for each of {LANES} lanes")
    if len(text) > LONGEST:
        raise SimError(f"an expression of {len(text)} characters is too long (at most {LONGEST})")
    try:
        tree = _parse(text)
        _refuse_the_rest(tree, text, names, column=1)
        values = []
        for lane in range(LANES):
            here = {name: int(column[lane]) for name, column in names.items()}
            values.append(_evaluate(tree.body, here, f"expression {text!r}, lane {lane}"))
    except (RecursionError, MemoryError):
        raise SimError(f"expression {text!r} is nested too deeply") from None
    return np.array(values, dtype=np.int64)


def _parse(text: str) -> ast.Expression:
    if foreign := [at for at, character in enumerate(text) if not 32 <= ord(character) < 127]:
        raise SimError(f"expression {text!r}, column {foreign[0] + 1}: {text[foreign[0]]!r} is not a plain character")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of "1if lane else 2" Python only warns; here it is a typo
            return ast.parse(text.lstrip(), mode="eval")
    except SyntaxError as error:
        column = _indent(text) + (error.offset or 1)
        raise SimError(f"expression {text!r}, column {column}: {error.msg}") from None


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _refuse_the_rest(node: ast.AST, text: str, names: Mapping[str, Any], column: int) -> None:
    """Raise at the first node that is not on the list; ``column`` is the parent's, for nodes that carry none."""
    if hasattr(node, "col_offset"):
        column = _indent(text) + node.col_offset + 1
    if isinstance(node, ast.Constant):
        bad = "" if type(node.value) is int else f"{node.value!r} is not an integer"
    elif isinstance(node, ast.Name):
        bad = "" if node.id in names else f"unknown name {node.id!r}"
    elif isinstance(node, GRAMMAR):
        bad = ""
    elif type(node) in SYMBOLS:
        bad = f"operator {SYMBOLS[type(node)]} is not allowed"
    else:
        bad = f"no {type(node).__name__.lower()} is allowed"
    if bad:
        known = " or ".join(names)
        raise SimError(f"expression {text!r}, column {column}: {bad} (allowed: {ALLOWED}, and the name {known})")
    for child in ast.iter_child_nodes(node):
        _refuse_the_rest(child, text, names, column)


def _evaluate(node: ast.AST, names: Mapping[str, int], place: str) -> int:
    """The value of an allowed node for one lane; ``place`` names the expression and the lane in errors."""
    match node:
        case ast.Constant(value=value):
            result = value
        case ast.Name(id=name):
            result = names[name]
        case ast.UnaryOp(op=op, operand=operand):
            result = int(OPERATORS[type(op)](_evaluate(operand, names, place)))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left, names, place), _evaluate(right, names, place)
            if isinstance(op, (ast.FloorDiv, ast.Mod)) and b == 0:
                raise SimError(f"{place}: {a} divided by zero")
            if isinstance(op, (ast.LShift, ast.RShift)) and not 0 <= b < 64:
                raise SimError(f"{place}: shift by {b} (0 to 63)")
            result = OPERATORS[type(op)](a, b)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            result = _evaluate(body if _evaluate(test, names, place) else orelse, names, place)
        case ast.BoolOp(op=op, values=values):
            for value in values:
                result = _evaluate(value, names, place)
                if bool(result) == isinstance(op, ast.Or):
                    break
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            a, result = _evaluate(left, names, place), 1
            for op, comparator in zip(ops, comparators, strict=True):
                b = _evaluate(comparator, names, place)
                if not OPERATORS[type(op)](a, b):
                    result = 0
                    break
                a = b
    if not -WORST <= result < WORST:
        raise SimError(f"{place}: {result} does not fit in 64 bits")
    return result
