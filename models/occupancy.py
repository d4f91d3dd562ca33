"""How many CTAs (blocks) an SM holds at once, which resource says so, and what one more would take.

The rule is the driver's, exact on each of the 3,102 answers in ``validation/measured/h200/occupancy.csv`` and the
same arithmetic as ``cuda_occupancy.h`` of the CUDA toolkit. An SM holds the least of four numbers::

    blocks      32
    warps       floor(64 / warps of a block)
    registers   floor(4 * floor(16384 / round_up(32 * registers, 256)) / warps of a block)
    shared      floor(capacity / round_up(static + dynamic + 1024, 128))

Registers are handed out to whole warps, from the quarter of the register file that the warp's partition owns;
that is why 7 warps of 92 registers fit twice, though 65,536 registers would hold them three times. Every number
above is read from the GPU's file; for compute capability 8.0 they are documented, not measured.

The capacity of shared memory is all an SM has (the driver's answer), or the carveout the driver picked for a
launch (Nsight Compute's "Block Limit Shared Mem": give ``carveout_kb`` what it prints as Shared Memory
Configuration Size; it prints decimal KB, 135.17 for 132). Thread block clusters and named barriers beyond the
first two, which can lower the number further, are not modelled.
"""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass

from models.gpu import GPU
from simgpu.errors import SimError
from simgpu.instructions import LANES

KB = 1024


@dataclass(frozen=True)
class NextStep:
    """What a kernel must become for ``blocks`` CTAs per SM, one more than it has, at the same block size.

    ``shared_bytes`` is the most shared memory (static + dynamic, bytes) a block may then have, ``registers`` the most
    registers a thread may have; both must hold, and both are tight. ``shared_less`` and ``registers_less`` are
    what the kernel has above them, 0 where it is there already. ``carveout_kb`` is the smallest carveout under
    which the present shared memory would do, None when it cannot or need not be raised.

    ``obstacle`` is "blocks" or "warps" when no change of registers or shared memory helps; the limits are None then.
    ``shared_bytes`` alone is None when the given carveout is too small for ``blocks`` blocks of any size.
    """

    blocks: int
    obstacle: str | None
    shared_bytes: int | None
    shared_less: int
    registers: int | None
    registers_less: int
    carveout_kb: int | None
    sentence: str


@dataclass(frozen=True)
class Occupancy:
    """Occupancy of one kernel on one GPU.

    ``limits`` are the blocks per SM each resource allows by itself, in the order blocks, warps, registers, shared; that
    of registers is None where their number is unknown, and ``blocks_per_sm`` then holds for few enough of them.
    ``limiter`` names the smallest, all of them when several tie ("registers, shared"). ``occupancy`` is the fraction of
    the SM's warp slots in use.
    """

    gpu: str
    blocks_per_sm: int
    limiter: str
    limits: dict[str, int | None]
    warps_per_sm: int
    occupancy: float
    next_step: NextStep

    def as_dict(self) -> dict:
        """Plain dicts, strings and numbers, ready for JSON."""
        return asdict(self)


def occupancy(gpu: GPU, *, threads: int, registers: int | None, shared_bytes: int, static_shared_bytes: int = 0,
              carveout_kb: int | None = None) -> Occupancy:
    """Blocks per SM of a kernel with ``threads`` threads a block and ``registers`` registers a thread (None: unknown).

    ``shared_bytes`` is the dynamic shared memory of a block in bytes, ``static_shared_bytes`` what ptxas reports;
    the driver's own 1,024 bytes are added here. A last warp that is not full counts as a warp.

    Raises :class:`~simgpu.errors.SimError` for what the compiler or the driver would refuse (threads outside 1..1024,
    registers outside 1..255, more registers or shared memory than a block may have) and for a carveout that
    the GPU does not offer or that does not hold one block.

    >>> from models.gpu import load_gpu
    >>> kernel = occupancy(load_gpu("h200"), threads=256, registers=72, shared_bytes=68 * 1024)
    >>> kernel.blocks_per_sm, kernel.limiter, kernel.occupancy
    (3, 'registers, shared', 0.375)
    >>> print(kernel.next_step.sentence)
    3 blocks; 4 needs shared memory <= 57,344 B: 12.0 KB less; registers <= 64: 8 fewer
    """
    threads = _whole(gpu, "threads", threads, 1, gpu.block_threads)
    # As many registers as let every warp slot be taken stand in for an unknown number: they limit nothing.
    used = (gpu.sm_registers // (gpu.sm_warps * LANES) if registers is None
            else _whole(gpu, "registers", registers, 1, gpu.thread_registers))
    static = _whole(gpu, "static_shared_bytes", static_shared_bytes, 0, gpu.shared_bytes_per_block_default)
    total = static + _whole(gpu, "shared_bytes", shared_bytes, 0, None)
    if total > gpu.shared_bytes_per_block:
        raise SimError(f"{gpu.name}: shared memory of {total:,} B a block ({static:,} static) exceeds the "
                       f"{gpu.shared_bytes_per_block:,} B that a kernel may opt in to")
    warps = -(-threads // LANES)
    capacity = gpu.shared_bytes_per_sm if carveout_kb is None else _carveout(gpu, carveout_kb, total)
    limits = {
        "blocks": gpu.sm_blocks,
        "warps": gpu.sm_warps // warps,
        "registers": None if registers is None else _register_limit(gpu, used, warps),
        "shared": capacity // _allocated(gpu, total),
    }
    blocks = min(limit for limit in limits.values() if limit is not None)
    if not blocks:  # only registers can get here: the other three are checked above, or part of the checks
        raise SimError(f"{gpu.name}: {threads:,} threads with {used} registers each: the {warps} warps of a block "
                       f"take more than the {gpu.block_registers:,} registers it may have")
    return Occupancy(
        gpu=gpu.name,
        blocks_per_sm=blocks,
        limiter=", ".join(name for name, limit in limits.items() if limit == blocks),
        limits=limits,
        warps_per_sm=blocks * warps,
        occupancy=blocks * warps / gpu.sm_warps,
        next_step=_next_step(gpu, blocks, warps, used, total, capacity, carveout_kb),
    )


def _whole(gpu: GPU, name: str, value: int, low: int, high: int | None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise SimError(f"{gpu.name}: {name} {value!r} is not a whole number") from None
    if high is not None and not low <= number <= high:
        raise SimError(f"{gpu.name}: {name} {number:,} is outside {low}..{high:,}")
    if number < low:
        raise SimError(f"{gpu.name}: {name} {number:,} is below {low}")
    return number


def _carveout(gpu: GPU, carveout_kb: int, total: int) -> int:
    """The bytes of a carveout. The driver never picks one that cannot hold a block, so neither does this."""
    if carveout_kb not in gpu.shared_carveouts_kb:
        raise SimError(f"{gpu.name}: no carveout of {carveout_kb} KB "
                       f"(there are {', '.join(map(str, gpu.shared_carveouts_kb))})")
    block = _allocated(gpu, total)
    if carveout_kb * KB < block:
        raise SimError(f"{gpu.name}: a carveout of {carveout_kb} KB does not hold one block: {block:,} B with the "
                       f"{gpu.shared_bytes_reserved:,} B that the driver reserves")
    return carveout_kb * KB


def smallest_carveout(gpu: GPU, blocks: int, total: int) -> int | None:
    """The smallest carveout, in KB, that holds ``blocks`` blocks of ``total`` bytes each; None where none does.

    >>> from models.gpu import load_gpu
    >>> smallest_carveout(load_gpu("h200"), blocks=3, total=70400)
    228
    """
    return next((kb for kb in gpu.shared_carveouts_kb if kb * KB // _allocated(gpu, total) >= blocks), None)


def _allocated(gpu: GPU, total: int) -> int:
    """Shared memory that a block with ``total`` bytes of its own takes from the SM."""
    return _round_up(total + gpu.shared_bytes_reserved, gpu.shared_granule_bytes)


def _round_up(number: int, granule: int) -> int:
    return -(-number // granule) * granule


def _register_limit(gpu: GPU, registers: int, warps: int) -> int:
    per_partition = gpu.sm_registers // gpu.sm_partitions
    return per_partition // _round_up(registers * LANES, gpu.register_granule) * gpu.sm_partitions // warps


# ---- one block more --------------------------------------------------------------------------------------


def _next_step(gpu: GPU, blocks: int, warps: int, registers: int, total: int, capacity: int,
               carveout_kb: int | None) -> NextStep:
    target = blocks + 1
    obstacle = why = None
    if target > gpu.sm_blocks:
        obstacle, why = "blocks", f"an SM holds {gpu.sm_blocks} blocks"
    elif target * warps > gpu.sm_warps:
        obstacle, why = "warps", f"{target} x {warps} warps, and an SM holds {gpu.sm_warps}"
    if obstacle:
        sentence = f"{_count(blocks)}; {target} is impossible: {why}"
        return NextStep(target, obstacle, None, 0, None, 0, None, sentence)

    # The largest allocations of which `target` fit, turned back into what the kernel asks for.
    room = capacity // target // gpu.shared_granule_bytes * gpu.shared_granule_bytes - gpu.shared_bytes_reserved
    most_shared = room if room >= 0 else None  # a small carveout may not even hold what the driver reserves
    shared_less = max(0, total - max(0, room))
    raised = None
    if total > room and carveout_kb is not None:
        raised = smallest_carveout(gpu, target, total)
    warps_per_partition = -(-target * warps // gpu.sm_partitions)
    per_warp = gpu.sm_registers // gpu.sm_partitions // warps_per_partition
    most_registers = min(per_warp // gpu.register_granule * gpu.register_granule // LANES, gpu.thread_registers)
    registers_less = max(0, registers - most_registers)

    needs = []
    if most_shared is not None:
        needs.append(f"shared memory <= {most_shared:,} B" + (f": {_size(shared_less)} less" if shared_less else ""))
    if raised is not None:
        needs.append(f"{needs.pop()} (or a carveout of {raised} KB)" if needs else f"a carveout of {raised} KB")
    needs.append(f"registers <= {most_registers}" + (f": {registers_less} fewer" if registers_less else ""))
    sentence = f"{_count(blocks)}; {target} needs {'; '.join(needs)}"
    return NextStep(target, None, most_shared, shared_less, most_registers, registers_less, raised, sentence)


def _count(blocks: int) -> str:
    return f"{blocks} block" + "s" * (blocks != 1)


def _size(size: int) -> str:
    return f"{size / KB:.1f} KB" if size >= KB else f"{size} B"
