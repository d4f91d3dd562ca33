"""From demand to time: what each unit of the GPU needs at least, which one binds, and what CTAs that wait make of it.

Each unit has a time: its demand (:mod:`models.work`) over its throughput, on the SM with the most CTAs or on the whole
GPU. The longest is a bound. Their sum is what a kernel takes whose CTAs never overlap. Between the two,
``blocks_per_sm`` CTAs share the units of an SM and get in each other's way; how much is the classical answer for
customers that go round a closed network of queues, mean value analysis (:func:`time_of_sharing`). It needs no number
but the times themselves. Nothing here is fitted to a kernel. The warps of a CTA are taken to march together, as
barriers make them; a kernel that overlaps units within a CTA comes closer to the bound than the estimate says.

Left out, and said so by :attr:`Estimate.unknown`: arithmetic outside the tensor cores, latencies, launch overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from models.gpu import GPU
from models.work import Work
from simgpu.errors import SimError
from simgpu.rules import LINE, SECTOR

# mma.sync cannot feed Hopper's tensor cores; wgmma can. FLOP per clock and SM: 62.9% of 4,096.
MMA_SYNC_FLOP_PER_CLK = {"9.0": 2576}
MMA_SYNC_SOURCE = "Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture (arXiv 2402.13499): " \
                  "mma instructions reach 62.9% of the peak on average"
COPY_SOURCE = "argued: the 32 banks take one wavefront a clock from cp.async.cg too, beside the data pipe"

MEANINGS = {
    "data pipe": "passes of the L1 data pipe: shared and global memory, shuffles",
    "cp.async": "wavefronts of cp.async.cg, around the data pipe",
    "tensor": "mma",
    "L1 tags": "lines that L1 looks up",
    "L2": "what L1 asks of L2: sectors, and requests of a line each",
    "DRAM": "bytes that cross DRAM at least once",
    "atomics": "updates of one sector, one after the other",
}


@dataclass(frozen=True)
class UnitTime:
    """The time of one unit for ``demand`` of the whole grid, counted in ``what``, at ``rate`` according to ``source``.
    """

    unit: str
    us: float
    demand: float
    what: str
    rate: str
    provenance: str
    source: str


@dataclass(frozen=True)
class Estimate:
    """What a launch takes on a GPU, in microseconds.

    ``units``: the time of each unit, the longest first. ``bound_us``: the longest; ``serial_us``: their sum; ``us``:
    the estimate, between them. ``blocks_per_sm`` CTAs share an SM. ``waves``: the grid in full loads of the GPU.
    ``fill``: CTAs of an average SM over those of the fullest, 1 when all get equally many. ``unknown``: what has no
    time here.
    """

    gpu: str
    us: float
    bound_us: float
    serial_us: float
    units: tuple[UnitTime, ...]
    blocks_per_sm: int
    waves: float
    fill: float
    unknown: tuple[str, ...]

    @property
    def binding(self) -> str:
        """The unit that takes longest."""
        return self.units[0].unit if self.units else "nothing"

    def time_of(self, unit: str) -> float:
        """The time of ``unit`` in microseconds, 0 where the launch does not use it."""
        return next((entry.us for entry in self.units if entry.unit == unit), 0.0)

    def as_dict(self) -> dict:
        """Plain dicts and numbers, ready for JSON."""
        return asdict(self) | {"binding": self.binding}


def estimate(work: Work, blocks_per_sm: int, gpu: GPU, *, warm: bool = False) -> Estimate:
    """The time of ``work`` on ``gpu`` with ``blocks_per_sm`` CTAs on each SM, at the boost clock.

    ``warm``: the launch is repeated on the same data, so that tensors which fit the L2 are found there and cost no DRAM
    time. Raises :class:`~simgpu.errors.SimError` for fewer than one block.

    >>> from models.gpu import load_gpu
    >>> from models.l1 import Traffic
    >>> copy = Work(ctas=13200, data_wavefronts=2e6, copy_wavefronts=0, lines=2e6,
    ...             traffic=Traffic(2e6, 4e6, 4e6, 2e6), tensor_bytes=2**28, dram_bytes=2**28, mma_flop=0, contended=0)
    >>> found = estimate(copy, 8, load_gpu("h200"))
    >>> found.binding, round(found.bound_us, 1), round(found.us, 1), round(found.waves, 2)
    ('DRAM', 67.8, 67.8, 12.5)
    """
    if blocks_per_sm < 1:
        raise SimError(f"{gpu.name}: {blocks_per_sm} blocks on an SM take forever")
    fullest = -(-work.ctas // gpu.sm_count)  # CTAs of the SM with the most
    units = _units(work, fullest, gpu, warm)
    units = tuple(sorted((unit for unit in units if unit.us), key=lambda unit: -unit.us))
    times = [unit.us for unit in units]
    return Estimate(
        gpu=gpu.name,
        us=time_of_sharing(times, min(blocks_per_sm, fullest)),
        bound_us=max(times, default=0.0),
        serial_us=sum(times),
        units=units,
        blocks_per_sm=blocks_per_sm,
        waves=work.ctas / (gpu.sm_count * blocks_per_sm),
        fill=work.ctas / (gpu.sm_count * fullest),
        unknown=_unknown(work, gpu, warm),
    )


def time_of_sharing(times: Sequence[float], customers: int) -> float:
    """The time for all work, when ``customers`` CTAs go from unit to unit and wait where another is being served.

    ``times`` are the units' own times for all work. One CTA alone takes their sum; ever more come ever closer to the
    longest. Mean value analysis of a closed network of queues: Reiser and Lavenberg, Journal of the ACM 27 (1980).

    >>> [round(time_of_sharing([60, 40], n), 1) for n in (1, 2, 3, 100)]
    [100.0, 76.0, 68.4, 60.0]
    """
    total = 0.0
    waiting = [0.0] * len(times)  # CTAs at each unit, on average
    for present in range(1, customers + 1):
        stays = [time * (1 + before) for time, before in zip(times, waiting, strict=True)]
        total = sum(stays) / present
        waiting = [stay / total if total else 0.0 for stay in stays]
    return total


def _units(work: Work, fullest: int, gpu: GPU, warm: bool) -> list[UnitTime]:
    mhz = gpu.clock_boost_mhz  # cycles per microsecond

    def of_sm(unit: str, demand: float, rate: float, text: str, provenance: str, source: str) -> UnitTime:
        us = demand / work.ctas * fullest / rate / mhz
        return UnitTime(unit, us, demand, MEANINGS[unit], text, provenance, source)

    banks, tensor, dram = (gpu.quantities[key] for key in ("shared.bytes_per_clk", "tensor.bf16_flop_per_clk",
                                                           "dram.gb_per_s"))
    pass_rate = gpu.shared_bytes_per_clk / LINE
    wavefronts = f"{pass_rate:g} wavefront/clk/SM"
    units = [
        of_sm("data pipe", work.data_wavefronts, pass_rate, wavefronts, banks.provenance, banks.source),
        of_sm("cp.async", work.copy_wavefronts, pass_rate, wavefronts, "inferred", COPY_SOURCE),
    ]
    flop, source, provenance = gpu.tensor_bf16_flop_per_clk, tensor.source, tensor.provenance
    ceiling = MMA_SYNC_FLOP_PER_CLK.get(gpu.compute_capability, flop)
    if ceiling < flop:
        flop, source, provenance = ceiling, MMA_SYNC_SOURCE, "documented"
    units.append(of_sm("tensor", work.mma_flop, flop, f"{flop:,} FLOP/clk/SM", provenance, source))
    tags = gpu.quantities["l1.lines_per_clk"]
    units.append(of_sm("L1 tags", work.lines, tags.value, f"{tags.value} line/clk/SM", tags.provenance, tags.source))
    units += _l2(work, gpu)
    if not (warm and fits_l2(work, gpu)):
        if gpu.dram_copy_gb_per_s:
            dram = gpu.quantities["dram.copy_gb_per_s"]
        units.append(UnitTime("DRAM", work.dram_bytes / dram.value / 1000, work.dram_bytes, MEANINGS["DRAM"],
                              f"{dram.value:,} GB/s", dram.provenance, dram.source))
    turn = gpu.quantities["l2.atomic_clk"]
    units.append(UnitTime("atomics", work.contended * turn.value / mhz, work.contended, MEANINGS["atomics"],
                          f"{turn.value:g} clk/update", turn.provenance, turn.source))
    return units


def _l2(work: Work, gpu: GPU) -> list[UnitTime]:
    """L2 by what it has less of: bytes a clock, or requests. Nothing where neither is known."""
    sectors, requests = work.traffic.read_sectors + work.traffic.written_sectors, work.traffic.requests
    found = []
    for key, demand, times in (("l2.read_bytes_per_clk", sectors, SECTOR), ("l2.requests_per_clk", requests, 1)):
        if rate := gpu.quantities.get(key):
            us = times * demand / rate.value / gpu.clock_boost_mhz
            found.append(UnitTime("L2", us, demand, MEANINGS["L2"], f"{rate.value:,} {rate.unit}", rate.provenance,
                                  rate.source))
    return [max(found, key=lambda unit: unit.us)] if found else []


def fits_l2(work: Work, gpu: GPU) -> bool:
    """Whether all global tensors fit in the L2 cache together."""
    return work.tensor_bytes <= gpu.l2_mb * 2**20


def _unknown(work: Work, gpu: GPU, warm: bool) -> tuple[str, ...]:
    unknown = ["arithmetic outside the tensor cores is not traced, so neither issue slots nor FMA/ALU time are known",
               "latency and launch overhead are not modelled: a kernel that waits for them is slower than this says",
               "what of a launch's traffic L2 answers is not known: each tensor is taken to cross DRAM once"]
    if work.contended > 1 and gpu.quantities["l2.atomic_clk"].provenance == "documented":
        unknown.append(f"atomics on one sector take turns; one a clock is the best case, what {gpu.name} takes is not "
                       "known (3.5 on an H200)")
    if fits_l2(work, gpu):
        unknown.append("the tensors fit the L2" + (": taken to be there already" if warm else
                       ": a launch repeated on the same data may not need DRAM (--warm)"))
    if work.unmodelled:
        unknown.append(f"accesses without a proven rule are left out: {', '.join(work.unmodelled)}")
    return tuple(unknown)
