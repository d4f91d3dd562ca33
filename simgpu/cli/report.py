"""``simgpu report``: a run, or two side by side, as one HTML file, or as Markdown for a pull request."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import click

from models.gpu import GPU, load_gpu
from models.occupancy import KB, Occupancy
from models.occupancy import occupancy as occupancy_of
from simgpu.cli.launches import configure, coverage, ctas_of, dims, occupancy_line, provenance
from simgpu.cli.options import gpu_option, progress, unmodelled_option, write
from simgpu.cli.sites import COLUMNS, no_rule
from simgpu.counters import SiteCounters
from simgpu.diff import Side, compare, side, verdict
from simgpu.errors import SimError
from simgpu.page import Run, page
from simgpu.report import Column, render, show
from simgpu.run import Result
from simgpu.staircase import Staircase, steps
from simgpu.worst import WorstSink

COMPARED = (
    Column("site", "site", text=True),
    Column("instruction", "instruction", text=True),
    *(
        Column(f"{key}@{which}", f"{heading}\n{which}", healthy=healthy)
        for key, heading, healthy in (
            ("wavefronts", "wavefronts", None),
            ("excessive", "excessive", 0),
            ("n_way", "n-way", 1),
            ("sectors", "sectors", None),
        )
        for which in ("before", "after")
    ),
    Column("unmodelled@before", "unmodelled\nbefore", zero=False),
    Column("unmodelled@after", "unmodelled\nafter", zero=False),
)


@click.command()
@click.argument("kernel")
@click.option("-o", "--output", metavar="FILE", help="Where to write; - is stdout.  [default: report.html; md: stdout]")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a kernel parameter; repeatable.")
@click.option("--vs", metavar="KERNEL2", help="Compare with this kernel: KERNEL is before, KERNEL2 after.")
@click.option(
    "--vs-set", "vs_settings", multiple=True, metavar="NAME=VALUE", help="Compare, with this parameter changed after."
)
@gpu_option
@click.option("--ctas", default="all", show_default=True, metavar="N|all", help="Emulate the first N CTAs of the grid.")
@click.option("--regs", type=click.IntRange(1, 255), help="Registers per thread (ptxas -v), for the occupancy.")
@unmodelled_option
@click.option("--format", "fmt", type=click.Choice(("html", "md")), default="html", show_default=True)
def report(kernel, output, settings, vs, vs_settings, gpu, ctas, regs, allow_unmodelled, fmt):
    """Write a page about a kernel: counters, worst accesses, annotated source, occupancy.

    The HTML file needs no network and no other file. It has the table of `simgpu conflicts`, a map of banks and
    wavefronts of each site's most expensive access, the source with counters in the margin, and blocks per SM over
    shared memory and over registers. Settings of --set hold for both sides of a comparison of one kernel.

    \b
    Examples:
    simgpu report transpose --vs transpose@pad1
    simgpu report hgemm_ladder@smem --regs 128 --gpu h200 -o smem.html
    simgpu report my_kernel.py:stencil --vs-set pad=1 --format md
    """
    machine = load_gpu(gpu)
    asked = [(kernel, settings)]
    if vs or vs_settings:
        other = vs or kernel
        shared = settings if other.partition("@")[0] == kernel.partition("@")[0] else ()
        asked.append((other, (*shared, *vs_settings)))
    runs, sides = zip(*(_run(name, values, machine, ctas, regs) for name, values in asked), strict=True)
    effect = verdict(compare(*sides)) if len(sides) == 2 else []
    columns, rows, footer = _single(runs[0], allow_unmodelled) if len(runs) == 1 else _compared(*runs, allow_unmodelled)
    title = " \N{RIGHTWARDS ARROW} ".join(run.label for run in runs) + f" on {machine.name}"
    if fmt == "md":
        text = render("md", columns, rows, footer=footer, title=title, notes=[*effect, *_notes(runs)])
    else:
        *before, last = runs
        text = page(title, [*before, replace(last, notes=[*effect, *last.notes])], columns, rows, footer)
    output = output or ("report.html" if fmt == "html" else "-")
    if output == "-":
        write(text)
        return
    try:
        with open(output, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise SimError(f"cannot write {output!r}: {error.strerror}") from None
    click.echo(f"wrote {output} ({len(text.encode()) / KB:,.0f} KB)")


def _run(name: str, settings: tuple[str, ...], machine: GPU, ctas: str, regs: int | None) -> tuple[Run, Side]:
    launch, worst = configure(name, settings), WorstSink()
    with progress("CTAs") as bar:
        found = side(name, launch, machine, registers=regs, ctas=ctas_of(ctas, launch), sinks=[worst], progress=bar)
    result, registers, fit = found.result, found.registers, found.fit
    total = result.table.total(allow_unmodelled=True)
    facts = [
        ("grid", dims(launch.grid)),
        ("block", dims(launch.block)),
        ("GPU", machine.name),
        ("wavefronts", show(total.wavefronts)),
        ("excessive", show(total.excessive)),
        ("sectors", show(total.sectors)),
        ("blocks/SM", f"{'up to ' if registers is None else ''}{fit.blocks_per_sm}"),
    ]
    notes = [occupancy_line(result, fit, registers), coverage(result), provenance(machine)]
    if unmodelled := total.unmodelled:
        notes.append(no_rule(unmodelled))
    stairs = _staircases(machine, result, registers, fit)
    return Run(" ".join([name, *settings]), launch, result.table, worst.found, facts, notes, stairs), found


def _notes(runs: Sequence[Run]) -> list[str]:
    """The notes of all runs: what holds for one of them only begins with its name."""
    own = [f"{run.label}: {note}" for run in runs for note in run.notes if any(note not in r.notes for r in runs)]
    return [*own, *(note for note in runs[0].notes if all(note in run.notes for run in runs))]


# ---- rows --------------------------------------------------------------------------------------------------------


def _single(run: Run, allow: bool) -> tuple[tuple[Column, ...], list[dict], dict]:
    rows = [row.as_dict() | {"where": f"{row.file}:{row.line}"} for row in run.table.sites]
    return COLUMNS, rows, run.table.total(allow_unmodelled=allow).as_dict() | {"where": "", "width": ""}


def _compared(before: Run, after: Run, allow: bool) -> tuple[tuple[Column, ...], list[dict], dict]:
    sides = [{row.site: row for row in run.table.sites} for run in (before, after)]
    rows = [_pair(site, *(side.get(site) for side in sides)) for site in {**sides[0], **sides[1]}]
    totals = [run.table.total(allow_unmodelled=allow) for run in (before, after)]
    return COMPARED, rows, _pair("total", *totals)


def _pair(site: str, before: SiteCounters | None, after: SiteCounters | None) -> dict:
    """One row of two sides; a site that one of them lacks has no numbers there."""
    names = list(dict.fromkeys(row.instruction for row in (before, after) if row))
    row = {"site": site, "instruction": " / ".join(names)}
    for which, own in (("before", before), ("after", after)):
        row |= {f"{key}@{which}": value for key, value in (own.as_dict() if own else {}).items()}
    return row


# ---- occupancy over one resource ---------------------------------------------------------------------------------


def _staircases(machine: GPU, result: Result, registers: int | None, fit: Occupancy) -> list[Staircase]:
    """Blocks per SM over shared memory and over registers, everything else as the kernel has it."""
    threads, shared = result.launch.threads, result.shared_bytes
    blocks = functools.partial(_blocks, machine, threads)
    step, most = fit.next_step, machine.shared_bytes_per_block
    samples = sorted({*range(0, most + 1, machine.shared_granule_bytes), shared, most})
    known = "registers that limit nothing" if registers is None else f"{registers} registers"
    label = f"{step.blocks} blocks: at most "
    next_shared = step.shared_bytes if step.shared_less else None
    next_registers = step.registers if step.registers_less and registers is not None else None
    return [
        Staircase(
            f"over shared memory, with {threads} threads and {known}",
            "shared memory of a block, KB",
            steps([(value, blocks(registers, value)) for value in samples]),
            tuple((kb * KB, str(kb)) for kb in range(0, most // KB + 1, 32)),
            shared,
            fit.blocks_per_sm,
            next_shared,
            f"{label}{next_shared or 0:,} B",
        ),
        Staircase(
            f"over registers, with {threads} threads and {shared:,} B of shared memory",
            "registers of a thread" + (" (unknown: --regs N)" if registers is None else ""),
            steps([(value, blocks(value, shared)) for value in range(1, machine.thread_registers + 1)]),
            tuple((value, str(value)) for value in range(32, machine.thread_registers + 1, 32)),
            registers,
            fit.blocks_per_sm,
            next_registers,
            f"{label}{next_registers}",
        ),
    ]


def _blocks(machine: GPU, threads: int, registers: int | None, shared: int) -> int:
    try:
        return occupancy_of(machine, threads=threads, registers=registers, shared_bytes=shared).blocks_per_sm
    except SimError:  # a block of that many registers does not start
        return 0
