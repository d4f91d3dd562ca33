"""What the units behind L1 deliver: measured on a GPU, and what of it the GPU files quote.

    python -m validation.rates --gpu h200 --out validation/measured/h200     # on that GPU: measures
    python -m validation.rates                                              # prints what was measured

``cuda/rates.cu`` runs loops of one kind of access on the whole GPU; a case says which. ``rates.jsonl`` holds the
program's own lines, a case each: its parameters, its time and the clocks of its slowest CTA.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from simgpu.errors import SimError
from simgpu.instructions import LANES
from simgpu.report import Column, render
from simgpu.rules import SECTOR
from validation.measure import REMEDIES, architecture, build, case, json_lines, output_of, provenance, require_tools

NAME = "rates.jsonl"

L1 = {"l1": 1, "own": 1, "kb": 128, "ctas": 1, "passes": 64}
STRIDES = (0, 8, 16, 32, 64)  # words between the lanes of a load; 0: 16 bytes a lane, side by side
MB = 1024
CASES = (
    *(case("load", **L1, stride=s) for s in STRIDES),  # resident in L1
    *(case("load", kb=kb * MB, stride=s) for kb in (4, 8, 16, 32, 48) for s in STRIDES),  # in L2
    *(case("load", kb=kb * MB, stride=s, ctas=1, sms=16) for kb in (4, 32) for s in STRIDES),  # by few SMs
    *(case("load", kb=32 * MB, stride=s, l1=1) for s in STRIDES),
    *(case("load", kb=32 * MB, stride=0, ctas=c) for c in (1, 3)),
    case("load", kb=2 * MB, own=1, stride=0),  # 528 MB, once: DRAM
    case("copy", kb=512 * MB),
    *(case("red", words=w, apart=a, lanes=n, ctas=4, repeats=min(16 * w, 256)) for n in (1, 32)
      for w, a in ((1, 1), (2, 1), (8, 1), (8, 8), (8, 32), (32, 1), (32, 8), (32, 32), (64, 1), (64, 32), (256, 1))),
)


def rate(run: dict[str, Any]) -> tuple[float, str]:
    """What a case delivers, and the unit: GB/s, or updates of one word in a microsecond.

    ``run`` is a line of ``rates.jsonl``.

    >>> rate({"variant": "copy", "params": {"kb": 1000}, "grid": [264], "block": [512], "time": {"median_us": 500}})
    (4.096, 'GB/s')
    """
    params, us, ctas, threads = run["params"], run["time"]["median_us"], run["grid"][0], run["block"][0]
    if run["variant"] == "copy":
        return 2 * 1024 * params["kb"] / us / 1000, "GB/s"
    if run["variant"] == "load":
        return 1024 * params["kb"] * ctas * params["passes"] / us / 1000, "GB/s"
    updates = ctas * threads // LANES * params["lanes"] * params["repeats"] / params["words"]
    return updates / us, "updates of a word/us"


def clocks_per_request(run: dict[str, Any]) -> float | None:
    """Clocks of an SM for each warp's request of a load, None for another case."""
    if run["variant"] != "load":
        return None
    params = run["params"]
    moved = SECTOR * LANES if params["stride"] else 16 * LANES
    return run["clocks"] / (1024 * params["kb"] * params["passes"] * params["ctas"] / moved)


COLUMNS = (Column("case", "case", text=True), Column("us", "us"), Column("rate", "rate"),
           Column("unit", "unit", text=True), Column("clk", "clk/\nrequest"))


def row(run: dict[str, Any]) -> dict[str, Any]:
    """A case as :data:`COLUMNS` show it."""
    value, unit = rate(run)
    return {"case": run["case"], "us": run["time"]["median_us"], "rate": value, "unit": unit,
            "clk": clocks_per_request(run)}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of ``rates.jsonl``. Raises :class:`SimError` for a file that is none."""
    try:
        return json_lines(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimError(f"{path}: {error}") from None


def measure(gpu: str, out: Path, commit: str | None) -> None:
    """Build the program, run its cases in turns, and write ``rates.jsonl`` and where it comes from into ``out``."""
    require_tools(*REMEDIES)
    arch = architecture()
    origin = provenance(gpu, arch, commit)
    with tempfile.TemporaryDirectory() as folder:
        runs = json_lines(output_of(str(build("rates", Path(folder), arch)), "time", *CASES))
    out.mkdir(parents=True, exist_ok=True)
    (out / NAME).write_text("".join(json.dumps(run) + "\n" for run in runs), encoding="utf-8")
    (out / NAME).with_suffix(".provenance.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


@click.command()
@click.option("--gpu", default="h200", show_default=True, help="the GPU's name in models/gpus")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="measure, and write into this folder")
@click.option("--commit", help="noted in the result; default: git's HEAD")
def main(gpu: str, out: Path | None, commit: str | None) -> None:
    """Measure (--out) or print the rates of GPU."""
    try:
        if out is not None:
            measure(gpu, out, commit)
        runs = read((out or Path(str(files("validation"))) / "measured" / gpu) / NAME)
    except SimError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(render("table", COLUMNS, [row(run) for run in runs]), nl=False)


if __name__ == "__main__":
    main()
