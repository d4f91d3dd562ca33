"""Pictures of one warp access and of one layout: which wavefront serves which lane, which bank holds what.

Functions that return plain data come first (:func:`schedule`, :func:`bank_rows`, :func:`sector_rows`,
:func:`layout_grid`), the two that turn it into something ``rich`` prints last (:func:`render_banks`,
:func:`render_layout`). Nothing here decides a cost: the groups come from the rules in :mod:`simgpu.rules`, and the
wavefronts drawn are as many as those rules count.
"""

from __future__ import annotations

import colorsys
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.color import Color
from rich.console import Group
from rich.style import Style
from rich.text import Text

from simgpu import rules
from simgpu.errors import SimError
from simgpu.instructions import LANES, Instruction
from simgpu.layout import bank_map, cosize, is_injective
from simgpu.rules import BANKS, LINE, SECTOR, WORD

SCHEDULED = ("lds", "sts", "ldmatrix", "stmatrix", "atoms", "atoms.cas")  # families whose groups are known

# ---- one access: data ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """``word`` of ``lane`` travels in ``wavefront`` (counted over the access), in turn ``turn`` of its ``group``.

    Turn 0 is what the group takes without bank conflicts.
    """

    lane: int
    word: int
    group: int
    wavefront: int
    turn: int


def is_scheduled(instruction: Instruction) -> bool:
    """Whether :func:`schedule` knows the groups of ``instruction``."""
    return instruction.proven and instruction.family in SCHEDULED


def schedule(instruction: Instruction, width: int, mask: int, shared: Sequence[int]) -> tuple[Served, ...]:
    """Which wavefront serves each (lane, word) of a shared-memory access; wavefronts count from 0 without gaps.

    The number of wavefronts is that of :func:`simgpu.rules.cost`. Which word of a bank goes first is not
    published; here words are served in the order of their first lane. A compare-and-swap serves every word
    in two wavefronts. ``shared`` is 32 byte addresses.

    Raises :class:`SimError` for an instruction whose assignment nobody has measured (cp.async, unmodelled
    forms, global memory), and for bad widths, masks and addresses.

    >>> from simgpu.instructions import instruction
    >>> served = schedule(instruction("lds"), 4, 0b111, shared=[0, 128, 0] + [0] * 29)
    >>> [(s.lane, s.word, s.wavefront) for s in served]
    [(0, 0, 0), (1, 32, 1), (2, 0, 0)]
    """
    if not is_scheduled(instruction):
        raise SimError(f"{instruction.name}: which wavefront serves which lane is not known")
    rules.cost(instruction, width, mask, shared)  # refuses what the instruction cannot do
    addresses = _active(mask, shared)
    atomic = instruction.family.startswith("atoms")
    passes = 2 if instruction.family == "atoms.cas" else 1
    served: list[Served] = []
    first_wavefront = 0
    for group, lanes in enumerate(_groups(instruction, width, addresses)):
        queues: dict[int, list[int]] = defaultdict(list)  # per bank: what takes turns, in order of first lane
        turns = {}
        for lane in (lane for lane in lanes if lane in addresses):
            for word in _words(addresses[lane], width):
                queue, waiting = queues[word % BANKS], lane if atomic else word
                if waiting not in queue:
                    queue.append(waiting)
                turns[lane, word] = queue.index(waiting)
        for (lane, word), turn in turns.items():
            served += [Served(lane, word, group, first_wavefront + passes * turn + again, turn)
                       for again in range(passes)]
        first_wavefront += passes * max(map(len, queues.values()), default=0)
    return tuple(served)


def _active(mask: int, addresses: Sequence[int]) -> dict[int, int]:
    return {lane: int(addresses[lane]) for lane in range(LANES) if mask >> lane & 1}


def _groups(instruction: Instruction, width: int, addresses: dict[int, int]) -> list[range]:
    """The lanes of each group the hardware serves together; ``addresses`` are those of the active lanes."""
    if instruction.matrices:
        return [range(8 * matrix, 8 * matrix + 8) for matrix in range(instruction.matrices)]
    size = rules.group_lanes(width)
    if instruction.family == "lds" and width > WORD and rules.pairs_merge(addresses):
        size *= 2
    return [range(first, first + size) for first in range(0, LANES, size)]


def _words(address: int, width: int) -> range:
    return range(address // WORD, (address + width - 1) // WORD + 1)


@dataclass(frozen=True)
class BankRow:
    """One row of the bank picture: a label and, per bank, the lanes it serves.

    ``excessive`` marks a wavefront its group would not need without bank conflicts.
    """

    label: str
    lanes: tuple[tuple[int, ...], ...]
    excessive: bool = False


def bank_rows(instruction: Instruction, width: int, mask: int, shared: Sequence[int]) -> tuple[BankRow, ...]:
    """One row per wavefront; for an instruction without a schedule, one per 128-byte row of shared memory touched."""
    addresses = _active(mask, shared)
    lanes: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    labels: dict[int, str] = {}
    excessive: set[int] = set()
    if is_scheduled(instruction):
        groups = _groups(instruction, width, addresses)
        for served in schedule(instruction, width, mask, shared):
            at, group = served.wavefront, groups[served.group]
            lanes[at][served.word % BANKS].append(served.lane)
            labels[at] = f"{at:>9}  {group[0]}-{group[-1]}"
            if served.turn:
                excessive.add(at)
    else:
        for lane, address in addresses.items():
            for word in _words(address, width):
                at = word // BANKS
                lanes[at][word % BANKS].append(lane)
                labels[at] = f"{at * LINE:>11}"
    return tuple(BankRow(labels[at], tuple(tuple(lanes[at][bank]) for bank in range(BANKS)), at in excessive)
                 for at in sorted(lanes))


@dataclass(frozen=True)
class SectorRow:
    """One 128-byte global line, by its byte address: who touches each of its four sectors, and how many bytes of it."""

    line: int
    lanes: tuple[tuple[int, ...], ...]
    touched: tuple[int, ...]


def sector_rows(width: int, mask: int, global_: Sequence[int]) -> tuple[SectorRow, ...]:
    """Which lanes touch which 32-byte sector, one row per 128-byte line touched, in address order."""
    lanes: dict[int, list[int]] = defaultdict(list)
    touched: dict[int, set[int]] = defaultdict(set)
    for lane, address in _active(mask, global_).items():
        lanes[address // SECTOR].append(lane)
        touched[address // SECTOR].update(range(address, address + width))
    rows = []
    for line in sorted({sector * SECTOR // LINE for sector in lanes}):
        sectors = range(line * LINE // SECTOR, (line + 1) * LINE // SECTOR)
        rows.append(SectorRow(line * LINE, tuple(tuple(lanes[sector]) for sector in sectors),
                              tuple(len(touched[sector]) for sector in sectors)))
    return tuple(rows)


def lane_ranges(lanes: Sequence[int]) -> str:
    """Lanes in as few characters as stay readable.

    >>> lane_ranges([0, 1, 2, 3, 8]), lane_ranges([0, 4, 8, 12]), lane_ranges([])
    ('0-3,8', '0-12 by 4', '')
    """
    lanes = sorted(set(lanes))
    steps = {after - before for before, after in itertools.pairwise(lanes)}
    if len(lanes) > 2 and len(steps) == 1 and steps != {1}:
        return f"{lanes[0]}-{lanes[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][-1] + 1:
            runs[-1].append(lane)
        else:
            runs.append([lane])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


# ---- one layout: data ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutGrid:
    """A layout's offsets and banks as two-dimensional arrays of cells, leading modes folded into the rows.

    A cell is ``run`` consecutive elements of the last mode, shown by its first; ``labels`` name the rows,
    ``columns`` the first element of each cell.
    """

    labels: tuple[str, ...]
    columns: tuple[int, ...]
    offsets: np.ndarray
    banks: np.ndarray
    run: int


def layout_grid(table: np.ndarray, itemsize: int, cells: int = 32) -> LayoutGrid:
    """The grid of a tabulated layout. Where a row has more than ``cells`` elements, consecutive elements at consecutive
    offsets share a cell, up to 16 bytes of them (the widest access of a lane), if that holds everywhere.

    >>> from simgpu.layout import parse_layout, tabulate
    >>> grid = layout_grid(tabulate(parse_layout("K-SW128(8,64)")), itemsize=2)
    >>> grid.run, grid.offsets[1].tolist()
    (8, [72, 64, 88, 80, 104, 96, 120, 112])
    """
    flat = table.reshape(-1, table.shape[-1]) if table.ndim else table.reshape(1, 1)
    run = 16 // itemsize if flat.shape[1] > cells else 1
    while run > 1 and not _in_runs(flat, run):
        run //= 2
    run = max(run, 1)
    leading = table.shape[:-1]
    labels = [",".join(map(str, where)) for where in np.ndindex(leading)] if leading else [""]
    offsets = flat[:, ::run]
    return LayoutGrid(tuple(labels), tuple(range(0, flat.shape[1], run)), offsets, bank_map(offsets, itemsize), run)


def _in_runs(flat: np.ndarray, run: int) -> bool:
    rows, extent = flat.shape
    if extent % run:
        return False
    runs = flat.reshape(rows, extent // run, run)
    return bool((runs == runs[:, :, :1] + np.arange(run)).all())


# ---- rendering -----------------------------------------------------------------------------------------------

FIRST, AGAIN, FAINT = Style(color="green"), Style(color="red", bold=True), Style(dim=True)
LABEL = 22  # columns before the 32 banks of 3 columns, and before the 4 sectors of 24


def render_banks(instruction: Instruction, width: int, mask: int, shared: Sequence[int] | None = None,
                 global_: Sequence[int] | None = None) -> Group:
    """One access as something ``rich`` prints within 120 columns: what it costs, then its banks, then its sectors.

    Shared memory: a row per wavefront, a column per bank, the lane served in the cell, ``+`` where more lanes
    share its word. Global memory: a row per 128-byte line, a column per sector. An instruction without a
    schedule (cp.async, unmodelled forms) gets a map of the 128-byte rows of shared memory it touches instead.
    Print it with ``soft_wrap=True``: a console that believes in fewer columns would crop it, in a pipe too.
    Raises :class:`SimError` as :func:`simgpu.rules.cost` does.

    >>> from rich.console import Console
    >>> from simgpu.instructions import instruction
    >>> picture = render_banks(instruction("ldg"), 16, 0b11, global_=[96, 144] + [0] * 30)
    >>> Console(width=120).print(picture, soft_wrap=True)
    ldg, 16 B a lane, 2 active lanes: 2 sectors (ideal 1)
    <BLANKLINE>
    line at byte          sector 0                sector 1                sector 2                sector 3
              0           .                       .                       .                       0: 16 B
            128           1: 16 B                 .                       .                       .
    the lanes on a sector and the bytes of its 32 that they touch
    """
    cost = rules.cost(instruction, width, mask, shared, global_)
    parts = [_line(summary(instruction, width, mask, cost))]
    if instruction.shared:
        rows = bank_rows(instruction, width, mask, shared)
        parts += ["", *_bank_lines(rows, is_scheduled(instruction))]
    if instruction.global_:
        parts += ["", *_sector_lines(sector_rows(width, mask, global_))]
    return Group(*parts)


def summary(instruction: Instruction, width: int, mask: int, cost: rules.Cost) -> str:
    """One line: the instruction, its active lanes and what :func:`simgpu.rules.cost` says."""
    facts = []
    if cost.wavefronts is not None:
        excessive = cost.wavefronts - cost.ideal
        facts.append(f"{_count(cost.wavefronts, 'wavefront')} (ideal {cost.ideal}, excessive {excessive})")
    if cost.sectors is not None:
        facts.append(f"{_count(cost.sectors, 'sector')} (ideal {cost.ideal_sectors})")
    if cost.unmodelled:
        facts.append(f"{'wavefronts ' if facts else ''}unmodelled (no proven rule)")
    return f"{instruction.name}, {width} B a lane, {_count(mask.bit_count(), 'active lane')}: {', '.join(facts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _line(text: str | Text, style: Style | str = "") -> Text:
    """A line that is never wrapped."""
    line = Text(text, style=style) if isinstance(text, str) else text
    line.rstrip()
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _bank_lines(rows: Sequence[BankRow], scheduled: bool) -> list[Text]:
    head = "wavefront  lanes" if scheduled else "row at byte"
    lines = [_line(f"{head:<{LABEL - 5}}bank " + "".join(f"{bank:>2} " for bank in range(BANKS)), FAINT)]
    for row in rows:
        line = Text(f"{row.label:<{LABEL - 2}}{'!' if row.excessive else ' '} ")
        for lanes in row.lanes:
            more = "+" if len(lanes) > 1 else " "
            line.append(f"{lanes[0]:>2}{more}" if lanes else " . ",
                        (AGAIN if row.excessive else FIRST) if lanes else FAINT)
        lines.append(_line(line))
    legend = ["+ more lanes on the same word"] * any(len(lanes) > 1 for row in rows for lanes in row.lanes)
    legend += ["! a wavefront that bank conflicts cost"] * any(row.excessive for row in rows)
    if not scheduled:
        legend.append("which wavefront serves which lane is not known")
    elif any(row.excessive for row in rows):
        legend.append("order within a bank: by first lane (the hardware's is unpublished)")
    return lines + [_line(remark, FAINT) for remark in legend]


def _sector_lines(rows: Sequence[SectorRow]) -> list[Text]:
    head = "".join(f"{f'sector {sector}':<24}" for sector in range(LINE // SECTOR))
    lines = [_line(f"{'line at byte':<{LABEL}}{head}", FAINT)]
    for row in rows:
        line = Text(f"{row.line:>11}".ljust(LABEL))
        for lanes, touched in zip(row.lanes, row.touched, strict=True):
            names = lane_ranges(lanes)
            if len(names) > 16:
                names = names[:names.rindex(",", 0, 14)] + ",.."
            line.append(f"{f'{names}: {touched} B' if lanes else '.':<24}",
                        (FIRST if touched == SECTOR else AGAIN) if lanes else FAINT)
        lines.append(_line(line))
    return [*lines, _line("the lanes on a sector and the bytes of its 32 that they touch", FAINT)]


def render_layout(table: np.ndarray, itemsize: int, title: str = "", width: int = 120, rows: int = 32) -> Group:
    """A tabulated layout as something ``rich`` prints: a summary, the element offsets and the banks, coloured by bank.

    ``table`` is what :func:`simgpu.layout.tabulate` gives, ``itemsize`` the bytes of an element. What does not fit
    in ``width`` columns or ``rows`` rows is cut, and a note says what was.
    """
    span = cosize(table)
    facts = [f"shape ({','.join(map(str, table.shape))})", f"{itemsize}-byte elements",
             f"spans {span} elements, {span * itemsize} B"]
    if not is_injective(table):
        facts.append("some coordinates share an offset")
    parts = [_line((f"{title}: " if title else "") + "; ".join(facts))]
    grid = layout_grid(table, itemsize)
    cell = f", the first of each {grid.run} consecutive ({grid.run * itemsize} B)" if grid.run > 1 else ""
    for name, values in (("element offsets", grid.offsets), ("banks", grid.banks)):
        parts += ["", _line(name + cell, "bold"), *_grid_lines(grid, values, width, rows)]
    return Group(*parts)


def _grid_lines(grid: LayoutGrid, values: np.ndarray, width: int, rows: int) -> list[Text]:
    digits = len(str(max(int(values.max(initial=0)), *grid.columns[-1:], 10)))
    margin = max(map(len, grid.labels), default=0)
    columns = min(len(grid.columns), max(1, (width - margin) // (digits + 1)))
    lines = [_line(" " * margin + "".join(f" {column:>{digits}}" for column in grid.columns[:columns]), FAINT)]
    for label, offsets, banks in list(zip(grid.labels, values, grid.banks, strict=True))[:rows]:
        line = Text(label.rjust(margin), style=FAINT)
        for value, bank in zip(offsets[:columns].tolist(), banks[:columns].tolist(), strict=True):
            line.append(" ")
            line.append(f"{value:>{digits}}", _bank_style(bank))
        lines.append(_line(line))
    cut = []
    if rows < len(grid.labels):
        cut.append(f"rows from {grid.labels[rows]} on ({len(grid.labels) - rows} of {len(grid.labels)})")
    if columns < len(grid.columns):
        hidden = len(grid.columns) - columns
        cut.append(f"columns from {grid.columns[columns]} on ({hidden * grid.run} of {len(grid.columns) * grid.run})")
    return [*lines, _line(f"not shown: {'; '.join(cut)}", FAINT)] if cut else lines


def _bank_style(bank: int) -> Style:
    """Black on one of 32 hues, so that a conflict shows as a column of one colour."""
    red, green, blue = (255 * channel for channel in colorsys.hls_to_rgb(bank / BANKS, 0.65, 0.8))
    return Style(color="black", bgcolor=Color.from_rgb(red, green, blue))
