"""``simgpu replay``: count the accesses of a trace file or of JSON lines."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter

import click

from simgpu.cli.options import emit, format_option
from simgpu.recorded import Source, read_recorded
from simgpu.replay import Columns
from simgpu.report import Column

COLUMNS = (
    Column("site", "site", text=True),
    Column("instruction", "instruction", text=True),
    Column("width", "bytes/lane"),
    Column("accesses", "accesses"),
    Column("wavefronts", "wavefronts"),
    Column("ideal", "ideal"),
    Column("excessive", "excessive"),
    Column("sectors", "sectors"),
    Column("ideal_sectors", "ideal sectors"),
    Column("unmodelled", "unmodelled"),
)
NUMBERS = ("wavefronts", "ideal", "sectors", "ideal_sectors")
IN_MEMORY = 1 << 26  # bytes of output held before it goes to a temporary file


@click.command()
@click.argument("file")
@format_option
def replay(file, fmt):
    """Count the accesses in FILE: a trace of `simgpu conflicts --save-trace`, or JSON lines (- reads them from stdin).

    A JSON line has "op", "bytes_per_lane", "active_mask" and the 32 "shared_byte_offset" and/or "global_byte_offset" of
    one warp access. With --format json every access gets one JSON line, in order; otherwise there is a row per site.
    """
    chunks = read_recorded("stdin", sys.stdin.buffer) if file == "-" else read_recorded(file)
    if fmt == "json":
        # Nothing is printed before the whole file has proved readable.
        with tempfile.SpooledTemporaryFile(IN_MEMORY, mode="w+", encoding="utf-8") as out:
            for chunk in chunks:
                lines: list[str] = [""] * len(chunk.masks)
                for source, rows, columns in chunk.counted():
                    for row, line in zip(rows, _objects(source, columns), strict=True):
                        lines[row] = line
                out.writelines(lines)
            out.seek(0)
            shutil.copyfileobj(out, sys.stdout)
        return
    counts: dict[Source, Counter] = {}
    for chunk in chunks:
        for source, rows, columns in chunk.counted():
            row = counts.setdefault(source, Counter())
            row["accesses"] += len(rows)
            row["unmodelled"] += int(columns.unmodelled.sum())
            for name in NUMBERS:
                column = getattr(columns, name)
                if column is not None:
                    row[name] += int(column[column >= 0].sum())
                    row[f"unknown {name}"] += int((column < 0).sum())
    emit(fmt, COLUMNS, [_row(source, row) for source, row in counts.items()], title=file)


def _objects(source: Source, columns: Columns):
    """A JSON line per access; null where the instruction does not use that memory or no rule is proven."""
    numbers = {name: getattr(columns, name) for name in NUMBERS}
    lists = {name: None if column is None else column.tolist() for name, column in numbers.items()}
    for row, unmodelled in enumerate(columns.unmodelled.tolist()):
        counted = {name: None if values is None or values[row] < 0 else values[row] for name, values in lists.items()}
        yield (
            json.dumps(
                {
                    "op": source.instruction.name,
                    "bytes_per_lane": source.width,
                    "site": source.name,
                    **counted,
                    "unmodelled": unmodelled,
                }
            )
            + "\n"
        )


def _row(source: Source, row: Counter) -> dict:
    shown = {
        "site": source.name,
        "instruction": source.instruction.name,
        "width": source.width,
        "accesses": row["accesses"],
        "unmodelled": row["unmodelled"] or None,
    }
    for name in NUMBERS:
        used = source.instruction.shared if name in ("wavefronts", "ideal") else source.instruction.global_
        shown[name] = row[name] if used and not row[f"unknown {name}"] else None
    excessive = shown["wavefronts"] is not None and shown["ideal"] is not None
    return shown | {"excessive": shown["wavefronts"] - shown["ideal"] if excessive else None}
