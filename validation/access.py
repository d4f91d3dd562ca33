"""Measures what single warp instructions cost: packs the rows, profiles ``cuda/access.cu``, reads the profile.

    python -m validation.access check PROGRAM            needs a GPU: does every row move the right data?
    python -m validation.access measure PROGRAM OUT      needs a GPU and Nsight Compute

A launch of the program holds 64 rows, each an instruction of its own, and Nsight Compute attributes some counters
to instructions: one profiled launch measures 64 patterns. The counters of the hardware units count whole launches:
for them the program is built with one row per launch (``-DROWS=1`` and ``--size 1``; for cp.async.cg with
``-DUNCHECKED`` too). ``measure`` writes one JSON line per row with every counter that is not zero, under the
metric's own name, and a provenance file beside them.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import click

from simgpu.errors import SimError
from validation.access_patterns import LANES, Pattern, patterns
from validation.measure import gpu_query, output_of, require_tools
from validation.ncu import report_module

LAUNCHES = 64  # of one profile: what is lost if it fails

# Nsight Compute attributes these to single instructions: the columns of its source page.
SOURCE = ("inst_executed", "memory_l1_wavefronts_shared", "memory_l1_wavefronts_shared_ideal",
          "memory_l1_tag_requests_global", "memory_l2_theoretical_sectors_global",
          "memory_l2_theoretical_sectors_global_ideal")
# These count whole launches; they belong to a row where it is the only one of its launch. Per instruction family.
DATA, BANKS, TAGS = ("l1tex__data_pipe_lsu_wavefronts_mem_shared", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared",
                     "l1tex__t_sectors_pipe_lsu_mem_global")
SASS_DATA, SASS_TAGS = f"smsp__sass_{DATA.replace('__', '_')}", f"smsp__sass_{TAGS.replace('__', '_')}"
LAUNCH = {
    "lds|ldmatrix": (f"{DATA}_op_ld", f"{BANKS}_op_ld", f"{SASS_DATA}_op_ld"),
    "sts|stmatrix": (f"{DATA}_op_st", f"{BANKS}_op_st", f"{SASS_DATA}_op_st"),
    "ldg": (f"{TAGS}_op_ld", f"{SASS_TAGS}_op_ld"),
    "stg": (f"{TAGS}_op_st", f"{SASS_TAGS}_op_st"),
    ".*[.]shared": (f"{DATA}_op_atom", f"{BANKS}_op_atom", f"{SASS_DATA}_op_atom"),
    "atom[.]global": (f"{TAGS}_op_atom", f"{SASS_TAGS}_op_atom"),
    "red[.]global": (f"{TAGS}_op_red", f"{SASS_TAGS}_op_red"),
    "cp[.]async": (f"{BANKS}_op_ldgsts", f"{TAGS}_op_ld", f"{SASS_TAGS}_op_ldgsts", "lts__t_sectors_srcunit_tex",
                   *(f"{SASS_DATA}_op_ldgsts{kind}" for kind in ("", "_cache_access", "_cache_bypass"))),
}

# How the instruction under test is spelled in SASS; the rest of the kernel spells none of its own that way,
# but for the verdict, which is one store after the 64 rows.
SASS = {"lds": "LDS", "sts": "STS", "ldg": "LDG", "stg": "STG", "ldmatrix": "LDSM", "stmatrix": "STSM",
        "atom.shared": "ATOMS", "red.shared": "ATOMS", "atom.global": "ATOMG", "red.global": "REDG?",
        "cp.async": "LDGSTS"}


def kernel_name(row: Pattern) -> str:
    """The name ``access.cu`` knows the instruction under.

    >>> kernel_name(Pattern("lds", 8, "random", 1, (0,) * 32))
    'lds.8'
    """
    if row.op in ("lds", "sts", "ldg", "stg"):
        return f"{row.op}.{row.width}"
    if row.op.startswith("cp.async"):
        return f"{row.op}.{row.width}" + (".zfill" if row.source_bytes else "")
    return row.op


def launches(rows: Sequence[Pattern], size: int) -> list[list[Pattern]]:
    """Rows in launches of ``size``, each of one instruction; a short launch is filled up with rows without lanes."""
    filled = []
    for _, same in groupby(rows, kernel_name):
        same = list(same)
        for first in range(0, len(same), size):
            launch = same[first:first + size]
            filled.append(launch + [replace(launch[-1], mask=0)] * (size - len(launch)))
    return filled


def packed(launch: Sequence[Pattern]) -> bytes:
    """One launch as ``struct Launch`` of access.cu."""
    nothing = (0,) * LANES
    out = struct.pack("32s", kernel_name(launch[0]).encode())
    for row in launch:
        out += struct.pack("<97I", row.mask, *(row.shared or nothing), *(row.global_ or nothing),
                           *(row.source_bytes or nothing))
    return out


def record(row: Pattern, counters: dict[str, int]) -> dict:
    """A row and its counters as one line of the measured data."""
    line = {"op": row.op, "bytes_per_lane": row.width, "set": row.set, "active_mask": f"{row.mask:#010x}"}
    for key, value in (("shared_byte_offset", row.shared), ("global_byte_offset", row.global_),
                       ("source_bytes", row.source_bytes)):
        if value is not None:
            line[key] = list(value)
    return line | {"counters": {name: value for name, value in counters.items() if value}}


# ---- on the machine with the GPU ---------------------------------------------------------------------------


def metrics_of(launch: Sequence[Pattern]) -> list[str]:
    """The metrics to collect for a launch: those of single instructions or, where it has only one, those of launches.

    Both together cost passes; and the source page knows nothing of cp.async.cg.
    """
    if len(launch) > 1:
        return list(SOURCE)
    return [f"{name}.sum" for name in next(names for op, names in LAUNCH.items() if re.match(op, launch[0].op))]


def measured(report: Path, batch: Sequence[Sequence[Pattern]], metrics: Sequence[str]) -> Iterator[dict]:
    """The records of one profiled batch."""
    context = report_module().load_report(str(report))
    profiled = context.range_by_idx(0)
    actions = [profiled.action_by_idx(index) for index in range(profiled.num_actions())]
    if len(actions) != len(batch):
        raise SimError(f"{report}: {len(actions)} launches profiled, {len(batch)} planned")
    for action, launch in zip(actions, batch, strict=True):
        if len(launch) == 1:
            counters = {name.removesuffix(".sum"): action.metric_by_name(name).as_uint64() for name in metrics}
            yield record(launch[0], counters)
            continue
        per_site: dict[int, dict[str, int]] = {}
        for name in metrics:
            metric = action.metric_by_name(name)
            if metric is None:  # the launch never touched that memory
                continue
            at = metric.correlation_ids()
            for index in range(metric.num_instances()):
                per_site.setdefault(at.as_uint64(index), {})[name] = metric.as_uint64(index)
        family = next(sass for op, sass in SASS.items() if launch[0].op.startswith(op))
        spelled = re.compile(rf"^(@!?U?P\w+ +)?{family}\b")
        sites = [pc for pc in sorted(per_site) if spelled.match(action.sass_by_pc(pc).strip())][:len(launch)]
        if len(sites) != len(launch):
            raise SimError(f"{report}: {action.name()}: {len(sites)} sites of {family}")
        for row, pc in zip(launch, sites, strict=True):
            if row.mask:
                yield record(row, per_site[pc])


@click.group()
def main() -> None:
    """Measure single warp instructions."""


def planned(seed: int, only: str, most: int, size: int) -> Iterator[list[list[Pattern]]]:
    """At most ``most`` rows, evenly spread, of each instruction that ``only`` matches, in batches of equal metrics."""
    todo = []
    for name, rows in groupby(patterns(seed), kernel_name):
        if re.search(only, name):
            rows = list(rows)
            kept = [rows[index * len(rows) // most] for index in range(most)] if most < len(rows) else rows
            todo += launches(kept, size)
    for _, alike in groupby(todo, metrics_of):
        alike = list(alike)
        for first in range(0, len(alike), LAUNCHES):
            yield alike[first:first + LAUNCHES]


def plan_options(command):
    """The options that say which rows to run."""
    for option in (
        click.option("--seed", default=1, help="of the pattern generator"),
        click.option("--only", default="", help="only instructions whose name matches this regular expression"),
        click.option("--most", default=1 << 30, help="at most this many rows of each instruction"),
        click.option("--size", default=64, help="rows of a launch: the ROWS that PROGRAM was built with"),
        click.argument("program", type=click.Path(exists=True, dir_okay=False, executable=True, path_type=Path)),
    ):
        command = option(command)
    return command


@main.command()
@plan_options
def check(program: Path, seed: int, only: str, most: int, size: int) -> None:
    """Run PROGRAM over every row without a profiler: does each move the right data?"""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "access.batch")
        for batch in planned(seed, only, most, size):
            file.write_bytes(b"".join(map(packed, batch)))
            wrong += subprocess.run([str(program.resolve()), str(file)], stdout=subprocess.DEVNULL).returncode != 0
    sys.exit(wrong > 0)


@main.command()
@plan_options
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", type=float, default=float("inf"), help="start no further batch after this long")
def measure(program: Path, out: Path, seed: int, only: str, most: int, size: int, seconds: float) -> None:
    """Profile PROGRAM over the planned rows and write them to OUT, one JSON line each."""
    try:
        require_tools("nvidia-smi", "nvcc", "ncu")
        # OUT appears when it is whole; until then a failure leaves what was measured in the other file.
        unfinished = out.with_name(f"{out.name}.part")
        profile(program, unfinished, planned(seed, only, most, size), seconds)
        origin = provenance(seed, size)
    except (SimError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    os.replace(unfinished, out)
    out.with_suffix(".provenance.json").write_text(json.dumps(origin, indent=2) + "\n")


def profile(program: Path, out: Path, plan: Iterator[list[list[Pattern]]], seconds: float) -> None:
    """Profile ``program`` over the batches of ``plan``, into ``out``; start none after ``seconds``."""
    started = time.monotonic()
    with out.open("w") as lines, tempfile.TemporaryDirectory() as folder:
        report, file = Path(folder, "access.ncu-rep"), Path(folder, "access.batch")
        for batch in plan:
            if time.monotonic() - started > seconds:
                click.echo(f"out of time before {kernel_name(batch[0][0])}")
                break
            file.write_bytes(b"".join(map(packed, batch)))
            metrics = metrics_of(batch[0])
            output_of("ncu", "--clock-control", "none", "-f", "-k", "regex:access", "--metrics", ",".join(metrics),
                      "-o", str(report), str(program.resolve()), str(file))
            for line in measured(report, batch, metrics):
                lines.write(json.dumps(line, separators=(",", ":")) + "\n")
            lines.flush()
            click.echo(f"{kernel_name(batch[0][0])}: {time.monotonic() - started:.1f} s")


def provenance(seed: int, size: int) -> dict:
    """Where the numbers come from: hardware, tools and plan."""
    return {
        "gpu": gpu_query("name"), "driver": gpu_query("driver_version"),
        "ncu": output_of("ncu", "--version").strip().splitlines()[-1],
        "ncu_flags": "--clock-control none", "seed": seed, "rows_per_launch": size,
        "nvcc": output_of("nvcc", "--version").strip().splitlines()[-1],
    }


if __name__ == "__main__":
    main()
