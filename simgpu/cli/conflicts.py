"""``simgpu conflicts``: run a kernel's Python twin and print the counters of every memory instruction."""

from __future__ import annotations

import os
from contextlib import nullcontext

import click

from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.cli.launches import configure, coverage, ctas_of, dims, occupancy_line, provenance
from simgpu.cli.options import format_option, gpu_option, progress, unmodelled_option
from simgpu.cli.sites import emit_sites
from simgpu.run import MODES, simulate
from simgpu.trace import TraceWriter


@click.command()
@click.argument("kernel")
@gpu_option
@click.option("--ctas", default="all", show_default=True, metavar="N|all", help="Emulate the first N CTAs of the grid.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a kernel parameter; repeatable.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="auto",
    show_default=True,
    help="values: compute data; addresses: addresses alone; auto: CTA 0 with values, the rest as fast as it can.",
)
@click.option("--regs", type=click.IntRange(1, 255), help="Registers per thread (ptxas -v), for the occupancy line.")
@click.option(
    "--threads", type=click.IntRange(1), default=None, help="Threads to use.  [default: the processor's cores]"
)
@unmodelled_option
@click.option("--save-trace", metavar="FILE", help="Also write every access to a trace file for `simgpu replay`.")
@format_option
def conflicts(kernel, gpu, ctas, settings, mode, regs, threads, allow_unmodelled, save_trace, fmt):
    """Count a kernel's bank conflicts and sectors.

    KERNEL is a name of `simgpu kernels`, as NAME or NAME@VARIANT, or path/file.py:function for a kernel of your own.

    The table has a row for every memory instruction (site), in the terms of Nsight Compute's source page: wavefronts,
    ideal and excessive (L1 Wavefronts Shared), sectors and ideal sectors (L2 Theoretical Sectors Global). n-way is
    wavefronts / ideal: 1 is free of conflicts.

    \b
    Examples:
    simgpu conflicts transpose
    simgpu conflicts transpose@pad1 --set rows=1000 --set cols=1000 --format csv
    simgpu conflicts my_kernel.py:stencil --gpu a100-80g --regs 64
    """
    machine = load_gpu(gpu)
    launch = configure(kernel, settings)
    count = ctas_of(ctas, launch)
    recorded = {"kernel": kernel, "settings": list(settings), "grid": launch.grid, "block": launch.block}
    # A trace appears when the block is left without an error: so all that may fail happens inside.
    with TraceWriter(save_trace, recorded) if save_trace else nullcontext() as trace:
        with progress("CTAs") as bar:
            result = simulate(
                launch,
                ctas=count,
                mode=mode,
                threads=threads or os.cpu_count() or 1,
                progress=bar,
                sinks=[trace] if trace else (),
                shared_limit=machine.shared_bytes_per_block,
            )
        registers = regs if regs is not None else launch.registers
        fit = occupancy(machine, threads=launch.threads, registers=registers, shared_bytes=result.shared_bytes)
    emit_sites(
        fmt,
        result.table,
        title=f"{kernel} on {machine.name}: grid {dims(launch.grid)}, block {dims(launch.block)}",
        notes=[occupancy_line(result, fit, registers), coverage(result), provenance(machine)],
        allow=allow_unmodelled,
        document={
            "kernel": kernel,
            "gpu": machine.name,
            "grid": launch.grid,
            "block": launch.block,
            "ctas": result.ctas,
            "ctas_in_grid": launch.ctas,
            "values": result.values,
            "shared_bytes": result.shared_bytes,
            "registers": registers,
            "occupancy": fit.as_dict(),
        },
    )
