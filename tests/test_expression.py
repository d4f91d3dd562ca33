"""Lane expressions: Python's own answers for what is allowed, a clear refusal for everything else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simgpu.errors import SimError
from simgpu.expression import lane_expression

# Six leaves of at most 40 and shifts of at most 5 stay far inside 64 bits, so Python's own eval is the reference.
LEAVES = st.sampled_from(["lane", "0", "1", "3", "7", "0x10", "0b101", "40"])
BINARY = st.sampled_from(["+", "-", "*", "//", "%", "&", "|", "^", "<", "<=", ">", ">=", "==", "!=", "and", "or"])


@st.composite
def expressions(draw, leaves=6):
    if leaves == 1:
        return draw(LEAVES)
    left = draw(st.integers(1, leaves - 1))
    a, b = draw(expressions(left)), draw(expressions(leaves - left))
    return draw(st.sampled_from((
        f"({a} {draw(BINARY)} {b})", f"({draw(st.sampled_from(('-', '+', '~', 'not ')))}{a})",
        f"({a} << {draw(st.integers(0, 5))})", f"({a} >> {draw(st.integers(0, 63))})",
        f"({a} if {b} else lane)", f"(lane < {a} <= {b})")))


@settings(max_examples=250, deadline=None)
@given(expressions())
def test_the_value_is_pythons(text):
    try:
        expected = [int(eval(text, {"lane": lane})) for lane in range(32)]
    except ZeroDivisionError:
        with pytest.raises(SimError, match="divided by zero"):
            lane_expression(text)
        return
    result = lane_expression(text)
    assert result.dtype == np.int64
    assert result.tolist() == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("lane * 4", [4 * lane for lane in range(32)]),
    ("  (lane & 7) << 4 ^ (lane >> 3)  ", [(lane & 7) << 4 ^ lane >> 3 for lane in range(32)]),
    ("0 if lane == 0 else 128 // lane", [128 // lane if lane else 0 for lane in range(32)]),
    ("lane and 128 % lane", [lane and 128 % lane for lane in range(32)]),
    ("-5 // 3", [-2] * 32),
    ("-5 % 3", [1] * 32),
    ("4 <= lane < 8", [int(4 <= lane < 8) for lane in range(32)]),
    ("not lane", [1] + [0] * 31),
    ("~lane", [~lane for lane in range(32)]),
    ("-0x7fffffffffffffff - 1", [-(2**63)] * 32),
])
def test_values(text, expected):
    assert lane_expression(text).tolist() == expected


def test_names_come_from_the_caller():
    names = {"row": [lane // 8 for lane in range(32)], "column": np.arange(32) % 8}
    assert lane_expression("row * 10 + column", names)[9] == 11
    with pytest.raises(SimError, match=r"unknown name 'lane' \(allowed: .* and the name row or column\)"):
        lane_expression("lane", names)
    with pytest.raises(SimError, match="name 'row' has 3 values"):
        lane_expression("row", {"row": [1, 2, 3]})


@pytest.mark.parametrize(("text", "message"), [
    ("", "column 1: invalid syntax"),
    ("lane +", "invalid syntax"),
    ("lane; lane", "column 5: invalid syntax"),
    ("lane\n+ 1", r"column 5: '\\n' is not a plain character"),
    ("ｌane", "column 1: 'ｌ' is not a plain character"),
    ("lane\0", "column 5"),
    ("4 * lanes", "column 5: unknown name 'lanes'"),
    ("  4 * tid", "column 7: unknown name 'tid'"),
    ("lane / 2", r"column 1: operator / \(write //\) is not allowed"),
    ("lane ** 2", r"operator \*\* is not allowed"),
    ("lane @ 2", "operator @ is not allowed"),
    ("lane in (1, 2)", "operator in is not allowed"),
    ("lane is lane", r"operator is \(write ==\)"),
    ("abs(lane)", "column 1: no call is allowed"),
    ("4 + lane.real", "column 5: no attribute is allowed"),
    ("lane[0]", "no subscript is allowed"),
    ("(lane, 1)", "no tuple is allowed"),
    ("[lane]", "no list is allowed"),
    ("{lane: 1}", "no dict is allowed"),
    ("lambda: lane", "no lambda is allowed"),
    ("[lane for lane in lane]", "no listcomp is allowed"),
    ("(x := lane)", "no namedexpr is allowed"),
    ("f'{lane}'", "no joinedstr is allowed"),
    ("lane * 1.5", "column 8: 1.5 is not an integer"),
    ("lane + 1j", "1j is not an integer"),
    ("'lane'", "'lane' is not an integer"),
    ("True + lane", "True is not an integer"),
    ("...", "Ellipsis is not an integer"),
    ("1 if 1 else abs(1)", "column 13: no call is allowed"),  # the side not taken is held to the list too
    ("__import__('os')", "no call is allowed"),
    ("128 // lane", "lane 0: 128 divided by zero"),
    ("lane % (lane - 3)", "lane 3: 3 divided by zero"),
    ("lane >> lane * 3", "lane 22: shift by 66 .0 to 63."),
    ("1 << lane - 1", "lane 0: shift by -1"),
    ("1 << 63", "lane 0: 9223372036854775808 does not fit in 64 bits"),
    ("(lane << 58) * 2", "lane 16: 9223372036854775808 does not fit"),
    ("9" * 400, "does not fit in 64 bits"),
    ("9" * 600, "600 characters is too long"),
    ("(" * 240 + "lane" + ")" * 240, "too many nested parentheses|nested too deeply"),
])
def test_everything_else_is_refused(text, message):
    with pytest.raises(SimError, match=message) as refusal:
        lane_expression(text)
    assert "\n" not in str(refusal.value)


def test_deep_nesting_is_answered():
    assert lane_expression("-" * 300 + "lane")[5] == 5


PIECES = ["lane", "(", ")", "+", "-", "*", "**", "//", "%", "<<", ">>", "~", "&", " if ", " else ", " and ",
          "not ", "0", "7",
          "0x", "1e9", "9223372036854775807", "[", "]", ".", ",", ":", ":=", "=", "'", "f'", "lambda ", "#", "\\", " "]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_32_integers_or_one_clear_line(text):
    try:
        values = lane_expression(text)
    except SimError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert values.shape == (32,)
