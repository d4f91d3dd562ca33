"""How far a kernel's number may lie from the exact one: running error analysis, carried along with the formulas."""

from __future__ import annotations

from math import log

import numpy as np

LN2 = log(2)


class Bounded:
    """A float64 ``value`` and a bound ``error`` on how far a kernel's number may lie from it, elementwise.

    Running error analysis. Narrowing to bf16 adds 2^-8 of the magnitude (8 significant bits, to nearest). Every fp32
    operation, and every term of a sum in any order, adds 2^-22: four times fp32's 2^-24, which covers ex2.approx and
    rsqrt.approx (2 ulp) and an mma's accumulator, which truncates.

    >>> x = Bounded(np.array([1.0, 2.0]), 2.0**-8)
    >>> (x * 3).holds(np.array([3.01, 6.02])).tolist()
    [True, False]
    """

    FP32 = 2.0**-22
    BF16 = 2.0**-8
    __array_ufunc__ = None  # so that array * Bounded comes here

    def __init__(self, value, error=0.0):
        if isinstance(value, Bounded):
            value, error = value.value, value.error
        self.value = np.asarray(value, np.float64)
        self.error = np.broadcast_to(error, self.value.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def holds(self, actual) -> np.ndarray:
        """Whether each element of ``actual`` is within the bound; False for NaN."""
        return np.abs(np.asarray(actual, np.float64) - self.value) <= self.error

    def _rounded(self, unit: float) -> Bounded:
        return Bounded(self.value, self.error + unit * (np.abs(self.value) + self.error))

    def __add__(self, other):
        other = Bounded(other)
        return Bounded(self.value + other.value, self.error + other.error)._rounded(self.FP32)

    def __neg__(self):
        return Bounded(-self.value, self.error)

    def __sub__(self, other):
        return self + -Bounded(other)

    def __mul__(self, other):
        other = Bounded(other)
        error = self.error * (np.abs(other.value) + other.error) + np.abs(self.value) * other.error
        return Bounded(self.value * other.value, error)._rounded(self.FP32)

    __rmul__ = __mul__

    def __matmul__(self, other):
        a, b = np.abs(self.value) + self.error, np.abs(other.value) + other.error
        error = self.error @ b + np.abs(self.value) @ other.error + self.FP32 * a.shape[-1] * (a @ b)
        return Bounded(self.value @ other.value, error)

    def __getitem__(self, index):
        return Bounded(self.value[index], self.error[index])

    def swapaxes(self, *axes):
        return Bounded(self.value.swapaxes(*axes), self.error.swapaxes(*axes))

    def sum(self, axis, keepdims=False):
        error = self._rounded(self.FP32 * self.shape[axis]).error
        return Bounded(self.value.sum(axis, keepdims=keepdims), error.sum(axis, keepdims=keepdims))

    def exp2(self):
        return Bounded(np.exp2(self.value), np.exp2(self.value) * np.expm1(LN2 * self.error))._rounded(self.FP32)

    def rsqrt(self):
        return Bounded(self.value**-0.5, (self.value - self.error) ** -0.5 - self.value**-0.5)._rounded(self.FP32)
