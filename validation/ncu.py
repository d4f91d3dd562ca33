"""Reads an Nsight Compute report: what every instruction of every profiled launch counted, and which site it is.

A program built with ``-lineinfo`` tells for each machine instruction (SASS) the source line it came from; the line
carries a comment ``// @site NAME``. A site is the sum of its instructions: a loop that the compiler unrolled has
several. The lines come from ``nvdisasm``: the report's own line table names the caller's line for some instructions
of inlined functions.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from simgpu.errors import SimError

# The per-instruction columns of Nsight Compute's source page, and the names they have here.
COLUMNS = {
    "inst_executed": "executed",
    "thread_inst_executed_true": "active_lanes",
    "memory_l1_wavefronts_shared": "l1_wavefronts_shared",
    "memory_l1_wavefronts_shared_ideal": "l1_wavefronts_shared_ideal",
    "memory_l2_theoretical_sectors_global": "l2_theoretical_sectors_global",
    "memory_l2_theoretical_sectors_global_ideal": "l2_theoretical_sectors_global_ideal",
    "memory_l1_tag_requests_global": "l1_tag_requests_global",
}
EXCESSIVE = ("l1_wavefronts_shared", "l2_theoretical_sectors_global")  # counted beside their ideal

SITE = re.compile(r"//\s*@site\s+([\w.]+)")
MEMORY = re.compile(r"^(?:@!?U?P\w+\s+)?((?:LDG(?:STS)?|STG|LDSM?|STSM?|LDL|STL|LD|ST|ATOM[SG]?|REDG?|UBLK\w+|UTMA\w+)"
                    r"\b[.\w]*)")
NEVER = re.compile(r"^@!PT\s")  # a predicate that is never true: the compiler's padding, it touches nothing


@dataclass(frozen=True)
class Instruction:
    """One machine instruction of a launch: its offset in the kernel (bytes), text, source and counters."""

    offset: int
    sass: str
    file: str
    line: int
    counters: Mapping[str, int]


@dataclass(frozen=True)
class Launch:
    """One profiled launch: the kernel's name, its instructions in order, and the metrics of the whole launch."""

    kernel: str
    instructions: tuple[Instruction, ...]
    totals: Mapping[str, float]


@dataclass(frozen=True)
class Sites:
    """The memory instructions of a launch by site.

    ``sites`` maps a site's name to its row, ``no_site`` a ``file:line`` to the row of the memory instructions there
    that no comment names, and ``never_active`` does so for those whose predicate is never true. A row holds ``sass``
    (how many instructions of each spelling), ``executed`` and every counter that is not zero.
    """

    sites: dict[str, dict] = field(default_factory=dict)
    no_site: dict[str, dict] = field(default_factory=dict)
    never_active: dict[str, dict] = field(default_factory=dict)


def source_sites(text: str) -> dict[int, str]:
    """The sites of a CUDA source, by line number counted from 1.

    >>> source_sites("int a;\\nLDS32(a, p);  // @site tile.load\\n")
    {2: 'tile.load'}
    """
    found = ((number, SITE.search(line)) for number, line in enumerate(text.splitlines(), 1))
    return {number: match[1] for number, match in found if match}


def folder_sites(folder: Path) -> dict[tuple[str, int], str]:
    """The sites of every CUDA source in ``folder``, by (file name, line number)."""
    return {(path.name, line): site for path in sorted(folder.glob("*.cu*"))
            for line, site in source_sites(path.read_text()).items()}


def by_site(instructions: Iterable[Instruction], sites: Mapping[tuple[str, int], str]) -> Sites:
    """Sum the memory instructions of a launch by site; see :class:`Sites`.

    An instruction on the line of a site that cannot touch memory (an address computation) is not counted.

    >>> load = Instruction(0x20, "LDS R1, [R2]", "/src/a.cu", 7, {"executed": 8, "l1_wavefronts_shared": 16,
    ...                                                           "l1_wavefronts_shared_ideal": 8})
    >>> row = by_site([load, load], {("a.cu", 7): "tile.load"}).sites["tile.load"]
    >>> row["executed"], row["l1_wavefronts_shared"], row["l1_wavefronts_shared_excessive"], row["sass"]
    (16, 32, 16, {'LDS': 2})
    """
    found = Sites()
    for instruction in instructions:
        spelled = MEMORY.match(instruction.sass)
        if not spelled:
            continue
        where = (Path(instruction.file).name, instruction.line)
        if NEVER.match(instruction.sass):
            row = found.never_active.setdefault("{}:{}".format(*where), _empty_row())
        elif where in sites:
            row = found.sites.setdefault(sites[where], _empty_row())
        else:
            row = found.no_site.setdefault("{}:{}".format(*where), _empty_row())
        row["sass"][spelled[1]] = row["sass"].get(spelled[1], 0) + 1
        for name, value in instruction.counters.items():
            row[name] = row.get(name, 0) + value
    for rows in (found.sites, found.no_site, found.never_active):
        for row in rows.values():
            for name in EXCESSIVE:
                if name in row or f"{name}_ideal" in row:
                    row[f"{name}_excessive"] = row.get(name, 0) - row.get(f"{name}_ideal", 0)
    return found


def _empty_row() -> dict:
    return {"sass": {}, "executed": 0}


LABEL = re.compile(r"\.text\.(\S+):$")
SOURCE_LINE = re.compile(r'\s*//## File "([^"]+)", line (\d+)')
SASS_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s")


def line_table(listing: str) -> dict[str, dict[int, tuple[str, int]]]:
    """The source (file, line) of each instruction by its byte offset, by the function's mangled name.

    ``listing`` is what ``nvdisasm -g -c`` prints of a cubin built with ``-lineinfo``. nvcc 13.0 misses a change of file
    between instructions of the same line number; a site so lost is reported (:attr:`Sites.no_site`) and calls for a
    line more or less.

    >>> line_table('''.text._Z1kPf:
    ...     //## File "/src/a.cu", line 7
    ...         /*0010*/                   LDS R1, [R2] ;
    ... ''')
    {'_Z1kPf': {16: ('/src/a.cu', 7)}}
    """
    table: dict[str, dict[int, tuple[str, int]]] = {}
    function: dict[int, tuple[str, int]] = {}
    source = None
    for text in listing.splitlines():
        if label := LABEL.match(text):
            function, source = table.setdefault(label[1], {}), None
        elif line := SOURCE_LINE.match(text):
            source = line[1], int(line[2])
        elif (instruction := SASS_LINE.match(text)) and source:
            function[int(instruction[1], 16)] = source
    return table


# ---- the report ------------------------------------------------------------------------------------------------------


def report_module():
    """Nsight Compute's own Python module ``ncu_report``, from beside the program; :class:`SimError` without it."""
    program = shutil.which("ncu")
    folders = [*Path(program).resolve().parents] if program else []
    folders += sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True)
    for folder in folders:
        if (folder / "extras" / "python" / "ncu_report.py").exists():
            sys.path.insert(0, str(folder / "extras" / "python"))
            import ncu_report

            return ncu_report
    raise SimError("ncu_report not found: install Nsight Compute with its extras/python folder and put ncu on PATH")


def read_report(path: Path, lines: Mapping[str, Mapping[int, tuple[str, int]]]) -> list[Launch]:
    """The launches of the report at ``path``, in the order they ran. ``lines``: see :func:`line_table`."""
    context = report_module().load_report(str(path))
    if context is None:
        raise SimError(f"{path} is not a readable Nsight Compute report")
    ranges = [context.range_by_idx(index) for index in range(context.num_ranges())]
    return [read_launch(action, lines) for profiled in ranges for action in profiled]


def read_launch(action, lines: Mapping[str, Mapping[int, tuple[str, int]]]) -> Launch:
    """A launch from ``ncu_report``'s IAction.

    A metric of :data:`COLUMNS` has an instance per instruction, correlated with its address; any other metric counts
    the launch. Every instruction has an instance of ``inst_executed``, so the lowest address is the kernel's start.
    """
    totals = {}
    counters: dict[int, dict[str, int]] = defaultdict(dict)
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        if name not in COLUMNS:
            totals[name] = metric.value()
            continue
        addresses = metric.correlation_ids()
        for index in range(metric.num_instances()):
            if (count := metric.as_uint64(index)) or name == "inst_executed":
                counters[addresses.as_uint64(index)][COLUMNS[name]] = count
    mangled = action.name(action.NameBase_MANGLED)
    start, known = min(counters, default=0), lines.get(mangled, {})
    instructions = tuple(
        Instruction(address - start, action.sass_by_pc(address).strip().rstrip(" ;"),
                    *known.get(address - start, ("?", 0)), counters[address])
        for address in sorted(counters))
    return Launch(mangled, instructions, totals)
