"""``simgpu layout``: print a CuTe layout as offsets and banks."""

from __future__ import annotations

import click
import numpy as np
from rich.console import Console

from simgpu.cli.options import draw, emit, format_option
from simgpu.layout import bank_map, cosize, tabulate
from simgpu.layout_spec import parse_layout
from simgpu.picture import render_layout
from simgpu.report import Column


@click.command()
@click.argument("spec")
@click.option(
    "--itemsize",
    type=click.Choice(["1", "2", "4", "8", "16"]),
    default="2",
    show_default=True,
    help="Bytes of an element.",
)
@format_option
def layout(spec, itemsize, fmt):
    """Print the element offset and the bank of every coordinate of a layout.

    SPEC is shape:stride, row(R,C[,pad=P]), col(...), a GMMA atom, or a swizzle of one of these. An atom is K- or MN-,
    then INTER, SW32, SW64 or SW128; ATOM(R,C) is its tile_to_shape, with the atoms column-first, or row-first as
    ATOM(R,C):row.

    \b
    Examples:
    simgpu layout "(32,32):(33,1)" --itemsize 4
    simgpu layout "K-SW128(8,64)"
    simgpu layout "MN-INTER(16,16):row"
    simgpu layout "Swizzle<3,3,3> o (8,64):(64,1)"
    """
    size = int(itemsize)
    table = tabulate(parse_layout(spec, size))
    if fmt == "table":
        console = Console()
        draw(render_layout(table, size, title=spec, width=console.width if console.is_terminal else 120))
        return
    banks = bank_map(table, size)
    rows = [
        {"coordinate": ",".join(map(str, where)), "offset": int(table[where]), "bank": int(banks[where])}
        for where in np.ndindex(table.shape)
    ]
    emit(
        fmt,
        (Column("coordinate", "coordinate", text=True), Column("offset", "offset"), Column("bank", "bank")),
        rows,
        document={
            "spec": spec,
            "itemsize": size,
            "shape": table.shape,
            "cosize": cosize(table),
            "offsets": table.tolist(),
            "banks": banks.tolist(),
        },
    )
