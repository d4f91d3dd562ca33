"""``simgpu replay``: count the accesses of a trace file or of JSON lines."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator

import click

from simgpu.cli.options import format_option, progress, unmodelled_option
from simgpu.cli.sites import emit_sites
from simgpu.events import Site
from simgpu.recorded import Chunk, count, read_recorded
from simgpu.replay import Columns

NUMBERS = ("wavefronts", "ideal", "sectors", "ideal_sectors", "lines")
IN_MEMORY = 1 << 25  # bytes of output held before it goes to a temporary file


@click.command()
@click.argument("file")
@unmodelled_option
@format_option
def replay(file, allow_unmodelled, fmt):
    """Count recorded accesses, from a trace or JSON lines.

    FILE is a trace of `simgpu conflicts --save-trace`, an NVBit trace of the Accel-Sim tracer (.traceg, .traceg.gz,
    .traceg.xz: a row per PC), or JSON lines (- reads them from stdin). A JSON line has "op",
    "bytes_per_lane", "active_mask" and the 32 "shared_byte_offset" and/or "global_byte_offset" of one warp access. With
    --format json every access gets one JSON line, in order; otherwise there is a row per site.

    \b
    Examples:
    simgpu conflicts transpose@pad1 --ctas 64 --save-trace pad1.trace
    simgpu replay pad1.trace
    simgpu replay validation/measured/h200/patterns.jsonl --format json
    """
    stream = sys.stdin.buffer if file == "-" else None
    name = "stdin" if stream else file
    if fmt != "json":
        with progress("accesses") as bar:
            table = count(read_recorded(name, stream, bar))
        emit_sites(fmt, table, title=name, notes=[], document={}, allow=allow_unmodelled)
        return
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as lines:  # nothing is printed before all of FILE proved readable
        with progress("accesses") as bar:
            for chunk in read_recorded(name, stream, bar):
                lines.write(_lines(chunk))
        lines.seek(0)
        shutil.copyfileobj(lines, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _lines(chunk: Chunk) -> bytes:
    """A JSON line per access, in order."""
    lines = [""] * len(chunk.masks)
    for site, rows, columns in chunk.counted():
        for row, line in zip(rows, _objects(site, columns), strict=True):
            lines[row] = line
    return "".join(lines).encode()


def _objects(site: Site, columns: Columns) -> Iterator[str]:
    """JSON lines of one site's accesses; null where the instruction does not use that memory or no rule is proven."""
    numbers = {name: getattr(columns, name) for name in NUMBERS}
    lists = {name: None if column is None else column.tolist() for name, column in numbers.items()}
    same = {"op": site.instruction.name, "bytes_per_lane": site.width, "site": site.name}
    for row, unmodelled in enumerate(columns.unmodelled.tolist()):
        counted = {name: None if values is None or values[row] < 0 else values[row] for name, values in lists.items()}
        yield json.dumps(same | counted | {"unmodelled": unmodelled}) + "\n"
