"""``simgpu occupancy`` and ``simgpu gpus``: the machine models."""

from __future__ import annotations

import click

from models.gpu import gpu_names, load_gpu
from models.occupancy import occupancy as occupancy_of
from simgpu.cli.options import Integer, emit, format_option, gpu_option
from simgpu.report import Column


@click.command()
@gpu_option
@click.option("--threads", type=Integer(), required=True, help="Threads per block.")
@click.option("--regs", type=Integer(), required=True, help="Registers per thread.")
@click.option("--smem", type=Integer(), required=True, help="Dynamic shared memory per block, in bytes.")
@click.option(
    "--static-smem", type=Integer(), default=0, show_default=True, help="Static shared memory per block, in bytes."
)
@click.option(
    "--carveout",
    type=Integer(),
    help="Shared memory the driver set aside per SM, in KB (ncu's Shared Memory Configuration Size).",
)
@format_option
def occupancy(gpu, threads, regs, smem, static_smem, carveout, fmt):
    """Print how many blocks an SM holds, and what one more would take.

    The answer is the driver's, with the resource that limits it. Numbers may be decimal, hexadecimal or binary.

    \b
    Examples:
    simgpu occupancy --gpu h20 --threads 256 --regs 72 --smem 69632
    simgpu occupancy --gpu a100-80g --threads 128 --regs 128 --smem 0x8000 --carveout 100
    """
    fit = occupancy_of(
        load_gpu(gpu),
        threads=threads,
        registers=regs,
        shared_bytes=smem,
        static_shared_bytes=static_smem,
        carveout_kb=carveout,
    )
    columns = [
        Column("gpu", "GPU", text=True),
        Column("blocks_per_sm", "blocks/\nSM"),
        Column("limiter", "limiter", text=True, wrap=10),
        *(Column(f"limit_{name}", f"limit by\n{name}") for name in fit.limits),
        Column("warps_per_sm", "warps/\nSM", rank=1),
        Column("occupancy", "occupancy"),
    ]
    row = fit.as_dict() | {f"limit_{name}": limit for name, limit in fit.limits.items()}
    emit(fmt, columns, [row], notes=[fit.next_step.sentence], document=fit.as_dict())


@click.command()
@click.argument("name", required=False)
@format_option
def gpus(name, fmt):
    """List the GPUs, or all that is known of one.

    With NAME every value of that GPU is printed, with its unit, its provenance (measured, documented or inferred) and
    its source.

    \b
    Examples:
    simgpu gpus
    simgpu gpus h20 --format md
    """
    if name:
        gpu = load_gpu(name)
        rows = [
            {
                "fact": fact,
                "value": list(q.value) if isinstance(q.value, tuple) else q.value,
                "unit": q.unit,
                "provenance": q.provenance,
                "source": q.source,
            }
            for fact, q in gpu.quantities.items()
        ]
        emit(
            fmt,
            [
                Column("fact", "fact", text=True),
                Column("value", "value", wrap=24),
                Column("unit", "unit", text=True),
                Column("provenance", "provenance", text=True),
                Column("source", "source", text=True, wrap=100),
            ],
            rows,
            title=gpu.title,
        )
        return
    columns = [
        Column("name", "name", text=True),
        Column("title", "GPU", text=True, rank=1),
        Column("compute_capability", "cc", text=True),
        Column("sm_count", "SMs"),
        Column("shared_bytes_per_sm", "shared\nB/SM"),
        Column("shared_bytes_per_block", "shared\nB/block"),
        Column("l2_mb", "L2\nMB"),
        Column("dram_gb_per_s", "DRAM\nGB/s"),
        Column("tensor_bf16_tflops", "bf16\nTFLOP/s"),
    ]
    rows = [{column.key: getattr(load_gpu(each), column.key) for column in columns} for each in gpu_names()]
    emit(fmt, columns, rows, notes=["simgpu gpus NAME prints every value with its provenance and source"])
