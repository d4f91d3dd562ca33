"""Recorded accesses, from a trace file or from JSON lines, counted in the order they were recorded.

Both kinds of file are read in chunks, so that a file may be larger than memory. A JSON line is one warp access: ``op``,
``bytes_per_lane``, ``active_mask`` ("0x..." or an integer) and 32 integers under ``shared_byte_offset`` and/or
``global_byte_offset``, whichever memories the instruction uses; other keys (measured counters, say) are ignored.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from simgpu.counters import CounterSink, CounterTable
from simgpu.errors import SimError
from simgpu.events import AccessEvent, Site
from simgpu.instructions import FULL_MASK, LANES, instruction
from simgpu.replay import Columns, replay
from simgpu.rules import cost
from simgpu.trace import TraceReader

ARCHIVE = b"PK"  # how a trace begins, and JSON cannot
CHUNK_LINES = 1 << 14
LONGEST_LINE = 1 << 20  # bytes; a measured access takes about 1,000
LONGEST_NAME = 64  # characters of an instruction
SHARED_BYTES = 228 * 1024  # of an SM of compute capability 9.0: no GPU here has more, so no address lies beyond
ENDS = {"shared": SHARED_BYTES, "global": 2**63}

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True)
class Chunk:
    """n consecutive accesses: ``site`` int[n] into ``sites``, ``order`` int[n] and ``ctas`` int[n] of the instruction,
    ``masks`` uint32[n], ``shared`` int32[n, 32] and ``global_`` int64[n, 32] byte addresses.

    ``places`` say where in the file a row stands: one for each row, or one for the chunk. JSON lines have a site per
    instruction and width, without a file.
    """

    sites: list[Site]
    site: np.ndarray
    order: np.ndarray
    ctas: np.ndarray
    masks: np.ndarray
    shared: np.ndarray
    global_: np.ndarray
    places: list[str] | str

    def events(self) -> Iterator[tuple[np.ndarray, AccessEvent]]:
        """What the emulator would tell a sink: for each site, its rows (int[k]) and an event of k CTAs of one warp."""
        for index in np.unique(self.site):
            site, here = self.sites[index], np.flatnonzero(self.site == index)
            yield (
                here,
                AccessEvent(
                    site,
                    self.masks[here, None],
                    np.ones((len(here), 1), bool),
                    self.shared[here, None] if site.instruction.shared else None,
                    self.global_[here, None] if site.instruction.global_ else None,
                    ctas=self.ctas[here],
                    warps=1,
                    order=int(self.order[here].min()),
                ),
            )

    def counted(self) -> Iterator[tuple[Site, np.ndarray, Columns]]:
        """For each site: its rows (int[k]) and what each costs. Raises SimError naming the place."""
        for rows, event in self.events():
            try:
                columns = replay(event.site.instruction, event.site.width, *_flat(event))
            except SimError as error:
                raise self._explained(rows, event) or error from None
            yield event.site, rows, columns

    def count(self) -> CounterSink:
        """The counters of the chunk's accesses, as the emulator would count them. Raises SimError naming the place."""
        sink = CounterSink()
        for rows, event in self.events():
            try:
                sink.access(event)
            except SimError as error:
                raise self._explained(rows, event) or error from None
        return sink

    def _explained(self, rows: np.ndarray, event: AccessEvent) -> SimError | None:
        """The refusal of the first bad row, told by the reference rule, with the row's place in the file."""
        masks, *sides = _flat(event)
        for k, row in enumerate(rows):
            try:
                addresses = (None if side is None else side[k].tolist() for side in sides)
                cost(event.site.instruction, event.site.width, int(masks[k]), *addresses)
            except SimError as error:
                if isinstance(self.places, list):
                    return SimError(f"{self.places[row]}: {error}")
                return SimError(f"{self.places}, access {row} ({event.site.name}): {error}")
        return None


def _flat(event: AccessEvent) -> tuple[np.ndarray | None, ...]:
    """The event's masks [k], shared and global addresses [k, 32]."""
    return tuple(None if side is None else side[:, 0] for side in (event.masks, event.shared, event.global_))


def count(chunks: Iterable[Chunk]) -> CounterTable:
    """The counters of every site: of a trace, the very table of the run that wrote it."""
    return CounterSink().merge(chunk.count() for chunk in chunks).table()


def read_recorded(file: str, stream: BinaryIO | None = None, progress: Progress | None = None) -> Iterator[Chunk]:
    """The accesses of ``file``: a trace, an Accel-Sim trace (``.traceg``) or JSON lines; ``stream`` (binary) is read as
    JSON lines instead if given.

    ``progress(done, total)`` is called after every chunk where the total is known. Raises SimError for a file that is
    neither, naming the line or the chunk.
    """
    if stream is not None:
        yield from _json_chunks(stream, file)
        return
    from simgpu.traceg import is_traceg, read_traceg  # it imports this module for Chunk

    if is_traceg(file):
        yield from read_traceg(file, progress)
        return
    try:
        with open(file, "rb") as opened:
            # A pipe, as in `simgpu replay <(zcat ...)`, can be looked into but not rewound.
            if not _size(opened) or (opened.peek(2)[:2] != ARCHIVE and not file.endswith(".trace")):
                yield from _json_chunks(opened, file, progress)
                return
    except OSError as error:
        raise SimError(f"cannot read {file!r}: {error.strerror}") from None
    yield from _trace_chunks(file, progress)


# ---- traces --------------------------------------------------------------------------------------------------


def _trace_chunks(file: str, progress: Progress | None) -> Iterator[Chunk]:
    reader = TraceReader(file)
    sites, done = list(reader.sites), 0
    for number, columns in enumerate(reader.chunks()):
        yield Chunk(
            sites,
            columns["site"],
            columns["order"],
            columns["cta"],
            columns["mask"],
            columns["shared"],
            columns["global"],
            f"{file}: chunk {number}",
        )
        done += len(columns["mask"])
        if progress:
            progress(done, len(reader))


# ---- JSON lines ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Access:
    """One JSON line."""

    site: Site
    mask: int
    shared: list[int]
    global_: list[int]
    place: str


def _json_chunks(stream: BinaryIO, file: str, progress: Progress | None = None) -> Iterator[Chunk]:
    size, done, first = _size(stream) if progress else 0, 0, 0
    sites: dict[Site, int] = {}
    accesses: list[_Access] = []
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
        done += len(line)
        if number == 1 and line.startswith(ARCHIVE):
            raise SimError(f"{file}: a trace is read from a file, not from a pipe")
        if line.strip():
            accesses.append(_parse(line, f"{file}: line {number}", first=number == 1))
        if len(accesses) == CHUNK_LINES:
            yield _chunk(accesses, sites, first)
            first += len(accesses)
            accesses = []
            if size:
                progress(done, size)
    if accesses:
        yield _chunk(accesses, sites, first)
    elif not first:
        raise SimError(f"{file}: no accesses: neither a trace nor JSON lines")


def _size(stream: BinaryIO) -> int:
    """Bytes of the file, 0 where it is none (a pipe)."""
    status = os.fstat(stream.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _chunk(accesses: list[_Access], sites: dict[Site, int], first: int) -> Chunk:
    order = np.arange(first, first + len(accesses))
    site = np.array([sites.setdefault(access.site, len(sites)) for access in accesses])
    return Chunk(
        list(sites),
        site,
        order,
        order,
        np.array([access.mask for access in accesses], np.uint32),
        np.array([access.shared for access in accesses], np.int32),
        np.array([access.global_ for access in accesses], np.int64),
        [access.place for access in accesses],
    )


def _parse(line: bytes, place: str, first: bool) -> _Access:
    try:
        if len(line) > LONGEST_LINE:
            raise SimError(f"longer than {LONGEST_LINE:,} bytes")
        access = _object(line, first)
        op, width = _field(access, "op", str), _field(access, "bytes_per_lane", int)
        if len(op) > LONGEST_NAME or width.bit_length() > 64:  # too long to print
            raise SimError(f"no instruction {reprlib.repr(op)} of {reprlib.repr(width)} bytes per lane")
        executed = instruction(op)
        executed.require_width(width)
        mask = _mask(access)
        executed.require_mask(mask)
        sides = [
            _addresses(access, memory, mask) if used else [-1] * LANES
            for memory, used in (("shared", executed.shared), ("global", executed.global_))
        ]
    except SimError as error:
        raise SimError(f"{place}: {error}") from None
    return _Access(Site(executed.name, "", 0, executed, width), mask, *sides, place)


def _object(line: bytes, first: bool) -> dict:
    """The line's JSON object; only a file's first line may begin with a byte order mark."""
    try:
        access = json.loads(
            line.decode("utf-8-sig" if first else "utf-8"), object_pairs_hook=_distinct, parse_constant=_refuse
        )
    except UnicodeDecodeError as error:
        raise SimError(f"not UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise SimError("not a JSON object: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise SimError(f"not a JSON object: {error}") from None
    if not isinstance(access, dict):
        raise SimError(f"not a JSON object but {type(access).__name__}")
    return access


def _distinct(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise SimError(f"key {reprlib.repr(repeated)} occurs twice")
    return found


def _refuse(constant: str):
    raise SimError(f"{constant} is not JSON")


def _field(access: dict, key: str, kind: type):
    if key not in access:
        raise SimError(f"no {key!r}")
    value = access[key]
    if type(value) is not kind:
        raise SimError(f"{key} {reprlib.repr(value)} is not {NAMES[kind]}")
    return value


NAMES = {int: "an integer", str: "a string", list: "a list"}


def _mask(access: dict) -> int:
    """The active mask: an integer or its text in any base; all lanes where there is none."""
    mask = access.get("active_mask", FULL_MASK)
    try:
        mask = int(mask, 0) if isinstance(mask, str) else mask
    except ValueError:
        mask = None
    if type(mask) is not int or not 0 <= mask <= FULL_MASK:
        raise SimError(f"active_mask {reprlib.repr(access['active_mask'])} is not a 32-bit mask")
    return mask


def _addresses(access: dict, memory: str, mask: int) -> list[int]:
    """The 32 addresses in ``memory``; what an inactive lane holds is ignored."""
    key, end = f"{memory}_byte_offset", ENDS[memory]
    addresses = _field(access, key, list)
    if len(addresses) != LANES:
        raise SimError(f"{key} has {len(addresses)} addresses, not {LANES}")
    checked = []
    for lane, address in enumerate(addresses):
        if not mask >> lane & 1:
            address = 0
        elif not isinstance(address, int) or isinstance(address, bool) or not 0 <= address < end:
            raise SimError(f"lane {lane}: {key} {reprlib.repr(address)} is not an integer from 0 to {end - 1}")
        checked.append(address)
    return checked
