"""Kernels written as Python twins. :func:`find` turns a command-line name into one."""

from __future__ import annotations

from simgpu.errors import SimError
from simgpu.instructions import nearest
from simgpu.launch import Kernel, load_kernel


def registered() -> dict[str, Kernel]:
    """Every kernel that ships with simgpu, by name."""
    from kernels_py.hgemm_ladder import hgemm_ladder
    from kernels_py.kda_b0 import kda_b0
    from kernels_py.kda_b1 import kda_b1
    from kernels_py.kda_b2 import kda_b2
    from kernels_py.kda_b3 import kda_b3
    from kernels_py.patterns import patterns
    from kernels_py.smem_to_reg import smem_to_reg
    from kernels_py.transpose import transpose

    kernels = hgemm_ladder, kda_b0, kda_b1, kda_b2, kda_b3, patterns, smem_to_reg, transpose
    return {made.name: made for made in kernels}


def find(text: str) -> tuple[Kernel, str | None]:
    """The kernel and variant that ``NAME[@VARIANT]`` or ``path/file.py:function[@VARIANT]`` means.

    Raises SimError for an unknown kernel or variant, naming the nearest.

    >>> find("transpose@pad1")[1]
    'pad1'
    """
    name, at, variant = text.partition("@")
    path, colon, function = name.rpartition(":")
    if colon:
        made = load_kernel(path, function)
    else:
        known = registered()
        if name not in known:
            raise SimError(
                f"unknown kernel {name!r}{nearest(name, known)}; a kernel of your own is named path/file.py:function"
            )
        made = known[name]
    if at:
        made.parameters(variant)
    return made, variant if at else None
