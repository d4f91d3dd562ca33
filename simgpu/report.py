"""Tables for people and programs: one list of rows, printed as a table, Markdown, CSV or JSON.

Analysis returns data; this module alone decides how it looks.
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
from rich.table import Table
from rich.text import Text

FORMATS = ("table", "csv", "json", "md")
WIDE = 1000  # columns: a pipe has no width to wrap at


@dataclass(frozen=True)
class Column:
    """A column: the key of a row's dictionary, the heading people see, whether it is text (left-aligned), and for long
    text the width to wrap at."""

    key: str
    heading: str
    text: bool = False
    wrap: int | None = None


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


def rich_table(
    columns: Sequence[Column], rows: Sequence[dict], title: str = "", footer: dict | None = None, markdown: bool = False
) -> Table:
    """The rows as a rich table; ``footer`` is a last row set apart (the totals)."""
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.MARKDOWN if markdown else box.SIMPLE_HEAD,
        show_edge=markdown,
        pad_edge=markdown,
    )
    for column in columns:
        table.add_column(
            Text(column.heading),
            justify="left" if column.text else "right",
            no_wrap=column.wrap is None,
            max_width=None if markdown else column.wrap,
        )
    bodies = [*rows, *([footer] if footer else [])]
    for number, row in enumerate(bodies):
        if footer and number == len(rows) and not markdown:
            table.add_section()
        cells = (show(row.get(column.key)) for column in columns)
        table.add_row(*(Text(cell.replace("|", "\\|") if markdown else cell) for cell in cells))
    return table


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
    ``notes`` are for people (table and md); ``footer`` also closes the CSV.

    >>> print(render("csv", [Column("n", "N")], [{"n": 1}, {"n": None}]), end="")
    n
    1
    <BLANKLINE>
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
    if fmt == "md":
        parts = [f"**{title}**", ""] if title else []
        grid = to_text(rich_table(columns, rows, footer=footer, markdown=True)).strip("\n")
        parts += [line.strip() for line in grid.splitlines()]
        for note in notes:
            parts += ["", note]
        return "\n".join(parts) + "\n"
    return to_text(rich_table(columns, rows, title, footer), *[Text(note) for note in notes], console=console)


def to_text(*renderables, console: Console | None = None) -> str:
    """Anything rich prints, as text: with the console's colours and width on a terminal, plain and wide otherwise."""
    if console is None or not console.is_terminal:
        console = Console(width=WIDE, color_system=None, force_terminal=False, file=io.StringIO())
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable, soft_wrap=not isinstance(renderable, Table))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
