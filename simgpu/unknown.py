"""The value of a load when only addresses are emulated."""

from __future__ import annotations

from simgpu.errors import DataDependent


class Unknown:
    """A value nobody computed. Whatever is done with it gives it back, except deciding something by it.

    >>> (UNKNOWN + 1).astype("float32") * 2 is UNKNOWN
    True
    """

    __slots__ = ()

    def __array_ufunc__(self, *_, **__):
        return self

    def __array_function__(self, *_, **__):
        return self

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    def __getitem__(self, _):
        return self

    def __setitem__(self, _, __):
        pass

    def __iter__(self):
        raise DataDependent("a loaded value is unpacked; index it instead, or run with values")

    def __bool__(self):
        raise DataDependent("a branch depends on a loaded value; run with values")

    def __array__(self, *_, **__):
        raise DataDependent("a loaded value is put into an array; compute with it as it is, or run with values")

    def __len__(self):
        raise DataDependent("the length of a loaded value is asked for; run with values")

    def __index__(self):
        raise DataDependent("a Python number depends on a loaded value; run with values")

    def __repr__(self):
        return "UNKNOWN"

    def __divmod__(self, _):
        return self, self

    def _same(self, *_):
        return self

    __rdivmod__ = __divmod__
    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _same
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = _same
    __rshift__ = __rrshift__ = __neg__ = __pos__ = __abs__ = __invert__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same


UNKNOWN = Unknown()
