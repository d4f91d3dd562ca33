"""``simgpu check``: races between barriers, and gates on bank conflicts."""

from __future__ import annotations

from dataclasses import asdict

import click

from simgpu.cli.launches import configure, ctas_of
from simgpu.cli.options import emit, format_option, write
from simgpu.launch import Launch
from simgpu.races import Finding, Report, gates, needed
from simgpu.races import check as check_races
from simgpu.report import Column, counted

COLUMNS = (
    Column("kind", "finding", text=True),
    Column("tensor", "tensor", text=True),
    Column("first", "first access", text=True),
    Column("second", "second access", text=True),
    Column("bytes", "bytes", zero=False),
    Column("cta", "CTA", rank=2),
    Column("byte", "at byte", rank=3),
    Column("first_lane", "first", text=True, rank=4),
    Column("second_lane", "second", text=True, rank=4),
    Column("interval", "between barriers", text=True, rank=1),
    Column("detail", "detail", text=True),
)
BARRIERS = (
    Column("barrier", "barrier", text=True),
    Column("executed", "executed"),
    Column("without", "findings\nwithout"),
    *COLUMNS[:4],
)


@click.command()
@click.argument("kernel")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a kernel parameter; repeatable.")
@click.option("--ctas", default="", metavar="N|all", help="The first N CTAs.  [default: the first 2 and the last]")
@click.option("--max-excessive", type=click.IntRange(0), metavar="N",
              help="Also a finding: more than N excessive wavefronts in all the CTAs checked.")
@click.option("--max-n-way", type=click.FloatRange(1), metavar="X",
              help="Also a finding: a site whose wavefronts / ideal exceed X.")
@click.option("--barriers", is_flag=True, help="Say what each barrier is needed for, by leaving it out.")
@format_option
def check(kernel, settings, ctas, max_excessive, max_n_way, barriers, fmt):
    """Find races in shared memory; exit with 1 if there is a finding.

    A finding names two accesses (site, file:line) to one byte by two warps of a CTA that no barrier orders, at least
    one of them a write. Others: bytes of a cp.async touched before its wait (in-flight), bytes read that nobody wrote
    (unwritten), lanes of one instruction that store different values to one byte (same-instruction), and what the
    device would refuse (fault). CTAs run with values. Order inside a warp is taken for granted.

    \b
    Examples:
    simgpu check transpose@pad1 --max-excessive 0
    simgpu check kda_b3@l6 --barriers
    """
    launch = configure(kernel, settings)
    report = check_races(launch, ctas=chosen(ctas, launch))
    findings = report.findings
    if report.table is not None:
        findings += gates(report.table, max_excessive, max_n_way)
    document = {
        "kernel": kernel,
        "ctas": report.ctas,
        "ctas_in_grid": launch.ctas,
        "barriers": report.barriers,
        "findings": [asdict(finding) for finding in findings],
    }
    if barriers and not findings:
        _emit_barriers(fmt, kernel, launch, report, document)
    elif fmt == "table" and not findings:
        write(f"{kernel}: clean ({_coverage(launch, report)})\n")
    else:
        title = f"{kernel}: {counted(len(findings), 'finding')}"
        notes = [f"checked {_coverage(launch, report)}"]
        emit(fmt, COLUMNS, [_row(finding) for finding in findings], title=title, notes=notes, document=document)
    if findings:
        raise click.exceptions.Exit(1)


def _emit_barriers(fmt: str, kernel: str, launch: Launch, report: Report, document: dict) -> None:
    """A row for every barrier and what is found without it; of many findings the first, and how many there are."""
    reasons = needed(launch, ctas=report.ctas)
    rows = []
    for where, executed in report.barriers.items():
        found = reasons[where]
        first = _row(found[0]) if found else {}
        rows.append({**first, "barrier": where, "executed": executed, "without": len(found)})
    document["needed"] = {where: [asdict(finding) for finding in found] for where, found in reasons.items()}
    idle = [where for where, found in reasons.items() if not found]
    notes = [f"checked {_coverage(launch, report)}; of what a barrier prevents, the first finding is shown"]
    if idle:
        notes.append(f"orders nothing, if the others stay: {', '.join(idle)}")
    emit(fmt, BARRIERS, rows, title=f"{kernel}: clean, {counted(len(rows), 'barrier')}", notes=notes, document=document)


def _row(finding: Finding) -> dict:
    return {key: None if value == "" else value for key, value in asdict(finding).items()}


def chosen(text: str, launch: Launch) -> range | None:
    """The CTAs of ``--ctas N|all``; None, for the default, where it is not given."""
    return range(ctas_of(text, launch) or launch.ctas) if text else None


def _coverage(launch: Launch, report: Report) -> str:
    met = sum(report.barriers.values())
    return f"{len(report.ctas):,} of {counted(launch.ctas, 'CTA')}, with values; {counted(met, 'barrier')} executed"
