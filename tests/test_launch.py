"""Launches, kernels and their variants, loading a user's file, and mistakes in a user's own code."""

import numpy as np
import pytest

from simgpu.errors import SimError
from simgpu.launch import Kernel, Launch, kernel, load_kernel
from simgpu.run import simulate
from simgpu.tensor import GlobalTensor, float32


def nothing(cta, *_):
    pass


# ---- grid and block ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dims"), [(7, (7, 1, 1)), ((2, 3), (2, 3, 1)), ([2, 3, 4], (2, 3, 4)), (np.int64(5), (5, 1, 1))]
)
def test_grid_and_block_are_one_to_three_integers(given, dims):
    launch = Launch(nothing, given, given)
    assert launch.grid == launch.block == dims
    assert launch.ctas == launch.threads == np.prod(dims)
    assert launch.warps == -(-launch.threads // 32)


@pytest.mark.parametrize("wrong", [0, -1, (), (1, 0), (1, 1, 1, 1), 2.0, "32", None, (2, 2.5)])
def test_other_grids_and_blocks_are_refused(wrong):
    for grid, block, what in ((wrong, 32, "grid"), (1, wrong, "block")):
        with pytest.raises(SimError, match=rf"{what} .* needs one to three positive integers"):
            Launch(nothing, grid, block)


@pytest.mark.parametrize(
    ("grid", "block", "words"),
    [
        (1, 1025, r"block \(1025, 1, 1\) has 1025 threads; the limit is 1024"),
        (1, (32, 33), "has 1056 threads"),
        (1, (1, 1, 65), "z is 65; the limit is 64"),
        ((1, 65536), 32, "y is 65536; the limit is 65535"),
        (2**31, 32, "x is 2147483648; the limit is 2147483647"),
    ],
)
def test_what_the_device_cannot_launch(grid, block, words):
    with pytest.raises(SimError, match=words):
        Launch(nothing, grid, block)
    Launch(nothing, (2**31 - 1, 65535, 65535), (4, 4, 64))


def test_global_tensors_have_distinct_names():
    with pytest.raises(SimError, match="distinct names"):
        Launch(nothing, 1, 32, (GlobalTensor("a", float32, (1,)), GlobalTensor("a", float32, (1,))))


# ---- variants and parameters ------------------------------------------------------------------------------


@kernel(small={"n": 4}, fast={"fast": True, "scale": 0.5})
def example(*, n: int = 8, fast: bool = False, scale: float = 1.0, name: str = "x") -> Launch:
    """Does nothing.

    At length.
    """
    return Launch(nothing, n, 32, (fast, scale, name))


def test_a_variant_replaces_defaults_and_settings_replace_a_variant():
    assert example.summary == "Does nothing."
    assert example.launch().grid[0] == 8 and example.launch("small").grid[0] == 4
    assert example.launch("small", n=2).grid[0] == 2
    assert example.launch("fast").args == (True, 0.5, "x")


def test_settings_take_the_type_of_the_default():
    values = example.parse("fast", {"n": "0x10", "fast": "off", "scale": "2", "name": "7"})
    assert values == {"n": 16, "fast": False, "scale": 2.0, "name": "7"}
    assert isinstance(values["scale"], float)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: example.launch("smal"), "no variant 'smal'; did you mean 'small'?"),
        (lambda: example.launch(m=1), "no parameter 'm'"),
        (lambda: example.parse(None, {"fsat": "1"}), "no parameter 'fsat'; did you mean 'fast'?"),
        (lambda: example.parse(None, {"n": "four"}), "parameter n: 'four' is not a number"),
        (lambda: example.parse(None, {"fast": "perhaps"}), "parameter fast: 'perhaps' is not a yes/no value"),
        (lambda: kernel(bad={"m": 1})(example.host), "variant 'bad' of 'example' sets unknown parameters"),
        (lambda: Kernel("k", lambda n: None).launch(), "needs a value for n"),
        (lambda: Kernel("k", lambda: 5).launch(), "returned int, not a simgpu.Launch"),
    ],
)
def test_mistakes_in_names_and_values(attempt, words):
    with pytest.raises(SimError) as caught:
        attempt()
    assert words in str(caught.value)


# ---- a user's file ----------------------------------------------------------------------------------------

SOURCE = """
import neighbour
from simgpu import launch

def plain(*, n: int = 2):
    return launch.Launch(neighbour.body, n, 32)

@launch.kernel(three={"n": 3})
def decorated(*, n: int = 2):
    return launch.Launch(neighbour.body, n, 32)

constant = 5
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "neighbour.py").write_text("def body(cta):\n    pass\n")
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


def test_a_file_holds_plain_and_decorated_kernels(folder):
    path = str(folder / "mine.py")
    assert load_kernel(path, "plain").launch(n=5).ctas == 5
    assert load_kernel(path, "decorated").launch("three").ctas == 3


@pytest.mark.parametrize(
    ("source", "function", "words"),
    [
        (None, "plain", "no kernel file"),
        (SOURCE, "plian", "has no function 'plian'; did you mean 'plain'?"),
        (SOURCE, "constant", "has no function 'constant'"),
        ("import numpy\n\nnumpy.nothing\n", "f", "(broken.py:3): AttributeError"),
        ("def f(:\n", "f", "SyntaxError"),
    ],
)
def test_files_that_hold_no_such_kernel(folder, source, function, words):
    path = folder / "broken.py"
    if source:
        path.write_text(source)
    with pytest.raises(SimError) as caught:
        load_kernel(str(path), function)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# ---- mistakes in a user's own code ------------------------------------------------------------------------


def bad_index(cta):
    [1, 2][cta.grid[0] + 5]


def bad_shapes(cta):
    _ = cta.lane + np.zeros(31)


def bad_stack(cta):
    np.stack([cta.lane, np.zeros(31)], -1)


def bad_type(cta):
    cta.lane + "a"


def bad_call(cta):
    cta.load()


def bad_name(cta):
    cta.lod(1)


MISTAKES = {
    bad_index: "IndexError: list index out of range",
    bad_shapes: "ValueError: operands could not be broadcast together with shapes (1,1,32) (31,)",
    bad_stack: "ValueError: all input arrays must have the same shape",
    bad_type: "UFuncTypeError: ufunc 'add' did not contain a loop",
    bad_call: "TypeError: CTA.load() missing 1 required positional argument: 'ref'",
    bad_name: "AttributeError: 'CTA' object has no attribute 'lod'",
}


@pytest.mark.parametrize("body", MISTAKES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("mode", ["auto", "values", "addresses"])
def test_an_exception_in_a_kernel_names_its_statement(body, mode):
    line = body.__code__.co_firstlineno + 1
    with pytest.raises(SimError) as caught:
        simulate(Launch(body, 1, 32), mode=mode)
    message = str(caught.value)
    assert message.startswith(f"kernel {body.__name__!r} (test_launch.py:{line}): {MISTAKES[body]}")
    assert "\n" not in message and caught.value.__cause__ is not None


def test_an_exception_in_a_function_of_the_kernel_names_that_statement():
    def part(cta):
        return {}["missing"]

    with pytest.raises(SimError, match=rf"kernel 'body' \(test_launch.py:{part.__code__.co_firstlineno + 1}\): Key"):
        def body(cta):
            part(cta)

        simulate(Launch(body, 1, 32))


def test_a_host_functions_own_words_pass_unchanged_and_others_get_a_place():
    def own(*, n: int = 1):
        raise SimError("n is odd")

    def tensor(*, n: int = 1):
        return Launch(nothing, 1, 32, (GlobalTensor("t", float32, (0,)),))

    def division(*, n: int = 1):
        return Launch(nothing, n // 0, 32)

    def messages():
        for host in (own, tensor, division):
            with pytest.raises(SimError) as caught:
                Kernel("k", host).launch()
            yield str(caught.value), f"test_launch.py:{host.__code__.co_firstlineno + 1}"

    (first, _), (second, there), (third, here) = messages()
    assert first == "n is odd"
    assert second == f"{there}: tensor 't': shape (0,) needs positive integers"
    assert third == f"kernel 'k' ({here}): ZeroDivisionError: integer division or modulo by zero"


def test_mistakes_in_initial_data_and_in_the_check():
    def data():
        raise RuntimeError("no such\nfile")

    def check(arrays):
        raise AssertionError("rows differ")

    tensor = GlobalTensor("t", float32, (1,), init=data)
    with pytest.raises(SimError, match=r"^nothing: initial data \(test_launch.py:\d+\): RuntimeError: no such file$"):
        simulate(Launch(nothing, 1, 32, (tensor,)), mode="values")
    with pytest.raises(SimError, match=r"^nothing: the result is wrong \(test_launch.py:\d+\): AssertionError: rows"):
        simulate(Launch(nothing, 1, 32, check=check), mode="values")


@pytest.mark.parametrize("verdict", [False, np.False_, 0, np.array([False])])
def test_a_false_verdict_of_the_check_is_refused(verdict):
    with pytest.raises(SimError, match=r"^nothing: the result is wrong$"):
        simulate(Launch(nothing, 1, 32, check=lambda arrays: verdict), mode="values")


@pytest.mark.parametrize("verdict", [True, np.True_, None])
def test_a_true_verdict_or_none_is_not(verdict):
    simulate(Launch(nothing, 1, 32, check=lambda arrays: verdict), mode="values")
