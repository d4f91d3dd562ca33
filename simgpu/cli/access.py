"""``simgpu access``: one warp, one instruction, addresses from an expression."""

from __future__ import annotations

import click

from simgpu.cli.options import Integer, draw, emit, format_option
from simgpu.errors import SimError
from simgpu.expression import lane_expression
from simgpu.instructions import FULL_MASK, instruction
from simgpu.picture import render_banks
from simgpu.recorded import SHARED_BYTES
from simgpu.report import Column
from simgpu.rules import cost

COLUMNS = (
    Column("op", "op", text=True),
    Column("width", "bytes/lane"),
    Column("mask", "mask", text=True),
    Column("wavefronts", "wavefronts"),
    Column("ideal", "ideal"),
    Column("excessive", "excessive", healthy=0),
    Column("sectors", "sectors"),
    Column("ideal_sectors", "ideal sectors"),
    Column("lines", "lines"),
    Column("unmodelled", "unmodelled", zero=False),
)


@click.command()
@click.argument("expr")
@click.option(
    "--op", default="lds", show_default=True, help="lds, sts, ldg, stg, ldmatrix[.x1|.x2|.x4][.trans], cp.async.cg, ..."
)
@click.option("--width", type=Integer(), help="Bytes per lane.  [default: 4, or the instruction's own]")
@click.option("--mask", type=Integer(), default=FULL_MASK, help="Active lanes, 32 bits.  [default: 0xffffffff]")
@click.option("--src", metavar="EXPR", help="Global byte address, for cp.async (EXPR is then the shared one).")
@format_option
def access(expr, op, width, mask, src, fmt):
    """Count and draw one warp's access to memory.

    EXPR is the byte address of each lane, an expression in `lane` (0..31): integers, + - * // % & | ^ ~ << >>,
    comparisons and `a if c else b`. Shared addresses count from bank 0.

    \b
    Examples:
    simgpu access "lane * 128" --op lds --width 4
    simgpu access "(lane % 8) * 128 + (lane // 8) * 16" --op ldmatrix
    simgpu access "lane*16" --src "lane*16 ^ 16" --op cp.async.cg
    """
    if op in ("ldmatrix", "stmatrix"):
        op += ".x4"
    executed = instruction(op)
    width = width if width is not None else 4 if 4 in executed.widths else executed.widths[0]
    sides = {}
    if executed.shared and executed.global_:
        if src is None:
            raise SimError(f"{op} copies global to shared memory: give the global byte address with --src")
        sides = {"shared": lane_expression(expr).tolist(), "global_": lane_expression(src).tolist()}
    elif src is not None:
        raise SimError(f"{op} has one address; --src is for cp.async")
    else:
        sides = {"shared" if executed.shared else "global_": lane_expression(expr).tolist()}
    found = cost(executed, width, mask, **sides)
    for lane, address in enumerate(sides.get("shared", [])):
        if mask >> lane & 1 and address >= SHARED_BYTES:
            raise SimError(f"{op}: lane {lane}: shared byte address {address} lies beyond the {SHARED_BYTES} of an SM")
    row = {
        "op": op,
        "width": width,
        "mask": f"{mask:#010x}",
        "wavefronts": found.wavefronts,
        "ideal": found.ideal,
        "excessive": None if found.wavefronts is None else found.wavefronts - found.ideal,
        "sectors": found.sectors,
        "ideal_sectors": found.ideal_sectors,
        "lines": found.lines,
        "unmodelled": found.unmodelled,
    }
    if fmt == "table":
        draw(render_banks(executed, width, mask, **sides))
    else:
        emit(fmt, COLUMNS, [row], document=row | {memory.rstrip("_"): side for memory, side in sides.items()})
