"""Tables for people and programs: one list of rows, printed as a table, Markdown, CSV or JSON.

Analysis returns data; this module alone decides how it looks. People see the columns that say something, as many as
their terminal holds, thousands separated and trouble in red; programs get every column under its key.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

FORMATS = ("table", "csv", "json", "md")
WIDE = 1000  # columns: a pipe has no width to wrap at
RULED = box.Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")  # rules below the head and above the totals
RULED_ASCII = box.Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    ``key`` of a row's dictionary; ``heading`` for people, of one or more lines; ``text`` is aligned to the left and
    wrapped at ``wrap`` characters; a number above ``healthy`` is red. For people, a column with nothing to say is left
    out: one of None throughout, or of nothing above 0 where ``zero`` is False. On a narrow terminal columns go in the
    order of their ``rank``, the highest first (0: never). ``data_only`` is for CSV alone.
    """

    key: str
    heading: str
    text: bool = False
    wrap: int | None = None
    healthy: float | None = None
    zero: bool = True
    rank: int = 0
    data_only: bool = False

    @property
    def title(self) -> str:
        """The heading in one line."""
        return self.heading.replace("/\n", "/").replace("\n", " ")

    def says_something(self, rows: Sequence[dict]) -> bool:
        values = [row.get(self.key) for row in rows]
        return not rows or any(value not in (None, "") and (self.zero or value) for value in values)

    def cell(self, row: dict) -> Text:
        value = row.get(self.key)
        if self.healthy is None or value is None:
            return Text(show(value))
        return Text(show(value), style="bold red" if value > self.healthy else "green")


def show(value: Any) -> str:
    """A cell for people: thousands separated, fractions short, ``-`` for what does not apply.

    >>> show(1048576), show(2.5), show(None)
    ('1,048,576', '2.5', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    return str(value)


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "barrier"), counted(2048, "CTA")
    ('1 barrier', '2,048 CTAs')
    """
    return f"{number:,} {noun}" + "s" * (number != 1)


def render(
    fmt: str,
    columns: Sequence[Column],
    rows: Sequence[dict],
    *,
    title: str = "",
    footer: dict | None = None,
    notes: Sequence[str] = (),
    document: Any = None,
    console: Console | None = None,
) -> str:
    """The rows in one of :data:`FORMATS`, as text ready to print.

    CSV holds the columns' keys and plain numbers; JSON is ``document`` if given, else the list of rows. ``title`` and
    ``notes`` are for people (table and md); ``footer`` (the totals) also closes the CSV. ``console`` is where a table
    goes: it decides colours, width and whether lines are drawn in ASCII.

    >>> print(render("csv", [Column("n", "N"), Column("m", "M")], [{"n": 1, "m": 2}, {"n": None, "m": 1024}]), end="")
    n,m
    1,2
    ,1024
    """
    bodies = [*rows, *([footer] if footer else [])]
    if fmt == "json":
        return json.dumps(list(rows) if document is None else document, indent=2) + "\n"
    if fmt == "csv":
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, [column.key for column in columns], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(bodies)
        return buffer.getvalue()
    shown = [column for column in columns if not column.data_only and column.says_something(bodies)]
    if fmt == "md":
        return "\n".join(_markdown(shown, bodies, title, notes)) + "\n"
    console = page(console)
    table, hidden = _fitted(shown, rows, footer, console)
    if hidden:
        names = ", ".join(column.title for column in hidden)
        notes = [*notes, f"left out for want of width: {names} (--format csv has every column)"]
    head = [Text(title, style="bold")] if title else []  # not the table's own title: that wraps at the table's width
    return to_text(*head, table, *map(Text, notes), console=console)


def page(console: Console | None = None) -> Console:
    """``console`` if it is a terminal, else a wide page without colours in the same encoding."""
    if console is not None and console.is_terminal:
        return console
    sheet = io.TextIOWrapper(io.BytesIO(), encoding="utf-8" if console is None else console.encoding)
    return Console(width=WIDE, color_system=None, force_terminal=False, file=sheet)


def to_text(*renderables, console: Console | None = None, soft_wrap: bool = False) -> str:
    """Anything rich prints, as text for ``console`` (see :func:`page`); ``soft_wrap`` leaves long lines to it."""
    console = page(console)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable, soft_wrap=soft_wrap)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _markdown(columns: Sequence[Column], bodies: Sequence[dict], title: str, notes: Sequence[str]) -> list[str]:
    """A GitHub table; columns of numbers are aligned to the right."""

    def line(cells) -> str:
        return f"| {' | '.join(cells)} |"

    lines = [f"**{title}**", ""] if title else []
    lines.append(line(column.title for column in columns))
    lines.append(line("---" if column.text else "--:" for column in columns))
    lines += [line(column.cell(row).plain.replace("|", "\\|") for column in columns) for row in bodies]
    for note in notes:
        lines += ["", note]
    return lines


def _fitted(
    columns: list[Column], rows: Sequence[dict], footer: dict | None, console: Console
) -> tuple[Table, list[Column]]:
    """The table with as many columns as the console holds, and the columns left out."""
    columns, hidden = list(columns), []
    while True:
        table = _table(columns, rows, footer, console.options.ascii_only)
        wanted = Measurement.get(console, console.options.update(width=WIDE), table).maximum
        spare = max(columns, key=lambda column: column.rank, default=None)
        if wanted <= console.width or spare is None or not spare.rank:
            return table, hidden
        columns.remove(spare)
        hidden.append(spare)


def _table(columns: list[Column], rows: Sequence[dict], footer: dict | None, ascii_only: bool) -> Table:
    table = Table(
        box=RULED_ASCII if ascii_only else RULED,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(
            Text(column.heading),
            justify="left" if column.text else "right",
            no_wrap=column.wrap is None,
            max_width=column.wrap,
        )
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    if footer:
        table.add_section()
        table.add_row(*(column.cell(footer) for column in columns), style="bold")
    return table
