"""``simgpu liveness``: which shared tensors could share bytes, what that takes, and what it gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from models.gpu import GPU, load_gpu
from models.occupancy import occupancy
from simgpu.cli.check import chosen
from simgpu.cli.launches import configure
from simgpu.cli.options import emit, format_option, gpu_option
from simgpu.liveness import Confirmation, Liveness, Packing, analyse, confirm, interference
from simgpu.report import Column, counted

BLOCKS = (
    Column("tensor", "tensor", text=True),
    Column("bytes", "bytes"),
    Column("live", "live in\nepochs", text=True),
    Column("first_write", "first write", text=True, rank=3),
    Column("last_read", "last read", text=True, rank=2),
    Column("unread", "bytes\nnever read", zero=False, rank=4),
    Column("declared_at", "declared\nat", rank=1),
    Column("planned_at", "planned\nat"),
)
STEPS = (
    Column("shared", "shared memory", text=True),
    Column("bytes", "bytes"),
    Column("blocks", "blocks/\nSM"),
    Column("limiter", "limited by", text=True),
    Column("barriers", "barriers\nmore"),
    Column("least", "least\npossible"),
)


@click.command()
@click.argument("kernel")
@gpu_option
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a kernel parameter; repeatable.")
@click.option("--ctas", default="", metavar="N|all", help="The first N CTAs.  [default: the first 2 and the last]")
@click.option("--regs", type=click.IntRange(1, 255), help="Registers per thread (ptxas -v), for blocks/SM.")
@click.option("--recompute", multiple=True, metavar="TENSOR",
              help="This tensor may be computed again, right before it is read; repeatable.")
@click.option("--whole", is_flag=True, help="Do not take tensors of three or more dimensions apart into slices.")
@format_option
def liveness(kernel, gpu, settings, ctas, regs, recompute, whole, fmt):
    """Find the shared tensors that can share bytes, and emulate the kernel that way.

    A tensor is live from a write to the last read before the next write. Epochs are what barriers separate, from 0.
    Two tensors that are never live at once can share bytes; within one epoch that takes a barrier more. The plan is the
    smallest placement; the kernel is run under it, its outputs are compared bit for bit, and races are looked for.
    Exits with 1 where the plan does not hold. Registers and time that a plan costs are not counted.

    \b
    Examples:
    simgpu liveness kda_b2@noalias
    simgpu liveness kda_b3@l6 --recompute operands --gpu h200
    """
    machine = load_gpu(gpu)
    launch = configure(kernel, settings)
    limit = machine.shared_bytes_per_sm  # a kernel that does not fit yet is welcome
    found = analyse(launch, ctas=chosen(ctas, launch), recompute=recompute, whole=whole, shared_limit=limit)
    confirmed = confirm(found.launch, found.ctas, found.least.plan, shared_limit=limit)
    registers = regs if regs is not None else launch.registers
    rows, steps = _blocks(found), _steps(found, machine, registers)
    document = {
        "kernel": kernel,
        "gpu": machine.name,
        "registers": registers,
        "ctas": found.ctas,
        "ctas_in_grid": launch.ctas,
        "blocks": rows,
        "steps": steps,
        "plan": {name: list(offsets) for name, offsets in found.least.plan.offsets.items()},
        "barriers": found.least.barriers,
        "interference": [list(pair) for pair in interference(found.ranges).edges],
        "overlaps": found.least.shared,
        "unions": [asdict(union) for union in found.unions],
        "confirmed": confirmed.holds,
        "wavefronts": confirmed.wavefronts,
    }
    emit(fmt, BLOCKS, rows, title=f"{kernel}: {counted(len(found.ranges.barriers), 'barrier')}", document=document)
    if fmt in ("table", "md"):
        click.echo()
        emit(fmt, STEPS, steps, notes=_notes(found, confirmed, machine, registers, recompute))
    if not confirmed.holds:
        raise click.exceptions.Exit(1)


def _blocks(found: Liveness) -> list[dict]:
    return [
        {
            "tensor": block.name,
            "bytes": block.nbytes,
            "live": _epochs(found, block.segments),
            "first_write": block.first_write or None,
            "last_read": block.last_read or None,
            "unread": block.unread,
            "declared_at": block.start,
            "planned_at": found.least.offsets[block.name],
        }
        for block in found.ranges.blocks
    ]


def _epochs(found: Liveness, segments) -> str:
    """``0-1, 3``: the epochs of live ranges, joined where they touch."""
    epochs = sorted({epoch for first, last in segments
                     for epoch in range(found.ranges.epoch(first), found.ranges.epoch(last) + 1)})
    runs: list[list[int]] = []
    for epoch in epochs:
        if runs and epoch == runs[-1][1] + 1:
            runs[-1][1] = epoch
        else:
            runs.append([epoch, epoch])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _steps(found: Liveness, gpu: GPU, registers: int | None) -> list[dict]:
    def step(name: str, nbytes: int, packing: Packing | None) -> dict:
        blocks, limiter = _fit(found, gpu, registers, nbytes)
        return {"shared": name, "bytes": nbytes, "blocks": blocks, "limiter": limiter,
                "barriers": len(packing.barriers) if packing else None, "least": packing.proven if packing else None}

    steps = [step("as declared", found.declared, None), step("aliased, no new barrier", found.free.span, found.free)]
    if found.least.span < found.free.span:
        steps.append(step("aliased", found.least.span, found.least))
    return steps


def _fit(found: Liveness, gpu: GPU, registers: int | None, nbytes: int) -> tuple[int, str | None]:
    """Blocks per SM and what limits them; 0 blocks where one does not fit."""
    if nbytes > gpu.shared_bytes_per_block:
        return 0, "shared"
    fit = occupancy(gpu, threads=found.launch.threads, registers=registers, shared_bytes=nbytes)
    return fit.blocks_per_sm, fit.limiter


def _notes(found: Liveness, confirmed: Confirmation, gpu: GPU, registers: int | None, recompute) -> list[str]:
    live, epoch = found.ranges.most_live()
    notes = [f"at most {live:,} B are live at once (epoch {epoch})"]
    if found.ranges.untouched:
        notes.append(f"never accessed: {', '.join(found.ranges.untouched)}")
    notes += [f"needs a barrier more in front of {site}" + (f", {count} times" if count > 1 else "")
              for site, count in Counter(found.least.barriers).items()]
    notes += [f"{name} is computed right before it is read; registers for it are not counted" for name in recompute]
    blocks, _ = _fit(found, gpu, registers, found.declared)
    told = {blocks}
    for union in found.unions:
        after, _ = _fit(found, gpu, registers, union.span)
        if after > blocks and after not in told:  # the largest saving comes first
            told.add(after)
            price = f", {counted(len(union.barriers), 'barrier')} more" if union.barriers else ""
            notes.append(f"alone enough for {after} blocks/SM: {union.tensor} over {', '.join(union.over)} "
                         f"({union.span:,} B{price})")
    known = "; registers unknown (--regs N): blocks/SM are at most that"
    if registers is not None:
        known = f", {registers} registers"
    notes.append(f"{gpu.name}, {found.launch.threads} threads{known}")
    ctas = counted(len(found.ctas), "CTA")
    if confirmed.holds:
        notes.append(f"confirmed: {ctas} emulated under the plan, with the same bits in every output, without a race")
    else:
        races = counted(len(confirmed.findings), "race")
        notes.append(f"NOT confirmed: {ctas} emulated under the plan: "
                     f"{'the same bits' if confirmed.equal else 'other outputs'}, {races}")
    own, planned = confirmed.wavefronts
    if own != planned:
        notes.append(f"{planned:,} wavefronts under the plan, {own:,} as declared")
    return notes
