"""``simgpu validate``: hold the model against what was measured and published. Needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path

import click

from kernels_py import registered
from models.gpu import gpu_names
from simgpu.cli.options import emit, format_option, progress
from simgpu.errors import SimError
from simgpu.instructions import nearest
from simgpu.report import Column
from validation.compare import VERDICTS, Outcome, compare_run, read_runs
from validation.compare_access import OCCUPANCY, PATTERNS, compare_occupancy, compare_patterns
from validation.exceptions import explain, read_exceptions
from validation.published import PUBLISHED, compare_case, read_cases

SHIPPED = Path(str(files("validation")))
LISTED = ("different", "explained", "shown")  # verdicts of numbers that are printed without --all-sites
SUMMARY = (
    Column("gpu", "GPU", text=True),
    Column("kernel", "kernel", text=True),
    Column("case", "case", text=True),
    Column("sites", "sites"),
    *(Column(verdict, verdict) for verdict in reversed(VERDICTS)),
)
DETAIL = (
    Column("gpu", "GPU", text=True),
    Column("kernel", "kernel", text=True),
    Column("case", "case", text=True),
    Column("site", "site", text=True),
    Column("column", "column", text=True),
    Column("kind", "kind", text=True),
    Column("predicted", "predicted"),
    Column("measured", "measured"),
    Column("verdict", "verdict", text=True),
)


@dataclass(frozen=True)
class Check:
    """A step of the validation: what it is about and how to run it; ``case`` is None where it yields several."""

    gpu: str
    kernel: str
    case: str | None
    run: Callable[[], list[Outcome]]


@click.command()
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--gpu", default="h200", show_default=True, metavar="NAME|all", help="The GPU that measured.")
@click.option("--case", "pattern", metavar="PATTERN", help="Only the cases that match, as '*,m=512,*'.")
@click.option("--all-sites", is_flag=True, help="Print every site, not only those that differ.")
@click.option("--hardware", is_flag=True, help="Show the l1tex__* counters and their noise too; they decide nothing.")
@click.option("--threads", type=click.IntRange(1), help="Threads to use.  [default: the processor's cores]")
@click.option("--measured", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder with GPU/KERNEL.json of validation.measure.  [default: what ships with simgpu]")
@click.option("--published", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder with published cases.  [default: what ships with simgpu]")
@click.option("--exceptions", type=click.Path(path_type=Path), metavar="FILE",
              help="Differences that are understood.  [default: what ships with simgpu]")
@format_option
@click.pass_context
def validate(ctx, kernels, gpu, pattern, all_sites, hardware, threads, measured, published, exceptions, fmt):
    """Compare predictions with measurements, site by site.

    Every run measured on the GPU is emulated again and each of its sites compared for equality. KERNEL is a measured
    kernel, or access-patterns (single accesses), occupancy (the driver's answers) or published (cases of other people);
    default: all there is for the GPU. A difference makes the exit code 1; one that is explained does not.

    \b
    Examples:
    simgpu validate
    simgpu validate transpose --all-sites
    simgpu validate --gpu a100-80g --format json
    """
    measured, published = measured or SHIPPED / "measured", published or SHIPPED / PUBLISHED
    checks, notes = plan(kernels, gpu, measured, published, threads or os.cpu_count() or 1, hardware)
    if pattern is not None:
        checks = [check for check in checks if check.case is None or fnmatchcase(check.case, pattern)]
    outcomes: list[Outcome] = []
    with progress("runs") as bar:
        for done, check in enumerate(checks, 1):
            outcomes += [found for found in check.run() if pattern is None or fnmatchcase(found.case, pattern)]
            if bar:
                bar(done, len(checks))
    if not outcomes:
        raise SimError("; ".join(notes) if pattern is None else f"no case matches {pattern!r}")
    explained = read_exceptions(exceptions or SHIPPED / "exceptions.toml")
    outcomes = explain(outcomes, explained, complete=pattern is None)
    report(outcomes, notes, all_sites, fmt)
    if any(outcome.different for outcome in outcomes):
        ctx.exit(1)


# ---- what to compare ---------------------------------------------------------------------------------------


def plan(
    kernels: tuple[str, ...], gpu: str, measured: Path, published: Path, threads: int, hardware: bool
) -> tuple[list[Check], list[str]]:
    """The checks of ``kernels`` (all if empty) on ``gpu``, and notes about what cannot be checked."""
    if gpu != "all" and gpu not in gpu_names():
        raise SimError(f"unknown GPU {gpu!r}{nearest(gpu, ('all', *gpu_names()))}")
    checks, notes = [], []
    for folder in sorted(measured.iterdir() if measured.is_dir() else ()):
        if folder.is_dir() and gpu in ("all", folder.name):
            for path in sorted(folder.iterdir()):
                checks += _checks(folder.name, path, threads, hardware)
    checks += [Check(case.gpu, PUBLISHED, case.id, lambda case=case: [compare_case(case)])
               for case in read_cases(published) if case.stands_for(gpu)]
    known = dict.fromkeys(check.kernel for check in checks)
    for kernel in kernels:
        if kernel not in known:
            raise SimError(f"nothing measured of {kernel!r} on {gpu}{nearest(kernel, known)}")
    if not checks:
        raise SimError(f"nothing was measured or published for {gpu}")
    chosen = [check for check in checks if not kernels or check.kernel in kernels]
    twins = (*registered(), PATTERNS, OCCUPANCY, PUBLISHED)
    for name, kernel in dict.fromkeys((check.gpu, check.kernel) for check in chosen if check.kernel not in twins):
        if kernel in kernels:
            raise SimError(f"kernel {kernel!r} was measured, but has no Python twin")
        notes.append(f"{name} {kernel}: not compared: no Python twin")
    return [check for check in chosen if check.kernel in twins], notes


def _checks(gpu: str, path: Path, threads: int, hardware: bool) -> list[Check]:
    """The checks that one file of measurements asks for; none for a file of another kind."""
    if path.name == "occupancy.csv":
        return [Check(gpu, OCCUPANCY, None, lambda: [compare_occupancy(gpu, path)])]
    if path.name == "patterns.jsonl":
        return [Check(gpu, PATTERNS, None, lambda: compare_patterns(gpu, path))]
    if path.suffix == ".json" and not path.name.endswith(".provenance.json"):
        return [
            Check(gpu, path.stem, run.case,
                  lambda run=run: [compare_run(gpu, run, threads=threads, hardware=hardware)])
            for run in read_runs(path)
        ]
    return []


# ---- what to print -----------------------------------------------------------------------------------------


def report(outcomes: list[Outcome], notes: list[str], everything: bool, fmt: str) -> None:
    """Print a row per case, then the comparisons that differ (``everything``: all of them).

    CSV holds the comparisons alone.
    """
    summary, details = [], []
    for outcome in outcomes:
        head = {"gpu": outcome.gpu, "kernel": outcome.kernel, "case": outcome.case}
        every = everything or outcome.kernel == PUBLISHED  # whose rows each say what kind of counter was published
        rows = [row.as_dict() for row in outcome.comparisons if every or row.verdict in LISTED]
        details += [head | row | {"verdict": ": ".join(filter(None, (row["verdict"], row["why"])))} for row in rows]
        summary.append(head | outcome.tally() | {"comparisons": rows})
    total = {"gpu": "all", "kernel": "", "case": ""}
    total |= {name: sum(row[name] for row in summary) for name in ("sites", *VERDICTS)}
    kernels = [_by_kernel(kernel, summary) for kernel in dict.fromkeys((row["gpu"], row["kernel"]) for row in summary)]
    verdict = f"{total['sites']:,} sites compared in {_cases(len(summary))}: " + ", ".join(
        f"{total[name]:,} {name}" for name in reversed(VERDICTS) if total[name]
    )
    if fmt == "csv":
        emit(fmt, DETAIL, details)
    elif fmt == "json":
        emit(fmt, SUMMARY, [], document={"cases": summary, "kernels": kernels, "total": total, "notes": notes})
    else:
        emit(fmt, SUMMARY, [_blank(row) for row in summary], title="cases")
        if details:
            click.echo()
            emit(fmt, DETAIL, details, title="numbers" if everything else "numbers that differ, and published ones")
        click.echo()
        rows = [_blank(row) for row in kernels]
        emit(fmt, SUMMARY, rows, footer=_blank(total), notes=[*notes, verdict], title="sums")


def _by_kernel(name: tuple[str, str], summary: list[dict]) -> dict:
    rows = [row for row in summary if (row["gpu"], row["kernel"]) == name]
    head = {"gpu": name[0], "kernel": name[1], "case": _cases(len(rows))}
    return head | {column: sum(row[column] for row in rows) for column in ("sites", *VERDICTS)}


def _cases(number: int) -> str:
    return f"{number:,} case" + "s" * (number != 1)


def _blank(row: dict) -> dict:
    """The row with its zeros left out, so that what is not zero stands out."""
    return {name: None if value == 0 and name in VERDICTS else value for name, value in row.items()}
