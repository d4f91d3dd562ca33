"""``simgpu conflicts``: run a kernel's Python twin and print the counters of every memory instruction."""

from __future__ import annotations

import os
from contextlib import nullcontext

import click

from kernels_py import find
from models.gpu import GPU, load_gpu
from models.occupancy import Occupancy, occupancy
from simgpu.cli.options import emit, format_option, gpu_option, progress
from simgpu.counters import SiteCounters
from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.report import Column
from simgpu.run import MODES, Result, simulate
from simgpu.trace import TraceWriter

COLUMNS = (
    Column("site", "site", text=True),
    Column("where", "file:line", text=True),
    Column("instruction", "instruction", text=True),
    Column("width", "bytes/lane"),
    Column("executed", "executed"),
    Column("wavefronts", "wavefronts"),
    Column("ideal", "ideal"),
    Column("excessive", "excessive"),
    Column("wavefronts_per_instruction", "wavefronts/instr"),
    Column("n_way", "n-way"),
    Column("sectors", "sectors"),
    Column("ideal_sectors", "ideal sectors"),
    Column("sectors_per_request", "sectors/request"),
    Column("unmodelled", "unmodelled"),
)
ANY_REGISTERS = 32  # per thread: 64 warps of them fill the register file exactly, so registers limit nothing


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
@click.option("--allow-unmodelled", is_flag=True, help="Total what is known where some accesses have no proven rule.")
@click.option("--save-trace", metavar="FILE", help="Also write every access to a trace file for `simgpu replay`.")
@format_option
def conflicts(kernel, gpu, ctas, settings, mode, regs, threads, allow_unmodelled, save_trace, fmt):
    """Print the bank-conflict and coalescing table of KERNEL, one row per memory instruction.

    KERNEL is a name of `simgpu kernels`, as NAME or NAME@VARIANT, or path/file.py:function for a kernel of your own.

    \b
    simgpu conflicts transpose
    simgpu conflicts transpose@pad1 --set rows=1000 --set cols=1000 --format csv
    simgpu conflicts my_kernel.py:stencil --gpu a100-80g --regs 64
    """
    machine = load_gpu(gpu)
    launch = configure(kernel, settings)
    writer = (
        TraceWriter(
            save_trace, {"kernel": kernel, "settings": list(settings), "grid": launch.grid, "block": launch.block}
        )
        if save_trace
        else nullcontext()
    )
    with writer as trace, progress("CTAs") as bar:
        result = simulate(
            launch,
            ctas=_ctas(ctas, launch),
            mode=mode,
            threads=threads or os.cpu_count() or 1,
            progress=bar,
            sinks=[trace] if trace else (),
            shared_limit=machine.shared_bytes_per_block,
        )
    registers = regs if regs is not None else launch.registers
    fit = occupancy(
        machine, threads=launch.threads, registers=registers or ANY_REGISTERS, shared_bytes=result.shared_bytes
    )
    total = result.table.total(allow_unmodelled=allow_unmodelled)
    notes = [_occupancy_line(result, fit, registers), _coverage(result), _provenance(machine)]
    if total.unmodelled:
        notes.append(
            f"{total.unmodelled:,} accesses have no proven rule (unmodelled)"
            + (
                ": totals sum what is known"
                if allow_unmodelled
                else "; totals that would include them are left out (--allow-unmodelled)"
            )
        )
    rows = [row.as_dict() for row in result.table.sites]
    document = {
        "kernel": kernel,
        "gpu": machine.name,
        "grid": launch.grid,
        "block": launch.block,
        "ctas": result.ctas,
        "ctas_in_grid": launch.ctas,
        "values": result.values,
        "sites": rows,
        "total": total.as_dict(),
        "work": result.table.work,
        "shared_bytes": result.shared_bytes,
        "registers": registers,
        "occupancy": fit.as_dict(),
    }
    emit(
        fmt,
        COLUMNS,
        [_shown(row) for row in result.table.sites],
        footer=_shown(total),
        notes=notes,
        document=document,
        title=f"{kernel} on {machine.name}: grid {_dims(launch.grid)}, block {_dims(launch.block)}",
    )


def configure(name: str, settings: tuple[str, ...]) -> Launch:
    """The launch that KERNEL[@VARIANT] and its ``--set NAME=VALUE`` settings describe."""
    kernel, variant = find(name)
    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise SimError(f"--set {setting!r} is not NAME=VALUE")
        values[key] = text
    return kernel.launch(variant, **kernel.parse(variant, values))


def _ctas(text: str, launch: Launch) -> int | None:
    if text == "all":
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= launch.ctas:
        raise SimError(f"--ctas {text!r} is neither 'all' nor a number from 1 to {launch.ctas}, the CTAs of the grid")
    return int(text)


def _shown(row: SiteCounters) -> dict:
    return row.as_dict() | {"where": f"{row.file}:{row.line}" if row.line else "", "unmodelled": row.unmodelled or None}


def _dims(dims: tuple[int, int, int]) -> str:
    return "x".join(map(str, dims))


def _occupancy_line(result: Result, fit: Occupancy, registers: int | None) -> str:
    limiter = fit.limiter if registers else ", ".join(name for name in fit.limiter.split(", ") if name != "registers")
    used = f"{result.launch.threads} threads, {result.shared_bytes:,} B shared"
    line = f"occupancy: {fit.blocks_per_sm} blocks/SM ({fit.occupancy:.1%}), limited by {limiter}, with {used}"
    if registers:
        return f"{line}, {registers} registers. {fit.next_step.sentence}"
    return f"{line}; registers not given (--regs N)"


def _coverage(result: Result) -> str:
    part = "all" if result.ctas == result.launch.ctas else f"the first {result.ctas:,} of"
    how = (
        "with values"
        if result.values
        else "addresses only" + (", CTA 0 checked with values first" if result.checked else "")
    )
    return f"emulated {part} {result.launch.ctas:,} CTAs, {how}"


def _provenance(gpu: GPU) -> str:
    return {
        "h200": "rules: measured on an H200",
        "h100": "rules: inferred for this GPU, measured on an H200 (the same GH100 SM)",
        "h20": "rules: inferred for this GPU, measured on an H200 (the same GH100 SM)",
        "h20-3e": "rules: inferred for this GPU, measured on an H200 (the same GH100 SM)",
    }.get(
        gpu.name,
        "rules: measured on an H200; for compute capability 8.0 documented and checked against published measurements",
    )
