"""``simgpu claims``: the design documents' claims, evaluated. Needs no GPU."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from models.gpu import load_gpu
from simgpu.cli.options import emit, format_option, gpu_option, progress
from simgpu.errors import SimError
from simgpu.instructions import nearest
from simgpu.report import Column
from validation.claim_values import MEASURED_ON
from validation.claims import VERDICTS, Claim, Finding, evaluate, read_claims

SHIPPED = Path(str(files("validation")))
NUMBERS = tuple(Column(f"{side}{end}", f"{side}{end}", data_only=True)
                for side in ("model", "measured") for end in ("", "_low", "_high"))
PEOPLE = (
    Column("id", "id", text=True),
    Column("text", "claim", text=True, wrap=30),
    Column("document", "document", text=True, wrap=10),
    Column("model_spelled", "model", text=True, wrap=9),
    Column("measured_spelled", "measured", text=True, wrap=9),
    Column("verdict", "verdict", text=True, wrap=10),
    Column("why", "why", text=True, wrap=18),
)
CRITERION = tuple(Column(key, key, data_only=True) for key in ("at_least", "at_most", "unit"))
DATA = (Column("id", "id"), Column("section", "section"), *PEOPLE[1:3], *CRITERION, *NUMBERS, *PEOPLE[-2:])


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@gpu_option
@click.option("--ledger", type=click.Path(path_type=Path), metavar="FILE",
              help="The claims.  [default: what ships with simgpu]")
@click.option("--measured", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder with KERNEL.json of validation.measure.  [default: the H200's, as shipped]")
@format_option
def claims(ids, gpu, ledger, measured, fmt):
    """Judge the design documents' claims by the model and by what was measured.

    Every claim is evaluated anew: the model's number comes out of the emulator or the occupancy model, the measured one
    out of the profiles. ID names every claim whose id begins so (b3, b3-l7-blocks); default: all.

    \b
    Examples:
    simgpu claims
    simgpu claims b1-stage b3-k1
    simgpu claims --format md
    """
    load_gpu(gpu)
    chosen = select(read_claims(ledger or SHIPPED / "claims.toml"), ids)
    findings = []
    with progress("claims") as bar:
        for done, claim in enumerate(chosen, 1):
            findings.append(evaluate(claim, measured or SHIPPED / "measured" / MEASURED_ON, gpu))
            if bar:
                bar(done, len(chosen))
    report(findings, gpu, fmt)


def select(claims: list[Claim], ids: tuple[str, ...]) -> list[Claim]:
    """The claims whose id begins with one of ``ids``, in the ledger's order; all without ``ids``.

    Raises :class:`~simgpu.errors.SimError` for one that no id begins with, with the nearest id.
    """
    known = [claim.id for claim in claims]
    for wanted in ids:
        if not any(name.startswith(wanted) for name in known):
            raise SimError(f"no claim {wanted!r}{nearest(wanted, known)}")
    return [claim for claim in claims if not ids or claim.id.startswith(ids)]


def report(findings: list[Finding], gpu: str, fmt: str) -> None:
    """Print a table a section; CSV and JSON hold all rows in one."""
    rows = [finding.as_dict() for finding in findings]
    tally = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    if fmt == "json":
        emit(fmt, DATA, [], document={"gpu": gpu, "measured_on": MEASURED_ON, "claims": rows, "verdicts": tally})
        return
    if fmt == "csv":
        emit(fmt, DATA, rows)
        return
    for section in dict.fromkeys(row["section"] for row in rows):
        shown = [
            row | {f"{side}_spelled": finding.claim.spell(getattr(finding, side)) for side in ("model", "measured")}
            for row, finding in zip(rows, findings, strict=True) if row["section"] == section
        ]
        emit(fmt, PEOPLE, shown, title=section)
        click.echo()
    counted = ", ".join(f"{number} {verdict}" for verdict, number in tally.items() if number)
    click.echo(f"{len(rows)} claim{'s' * (len(rows) != 1)}: {counted}")
    click.echo(f"model: {gpu}, or the GPU a claim names; measured: an {MEASURED_ON.upper()}, of the same SM as the H20")
    click.echo("times: medians of interleaved rounds, and the range from first decile over last to the reverse")
