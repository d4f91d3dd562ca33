"""NVBit traces of the Accel-Sim tracer (``kernel-1.traceg``, also ``.gz`` or ``.xz``) as recorded accesses.

The format is that of accel-sim-framework: ``util/tracer_nvbit/tracer_tool/tracer_tool.cu`` writes it,
``traces-processing/post-traces-processing.cpp`` groups it by thread block and
``gpu-simulator/trace-parser/trace_parser.cc`` reads it. After the
kernel's header an instruction of a warp is a line::

    [line] PC mask dest_num [R..] opcode src_num [R..] mem_width [mode addresses] immediate...

PC, mask and addresses are hexadecimal. Mode 0 lists the address of every active lane; 1 is a base and a stride, for
active lanes without a gap; 2 is a base and the step to each further active lane. A site is PC and opcode.

Addresses are what NVBit's ``nvbit_add_call_arg_mref_addr64`` computes from the operand: for LDS, STS, LDSM and ATOMS
an offset into the shared window, for LDG, STG, ATOMG and RED a virtual address. A shared address that lies in the
window of ``-shmem base_addr`` is made an offset, any other is refused.

What no proven rule covers is counted as *unmodelled* under its own opcode: generic LD, ST and ATOM (any memory),
local memory, TMA, and LDGSTS where the file holds only one of its two addresses (the post-processing leaves one).
"""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO

import numpy as np

from simgpu.errors import SimError
from simgpu.events import Site
from simgpu.instructions import FULL_MASK, INSTRUCTIONS, LANES, Instruction
from simgpu.recorded import CHUNK_LINES, LONGEST_NAME, SHARED_BYTES, Chunk, Progress

SUFFIXES = {".traceg": None, ".traceg.gz": gzip.open, ".traceg.xz": lzma.open}
OPCODE = re.compile(rf"[A-Za-z0-9_.]{{1,{LONGEST_NAME}}}")
LONGEST_LINE = 1 << 16  # bytes; 32 listed addresses take about 700
NO_ADDRESS = np.full(LANES, -1, np.int64)
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def is_traceg(file: str) -> bool:
    """Whether ``file`` is named as a trace this module reads.

    >>> is_traceg("kernel-1.traceg.xz"), is_traceg("kernel-1.trace")
    (True, False)
    """
    return file.endswith(tuple(SUFFIXES))


def read_traceg(file: str, progress: Progress | None = None) -> Iterator[Chunk]:
    """The memory accesses of an Accel-Sim trace, in chunks.

    ``progress(done, total)`` is told bytes of the file. Raises :class:`~simgpu.errors.SimError` naming the line for
    what the format does not allow, a file that ends early, and a shared address outside the shared window.
    """
    rows: list[_Row] = []
    sites: dict[Site, int] = {}
    found = 0
    with _opened(file) as (raw, size, lines):
        for row in _paired(_rows(file, lines)):
            rows.append(row)
            if len(rows) == CHUNK_LINES:
                yield _chunk(rows, sites)
                found, rows = found + len(rows), []
                if progress:
                    progress(raw.tell(), size)
    if rows:
        yield _chunk(rows, sites)
    elif not found:
        raise SimError(f"{file}: no memory accesses")


@contextmanager
def _opened(file: str) -> Iterator[tuple[BinaryIO, int, Iterator[bytes]]]:
    """The file, its size in bytes, and its lines, decompressed."""
    suffix = max((suffix for suffix in SUFFIXES if file.endswith(suffix)), key=len)
    try:
        with open(file, "rb") as raw:
            size = raw.seek(0, 2)
            raw.seek(0)
            stream = SUFFIXES[suffix](raw) if SUFFIXES[suffix] else raw
            yield raw, size, iter(lambda: stream.readline(LONGEST_LINE + 1), b"")
    except DAMAGED as error:
        raise SimError(f"{file}: not a whole {suffix} file: {error}") from None
    except OSError as error:
        raise SimError(f"cannot read {file!r}: {error.strerror or error}") from None


# ---- lines ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """What the kernel's header says of its lines: see :func:`_header`."""

    shared_base: int = 0
    version: int = 0
    lineinfo: bool = False
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class _Row:
    """One access of one warp: ``addresses`` int64[32], -1 in lanes that are off."""

    site: Site
    pc: int
    cta: int
    warp: int
    mask: int
    addresses: np.ndarray
    place: str
    source: np.ndarray | None = None  # the global addresses of an LDGSTS whose other line was found


def _rows(file: str, lines: Iterable[bytes]) -> Iterator[_Row]:
    """The memory instructions among ``lines``; the structure around them is checked on the way."""
    header, inside, cta, warp, left, number = _Header(), False, None, None, 0, 0
    for number, line in enumerate(lines, 1):
        place = f"{file}: line {number}"
        if len(line) > LONGEST_LINE:
            raise SimError(f"{place}: longer than {LONGEST_LINE:,} bytes")
        try:
            text = line.decode("ascii").strip()
        except UnicodeDecodeError as error:
            raise SimError(f"{place}: not ASCII (byte {error.start + 1})") from None
        if not text:
            continue
        if left and (text.startswith("#") or " = " in text):
            raise SimError(f"{place}: warp {warp} has {left} more instructions to come (insts = ...)")
        if text.startswith("-"):
            header = _header(header, text, place)
        elif text in ("#BEGIN_TB", "#END_TB"):
            if inside == (text == "#BEGIN_TB"):
                raise SimError(f"{place}: {text} {'inside' if inside else 'outside'} a thread block")
            inside, cta, warp = not inside, None, None
        elif text.startswith("#") or text.startswith("cluster "):
            continue
        elif not inside:
            hint = "" if "=" in text else " (a .trace file must go through post-traces-processing first)"
            raise SimError(f"{place}: {text[:40]!r} outside #BEGIN_TB{hint}")
        elif match := re.fullmatch(r"thread block = (\d{1,10}),(\d{1,10}),(\d{1,10})", text):
            cta = _linear(tuple(map(int, match.groups())), header, place)
        elif match := re.fullmatch(r"(warp|insts) = (\d{1,18})", text):
            warp, left = (int(match[2]), left) if match[1] == "warp" else (warp, int(match[2]))
        elif cta is None or warp is None or not left:
            missing = "thread block" if cta is None else "warp" if warp is None else "insts"
            raise SimError(f"{place}: {text[:40]!r} before '{missing} ='")
        else:
            left -= 1
            if found := _instruction(text, header, place):
                yield _Row(found[0], found[1], cta, warp, *found[2:], place)
    if inside:
        raise SimError(f"{file}: line {number}: the file ends inside a thread block")


def _header(header: _Header, text: str, place: str) -> _Header:
    """``header`` with what a ``-key = value`` line says, if it matters to the accesses."""
    key, _, value = (part.strip() for part in text[1:].partition("="))
    try:
        known = {
            "shmem base_addr": lambda: {"shared_base": int(value, 16)},
            "accelsim tracer version": lambda: {"version": int(value)},
            "enable lineinfo": lambda: {"lineinfo": bool(int(value))},
            "grid dim": lambda: {"grid": _dims(value)},
        }
        return _Header(**vars(header) | known[key]()) if key in known else header
    except ValueError:
        raise SimError(f"{place}: {key} {value[:40]!r} is not understood") from None


def _dims(text: str) -> tuple[int, int, int]:
    x, y, z = map(int, text.strip("()").split(","))
    return x, y, z


def _linear(cta: tuple[int, ...], header: _Header, place: str) -> int:
    if header.grid is None:
        raise SimError(f"{place}: a thread block before '-grid dim ='")
    if any(index >= extent for index, extent in zip(cta, header.grid, strict=True)):
        raise SimError(f"{place}: thread block {cta} lies outside the grid {header.grid}")
    return (cta[2] * header.grid[1] + cta[1]) * header.grid[0] + cta[0]


def _instruction(text: str, header: _Header, place: str) -> tuple[Site, int, int, np.ndarray] | None:
    """Site, PC, mask and addresses of an instruction's line; None if it is no memory instruction."""
    fields = text.split()
    at = 4 if header.version < 3 else 0  # older tracers leave thread block and warp on the line
    try:
        line = f" (line {int(fields[at])})" if header.lineinfo else ""
        at += header.lineinfo
        pc, mask = int(fields[at], 16), int(fields[at + 1], 16)
        at += 3 + _count(fields[at + 2])
        opcode = fields[at]
        at += 2 + _count(fields[at + 1])
        memory = int(fields[at]) > 0 or opcode.startswith(("UTMA", "UBLK"))
        if not memory:
            return None
        if not 0 <= mask <= FULL_MASK or not 0 <= pc < 2**63 or not OPCODE.fullmatch(opcode):
            raise ValueError
        executed, width, kept = decode(opcode)
        site = Site(f"{pc:#06x} {opcode}{line}", "", 0, executed, width)
        addresses = _addresses(fields[at + 1 :], mask) if kept else NO_ADDRESS
    except (ValueError, IndexError):
        form = "PC mask dest_num [..] opcode src_num [..] mem_width [mode addresses]"
        raise SimError(f"{place}: {text[:60]!r} is not {form}") from None
    if executed.shared and executed.proven:
        addresses = _window(addresses, header, opcode, place)
    return site, pc, mask, addresses


def _count(field: str) -> int:
    """A number of registers."""
    if not field.isdecimal():
        raise ValueError
    return int(field)


def _addresses(fields: list[str], mask: int) -> np.ndarray:
    """int64[32] from a mode and its numbers. Raises ValueError or IndexError if they are not what the mode needs."""
    active = [lane for lane in range(LANES) if mask >> lane & 1]
    addresses = NO_ADDRESS.copy()
    if not active:
        return addresses
    mode = int(fields[0])
    if mode == 0:
        values = [int(field, 16) for field in fields[1 : 1 + len(active)]]
    elif mode == 1:
        base, stride = int(fields[1], 16), int(fields[2])
        if active[-1] - active[0] + 1 != len(active):
            raise ValueError("a stride over a gap")
        values = [base + stride * k for k in range(len(active))]
    elif mode == 2:
        values = [int(fields[1], 16)]
        for field in fields[2 : 1 + len(active)]:
            values.append(values[-1] + int(field))
    else:
        raise ValueError(mode)
    if len(values) < len(active) or min(values) < 0 or max(values) >= 2**63:
        raise ValueError("addresses")
    addresses[active] = values
    return addresses


def _window(addresses: np.ndarray, header: _Header, opcode: str, place: str) -> np.ndarray:
    """Shared addresses as offsets into the shared window."""
    base = header.shared_base
    inside = (addresses >= base) & (addresses < base + SHARED_BYTES) if base else np.zeros(LANES, bool)
    offsets = np.where(inside, addresses - base, addresses)
    if (offsets >= SHARED_BYTES).any():
        lane = int(np.argmax(offsets >= SHARED_BYTES))
        window = f"in the shared window at {base:#x}" if base else "in a shared window that the header states"
        raise SimError(
            f"{place}: {opcode}: lane {lane}: shared address {int(addresses[lane]):#x} is neither an offset below "
            f"{SHARED_BYTES:,} nor {window}"
        )
    return offsets


# ---- opcodes -----------------------------------------------------------------------------------------------------

PLAIN = {"LDS": "lds", "STS": "sts", "LDG": "ldg", "STG": "stg"}
UNSIGNED, BITS = ("ADD", "MIN", "MAX", "INC"), ("AND", "OR", "XOR", "EXCH", "CAS")
SCOPES = {"E", "STRONG", "WEAK", "GPU", "SYS", "SM", "CTA", "FTZ", "RN", "U32", "32"}  # what leaves the cost as it is


@lru_cache(maxsize=4096)
def decode(opcode: str) -> tuple[Instruction, int, bool]:
    """The instruction and bytes per lane of a SASS opcode, and whether its addresses are needed.

    An opcode without a proven rule is an instruction of its own name that is not ``proven``.

    >>> [(decode(op)[0].name, decode(op)[1]) for op in ("LDG.E.128.CONSTANT", "LDSM.16.MT88.4", "STS.U8", "RED.E.ADD")]
    [('ldg', 16), ('ldmatrix.x4.trans', 16), ('sts', 1), ('red.global.add.u32', 4)]
    >>> decode("LD.E.64")[0].proven
    False
    """
    base, *modifiers = opcode.split(".")
    name, width = _name(base, modifiers), _width(modifiers)
    if base in ("LDSM", "STSM"):
        width = 16
    known = INSTRUCTIONS.get(name)
    if known is not None and known.proven and width in known.widths:
        return known, width, True
    # Which memory it touches need not be told: nothing of it is counted, and totals of either memory are refused. The
    # family only has to be one whose replay takes any width.
    return Instruction(opcode, "ldg", (width,), global_=True, proven=False), width, base == "LDGSTS"


def _name(base: str, modifiers: list[str]) -> str | None:
    if base in PLAIN:
        return PLAIN[base]
    if base in ("LDSM", "STSM") and modifiers[:1] == ["16"] and modifiers[1:2] in (["M88"], ["MT88"]):
        count = "".join(modifiers[2:]) or "1"
        trans = ".trans" if modifiers[1] == "MT88" else ""
        return f"{'ldmatrix' if base == 'LDSM' else 'stmatrix'}.x{count}{trans}"
    if base in ("ATOMS", "ATOMG", "RED", "REDG"):
        verb, *kind = [modifier for modifier in modifiers if modifier not in SCOPES] or [""]
        letter = "u" if verb in UNSIGNED else "b" if verb in BITS else "?"
        kind = {"": f"{letter}32", "64": f"{letter}64", "F32": "f32"}.get(".".join(kind))
        side = "shared" if base == "ATOMS" else "global"
        return f"{'red' if base.startswith('RED') else 'atom'}.{side}.{verb.lower()}.{kind}"
    return None


def _width(modifiers: list[str]) -> int:
    sizes = (re.fullmatch(r"[US]?(8|16|32|64|128|256)", modifier) for modifier in modifiers)
    return next((int(match[1]) // 8 for match in sizes if match), 4)


# ---- LDGSTS ------------------------------------------------------------------------------------------------------


def _paired(rows: Iterable[_Row]) -> Iterator[_Row]:
    """``rows`` with the two lines of an LDGSTS, its shared and then its global addresses, made one cp.async.

    The tracer writes both; a post-processing that keeps them leaves them next to each other.
    """
    held = None
    for row in rows:
        if held is not None:
            same = (held.site, held.cta, held.warp, held.mask) == (row.site, row.cta, row.warp, row.mask)
            if same and row.addresses.max() >= SHARED_BYTES > held.addresses.max() >= 0:
                row, held = _copy(held, row.addresses), None
                yield row
                continue
            yield held
            held = None
        if row.site.name.partition(" ")[2].startswith("LDGSTS") and "ZFILL" not in row.site.name:
            held = row  # which lanes of a .ZFILL have a source is not in the trace
        else:
            yield row
    if held is not None:
        yield held


def _copy(held: _Row, source: np.ndarray) -> _Row:
    executed = INSTRUCTIONS["cp.async.cg" if ".BYPASS" in held.site.name else "cp.async.ca"]
    if held.site.width not in executed.widths:
        return held
    site = Site(held.site.name, "", 0, executed, held.site.width)
    return _Row(site, held.pc, held.cta, held.warp, held.mask, held.addresses, held.place, source)


# ---- columns -----------------------------------------------------------------------------------------------------


def _chunk(rows: list[_Row], sites: dict[Site, int]) -> Chunk:
    site = np.array([sites.setdefault(row.site, len(sites)) for row in rows])
    addresses = np.array([row.addresses if row.site.instruction.proven else np.zeros(LANES, int) for row in rows])
    sources = np.array([row.addresses if row.source is None else row.source for row in rows])
    proven = np.array([row.site.instruction.proven for row in rows])
    shared = np.array([row.site.instruction.shared for row in rows])
    return Chunk(
        list(sites),
        site,
        np.array([row.pc for row in rows]),  # rows are listed by PC
        np.array([row.cta for row in rows]),
        np.array([row.mask for row in rows], np.uint32),
        np.where(shared[:, None], addresses, 0).astype(np.int32),
        np.where(proven[:, None], sources, 0),
        [row.place for row in rows],
    )
