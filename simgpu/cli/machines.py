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
    """Print the blocks per SM of a kernel, what limits them, and what one more block would take."""
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
        Column("blocks_per_sm", "blocks/SM"),
        Column("limiter", "limiter", text=True),
        *(Column(f"limit_{name}", f"limit: {name}") for name in fit.limits),
        Column("warps_per_sm", "warps/SM"),
        Column("occupancy", "occupancy"),
    ]
    row = fit.as_dict() | {f"limit_{name}": limit for name, limit in fit.limits.items()}
    emit(fmt, columns, [row], notes=[fit.next_step.sentence], document=fit.as_dict())


@click.command()
@click.argument("name", required=False)
@format_option
def gpus(name, fmt):
    """List the GPUs, or every value of GPU NAME with its unit, provenance and source."""
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
                Column("value", "value"),
                Column("unit", "unit", text=True),
                Column("provenance", "provenance", text=True),
                Column("source", "source", text=True),
            ],
            rows,
            title=gpu.title,
        )
        return
    columns = [
        Column("name", "name", text=True),
        Column("title", "GPU", text=True),
        Column("compute_capability", "cc", text=True),
        Column("sm_count", "SMs"),
        Column("shared_bytes_per_sm", "shared B/SM"),
        Column("shared_bytes_per_block", "shared B/block"),
        Column("l2_mb", "L2 MB"),
        Column("dram_gb_per_s", "DRAM GB/s"),
        Column("tensor_bf16_tflops", "bf16 TFLOP/s"),
    ]
    rows = [{column.key: getattr(load_gpu(each), column.key) for column in columns} for each in gpu_names()]
    emit(fmt, columns, rows, notes=["simgpu gpus NAME prints every value with its provenance and source"])
