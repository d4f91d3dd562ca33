"""Recorded accesses, from a trace file or from JSON lines, counted in the order they were recorded.

Both kinds of file are read in chunks, so that a file may be larger than memory. A JSON line is one warp access: ``op``,
``bytes_per_lane``, ``active_mask`` ("0x..." or an integer) and 32 integers under ``shared_byte_offset`` and/or
``global_byte_offset``, whichever memories the instruction uses; other keys (measured counters, say) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from simgpu.errors import SimError
from simgpu.instructions import FULL_MASK, LANES, Instruction, instruction
from simgpu.replay import Columns, replay
from simgpu.rules import cost
from simgpu.trace import TraceReader

CHUNK_LINES = 1 << 14
SIDES = {"shared": 2**31, "global": 2**63}  # memories and the end of their address columns' range


@dataclass(frozen=True)
class Source:
    """What executed an access: a site of a trace, or an instruction and width of JSON lines."""

    name: str
    instruction: Instruction
    width: int


@dataclass(frozen=True)
class Chunk:
    """n consecutive accesses: ``source`` int[n] into ``sources``, ``masks`` uint32[n], addresses [n, 32].

    ``places`` say where in the file a row stands: one for each row, or one for the chunk.
    """

    sources: list[Source]
    source: np.ndarray
    masks: np.ndarray
    shared: np.ndarray
    global_: np.ndarray
    places: list[str] | str

    def counted(self) -> Iterator[tuple[Source, np.ndarray, Columns]]:
        """For each source in the chunk: its rows (int[k]) and what they cost. Raises SimError naming the place."""
        for index in np.unique(self.source):
            source, rows = self.sources[index], np.flatnonzero(self.source == index)
            sides = (
                self.shared[rows] if source.instruction.shared else None,
                self.global_[rows] if source.instruction.global_ else None,
            )
            try:
                yield source, rows, replay(source.instruction, source.width, self.masks[rows], *sides)
            except SimError as error:
                raise self._explained(source, rows, *sides) or error from None

    def _explained(self, source: Source, rows: np.ndarray, shared, global_) -> SimError | None:
        """The refusal of the first bad row, told by the reference rule, with the row's place in the file."""
        for k, row in enumerate(rows):
            try:
                cost(
                    source.instruction,
                    source.width,
                    int(self.masks[row]),
                    *(None if side is None else side[k].tolist() for side in (shared, global_)),
                )
            except SimError as error:
                place = (
                    self.places[row]
                    if isinstance(self.places, list)
                    else f"{self.places}, access {row} ({source.name})"
                )
                return SimError(f"{place}: {error}")
        return None


def read_recorded(file: str, stream: BinaryIO | None = None) -> Iterator[Chunk]:
    """The accesses of ``file``: a trace, or JSON lines; ``stream`` (binary) is read as JSON lines instead if given.

    Raises SimError for a file that is neither, naming the line or the chunk.
    """
    if stream is not None:
        yield from _json_chunks(stream, file)
        return
    path = Path(file)
    if not path.is_file():
        raise SimError(f"no file {file!r}")
    with path.open("rb") as opened:
        if opened.read(2) != b"PK" and path.suffix != ".trace":
            opened.seek(0)
            yield from _json_chunks(opened, file)
            return
    reader = TraceReader(path)
    sources = [Source(site.name, site.instruction, site.width) for site in reader.sites]
    for number, columns in enumerate(reader.chunks()):
        yield Chunk(
            sources, columns["site"], columns["mask"], columns["shared"], columns["global"], f"{file}: chunk {number}"
        )


def _json_chunks(stream: BinaryIO, file: str) -> Iterator[Chunk]:
    sources: dict[tuple[str, int], int] = {}
    known: list[Source] = []
    rows: list[tuple[int, int, list[int], list[int]]] = []
    places: list[str] = []

    def chunk() -> Chunk:
        source, masks, shared, global_ = zip(*rows, strict=True)
        return Chunk(
            known,
            np.array(source),
            np.array(masks, np.uint32),
            np.array(shared, np.int32),
            np.array(global_, np.int64),
            places,
        )

    for number, line in enumerate(stream, 1):
        place = f"{file}: line {number}"
        if not line.strip():
            continue
        access = _parse(line, place)
        key = access["op"], access["bytes_per_lane"]
        if key not in sources:
            sources[key] = len(known)
            known.append(Source(key[0], instruction(key[0]), key[1]))
        rows.append((sources[key], access["active_mask"], access["shared"], access["global"]))
        places.append(place)
        if len(rows) == CHUNK_LINES:
            yield chunk()
            rows, places = [], []
    if rows:
        yield chunk()


def _parse(line: bytes, place: str) -> dict:
    try:
        access = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise SimError(f"{place}: not UTF-8 (byte {error.start})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise SimError(f"{place}: not a JSON object: {error}") from None
    if not isinstance(access, dict):
        raise SimError(f"{place}: not a JSON object but {type(access).__name__}")
    try:
        executed = instruction(_field(access, "op", str))
        width = _field(access, "bytes_per_lane", int)
        executed.require_width(width)
        mask = access.get("active_mask", FULL_MASK)
        try:
            mask = (
                int(mask, 0)
                if isinstance(mask, str)
                else _field(access, "active_mask", int)
                if "active_mask" in access
                else mask
            )
        except ValueError:
            raise SimError(f"active_mask {mask!r} is not a number") from None
        executed.require_mask(mask)
        parsed = {"op": executed.name, "bytes_per_lane": width, "active_mask": mask}
        for side, used in (("shared", executed.shared), ("global", executed.global_)):
            parsed[side] = _addresses(access, f"{side}_byte_offset", SIDES[side], mask) if used else [-1] * LANES
    except SimError as error:
        raise SimError(f"{place}: {error}") from None
    return parsed


def _field(access: dict, key: str, kind: type):
    if key not in access:
        raise SimError(f"no {key!r}")
    value = access[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise SimError(
            f"{key} {value!r} is not {'an integer' if kind is int else 'a string' if kind is str else 'a list'}"
        )
    return value


def _addresses(access: dict, key: str, end: int, mask: int) -> list[int]:
    """The 32 addresses under ``key``; what an inactive lane holds is ignored."""
    addresses = _field(access, key, list)
    if len(addresses) != LANES:
        raise SimError(f"{key} has {len(addresses)} addresses, not {LANES}")
    checked = []
    for lane, address in enumerate(addresses):
        if not mask >> lane & 1:
            address = 0
        elif not isinstance(address, int) or isinstance(address, bool) or not 0 <= address < end:
            raise SimError(f"lane {lane}: {key} {address!r} is not an integer from 0 to {end - 1}")
        checked.append(address)
    return checked
