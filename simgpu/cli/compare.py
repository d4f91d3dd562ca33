"""``simgpu compare``: hold the model against somebody's own Nsight Compute profile."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

from kernels_py import find
from simgpu.cli.launches import configure
from simgpu.cli.options import emit, format_option, progress
from simgpu.counters import CounterTable
from simgpu.errors import SimError
from simgpu.instructions import instruction
from simgpu.launch import Launch
from simgpu.report import Column
from simgpu.run import simulate
from validation.compare import COLUMNS, METRICS, VERDICTS, Comparison, compare_sites, compare_totals
from validation.ncu_csv import COLLECT, Profile, Row, count, read_profiles

TABLE = (
    Column("site", "site", text=True),
    Column("column", "column", text=True),
    Column("predicted", "predicted"),
    Column("measured", "measured"),
    Column("verdict", "verdict", text=True),
)
CLASSES = {  # how an instruction family is spelled in SASS
    "lds": "LDS", "sts": "STS", "ldmatrix": "LDSM", "stmatrix": "STSM", "atoms": "ATOMS", "atoms.cas": "ATOMS",
    "ldg": "LDG", "stg": "STG", "atomg": "ATOMG", "cp.async.ca": "LDGSTS", "cp.async.cg": "LDGSTS",
}
SPELLINGS = {"RED": "ATOMG", "REDG": "ATOMG", "ATOM": "ATOMG"}  # atomics on global memory go by four names


@click.command()
@click.argument("kernel")
@click.option("--ncu", "file", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="CSV of ncu --page raw, or of --page source with --print-source sass or cuda,sass.")
@click.option("--launch", "number", type=click.IntRange(1), metavar="N",
              help="Which launch of the file, counted from 1.  [default: the only one named like KERNEL or its device "
                   "function]")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a kernel parameter; repeatable.")
@click.option("--threads", type=click.IntRange(1), help="Threads to use.  [default: the processor's cores]")
@format_option
@click.pass_context
def compare(ctx, kernel, file, number, settings, threads, fmt):
    """Compare a kernel with your own ncu profile.

    KERNEL is a name of `simgpu kernels`, as NAME or NAME@VARIANT, or path/file.py:function; --set must say what the
    profiled launch ran with. The source page is compared site by site where it names source lines with a comment
    `// @site NAME` (cuda,sass), else by class of instruction. A difference makes the exit code 1.

    \b
    Examples:
    ncu -i rep.ncu-rep --page source --csv --print-source cuda,sass > source.csv
    simgpu compare transpose@pad1 --ncu source.csv --set rows=2048 --set cols=2048
    simgpu compare my_kernel.py:stencil --ncu raw.csv --launch 3
    """
    launch = configure(kernel, settings)
    profile = choose(read_profiles(file), number, find(kernel)[0].name, launch, file)
    with progress("CTAs") as bar:
        table = simulate(launch, threads=threads or os.cpu_count() or 1, progress=bar).table
    rows, notes = (compare_source if profile.rows else compare_raw)(profile, table, file)
    if alone := executed_alone(rows):
        notes.append(f"only the executed count differs at {', '.join(alone)}: ncu also counts instructions that no "
                     "lane executes, at predicated edges")
    tally = Counter(row.verdict for row in rows)
    notes.append(f"{len(rows)} numbers compared: "
                 + ", ".join(f"{tally[verdict]} {verdict}" for verdict in reversed(VERDICTS) if tally[verdict]))
    document = {"kernel": kernel, "launch": profile.title, "numbers": [row.as_dict() for row in rows], "notes": notes}
    emit(fmt, TABLE, [row.as_dict() for row in rows], notes=notes, document=document,
         title=f"{kernel} beside launch {profile.title}")
    if tally["different"]:
        ctx.exit(1)


def choose(profiles: list[Profile], number: int | None, name: str, launch: Launch, file: Path) -> Profile:
    """The launch to compare: the ``number``th, or the only one whose kernel's name contains ``name``.

    Where none does, the name of the twin's device function may be the kernel's, as of ``hgemm`` in hgemm_ladder.cu.
    Raises SimError, listing the launches, when there is no such launch or more than one, and when the profile ran
    another grid or block than the twin.
    """
    listing = "; ".join(profile.title for profile in profiles)
    if number is not None:
        if number > len(profiles):
            raise SimError(f"{file}: no launch {number}: it holds {listing}")
        found = profiles[number - 1]
    else:
        named = [profile for profile in profiles if name.lower() in profile.kernel.lower()]
        named = named or [profile for profile in profiles if launch.name in re.findall(r"\w+", profile.kernel)]
        if not named:
            raise SimError(f"{file}: no launch of {name!r}: it holds {listing} (pick one with --launch)")
        if len(named) > 1:
            raise SimError(f"{file}: {len(named)} launches of {name!r}: pick one with --launch: "
                           + "; ".join(profile.title for profile in named))
        found = named[0]
    for what, measured, twin in (("grid", found.grid, launch.grid), ("block", found.block, launch.block)):
        if measured and measured.replace(" ", "") != str(twin).replace(" ", ""):
            raise SimError(f"{file}: launch {found.title} ran with {what} {measured}, the twin with {twin}: "
                           f"another kernel, variant or size (--set NAME=VALUE)")
    return found


def executed_alone(rows: list[Comparison]) -> list[str]:
    """The sites that were executed more often than predicted and are otherwise equal."""
    wrong: dict[str, list[Comparison]] = {}
    for row in rows:
        if row.verdict == "different":
            wrong.setdefault(row.site, []).append(row)
    return [site for site, (first, *more) in wrong.items()
            if not more and first.column == "executed" and None not in (first.predicted, first.measured)
            and first.predicted < first.measured]


# ---- raw page ----------------------------------------------------------------------------------------------


def compare_raw(profile: Profile, table: CounterTable, file: Path) -> tuple[list[Comparison], list[str]]:
    """The metrics of the launch that the model predicts, and a note of those that were not collected."""
    totals = {name: count(profile.metrics[name], f"{file}: launch {profile.number}, {name}")
              for name in METRICS if name in profile.metrics}
    totals = {name: value for name, value in totals.items() if value is not None}
    missing = [name for name, metric in METRICS.items()
               if metric.exact and "__" in name and name not in totals and metric.predict(table) != (0, False)]
    command = f"ncu --metrics {','.join(missing)} --page raw --csv APP"
    if not totals:
        raise SimError(f"{file}: none of the metrics that the model predicts; collect them with {command}")
    notes = [f"not collected: {', '.join(missing)}; collect with {command}"] if missing else []
    return compare_totals(totals, table, hardware=True), notes


# ---- source page -------------------------------------------------------------------------------------------


def compare_source(profile: Profile, table: CounterTable, file: Path) -> tuple[list[Comparison], list[str]]:
    """The instructions by site where the page names sites, else by class."""
    rows, notes = list(profile.rows.values()), []
    collected = set().union(*(row.counts for row in rows))
    if absent := [column for column in COLUMNS if column not in collected]:
        notes.append(f"not collected: {', '.join(absent)}; collect with {COLLECT}")
    if any(row.site for row in rows):
        sites = _sums((row.site, row) for row in rows if row.site)
        unnamed = _sums((row.opcode, row) for row in rows if not row.site)
        found = compare_sites(_as_profiled(sites), _as_profiled(unnamed), table)
    else:
        notes.append("by class of instruction: the page names no sites"
                     + ("" if profile.lines else " (--print-source cuda,sass prints source lines)"))
        found = compare_classes(_sums((_class(row.opcode), row) for row in rows), table)
    return [row for row in found if row.column in collected], notes


def compare_classes(measured: dict[str, Counter], table: CounterTable) -> list[Comparison]:
    """The sums of every class of memory instructions that the twin or the profile executes."""
    predicted: dict[str, Counter] = {}
    unknown: set[tuple[str, str]] = set()
    for row in table.sites:
        used = instruction(row.instruction)
        name = CLASSES[used.family]
        sums = predicted.setdefault(name, Counter())
        for column in COLUMNS:
            value = getattr(row, column)
            if value is not None:
                sums[column] += value
            elif row.unmodelled and (used.global_ if "sectors" in column else used.shared):
                unknown.add((name, column))
    rows = []
    for name in dict.fromkeys((*predicted, *measured)):
        for column in COLUMNS:
            mine, theirs = predicted.get(name, Counter())[column], measured.get(name, Counter())[column]
            unmodelled = (name, column) in unknown
            if mine or theirs or unmodelled:
                rows.append(Comparison(name, column, None if unmodelled else mine, theirs, unmodelled=unmodelled))
    return rows


def _class(opcode: str) -> str:
    stem = opcode.partition(".")[0]
    return SPELLINGS.get(stem, stem)


def _sums(rows: Iterable[tuple[str, Row]]) -> dict[str, Counter]:
    sums: dict[str, Counter] = {}
    for name, row in rows:
        sums.setdefault(name, Counter()).update(row.counts)
    return sums


def _as_profiled(sums: dict[str, Counter]) -> dict[str, dict[str, int]]:
    """Sums under the names that a measured file gives the columns."""
    return {name: {COLUMNS[column]: value for column, value in row.items()} for name, row in sums.items()}
