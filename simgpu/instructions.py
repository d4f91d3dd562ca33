"""The memory instructions simgpu knows, and the one place that says what each may do.

An :class:`Instruction` is what a row of every table is about: its name as measured data spells it
(``lds``, ``ldmatrix.x4.trans``, ``cp.async.cg`` ...), the bytes a lane may move, and the memories it touches.
Names follow PTX where PTX has one; ``lds``/``sts``/``ldg``/``stg`` are the SASS names of the plain
loads and stores.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType

from simgpu.errors import SimError

LANES = 32  # threads of a warp
FULL_MASK = 0xFFFFFFFF
NO_SOURCE = -1  # in place of the global address of a cp.async lane that reads nothing and fills with zeros


@dataclass(frozen=True)
class Instruction:
    """One memory instruction.

    ``family`` selects the counting rule; ``widths`` are the legal bytes per lane; ``matrices`` is the N of
    ldmatrix/stmatrix ``.xN`` (0 otherwise); ``shared``/``global_`` say which memories it addresses.
    ``proven`` is False for an instruction nobody has measured: it is counted, and shown as *unmodelled*.

    >>> instruction("ldmatrix.x4.trans").matrices
    4
    >>> instruction("cp.async.cg").widths
    (16,)
    """

    name: str
    family: str
    widths: tuple[int, ...]
    shared: bool = False
    global_: bool = False
    matrices: int = 0
    proven: bool = True

    def require_width(self, width: int) -> None:
        """Raise :class:`SimError` unless ``width`` bytes per lane is a form of this instruction."""
        if width not in self.widths:
            legal = ", ".join(map(str, self.widths))
            raise SimError(f"{self.name} has no form of {width} bytes per lane (it has {legal})")

    def require_mask(self, mask: int) -> None:
        """Raise :class:`SimError` unless ``mask`` is a 32-bit active mask this instruction can run under."""
        if not 0 <= mask <= FULL_MASK:
            raise SimError(f"mask {mask:#x} is not a 32-bit mask")
        if self.matrices and mask not in (0, FULL_MASK):
            raise SimError(f"{self.name} needs all 32 lanes active, or none (mask {mask:#010x})")


def _table() -> dict[str, Instruction]:
    rows = [
        Instruction("lds", "lds", (1, 2, 4, 8, 16), shared=True),
        Instruction("sts", "sts", (1, 2, 4, 8, 16), shared=True),
        Instruction("ldg", "ldg", (1, 2, 4, 8, 16), global_=True),
        Instruction("stg", "stg", (1, 2, 4, 8, 16), global_=True),
        Instruction("cp.async.ca", "cp.async.ca", (4, 8, 16), shared=True, global_=True),
        Instruction("cp.async.cg", "cp.async.cg", (16,), shared=True, global_=True),
    ]
    for n in (1, 2, 4):
        for trans in ("", ".trans"):
            rows.append(Instruction(f"ldmatrix.x{n}{trans}", "ldmatrix", (16,), shared=True, matrices=n))
            rows.append(Instruction(f"stmatrix.x{n}{trans}", "stmatrix", (16,), shared=True, matrices=n))
    # Float and 64-bit adds on shared memory compile to a loop of loads and compare-and-swaps, whose trips depend on
    # who wins: they carry no rule.
    rows.append(Instruction("red.shared.add.u32", "atoms", (4,), shared=True))
    for verb in ("add.u32", "exch.b32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32"):
        rows.append(Instruction(f"atom.shared.{verb}", "atoms", (4,), shared=True))
    rows.append(Instruction("atom.shared.exch.b64", "atoms", (8,), shared=True))
    rows.append(Instruction("atom.shared.cas.b32", "atoms.cas", (4,), shared=True))
    rows.append(Instruction("atom.shared.cas.b64", "atoms.cas", (8,), shared=True))
    rows.append(Instruction("atom.shared.add.f32", "atoms", (4,), shared=True, proven=False))
    for verb in ("atom.global.add.u32", "red.global.add.u32", "atom.global.add.f32", "red.global.add.f32",
                 "atom.global.exch.b32", "atom.global.cas.b32"):
        rows.append(Instruction(verb, "atomg", (4,), global_=True))
    rows.append(Instruction("atom.global.add.u64", "atomg", (8,), global_=True))
    return {row.name: row for row in rows}


INSTRUCTIONS = MappingProxyType(_table())


def instruction(name: str) -> Instruction:
    """The :class:`Instruction` called ``name``.

    Raises :class:`SimError` for an unknown name, with the nearest known one.

    >>> instruction("lds").widths
    (1, 2, 4, 8, 16)
    """
    try:
        return INSTRUCTIONS[name]
    except KeyError:
        raise SimError(f"unknown instruction {name!r}{nearest(name, INSTRUCTIONS)}") from None


def nearest(name: str, known) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``known``, else the whole list when there is a short one."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f" (known: {', '.join(sorted(known))})" if 0 < len(known) <= 24 else ""
