"""``simgpu search``: explore a kernel's parameters, or the layouts of one of its shared tensors."""

from __future__ import annotations

import functools
import os

import click

from kernels_py import find
from models.gpu import GPU, load_gpu
from models.occupancy import occupancy
from simgpu.cli.launches import configure, pairs
from simgpu.cli.options import emit, format_option, gpu_option, progress, unmodelled_option
from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.report import Column
from simgpu.search import Journal, Outcome, axis, explore, fingerprint, product, rank
from simgpu.search_layout import Found, search_layout

MOST_SHOWN = 10  # refused combinations; CSV and JSON have them all
SITE_COLUMNS = 6  # more sites than these have their wavefronts in CSV and JSON alone
ONLY_OVER = {"jobs": "--jobs", "resume": "--resume", "regs": "--regs", "allow_unmodelled": "--allow-unmodelled"}
ONLY_TENSOR = {"views": "--view", "max_bytes": "--max-bytes", "max_pad": "--max-pad", "column_major": "--column-major"}


class Ctas(click.ParamType):
    """A number of CTAs, or ``all`` (None)."""

    name = "ctas"

    def convert(self, value, param, ctx):
        return None if value == "all" else click.IntRange(1).convert(value, param, ctx)


@click.command()
@click.argument("kernel")
@click.option("--over", multiple=True, metavar="NAME=VALUES", help="Explore a parameter: V1,V2,... or LO:HI[:STEP].")
@click.option("--tensor", metavar="NAME", help="Find the best layout of this shared tensor (As*: of all that match).")
@click.option("--view", "views", multiple=True, metavar="NAME", help="A tensor over the same bytes and the same data.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a kernel parameter; repeatable.")
@gpu_option
@click.option("--ctas", type=Ctas(), metavar="N|all", help="Emulate the first N CTAs.  [default: all; --tensor: 1]")
@click.option("--regs", type=click.IntRange(1, 255), help="Registers per thread (ptxas -v), for blocks/SM.")
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Print N; CSV and JSON: all.")
@click.option("--max-bytes", type=click.IntRange(1), help="The most bytes the tensor may take.")
@click.option("--max-pad", type=click.IntRange(0, 4096), help="The most elements of pad.  [default: under 128 bytes]")
@click.option("--column-major", is_flag=True, help="Try column-major layouts too.")
@click.option("--jobs", type=click.IntRange(1), help="Processes to use.  [default: the processor's cores]")
@click.option("--resume", metavar="FILE", help="Keep finished combinations in FILE, and go on from there.")
@unmodelled_option
@format_option
def search(kernel, over, tensor, settings, gpu, ctas, top, fmt, **given):
    """Find the best parameters of a kernel, or the best layout of one of its shared tensors.

    KERNEL is named as for `simgpu conflicts`. With --over, every combination of the values is emulated, and ranked by
    wavefronts, then bytes of shared memory, then blocks per SM. What the kernel refuses is listed with the reason.

    With --tensor, the accesses of one CTA to that tensor are recorded, and every row-major layout with a pad or a
    Swizzle<B,M,S> or both is priced: all sites that read or write it, vectors whole and aligned. The kernel is then
    run under the winner and must compute the same.

    \b
    Examples:
    simgpu search kda_b1 --over stage_stride=128:148:4 --over stage_vec=1,2 --set tokens=64
    simgpu search transpose --tensor tile --max-bytes 4096
    simgpu search kda_b1 --tensor dS --view dS_t
    """
    if bool(over) == bool(tensor):
        raise SimError("search needs --over NAME=VALUES or --tensor NAME, and not both")
    for name, option in (ONLY_OVER if tensor else ONLY_TENSOR).items():
        if given[name] is not None and given[name] is not False and given[name] != ():
            raise SimError(f"{option} belongs to --{'over' if tensor else 'tensor'}")
    machine = load_gpu(gpu)
    if tensor:
        wanted = {name: given[name] for name in ONLY_TENSOR}
        source = click.get_current_context().get_parameter_source("ctas")
        default = source is click.core.ParameterSource.DEFAULT
        _layouts(kernel, settings, tensor, machine, 1 if default else ctas, top, fmt, **wanted)
    else:
        wanted = {name: given[name] for name in ONLY_OVER}
        _parameters(kernel, settings, over, machine, ctas, top, fmt, **wanted)


# ---- parameters ------------------------------------------------------------------------------------------------------

_found = functools.cache(find)  # a worker reads a kernel's file once


def launch_of(kernel: str, settings: tuple[tuple[str, object], ...], **parameters) -> Launch:
    """The launch of one combination; by name, so that another process can make it too."""
    made, variant = _found(kernel)
    return made.launch(variant, **dict(settings), **parameters)


def _parameters(kernel, settings, over, machine: GPU, ctas, top, fmt, *, jobs, resume, regs, allow_unmodelled):
    made, variant = find(kernel)
    fixed = made.parse(variant, pairs(settings))
    axes = {}
    for text in over:
        name, values = axis(made, variant, text)
        if name in axes or name in fixed:
            raise SimError(f"--over {text!r}: {name} is set elsewhere too")
        axes[name] = values
    combinations = product(axes)
    host = functools.partial(launch_of, kernel, tuple(fixed.items()))
    limit = machine.shared_bytes_per_block
    journal = Journal(resume, fingerprint(made, variant, fixed, axes, ctas, limit)) if resume else None
    with progress("combinations") as bar:
        outcomes = explore(host, combinations, ctas=ctas, shared_limit=limit, jobs=jobs or os.cpu_count(),
                           journal=journal, progress=bar)

    def blocks(outcome: Outcome) -> int:
        registers = regs or outcome.registers
        return occupancy(
            machine, threads=outcome.threads, registers=registers, shared_bytes=outcome.shared_bytes
        ).blocks_per_sm

    ranked, refused = rank(outcomes, blocks, allow_unmodelled=allow_unmodelled)
    if not ranked:
        raise SimError(f"all {len(refused):,} combinations are refused; {_setting(refused[0])}: {refused[0].refusal}")
    rows = [_row(place, outcome, blocks(outcome)) for place, outcome in enumerate(ranked, 1)]
    notes = [f"{len(combinations):,} combinations: {len(ranked):,} ranked by wavefronts, shared bytes, blocks/SM; "
             f"{len(refused):,} refused"]
    notes += [f"refused: {_setting(each)}: {each.refusal}" for each in refused[:MOST_SHOWN]]
    if len(refused) > MOST_SHOWN:
        notes.append(f"refused: {len(refused) - MOST_SHOWN:,} more (--format csv has them all)")
    if regs is None and any(outcome.registers is None for outcome in ranked):
        notes.append("blocks/SM: at most so many, for want of registers per thread (--regs N)")
    everything = fmt in ("csv", "json")
    emit(
        fmt,
        [
            Column("rank", "rank"),
            *(Column(f"set.{name}", name) for name in axes),
            Column("wavefronts", "wavefronts"),
            Column("excessive", "excessive", healthy=0),
            Column("shared_bytes", "shared\nbytes"),
            Column("blocks_per_sm", "blocks/\nSM"),
            Column("sectors", "sectors", zero=False, rank=1),
            Column("unmodelled", "unmodelled", zero=False),
            Column("refusal", "refused", text=True, data_only=True),
        ],
        (rows + [_row(None, outcome, None) for outcome in refused]) if everything else rows[:top],
        title=f"{kernel} on {machine.name}, over {', '.join(axes)}",
        notes=notes,
    )


def _setting(outcome: Outcome) -> str:
    return " ".join(f"{name}={value}" for name, value in outcome.parameters.items())


def _row(place: int | None, outcome: Outcome, blocks: int | None) -> dict:
    return {
        "rank": place,
        **{f"set.{name}": value for name, value in outcome.parameters.items()},
        "wavefronts": outcome.wavefronts,
        "excessive": outcome.excessive,
        "shared_bytes": outcome.shared_bytes,
        "blocks_per_sm": blocks,
        "sectors": outcome.sectors,
        "unmodelled": outcome.unmodelled,
        "refusal": outcome.refusal,
    }


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _layouts(kernel, settings, tensor, machine: GPU, ctas, top, fmt, *, views, max_bytes, max_pad, column_major):
    launch = configure(kernel, settings)
    with progress("layouts") as bar:
        found = search_layout(launch, tensor, views, ctas=ctas, max_bytes=max_bytes, max_pad=max_pad,
                              column_major=column_major, shared_limit=machine.shared_bytes_per_block, progress=bar)
    rows = [_layout_row(place, each) for place, each in enumerate(found.ranked, 1)]
    shown = rows if fmt in ("csv", "json") else rows[:top]
    if not any(row["own"] for row in shown):  # there may be none but a larger one than --max-bytes allows
        shown = shown + ([row for row in rows if row["own"]] or [_layout_row(None, found.own)])
    refused = [f"refused: {each.name} ({each.wavefronts:,} wavefronts): {why}" for each, why in found.refused]
    emulated = "CTA 0" if ctas == 1 else f"the {launch.ctas if ctas is None else ctas:,} CTAs emulated"
    emit(
        fmt,
        [
            Column("rank", "rank"),
            Column("layout", "layout", text=True),
            Column("bytes", "bytes"),
            Column("wavefronts", "wavefronts"),
            Column("ideal", "ideal"),
            Column("excessive", "excessive", healthy=0),
            *(Column(f"wavefronts.{site}", site, rank=1, data_only=len(found.own.sites) > SITE_COLUMNS)
              for site in found.own.sites),
        ],
        shown,
        title=f"{kernel}: layouts of {', '.join((*found.recording.names, *found.recording.views))}, {emulated}",
        notes=[found.statement, *refused, _confirmation(found)],
        document={
            "kernel": kernel,
            "tensors": [*found.recording.names, *found.recording.views],
            "layouts": shown,
            "tried": found.tried,
            "dropped": dict(found.dropped),
            "refused": [{"layout": each.name, "reason": why} for each, why in found.refused],
            "statement": found.statement,
            "result_compared": found.values,
        },
    )


def _layout_row(place: int | None, found: Found) -> dict:
    return {
        "rank": place,
        "layout": found.name,
        "own": found.candidate is None,
        "bytes": found.nbytes,
        "wavefronts": found.wavefronts,
        "ideal": found.ideal,
        "excessive": found.excessive,
        **{f"wavefronts.{site}": wavefronts for site, (wavefronts, _) in found.sites.items()},
    }


def _confirmation(found) -> str:
    if found.best is found.own:
        return "no layout tried is better than the kernel's own"
    result = "computes the same bytes" if found.values else "was emulated with addresses only: results not compared"
    return f"under {found.best.name} the kernel takes these wavefronts and {result}"
