"""A kernel as a user writes it: a host function that returns a :class:`Launch`, and the device function it launches.

::

    def stencil(*, n: int = 4096, pad: int = 0) -> Launch:          # host: parameters in, launch out
        src = GlobalTensor("src", float32, (n,))
        return Launch(body, grid=n // 256, block=256, args=(src, pad))

    def body(cta, src, pad): ...                                     # device: one statement, every warp

Such a function needs no registration: ``simgpu conflicts stencil.py:stencil --set pad=1``. Decorating it with
:func:`kernel` names variants, so that ``stencil.py:stencil@padded`` works too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from simgpu.errors import DataDependent, SimError
from simgpu.instructions import nearest
from simgpu.tensor import GlobalTensor

# Every GPU this project knows (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
MAX_THREADS = 1024  # of a block
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)

# Code that runs on a user's behalf: a message never points into it.
FOREIGN = (*(str(Path(file).parent) + os.sep for file in (__file__, np.__file__)), contextlib.__file__, "<frozen ")


def _dim3(what: str, value, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    try:
        dims = tuple(index(d) for d in (value if isinstance(value, (tuple, list)) else (value,)))
    except TypeError:
        dims = ()
    if not 1 <= len(dims) <= 3 or min(dims) < 1:
        raise SimError(f"{what} {value!r} needs one to three positive integers")
    dims = (*dims, 1, 1)[:3]
    for axis, extent, limit in zip("xyz", dims, limits, strict=True):
        if extent > limit:
            raise SimError(f"{what} {dims}: {axis} is {extent}; the limit is {limit}")
    return dims


def statement(traceback: TracebackType | None) -> tuple[str, bool]:
    """The innermost statement of a user's that ``traceback`` passes, as ``file:line``, and whether it ends there."""
    place, own = "", False
    while traceback is not None:
        code = traceback.tb_frame.f_code
        file = code.co_filename
        made = file == "<string>" and code.co_name == "__init__"  # by dataclass
        own = not made and not file.startswith(FOREIGN)
        if own:
            place = f"{os.path.basename(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place, own


@contextlib.contextmanager
def blaming(what: str) -> Iterator[None]:
    """Run a user's function; whatever it raises becomes one SimError that names its statement.

    A SimError the function raises itself passes unchanged, as does one that names the statement already.
    """
    try:
        yield
    except SimError as error:
        place, own = statement(error.__traceback__)
        if own or not place or place in str(error):
            raise
        raise type(error)(f"{place}: {error}") from error
    except (Exception, SystemExit) as error:  # a script imported for its kernel may end by sys.exit
        place, _ = statement(error.__traceback__)
        origin = error
        while origin is not None and not isinstance(origin, DataDependent):
            origin = origin.__cause__ or origin.__context__
        if origin is not None:  # numpy hides it: array[0] = UNKNOWN
            raise DataDependent(f"{place}: {origin}") from error
        cause = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        raise SimError(f"{what}{f' ({place})' if place else ''}: {cause}") from error


@dataclass(frozen=True)
class Launch:
    """A device function with its grid, block and arguments, as in ``body<<<grid, block>>>(*args)``.

    ``grid`` and ``block`` are (x, y, z), shorter tuples or an integer. ``args`` are passed on to
    ``body(cta, *args)``; those that are :class:`GlobalTensor` become the kernel's global memory.
    ``registers`` per thread, if known (from ``ptxas -v``), lets occupancy be exact. ``check`` is called with
    {name: array} of every global tensor after a run with values of the whole grid, and raises or returns
    something false other than None when the result is wrong.

    >>> Launch(lambda cta: None, grid=4, block=(32, 8)).threads
    256
    """

    body: Callable[..., None]
    grid: tuple[int, int, int] | int
    block: tuple[int, int, int] | int
    args: tuple[Any, ...] = ()
    registers: int | None = None
    check: Callable[[Mapping[str, Any]], Any] | None = None

    def __post_init__(self):
        object.__setattr__(self, "grid", _dim3("grid", self.grid, MAX_GRID))
        block = _dim3("block", self.block, (sys.maxsize,) * 3)
        if prod(block) > MAX_THREADS:
            raise SimError(f"block {block} has {prod(block)} threads; the limit is {MAX_THREADS}")
        object.__setattr__(self, "block", _dim3("block", block, MAX_BLOCK))
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) < len(names):
            raise SimError(f"global tensors need distinct names, not {names}")

    @property
    def name(self) -> str:
        """The name of the device function."""
        return getattr(self.body, "__name__", type(self.body).__name__)

    @property
    def threads(self) -> int:
        return prod(self.block)

    @property
    def warps(self) -> int:
        return -(-self.threads // 32)

    @property
    def ctas(self) -> int:
        return prod(self.grid)

    @property
    def tensors(self) -> tuple[GlobalTensor, ...]:
        return tuple(arg for arg in self.args if isinstance(arg, GlobalTensor))


@dataclass(frozen=True)
class Kernel:
    """A host function and its named variants, each a set of parameter values."""

    name: str
    host: Callable[..., Launch]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first line of the host function's docstring."""
        return (inspect.getdoc(self.host) or "").split("\n")[0]

    def parameters(self, variant: str | None = None) -> dict[str, Any]:
        """Parameter values of ``variant`` (None: the defaults). Raises SimError for an unknown variant."""
        defaults = {name: p.default for name, p in inspect.signature(self.host).parameters.items()}
        if variant is None:
            return defaults
        if variant not in self.variants:
            raise SimError(f"kernel {self.name!r} has no variant {variant!r}{nearest(variant, self.variants)}")
        return {**defaults, **self.variants[variant]}

    def launch(self, variant: str | None = None, /, **overrides) -> Launch:
        """The launch of ``variant`` with single parameters replaced.

        Raises SimError for an unknown variant or parameter, a missing parameter, or a value the host
        function refuses.
        """
        parameters = self.parameters(variant)
        for name in overrides:
            if name not in parameters:
                raise SimError(f"kernel {self.name!r} has no parameter {name!r}{nearest(name, parameters)}")
        parameters |= overrides
        missing = [name for name, value in parameters.items() if value is inspect.Parameter.empty]
        if missing:
            raise SimError(f"kernel {self.name!r} needs a value for {', '.join(missing)} (--set {missing[0]}=VALUE)")
        with blaming(f"kernel {self.name!r}"):
            launch = self.host(**parameters)
        if not isinstance(launch, Launch):
            raise SimError(f"kernel {self.name!r} returned {type(launch).__name__}, not a simgpu.Launch")
        return launch

    def parse(self, variant: str | None, settings: Mapping[str, str]) -> dict[str, Any]:
        """``settings`` as text turned into values of each parameter's own type (that of its default).

        >>> Kernel("k", lambda *, n=4, fast=False: None).parse(None, {"n": "0x10", "fast": "yes"})
        {'n': 16, 'fast': True}
        """
        parameters = self.parameters(variant)
        values = {}
        for name, text in settings.items():
            if name not in parameters:
                raise SimError(f"kernel {self.name!r} has no parameter {name!r}{nearest(name, parameters)}")
            values[name] = _parse_value(f"parameter {name}", text, parameters[name])
        return values


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse_value(what: str, text: str, default):
    kind = bool if isinstance(default, bool) else int if isinstance(default, int) else type(default)
    try:
        if kind is bool:
            return _BOOLEANS[text.lower()]
        if kind is int or default is inspect.Parameter.empty:
            return int(text, 0)
        return float(text) if kind is float else text
    except (KeyError, ValueError):
        raise SimError(f"{what}: {text!r} is not {'a yes/no value' if kind is bool else 'a number'}") from None


def kernel(**variants: Mapping[str, Any]) -> Callable[[Callable[..., Launch]], Kernel]:
    """Decorate a host function with its named variants: ``@kernel(plain={}, padded={"pad": 1})``."""

    def decorate(host: Callable[..., Launch]) -> Kernel:
        made = Kernel(host.__name__, host, dict(variants))
        for variant, values in variants.items():
            unknown = set(values) - set(made.parameters())
            if unknown:
                raise SimError(f"variant {variant!r} of {made.name!r} sets unknown parameters {sorted(unknown)}")
        return made

    return decorate


def load_kernel(path: str, function: str) -> Kernel:
    """The kernel called ``function`` in the Python file ``path``: decorated, or a plain host function.

    Raises SimError when the file cannot be imported or has no such function.
    """
    file = Path(path)
    if not file.is_file():
        raise SimError(f"no kernel file {path!r}")
    spec = importlib.util.spec_from_file_location(f"simgpu_user_{file.stem}", file)
    if spec is None:
        raise SimError(f"{path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.resolve().parent))  # so that the file may import its neighbours
    try:
        with blaming(path):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found = getattr(module, function, None)
    if isinstance(found, Kernel):
        return found
    if callable(found):
        return Kernel(function, found)
    hosts = [
        name
        for name, value in vars(module).items()
        if isinstance(value, Kernel) or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]
    raise SimError(f"{path} has no function {function!r}{nearest(function, hosts)}")
