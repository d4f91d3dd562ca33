"""A report of one run, or of two side by side, as one HTML file that needs nothing else.

The page is put together from what the analysis found (:class:`Run`) and the columns and rows that the command line
prints too; ``page.html`` is its frame, style sheet and script. All text is escaped, nothing depends on the time or
place of the run, and the same input gives the same bytes.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from simgpu.counters import CounterTable, SiteCounters
from simgpu.instructions import NO_SOURCE
from simgpu.launch import Launch
from simgpu.picture import bank_rows, is_scheduled, lane_ranges, sector_rows, summary
from simgpu.report import Column, show
from simgpu.rules import BANKS, LINE, SECTOR
from simgpu.staircase import Staircase, draw
from simgpu.worst import WorstAccess

BARS = {"wavefronts": "ideal", "sectors": "ideal_sectors"}  # a column with a bar, and what of it is unavoidable
MARGIN = ("wavefronts", "sectors")  # beside the source


@dataclass(frozen=True)
class Run:
    """One kernel on one GPU: the counters, the worst access of each site, and where the kernel stands.

    ``label`` names it; ``facts`` are (name, value) for the head of the page; ``notes`` are lines below the table;
    ``stairs`` the drawings of its occupancy.
    """

    label: str
    launch: Launch
    table: CounterTable
    worst: Mapping[str, WorstAccess]
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    stairs: Sequence[Staircase]


def page(title: str, runs: Sequence[Run], columns: Sequence[Column], rows: Sequence[dict], footer: dict) -> str:
    """The HTML text. ``columns``, ``rows`` (with a ``site`` each) and ``footer`` are those of the table."""
    frame = Template((files("simgpu") / "page.html").read_text(encoding="utf-8"))
    return frame.substitute(
        title=escape(title),
        heads="".join(_head(run, runs) for run in runs),
        table=_table(columns, rows, footer),
        options=_options(runs, rows),
        listing=_listing(runs),
        occupancy="".join(_occupancy(run, runs) for run in runs),
        data=_embedded({row["site"]: [view(run, row["site"]) for run in runs] for row in rows}),
    )


def _options(runs: Sequence[Run], rows: Sequence[dict]) -> str:
    """The sites to choose from; the one that wastes most comes first into view."""
    waste = {row["site"]: (0, 0) for row in rows}
    for counters in (counters for run in runs for counters in run.table.sites):
        sectors = (counters.sectors or 0) - (counters.ideal_sectors or 0)
        waste[counters.site] = max(waste[counters.site], (counters.excessive or 0, sectors))
    first = max(waste, key=waste.__getitem__, default=None)
    return "".join(f'<option value="{escape(site)}"{" selected" * (site == first)}>{escape(site)}</option>'
                   for site in waste)


def _embedded(data) -> str:
    """JSON that may stand in a script element: no character of it can end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _named(run: Run, runs: Sequence[Run]) -> str:
    """The label where there are two."""
    return f"<h3>{escape(run.label)}</h3>" if len(runs) > 1 else ""


def _head(run: Run, runs: Sequence[Run]) -> str:
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in run.facts)
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f'<div class="run">{_named(run, runs)}<dl>{facts}</dl><ul class="notes">{notes}</ul></div>'


def _occupancy(run: Run, runs: Sequence[Run]) -> str:
    figures = "".join(f"<figure><figcaption>{escape(stairs.title)}</figcaption>{draw(stairs)}</figure>"
                      for stairs in run.stairs)
    return f'{_named(run, runs)}<div class="stairs-pair">{figures}</div>'


# ---- the table ---------------------------------------------------------------------------------------------------


def _table(columns: Sequence[Column], rows: Sequence[dict], footer: dict) -> str:
    shown = [column for column in columns if not column.data_only and column.says_something([*rows, footer])]
    heads = "".join(f'<th scope="col"{_kind(column)}><button type="button">{escape(column.heading)}</button></th>'
                    for column in shown)
    longest: dict[str, int] = {}  # before and after share a scale
    for stem, value in ((column.key.partition("@")[0], row.get(column.key)) for column in shown for row in rows):
        if stem in BARS:
            longest[stem] = max(longest.get(stem, 0), value or 0)
    body = "".join(
        f'<tr data-site="{escape(row["site"])}" tabindex="0">{"".join(_cell(c, row, longest) for c in shown)}</tr>'
        for row in rows)
    foot = "".join(_cell(column, footer, {}) for column in shown)
    return f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody><tfoot><tr>{foot}</tr></tfoot>"


def _kind(column: Column) -> str:
    return ' class="text"' if column.text else ""


def _cell(column: Column, row: dict, longest: Mapping[str, int]) -> str:
    value = row.get(column.key)
    sick = column.healthy is not None and value is not None and value > column.healthy
    kind = "text" if column.text else "sick" if sick else ""
    bar = _bar(column.key, row, longest)
    data = "" if value is None else f' data-value="{escape(str(value))}"'
    return f'<td{f" class={kind}" if kind else ""}{data}>{escape(show(value))}{bar}</td>'


def _bar(key: str, row: dict, longest: Mapping[str, int]) -> str:
    """A bar as long as the value among its column, the part beyond the ideal in another colour."""
    stem, at, which = key.partition("@")
    value = row.get(key)
    if stem not in longest or not value:
        return ""
    ideal = row.get(f"{BARS[stem]}{at}{which}")
    whole, needed = (100 * part / longest[stem] for part in (value, value if ideal is None else min(value, ideal)))
    return f'<i class="bar"><b style="width:{needed:.2f}%"></b><u style="width:{whole - needed:.2f}%"></u></i>'


# ---- the source ------------------------------------------------------------------------------------------------


def sources(run: Run) -> dict[str, str]:
    """Where the source files of the sites are: {base name: path}, as far as they can be found."""
    code = getattr(run.launch.body, "__code__", None)
    home = os.path.dirname(code.co_filename) if code else ""
    loaded = {os.path.basename(file): file for file in
              (getattr(module, "__file__", None) for module in list(sys.modules.values())) if file}
    found = {}
    for name in dict.fromkeys(row.file for row in run.table.sites if row.file):
        beside = os.path.join(home, name)
        path = beside if os.path.isfile(beside) else loaded.get(name)
        if path and os.path.isfile(path):
            found[name] = path
    return found


def _listing(runs: Sequence[Run]) -> str:
    places = {path: name for run in runs for name, path in sources(run).items()}
    parts = []
    for path, name in places.items():
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        parts.append(f"<h3>{escape(name)}</h3>{_annotated(text, name, path, runs)}")
    return "".join(parts) or "<p>The kernel's source file was not found.</p>"


def _annotated(text: str, name: str, path: str, runs: Sequence[Run]) -> str:
    """The functions of a file that have sites, every line with the counters of its sites."""
    counters = [
        _by_line(run.table, name) if sources(run).get(name) == path else {} for run in runs
    ]
    lines = text.splitlines()
    wanted = {line for by_line in counters for line in by_line}
    sides = [""] if len(runs) == 1 else [" before", " after"]
    heads = "".join(f"<th>{key}{side}</th>" for side in sides for key in MARGIN)
    rows = [f'<thead><tr>{heads}<th></th><th class="text">source</th></tr></thead>']
    for first, last in _functions(text, wanted):
        rows.append("<tbody>")
        for number in range(first, min(last, len(lines)) + 1):
            margin = "".join(_margin(by_line.get(number, [])) for by_line in counters)
            names = list(dict.fromkeys(row.site for by_line in counters for row in by_line.get(number, [])))
            site = f' data-site="{escape(names[0])}" title="{escape(", ".join(names))}"' if names else ""
            code = escape(lines[number - 1])
            rows.append(f'<tr{site}>{margin}<td class="no">{number}</td><td class="code">{code}</td></tr>')
        rows.append("</tbody>")
    return f'<div class="scroll"><table class="listing">{"".join(rows)}</table></div>'


def _by_line(table: CounterTable, file: str) -> dict[int, list[SiteCounters]]:
    found: dict[int, list[SiteCounters]] = {}
    for row in table.sites:
        if row.file == file:
            found.setdefault(row.line, []).append(row)
    return found


def _functions(text: str, lines: set[int]) -> list[tuple[int, int]]:
    """First and last line of the top-level statements that hold one of ``lines``."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:  # changed since it ran
        return [(max(1, line - 3), line + 3) for line in sorted(lines)]
    spans = []
    for node in statements:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        if any(first <= line <= node.end_lineno for line in lines):
            spans.append((first, node.end_lineno))
    return spans


def _margin(rows: Sequence[SiteCounters]) -> str:
    """The counters of a line's sites together, ``?`` where no rule is proven; conflicts in red."""
    cells = []
    for key in MARGIN:
        values = [value for value in (getattr(row, key) for row in rows) if value is not None]
        text = show(sum(values)) if values else "?" * any(row.unmodelled for row in rows)
        sick = key == "wavefronts" and any(row.excessive for row in rows)
        cells.append(f"<td{' class=sick' if sick else ''}>{text}</td>")
    return "".join(cells)


# ---- the worst access -----------------------------------------------------------------------------------------------


def view(run: Run, site: str) -> dict | None:
    """What the script draws of a site: a line of text and one map per memory; None where the run has no such access.

    A map has ``columns``, and rows of a label, a heat (0: unavoidable) and cells [column, text, explanation].
    """
    worst = run.worst.get(site)
    if worst is None:
        return None
    instruction, width = worst.site.instruction, worst.site.width
    maps = []
    if instruction.shared:
        maps.append(_bank_map(worst))
    if instruction.global_:
        maps.append(_sector_map(worst))
    text = summary(instruction, width, worst.mask, worst.cost())
    return {"label": run.label, "text": text, "who": f"CTA {worst.cta}, warp {worst.warp}", "maps": maps}


def _bank_map(worst: WorstAccess) -> dict:
    instruction, rows, turn = worst.site.instruction, [], 0
    scheduled = is_scheduled(instruction)
    for row in bank_rows(instruction, worst.site.width, worst.mask, worst.shared):
        turn = turn + 1 if row.excessive else 0
        cells = [[bank, f"{lanes[0]}{'+' * (len(lanes) > 1)}", f"bank {bank}: lane {lane_ranges(lanes)}"]
                 for bank, lanes in enumerate(row.lanes) if lanes]
        rows.append({"label": " \N{MIDDLE DOT} lanes ".join(row.label.split()), "heat": turn, "cells": cells})
    if scheduled:
        legend = "A row is a wavefront and the lanes it may serve, a column a bank, a number the lane. Warm rows are "
        legend += "wavefronts that bank conflicts cost; + marks more lanes on the same word."
    else:
        legend = "A row is 128 bytes of shared memory by its address: which wavefront serves which lane is not known."
    return {"corner": "wavefront" if scheduled else "byte", "columns": [str(bank) for bank in range(BANKS)],
            "rows": rows, "legend": legend, "above": "bank"}


def _sector_map(worst: WorstAccess) -> dict:
    mask = worst.mask
    if worst.site.instruction.shared:  # lanes of a cp.async without a source
        mask &= ~sum(1 << lane for lane, address in enumerate(worst.global_) if address == NO_SOURCE)
    rows = [
        {"label": f"{row.line:#x}", "heat": 0, "cells": [
            [sector, f"{_short(lane_ranges(lanes))}: {touched} B", f"sector {sector}: lanes {lane_ranges(lanes)}"]
            for sector, (lanes, touched) in enumerate(zip(row.lanes, row.touched, strict=True)) if lanes]}
        for row in sector_rows(worst.site.width, mask, worst.global_)
    ]
    legend = "A row is a 128-byte line of global memory by its address, a cell the lanes on a 32-byte sector and the "
    legend += "bytes of it that they touch."
    return {"corner": "line", "columns": [str(sector) for sector in range(LINE // SECTOR)], "rows": rows,
            "legend": legend, "above": "sector"}


def _short(text: str) -> str:
    return text if len(text) <= 16 else f"{text[:13]}..."
