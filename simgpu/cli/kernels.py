"""``simgpu kernels``: what ships with simgpu."""

from __future__ import annotations

import click

from kernels_py import registered
from simgpu.cli.options import emit, format_option
from simgpu.report import Column


@click.command()
@format_option
def kernels(fmt):
    """List the kernels that ship with simgpu.

    A variant is run as NAME@VARIANT, a parameter set with --set NAME=VALUE.

    \b
    Examples:
    simgpu kernels
    simgpu conflicts patterns@stride2
    """
    rows = []
    for name, kernel in registered().items():
        parameters = kernel.parameters()
        rows.append(
            {
                "kernel": name,
                "summary": kernel.summary.replace("`", ""),
                "variants": list(kernel.variants),
                "parameters": parameters,
            }
        )
    shown = [
        row
        | {
            "variants": " ".join(row["variants"]),
            "parameters": " ".join(f"{k}={v}" for k, v in row["parameters"].items()),
        }
        for row in rows
    ]
    emit(
        fmt,
        [
            Column("kernel", "kernel", text=True),
            Column("summary", "summary", text=True, wrap=30),
            Column("variants", "variants", text=True, wrap=50),
            Column("parameters", "parameters (--set)", text=True, wrap=40),
        ],
        shown,
        document=rows,
    )
