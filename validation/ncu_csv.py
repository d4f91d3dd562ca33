"""Reads what Nsight Compute prints as CSV: the raw page (metrics of launches) and the source page (per instruction).

    ncu -i report.ncu-rep --page raw --csv
    ncu -i report.ncu-rep --page source --csv --print-source sass
    ncu -i report.ncu-rep --page source --csv --print-source cuda,sass      # names source lines, hence sites

The raw page has a row per launch below a header and a row of units; without ``--page raw`` there is a row per metric
instead, which is read as well. The source page has a section per launch, of one row per machine instruction; with
``cuda,sass`` a section per source file, and the rows below a source line are its instructions. Version 2025.3 prints
all of it twice. Columns are headed by their titles or, when collected with ``--metrics``, by metric names.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from simgpu.errors import SimError
from validation.ncu import MEMORY, NEVER, SITE

TITLES = {  # our columns: what the source page heads them with
    "executed": ("Instructions Executed", "inst_executed"),
    "wavefronts": ("L1 Wavefronts Shared", "memory_l1_wavefronts_shared"),
    "ideal": ("L1 Wavefronts Shared Ideal", "memory_l1_wavefronts_shared_ideal"),
    "excessive": ("L1 Wavefronts Shared Excessive", "derived__memory_l1_wavefronts_shared_excessive"),
    "sectors": ("L2 Theoretical Sectors Global", "memory_l2_theoretical_sectors_global"),
    "ideal_sectors": ("L2 Theoretical Sectors Global Ideal", "memory_l2_theoretical_sectors_global_ideal"),
    "lines": ("L1 Tag Requests Global", "memory_l1_tag_requests_global"),
}
COLLECT = "ncu --section SourceCounters --import-source yes -o rep APP, then ncu -i rep.ncu-rep --page source --csv " \
          "--print-source cuda,sass"
ABSENT = ("", "-", "n/a", "N/A", "nan")
ENGLISH = re.compile(r"(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
THOUSANDS = re.compile(r"\d{1,3}(\.\d{3})+")  # ncu prints two or six decimals: groups of three are thousands
FIRST_CELLS = {"ID": "raw", "Kernel Name": "source", "Function Name": "source", "File Path": "source"}


@dataclass(frozen=True)
class Row:
    """One memory instruction: how it is spelled (``LDG.E``), the site its source line names, its counts by column."""

    opcode: str
    site: str | None
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Profile:
    """One launch, the ``number``th of the file. ``metrics`` are those of the raw page (as text), ``rows`` the memory
    instructions of the source page by address; ``lines`` says that it names source lines. ``grid`` and ``block`` are
    "(x, y, z)", or "" where the page does not tell."""

    number: int
    kernel: str
    grid: str = ""
    block: str = ""
    metrics: Mapping[str, str] = field(default_factory=dict, repr=False)
    rows: Mapping[str, Row] = field(default_factory=dict, repr=False)
    lines: bool = False

    @property
    def title(self) -> str:
        return f"{self.number}: {self.kernel}" + (f" grid {self.grid} block {self.block}" if self.grid else "")


def read_profiles(path: Path) -> list[Profile]:
    """The launches in the CSV file ``path``, in order.

    Raises :class:`~simgpu.errors.SimError` for a file that is neither page, is cut, lacks the columns, or is written in
    another locale's number format, naming the row and the value.
    """
    rows = _rows(path)
    pages = {"raw": _raw_page, "source": _source_page}
    return pages[FIRST_CELLS[rows[0][0]]](path, rows)


def _rows(path: Path) -> list[list[str]]:
    """The cells from the first row that either page begins with; what a program or ncu itself printed is left out."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except OSError as error:
        raise SimError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SimError(f"{path}: not text: export the report with ncu -i REPORT --page raw --csv") from None
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    begin = re.compile('"?({})"?[,;]'.format("|".join(FIRST_CELLS)))
    first = next((number for number, line in enumerate(lines) if begin.match(line)), None)
    if first is None:
        raise SimError(f"{path}: neither a raw nor a source page of ncu --csv")
    if begin.match(lines[first])[0].endswith(";"):
        raise SimError(f"{path}: cells are separated by ';', as by another locale's spreadsheet; ncu separates by ','")
    try:
        rows = [row for row in csv.reader(lines[first:], strict=True) if row]
    except csv.Error as error:
        raise SimError(f"{path}: the file is cut or no CSV: {error}") from None
    if not rows[-1][-1] and not text.endswith("\n"):
        raise SimError(f"{path}: the last row ends in a comma: the file is cut")
    return rows


# ---- raw page --------------------------------------------------------------------------------------------------------


def _raw_page(path: Path, rows: list[list[str]]) -> list[Profile]:
    header, *rows = rows
    if "Kernel Name" not in header:
        raise SimError(f"{path}: no column 'Kernel Name'")
    # Of a row per metric the cells after the value, about rules, are left out where empty.
    needed = header.index("Metric Value") + 1 if "Metric Value" in header else len(header)
    by_launch: dict[str, dict[str, str]] = {}
    units: dict[str, str] = {}
    for number, row in enumerate(rows, 2):
        if len(row) < needed or len(row) > len(header):
            raise SimError(f"{path}: row {number} has {len(row)} of {len(header)} cells: the file is cut")
        cells = dict(zip(header, row, strict=False))
        if not cells["ID"]:
            units = cells
        elif "Metric Name" in cells:  # a row per metric
            launch = by_launch.setdefault(cells["ID"], dict(cells))
            if cells["Metric Name"]:
                launch[cells["Metric Name"]] = cells.get("Metric Value", "")
                units[cells["Metric Name"]] = cells.get("Metric Unit", "")
        else:
            by_launch[cells["ID"]] = cells
    if not by_launch:
        raise SimError(f"{path}: no launch below the header")
    for name, unit in units.items():
        if name.startswith(("smsp__sass", "memory_", "l1tex__")) and re.match(r"[KMG](sector|inst|request)", unit):
            raise SimError(f"{path}: {name} is in {unit}: export with --print-units base")
    return [Profile(number, cells["Kernel Name"], cells.get("Grid Size", ""), cells.get("Block Size", ""), cells)
            for number, cells in enumerate(by_launch.values(), 1)]


# ---- source page -----------------------------------------------------------------------------------------------------


def _source_page(path: Path, rows: list[list[str]]) -> list[Profile]:
    profiles: list[Profile] = []
    seen: dict[str, list[list[str]]] = {}  # the sections of the launch, by source file
    for kernel, file, section in _sections(rows):
        if len(section) < 2:
            raise SimError(f"{path}: {kernel}: no instruction follows: the file is cut")
        same = bool(profiles) and profiles[-1].kernel == kernel
        before = seen.get(file, []) if same else []
        if section == before:
            continue  # printed twice
        if section == before[:len(section)]:
            raise SimError(f"{path}: {kernel}: the second printing ends early: the file is cut")
        more = same and file not in seen  # of the same launch, from another file
        number = len(profiles) + (not more)
        found = _section(path, number, kernel, section)
        seen = {**(seen if more else {}), file: section}
        if more:
            sited = {address: row for address, row in found.rows.items() if row.site}
            found = replace(found, rows={**found.rows, **profiles.pop().rows, **sited})
        profiles.append(found)
    if not profiles:
        raise SimError(f"{path}: no launch")
    return profiles


def _sections(rows: list[list[str]]) -> Iterator[tuple[str, str, list[list[str]]]]:
    """The kernel's name, the source file and the rows (the header first) of each section; the last may be empty."""
    kernel = file = ""
    section: list[list[str]] = []
    for row in rows:
        if row[0] not in FIRST_CELLS:
            section.append(row)
            continue
        if section:
            yield kernel, file, section
            section = []
        if row[0] == "File Path":
            file = row[1] if len(row) > 1 else ""
        else:
            kernel = row[1] if len(row) > 1 else ""
    yield kernel, file, section


def _section(path: Path, number: int, kernel: str, section: list[list[str]]) -> Profile:
    header, *rows = section
    if "Address" not in header:
        raise SimError(f"{path}: {kernel}: no column 'Address': print the source with --print-source sass or cuda,sass")
    address, lines = header.index("Address"), header[0] in ("Line No", "#")
    where = {column: header.index(title) for column, titles in TITLES.items() for title in titles if title in header}
    if "executed" not in where or not {"wavefronts", "sectors"} & set(where):
        raise SimError(f"{path}: {kernel}: no columns of instructions executed and of shared wavefronts or global "
                       f"sectors; collect them with {COLLECT}")
    found: dict[str, Row] = {}
    site = None
    for row in rows:
        if len(row) != len(header):
            raise SimError(f"{path}: {kernel}: row {row[0]!r} has {len(row)} of {len(header)} cells: the file is cut")
        if lines and row[0]:
            named = SITE.search(row[1])
            site = named[1] if named else None
        spelled = MEMORY.match(row[address + 1].strip())
        if not row[address].startswith("0x") or not spelled or NEVER.match(row[address + 1].strip()):
            continue
        counts = {column: count(row[at], f"{path}: {kernel}: {row[address]}, {header[at]}")
                  for column, at in where.items()}
        if row[address] not in found or site:
            found[row[address]] = Row(spelled[1], site, {column: value or 0 for column, value in counts.items()})
    return Profile(number, kernel, rows=found, lines=lines)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def count(text: str, place: str) -> int | None:
    """A count as ncu prints it in English; None where it printed none.

    Raises :class:`~simgpu.errors.SimError`, beginning with ``place``, for anything else: in another locale ``1.234``
    means 1,234, so it must not be taken for a fraction.

    >>> count("1,048,576", "x"), count("382.000000", "x"), count("-", "x")
    (1048576, 382, None)
    >>> count("1.048.576", "row 3")
    Traceback (most recent call last):
    simgpu.errors.SimError: row 3: '1.048.576' is no count in English notation: export again with LC_ALL=C ncu ...
    """
    text = text.strip()
    if text in ABSENT:
        return None
    if not ENGLISH.fullmatch(text) or THOUSANDS.fullmatch(text) or text.partition(".")[2].strip("0"):
        raise SimError(f"{place}: {text!r} is no count in English notation: export again with LC_ALL=C ncu ...")
    return int(text.partition(".")[0].replace(",", ""))
