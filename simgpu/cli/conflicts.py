"""``simgpu conflicts``: run a kernel's Python twin and print the counters of every memory instruction."""

from __future__ import annotations

import os
import re
import reprlib
from contextlib import nullcontext

import click

from kernels_py import find
from models.gpu import GPU, load_gpu
from models.occupancy import Occupancy, occupancy
from simgpu.cli.options import format_option, gpu_option, progress, unmodelled_option
from simgpu.cli.sites import emit_sites
from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.report import counted
from simgpu.run import MODES, Result, simulate
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


def configure(name: str, settings: tuple[str, ...]) -> Launch:
    """The launch that KERNEL[@VARIANT] and its ``--set NAME=VALUE`` settings describe."""
    kernel, variant = find(name)
    return kernel.launch(variant, **kernel.parse(variant, pairs(settings)))


def pairs(settings: tuple[str, ...], option: str = "--set") -> dict[str, str]:
    """The NAME=VALUE settings of ``option``, as texts by name; of a name given twice the last one holds."""
    found = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise SimError(f"{option} {setting!r} is not NAME=VALUE")
        found[name] = text
    return found


def ctas_of(text: str, launch: Launch) -> int | None:
    if text == "all":
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text) or not 1 <= int(text) <= launch.ctas:
        raise SimError(
            f"--ctas {reprlib.repr(text)} is neither 'all' nor a number from 1 to {launch.ctas}, the CTAs of the grid"
        )
    return int(text)


def dims(dims: tuple[int, int, int]) -> str:
    return "x".join(map(str, dims))


def occupancy_line(result: Result, fit: Occupancy, registers: int | None) -> str:
    blocks = f"{'up to ' if registers is None else ''}{fit.blocks_per_sm} blocks/SM ({fit.occupancy:.1%})"
    known = "registers unknown (--regs N)" if registers is None else f"{registers} registers"
    used = f"{result.launch.threads} threads, {result.shared_bytes:,} B shared, {known}"
    return f"occupancy: {blocks}, limited by {fit.limiter}, with {used}. {fit.next_step.sentence}"


def coverage(result: Result) -> str:
    how = (
        "with values"
        if result.values
        else "addresses only" + (", CTA 0 checked with values first" if result.checked else "")
    )
    return f"emulated {result.ctas:,} of {counted(result.launch.ctas, 'CTA')}, {how}"


def provenance(gpu: GPU) -> str:
    """How the rules that counted are known for this GPU."""
    if gpu.name == "h200":
        return "rules: measured on an H200"
    if gpu.compute_capability == "9.0":
        return "rules: inferred for this GPU, measured on an H200 (the same GH100 SM)"
    known = "documented and checked against published measurements"
    return f"rules: measured on an H200; for compute capability {gpu.compute_capability} {known}"
