"""What changes between two launches: every site, the totals, the blocks on an SM, and what that should do to the time.

:func:`side` runs a launch and prices it, :func:`compare` puts two of them beside each other, :func:`verdict` says what
it means in words. :class:`Gate` is a condition for continuous integration, such as ``excessive>0`` or
``tile.*:wavefronts increased by 5%``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from models.cost import Estimate, estimate
from models.gpu import GPU
from models.l1 import L1Sink, lines_of_a_block
from models.occupancy import Occupancy, occupancy
from models.work import ContentionSink, Work, work_of
from simgpu.counters import SiteCounters, concerns
from simgpu.errors import SimError
from simgpu.events import Sink
from simgpu.instructions import nearest
from simgpu.launch import Launch
from simgpu.report import show
from simgpu.run import Result, simulate

COUNTED = ("executed", "wavefronts", "excessive", "sectors")  # what makes a site better or worse
SITE_COLUMNS = (*COUNTED, "ideal", "n_way", "ideal_sectors", "lines", "requests",
                "sectors_per_request", "bytes", "unmodelled")
LAUNCH_COLUMNS = ("shared_bytes", "registers", "blocks_per_sm", "us", "bound_us")
ABOUT = 0.02  # a smaller change of the estimate is "about 0%"


# ---- two launches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One of the two launches: what it counted, how it fits an SM, what it should take.

    ``registers`` per thread is None where unknown; ``fit`` is then that of the other resources.
    """

    name: str
    result: Result
    registers: int | None
    fit: Occupancy
    work: Work
    estimate: Estimate

    def value(self, column: str) -> float | None:
        """One of :data:`LAUNCH_COLUMNS`."""
        return {"shared_bytes": self.result.shared_bytes, "registers": self.registers,
                "blocks_per_sm": self.fit.blocks_per_sm, "us": self.estimate.us,
                "bound_us": self.estimate.bound_us}[column]

    def as_dict(self) -> dict:
        """What JSON says of this side."""
        return {"kernel": self.name, "grid": self.result.launch.grid, "block": self.result.launch.block,
                "ctas": self.result.ctas, "shared_bytes": self.result.shared_bytes, "registers": self.registers,
                "occupancy": self.fit.as_dict(), "estimate": self.estimate.as_dict(),
                "total": self.result.table.total().as_dict()}


def side(name: str, launch: Launch, gpu: GPU, *, registers: int | None = None, ctas: int | None = None,
         warm: bool = False, mode: str = "auto", sinks: Iterable[Sink] = (),
         progress: Callable[[int, int], None] | None = None) -> Side:
    """Run ``launch`` (its first ``ctas`` CTAs) and price it on ``gpu``.

    ``registers`` per thread default to the launch's own. ``warm``: see :func:`models.cost.estimate`. ``sinks``
    also hear every event. Raises
    :class:`~simgpu.errors.SimError` for what the device would refuse.

    >>> from kernels_py import find
    >>> from models.gpu import load_gpu
    >>> kernel, _ = find("transpose")
    >>> found = side("plain", kernel.launch("plain", rows=1024, cols=1024), load_gpu("h200"))
    >>> found.estimate.binding, found.fit.blocks_per_sm
    ('data pipe', 8)
    """
    contention, l1 = ContentionSink(), L1Sink()
    result = simulate(launch, ctas=ctas, mode=mode, sinks=(contention, l1, *sinks),
                      shared_limit=gpu.shared_bytes_per_block, progress=progress)
    registers = launch.registers if registers is None else registers
    fit = occupancy(gpu, threads=launch.threads, registers=registers, shared_bytes=result.shared_bytes)
    blocks = max(1, min(fit.blocks_per_sm, -(-launch.ctas // gpu.sm_count)))  # that share an SM
    demand = work_of(result.table, ctas=result.ctas, grid=launch.ctas, contended=contention.busiest,
                     tensor_bytes=sum(tensor.nbytes for tensor in launch.tensors),
                     traffic=l1.traffic(lines_of_a_block(gpu, blocks, result.shared_bytes)))
    return Side(name, result, registers, fit, demand, estimate(demand, fit.blocks_per_sm, gpu, warm=warm))


@dataclass(frozen=True)
class Change:
    """A row of the comparison: a site before and after, None where that side has no such site; or the totals."""

    site: str
    before: SiteCounters | None
    after: SiteCounters | None

    def pair(self, column: str) -> tuple[float | None, float | None]:
        """A column before and after; a site that is not there counts 0 if the other side counts it."""
        values = [None if row is None else getattr(row, column) for row in (self.before, self.after)]
        if (self.before is None) != (self.after is None):
            values = [0 if row is None and any(v is not None for v in values) else value
                      for row, value in zip((self.before, self.after), values, strict=True)]
        return values[0], values[1]

    def delta(self, column: str) -> float | None:
        """After minus before; None where either is unknown or does not apply."""
        before, after = self.pair(column)
        return None if before is None or after is None else after - before

    @property
    def status(self) -> str:
        """new, gone, same, better, worse or mixed: by the columns of :data:`COUNTED`.

        >>> row = SiteCounters("x", "", 1, "lds", 4, 8, None, 8, 8, None, None, None, 0)
        >>> Change("x", row, row).status, Change("x", None, row).status
        ('same', 'new')
        """
        if self.before is None or self.after is None:
            return "new" if self.before is None else "gone"
        deltas = [self.delta(column) or 0 for column in COUNTED]
        if unknown := [column for column in COUNTED if None in self.pair(column) and self.pair(column) != (None, None)]:
            return f"unknown {', '.join(unknown)}"
        more, less = any(delta > 0 for delta in deltas), any(delta < 0 for delta in deltas)
        return {(True, True): "mixed", (True, False): "worse", (False, True): "better"}.get((more, less), "same")

    @property
    def worsened(self) -> list[str]:
        """The columns of :data:`COUNTED` that grew; of a new site only its bank conflicts count as worse."""
        columns = COUNTED if self.before else ("excessive",)
        return [column for column in columns if (self.delta(column) or 0) > 0]

    def as_dict(self) -> dict:
        """Columns as ``wavefronts_before``, ``wavefronts_after``, ``wavefronts_delta``; ready for CSV and JSON."""
        row = {"site": self.site, "status": self.status, "instruction": self.instruction}
        for column in SITE_COLUMNS:
            before, after = self.pair(column)
            row |= {f"{column}_before": before, f"{column}_after": after, f"{column}_delta": self.delta(column)}
        return row

    @property
    def instruction(self) -> str:
        """The instruction with its width, before and after where they differ."""
        names = [f"{row.instruction} {row.width} B" for row in (self.before, self.after) if row and row.instruction]
        return " -> ".join(dict.fromkeys(names))


@dataclass(frozen=True)
class Diff:
    """Two sides, the sites in the order of the second (those that are gone last), and the totals."""

    before: Side
    after: Side
    sites: tuple[Change, ...]
    total: Change

    @property
    def time_change(self) -> float | None:
        """The estimated change of the time, as a fraction of the time before; None where that is 0."""
        before, after = self.before.estimate.us, self.after.estimate.us
        return after / before - 1 if before else None


def compare(before: Side, after: Side) -> Diff:
    """Put two sides beside each other, site by site (sites of one name belong together)."""
    old, new = ({row.site: row for row in side.result.table.sites} for side in (before, after))
    sites = tuple(Change(name, old.get(name), new.get(name)) for name in dict.fromkeys((*new, *old)))
    total = Change("total", before.result.table.total(), after.result.table.total())
    return Diff(before, after, sites, total)


# ---- in words --------------------------------------------------------------------------------------------------------


def verdict(diff: Diff) -> list[str]:
    """What the change means: counters, occupancy, bounds, estimate; and every site that got worse."""
    before, after = diff.before.estimate, diff.after.estimate
    times = f"estimate {_us(before.us)} -> {_us(after.us)} us, bound {_us(before.bound_us)} -> {_us(after.bound_us)} us"
    lines = [f"{_counters(diff)}{_blocks(diff)}; {_bounds(before, after)}: "
             f"expect {percent(diff.time_change)} time ({times})"]
    worse = [f"{change.site} ({', '.join(arrow(*change.pair(column), column) for column in change.worsened)})"
             for change in diff.sites if change.worsened]
    if worse:
        lines.append(f"worse at {'; '.join(worse)}")
    crowd = max(side.estimate.waves * side.fit.blocks_per_sm / side.estimate.fill for side in (diff.before, diff.after))
    fewest = min(diff.before.fit.blocks_per_sm, diff.after.fit.blocks_per_sm)
    if _blocks(diff) and crowd <= fewest:
        lines.append(f"so small a grid puts {crowd:.0f} CTAs on an SM at most: blocks/SM would matter in a larger one")
    tails = {f"{side.estimate.waves:.2f} waves: {1 - side.estimate.fill:.0%} of the SMs' time is idle, waiting for the "
             "SM with the most CTAs": side for side in (diff.after, diff.before) if side.estimate.fill < 0.9}
    return lines + [f"{side.name}: {tail}" for tail, side in tails.items()]


def _counters(diff: Diff) -> str:
    parts = []
    for column, name in (("wavefronts", "shared wavefronts"), ("sectors", "sectors")):
        old, new = diff.total.pair(column)
        if old and new is not None and abs(new / old - 1) >= 0.005:
            parts.append(f"{'removes' if new < old else 'adds'} {_share(new / old - 1)} of {name}")
        elif new and old in (0, None) and diff.total.delta(column):
            parts.append(f"adds {show(new)} {name}")
    old, new = diff.before.work.contended, diff.after.work.contended
    if old != new:
        parts.append(f"takes updates of the most wanted sector from {old:,.0f} to {new:,.0f}")
    return ", ".join(parts) or "changes no total of wavefronts or sectors by 0.5%"


def _blocks(diff: Diff) -> str:
    old, new = diff.before.fit, diff.after.fit
    if old.blocks_per_sm == new.blocks_per_sm:
        return ""
    return f", holds {old.blocks_per_sm} -> {new.blocks_per_sm} blocks/SM (limited by {new.limiter})"


def _bounds(before: Estimate, after: Estimate) -> str:
    old, new = before.binding, after.binding
    if old != new:
        return f"bound by {old} before ({_us(before.bound_us)} us), by {new} after ({_us(after.bound_us)} us)"
    same = abs(after.bound_us - before.bound_us) <= ABOUT * before.bound_us
    return f"bound by {old} before and after" + (f" ({_us(after.bound_us)} us), which does not change" if same else "")


def percent(change: float | None) -> str:
    """A change of time in words.

    >>> percent(-0.5), percent(0.011), percent(None)
    ('about -50%', 'about 0%', 'an unknown change of')
    """
    if change is None:
        return "an unknown change of"
    return "about 0%" if abs(change) < ABOUT else f"about {change:+.0%}"


def _share(change: float) -> str:
    return f"{abs(change):.0%}" if abs(change) < 10 else f"{abs(change):.0f}x"


def _us(time: float) -> str:
    return f"{time:.3g}" if time < 100 else f"{time:,.0f}"


def arrow(before: float | None, after: float | None, name: str = "") -> str:
    """``before -> after``, or the one value where nothing changes.

    >>> arrow(1024, 32), arrow(5, 5), arrow(None, None)
    ('1,024 -> 32', '5', '-')
    """
    text = show(after) if before == after else f"{show(before)} -> {show(after)}"
    return f"{name} {text}" if name else text


# ---- gates -----------------------------------------------------------------------------------------------------------

OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
             "!=": operator.ne}
GATE = re.compile(r"\s*(?:(?P<site>.+):)?\s*(?P<column>\w+)\s*(?:(?P<op>[<>]=?|[=!]=)\s*(?P<number>-?\d[\d_]*\.?\d*)"
                  r"|(?P<way>increased|decreased)(?:\s+by\s+(?P<by>\d[\d_]*\.?\d*)\s*(?P<percent>%)?)?)\s*")
FORM = "[SITE:]COLUMN OP NUMBER, or [SITE:]COLUMN increased [by N[%]]"


@dataclass(frozen=True)
class Gate:
    """A condition under which a comparison fails; ``text`` is how it was written.

    ``[SITE:]COLUMN OP NUMBER`` looks at the second side, ``[SITE:]COLUMN increased [by N[%]]`` at the change by more
    than N. Without SITE every site is looked at on its own; SITE is a name, a pattern (``tile.*``) or ``total``. The
    columns of :data:`LAUNCH_COLUMNS` belong to the launch and take no SITE.

    >>> Gate.parse("tile.*: excessive > 0").site
    'tile.*'
    >>> Gate.parse("excessive")
    Traceback (most recent call last):
    simgpu.errors.SimError: gate 'excessive' is not [SITE:]COLUMN OP NUMBER, or [SITE:]COLUMN increased [by N[%]]
    """

    text: str
    site: str | None
    column: str
    op: str | None
    number: float
    percent: bool

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Raises :class:`~simgpu.errors.SimError` for another form, or a column that does not exist."""
        match = GATE.fullmatch(text)
        if not match:
            raise SimError(f"gate {text!r} is not {FORM}")
        site, column = (match["site"] or "").strip() or None, match["column"]
        if column not in (*SITE_COLUMNS, *LAUNCH_COLUMNS):
            raise SimError(f"gate {text!r}: no column {column!r}{nearest(column, (*SITE_COLUMNS, *LAUNCH_COLUMNS))}")
        if site and column in LAUNCH_COLUMNS:
            raise SimError(f"gate {text!r}: {column} belongs to the launch, not to site {site!r}")
        number = float((match["number"] or match["by"] or "0").replace("_", ""))
        return cls(text, site, column, match["op"] or match["way"], number, bool(match["percent"]))

    def failures(self, diff: Diff) -> list[str]:
        """One line, naming the site and the value, for each place where the condition holds.

        Raises :class:`~simgpu.errors.SimError` for a site that does not exist and for a value that is unknown: a gate
        must not pass by not knowing.
        """
        return [f"gate {self.text!r}: {place}{arrow(before, after, self.column)}"
                for place, before, after in self._values(diff) if self._holds(before, after)]

    def _values(self, diff: Diff) -> Iterator[tuple[str, float | None, float]]:
        if self.column in LAUNCH_COLUMNS:
            before, after = diff.before.value(self.column), diff.after.value(self.column)
            if after is None or (before is None and self.op not in OPERATORS):
                raise SimError(f"gate {self.text!r}: {self.column} unknown (--regs N, --vs-regs N)")
            yield "", before, after
            return
        rows = [diff.total] if self.site == "total" else [
            row for row in diff.sites if self.site is None or fnmatchcase(row.site, self.site)]
        if not rows:
            raise SimError(f"gate {self.text!r}: no site {self.site!r}{nearest(self.site or '', _names(diff))}")
        for row in rows:
            if any(self._unknown(table, row.site) for table in (diff.before.result.table, diff.after.result.table)):
                raise SimError(f"gate {self.text!r}: site {row.site}: {self.column} unknown: accesses without a rule")
            before, after = row.pair(self.column)
            if after is not None:
                yield f"{'' if row is diff.total else 'site '}{row.site}: ", before, after

    def _unknown(self, table, site: str) -> bool:
        """Whether accesses without a proven rule keep the column unknown at ``site``."""
        for row in table.sites:
            if (concerns(row, self.column) and site in (row.site, "total") and row.unmodelled
                    and getattr(row, self.column) is None):
                return True
        return False

    def _holds(self, before: float | None, after: float) -> bool:
        if self.op in OPERATORS:
            return OPERATORS[self.op](after, self.number)
        before = before or 0
        change = after - before if self.op == "increased" else before - after
        return change > (self.number / 100 * before if self.percent else self.number)


def _names(diff: Diff) -> list[str]:
    return [change.site for change in diff.sites]
