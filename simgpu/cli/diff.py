"""``simgpu diff``: what another variant, layout or parameter changes, site by site, and what that does to the time."""

from __future__ import annotations

import click
from rich.console import Console

from kernels_py import find
from models.gpu import load_gpu
from simgpu.cli.launches import configure, pairs
from simgpu.cli.options import format_option, gpu_option, progress, write
from simgpu.diff import COUNTED, SITE_COLUMNS, Change, Diff, Gate, arrow, compare, side, verdict
from simgpu.errors import SimError
from simgpu.report import WIDE, Column, render

PARTS = ("before", "after", "delta")
SITES = (
    Column("site", "site", text=True),
    Column("instruction", "instruction", text=True),
    *(Column(column, column) for column in COUNTED),
    Column("status", "", text=True),
)
DATA = (
    Column("site", "site"), Column("status", "status"), Column("instruction", "instruction"),
    *(Column(f"{column}_{part}", f"{column} {part}") for column in SITE_COLUMNS for part in PARTS),
)
UNITS = (
    Column("unit", "unit", text=True),
    Column("before", "us before"),
    Column("after", "us after"),
    Column("what", "for", text=True),
    Column("rate", "at", text=True),
    Column("provenance", "", text=True),
)


@click.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="[B]", required=False)
@gpu_option
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a parameter of A and B; repeatable.")
@click.option("--vs", "changes", multiple=True, metavar="NAME=VALUE", help="Set a parameter of B alone; repeatable.")
@click.option("--regs", type=click.IntRange(1, 255), help="Registers per thread of A, and of B unless --vs-regs.")
@click.option("--vs-regs", type=click.IntRange(1, 255), help="Registers per thread of B.")
@click.option("--ctas", type=click.IntRange(1), metavar="N", help="Emulate the first N CTAs of each grid alone.")
@click.option("--warm", is_flag=True, help="The launch is repeated: what fits the L2 cache costs no DRAM time.")
@click.option("--fail-if", "gates", multiple=True, metavar="CONDITION",
              help="Exit with 1 if this holds, as 'excessive>0' or 'total:wavefronts increased by 5%'; repeatable.")
@click.option("--all-sites", is_flag=True, help="Show sites that do not change, too.")
@format_option
@click.pass_context
def diff(ctx, before, after, gpu, settings, changes, regs, vs_regs, ctas, warm, gates, all_sites, fmt):
    """Compare two kernels, variants or settings, and estimate the effect on time.

    A and B are kernels as for `simgpu conflicts`; without B it is A with what --vs changes. Each unit's time is its
    demand over its throughput; the longest is a bound. The estimate lets the CTAs of an SM wait for each other.

    A condition of --fail-if is [SITE:]COLUMN OP NUMBER, about B, or [SITE:]COLUMN increased|decreased [by N[%]].
    Without SITE it is tested at every site; SITE may be a pattern, or total. Columns: executed, wavefronts, ideal,
    excessive, n_way, sectors, ideal_sectors, sectors_per_request, lines, bytes, unmodelled; and, of the launch:
    shared_bytes, registers, blocks_per_sm, us, bound_us.

    \b
    Examples:
    simgpu diff transpose transpose@pad1 --gpu h200
    simgpu diff hgemm_ladder@A3 --vs swizzle=0 --set k=256 --regs 126
    simgpu diff kda_b3@l8 kda_b3@atomics --fail-if "excessive increased" --fail-if "blocks_per_sm decreased"
    """
    if after is None and not changes and vs_regs is None:
        raise SimError(f"nothing to compare {before} with: give a second kernel, or --vs NAME=VALUE")
    conditions = [Gate.parse(text) for text in gates]
    machine = load_gpu(gpu)
    pairs(changes, "--vs")  # refused under its own name
    other, varied = after or before, (*settings, *changes)
    launches = configure(before, settings), configure(other, varied)
    names = _name(before, settings), _name(other, varied)
    if find(before)[0].name == find(other)[0].name:
        vs_regs = regs if vs_regs is None else vs_regs
    with progress("CTAs") as bar:
        first, second = (
            side(name, launch, machine, registers=registers, ctas=ctas, warm=warm, progress=bar)
            for name, launch, registers in zip(names, launches, (regs, vs_regs), strict=True)
        )
    found = compare(first, second)
    failed = [line for condition in conditions for line in condition.failures(found)]
    write(text(fmt, found, all_sites, failed))
    for line in failed:
        click.echo(line, err=True)
    if failed:
        ctx.exit(1)


def _name(kernel: str, settings: tuple[str, ...]) -> str:
    """The kernel with its settings, of which the last one of a name holds."""
    return " ".join((kernel, *(f"{name}={value}" for name, value in pairs(settings).items())))


def text(fmt: str, found: Diff, all_sites: bool, failed: list[str]) -> str:
    """The comparison in one of the formats: CSV has the sites, JSON everything."""
    rows = [change.as_dict() for change in found.sites]
    if fmt == "csv":
        return render(fmt, DATA, rows, footer=found.total.as_dict())
    if fmt == "json":
        return render(fmt, DATA, rows, document={
            "before": found.before.as_dict(), "after": found.after.as_dict(), "sites": rows,
            "total": found.total.as_dict(), "time_change": found.time_change, "verdict": verdict(found),
            "unknown": _unknown(found), "failed": failed})
    shown = [change for change in found.sites if all_sites or change.status != "same"]
    hidden = len(found.sites) - len(shown)
    unchanged = f"{hidden} site{'s do' if hidden > 1 else ' does'} not change (--all-sites)"
    title = f"{found.before.name} -> {found.after.name} on {found.before.estimate.gpu}"
    console = Console(width=WIDE)  # a comparison leaves no column out: a narrow terminal wraps its lines
    sites = render(fmt, SITES, [_cells(change) for change in shown], title=title, footer=_cells(found.total),
                   notes=[*([unchanged] if hidden else []), *_partial(found)], console=console)
    missing = [f"not in it: {line}" for line in _unknown(found)]
    units = render(fmt, UNITS, _units(found), notes=[_launch(found), *verdict(found), *missing], console=console)
    return f"{sites}\n{units}"


def _cells(change: Change) -> dict:
    cells = {column: None if change.pair(column) == (None, None) else arrow(*change.pair(column)) for column in COUNTED}
    return cells | {"site": change.site, "instruction": change.instruction, "status": change.status}


def _units(found: Diff) -> list[dict]:
    """A row for each unit that either side uses, the longest time first."""
    sides = found.before.estimate, found.after.estimate
    units = {entry.unit: entry for estimate in reversed(sides) for entry in estimate.units}
    rows = [{"unit": name, "before": sides[0].time_of(name), "after": sides[1].time_of(name), "what": entry.what,
             "rate": entry.rate, "provenance": entry.provenance} for name, entry in units.items()]
    return sorted(rows, key=lambda row: -max(row["before"], row["after"]))


def _launch(found: Diff) -> str:
    """Resources and occupancy; where registers are unknown, the blocks are those that all else allows."""

    def both(column: str) -> str:
        return arrow(found.before.value(column), found.after.value(column))

    sides = found.before, found.after
    unknown = any(part.registers is None for part in sides)
    registers = "unknown (--regs N)" if unknown else both("registers")
    limiters = dict.fromkeys(part.fit.limiter for part in sides)
    waves = arrow(*(round(part.estimate.waves, 2) for part in sides))
    return (f"{both('shared_bytes')} B shared, registers {registers}, {'up to ' if unknown else ''}"
            f"{both('blocks_per_sm')} blocks/SM (limited by {' -> '.join(limiters)}), {waves} waves")


def _partial(found: Diff) -> list[str]:
    """How many CTAs were counted, if not all."""
    parts = [(part.result.ctas, part.result.launch.ctas) for part in (found.before, found.after)]
    if all(counted == grid for counted, grid in parts):
        return []
    counted, grids = (arrow(*numbers) for numbers in zip(*parts, strict=True))
    return [f"counted {counted} of {grids} CTAs; the times below are for all"]


def _unknown(found: Diff) -> list[str]:
    return list(dict.fromkeys((*found.before.estimate.unknown, *found.after.estimate.unknown)))
