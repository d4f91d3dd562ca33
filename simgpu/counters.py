"""From events to the table: what each site executed and what that cost, in Nsight Compute's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from simgpu.errors import SimError
from simgpu.events import AccessEvent, Site, WorkEvent
from simgpu.instructions import INSTRUCTIONS, Instruction
from simgpu.replay import totals

METRICS = {
    "executed": "source page 'Instructions Executed'; smsp__sass_inst_executed per instruction",
    "requests": "l1tex__t_requests_pipe_lsu_mem_global_op_{ld,st}: one per executed instruction that uses it",
    "wavefronts": "source page 'L1 Wavefronts Shared'; "
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{ld,st,atom,ldsm,stsm,ldgsts}",
    "ideal": "source page 'L1 Wavefronts Shared Ideal'",
    "excessive": "source page 'L1 Wavefronts Shared Excessive'; "
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{ld,st} without its arbitration noise",
    "n_way": "wavefronts / ideal",
    "sectors": "source page 'L2 Theoretical Sectors Global'; "
    "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{ld,st,ldgsts}",
    "ideal_sectors": "source page 'L2 Theoretical Sectors Global Ideal'",
    "lines": "source page 'L1 Tag Requests Global': 128-byte lines that L1 looks up, one a clock",
    "sectors_per_request": "sectors / requests",
    "bytes": "bytes the active lanes asked for",
}
"""What each column equals in Nsight Compute.

The source page and the ``smsp__sass_`` metrics agree with each other. They differ from the hardware's own ``l1tex__``
counters in two places, and there the numbers here are the hardware's: 8- and 16-byte loads in which neighbouring lanes
share an address (the source page merges them only where that leaves no conflict), and global atomics of several lanes
on one sector (the source page counts the sector once). Measured: ``validation/measured/h200/access_*.jsonl.gz``.
"""


SHARED = ("wavefronts", "ideal", "excessive", "n_way", "wavefronts_per_instruction")  # columns of shared memory
GLOBAL = ("requests", "sectors", "ideal_sectors", "sectors_per_request", "lines")  # and of global memory

SUMMED = (
    "wavefronts",
    "ideal",
    "sectors",
    "ideal_sectors",
    "lines",
    "unmodelled",
    "unknown_wavefronts",
    "unknown_sectors",
    "unknown_lines",
)  # of simgpu.replay.Totals


@dataclass(frozen=True)
class SiteCounters:
    """One row: the counters of a site, or of all sites together.

    ``None`` means the instruction does not use that memory, or that some of its accesses have no proven rule:
    ``unmodelled`` counts those. :data:`METRICS` says what each number equals in Nsight Compute.
    """

    site: str
    file: str
    line: int | None
    instruction: str
    width: int | None
    executed: int
    requests: int | None
    wavefronts: int | None
    ideal: int | None
    sectors: int | None
    ideal_sectors: int | None
    lines: int | None
    bytes: int
    unmodelled: int = 0

    @property
    def excessive(self) -> int | None:
        """Wavefronts beyond the ideal: bank conflicts."""
        return None if self.wavefronts is None or self.ideal is None else self.wavefronts - self.ideal

    @property
    def n_way(self) -> float | None:
        """Wavefronts per ideal wavefront: 1 is conflict-free."""
        return self.wavefronts / self.ideal if self.wavefronts is not None and self.ideal else None

    @property
    def wavefronts_per_instruction(self) -> float | None:
        """None for a total: its instructions are of all kinds."""
        if self.wavefronts is None or not self.executed or not self.instruction:
            return None
        return self.wavefronts / self.executed

    @property
    def sectors_per_request(self) -> float | None:
        return self.sectors / self.requests if self.sectors is not None and self.requests else None

    def as_dict(self) -> dict:
        """Every column, the derived ones included, ready for JSON."""
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        derived = ("excessive", "n_way", "wavefronts_per_instruction", "sectors_per_request")
        return row | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class CounterTable:
    """All sites of a run in program order, and the other instructions it executed (``work``: kind -> warps)."""

    sites: tuple[SiteCounters, ...]
    work: dict[str, int]

    def __getitem__(self, site: str) -> SiteCounters:
        for row in self.sites:
            if row.site == site:
                return row
        raise SimError(f"no site {site!r} (there are {', '.join(row.site for row in self.sites)})")

    def total(self, *, allow_unmodelled: bool = False) -> SiteCounters:
        """The sum of all rows.

        A column in which some row's accesses have no proven rule is None unless ``allow_unmodelled``,
        which sums what is known.
        """

        def add(name: str) -> int | None:
            values = [getattr(row, name) for row in self.sites]
            unknown = any(
                value is None and row.unmodelled and concerns(row, name)
                for row, value in zip(self.sites, values, strict=True)
            )
            present = [value for value in values if value is not None]
            return None if (unknown and not allow_unmodelled) or not present else sum(present)

        summed = ("executed", "requests", "wavefronts", "ideal", "sectors", "ideal_sectors", "lines", "bytes",
                  "unmodelled")
        return SiteCounters("total", "", None, "", None, **{name: add(name) for name in summed})


def concerns(row: SiteCounters, column: str) -> bool:
    """Whether ``row``'s instruction uses the memory that ``column`` counts: one of :data:`SHARED` or :data:`GLOBAL`.

    >>> load = SiteCounters("x.load", "", 1, "ldg", 4, 1, 1, None, None, 4, 4, 1, 128)
    >>> concerns(load, "lines"), concerns(load, "excessive"), concerns(load, "executed")
    (True, False, False)
    """
    used = INSTRUCTIONS.get(row.instruction)
    if used is None:  # an opcode of an imported trace that simgpu has no name for
        return True
    return (used.shared and column in SHARED) or (used.global_ and column in GLOBAL)


class CounterSink:
    """Counts events as they come; nothing is kept per access, so memory stays flat for any grid."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Forget everything counted so far."""
        self.order: dict[Site, int] = {}
        self.counts: dict[Site, Counter] = {}
        self.kinds: Counter[str] = Counter()

    def access(self, event: AccessEvent) -> None:
        masks, shared, global_, times = event.columns()
        site = event.site
        counted = totals(site.instruction, site.width, masks, shared, global_)
        row = self.counts.setdefault(site, Counter())
        self.order[site] = min(self.order.get(site, event.order), event.order)
        row["executed"] += event.executed
        row["bytes"] += _pointers(masks, site.instruction) * site.width * times
        for name in SUMMED:
            row[name] += getattr(counted, name) * times

    def work(self, event: WorkEvent) -> None:
        self.kinds[event.kind] += event.warps

    def merge(self, others: Iterable[CounterSink]) -> CounterSink:
        """Add what ``others`` counted to this sink, and return it."""
        for other in others:
            for site, row in other.counts.items():
                self.counts.setdefault(site, Counter()).update(row)
                self.order[site] = min(self.order.get(site, other.order[site]), other.order[site])
            self.kinds.update(other.kinds)
        return self

    def table(self) -> CounterTable:
        """The counts so far."""
        rows = []
        for site in sorted(self.counts, key=self.order.__getitem__):
            row, used = self.counts[site], site.instruction
            shared = used.shared and not row["unknown_wavefronts"]
            global_ = used.global_ and not row["unknown_sectors"]
            rows.append(
                SiteCounters(
                    site.name,
                    site.file,
                    site.line,
                    used.name,
                    site.width,
                    row["executed"],
                    row["executed"] if used.global_ else None,
                    row["wavefronts"] if shared else None,
                    row["ideal"] if shared else None,
                    row["sectors"] if global_ else None,
                    row["ideal_sectors"] if global_ else None,
                    row["lines"] if used.global_ and not row["unknown_lines"] else None,
                    row["bytes"],
                    row["unmodelled"],
                )
            )
        return CounterTable(tuple(rows), dict(self.kinds))


def _pointers(masks: np.ndarray, executed: Instruction) -> int:
    """Lanes whose address moves bytes, in all of ``masks`` (uint32[n]): of ldmatrix.x1 and .x2 the first 8 and 16."""
    if executed.matrices:
        masks = masks & np.uint32((1 << 8 * executed.matrices) - 1)
    return int(np.unpackbits(masks.view(np.uint8)).sum(dtype=np.int64))
