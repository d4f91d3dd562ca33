"""Tables: full keys for programs, what fits and says something for people, in any encoding."""

import csv
import io
import json

import pytest
from rich.cells import cell_len
from rich.console import Console

from simgpu.report import Column, render

COLUMNS = (
    Column("site", "site", text=True),
    Column("where", "file:line", text=True, rank=1),
    Column("wavefronts", "wavefronts"),
    Column("ideal_sectors", "ideal\nsectors", rank=2),
    Column("excessive", "excessive", healthy=0),
    Column("bytes", "bytes", data_only=True),
    Column("unmodelled", "unmodelled", zero=False),
)
ROWS = [
    {"site": "a|b", "where": "kernel.py:10", "wavefronts": 1048576, "excessive": 0, "bytes": 7, "unmodelled": 0},
    {"site": "c", "where": "kernel.py:11", "wavefronts": None, "excessive": 12, "bytes": 8, "unmodelled": 0},
]
TOTAL = {"site": "total", "wavefronts": 1048576, "excessive": 12, "bytes": 15, "unmodelled": 0}


def terminal(width: int, **kwargs) -> Console:
    return Console(width=width, force_terminal=True, file=io.StringIO(), color_system="standard", **kwargs)


def test_csv_has_every_key_and_plain_numbers():
    text = render("csv", COLUMNS, ROWS, footer=TOTAL, title="not in it", notes=["nor this"])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == [column.key for column in COLUMNS]
    assert [row["wavefronts"] for row in rows] == ["1048576", "", "1048576"]
    assert rows[0]["unmodelled"] == "0" and rows[-1]["site"] == "total" and rows[0]["site"] == "a|b"


def test_json_is_the_document_or_the_rows():
    assert json.loads(render("json", COLUMNS, ROWS, footer=TOTAL)) == ROWS
    assert json.loads(render("json", COLUMNS, ROWS, document={"rows": 2})) == {"rows": 2}


def test_markdown_is_a_github_table():
    lines = render("md", COLUMNS, ROWS, footer=TOTAL, title="T", notes=["a note"]).splitlines()
    assert lines[0] == "**T**" and lines[-1] == "a note"
    assert lines[2] == "| site | file:line | wavefronts | excessive |"
    assert lines[3] == "| --- | --- | --: | --: |"
    assert lines[4] == "| a\\|b | kernel.py:10 | 1,048,576 | 0 |"
    assert lines[6].startswith("| total |")


def test_people_are_spared_columns_that_say_nothing():
    text = render("table", COLUMNS, ROWS, footer=TOTAL)
    assert "unmodelled" not in text and "sectors" not in text and "bytes" not in text
    assert "excessive" in text  # a column of zeros can be good news
    assert "unmodelled" in render("table", COLUMNS, [ROWS[0] | {"unmodelled": 3}])
    assert "sectors" in render("table", COLUMNS, [ROWS[0] | {"ideal_sectors": 0}])
    assert "wavefronts" in render("table", COLUMNS, [])


def test_a_title_wider_than_its_table_stays_in_one_line():
    text = render("table", [Column("n", "N")], [{"n": 1}], title="a kernel with a long name")
    assert text.startswith("a kernel with a long name\n")


def test_numbers_line_up_on_the_right_and_totals_are_ruled_off():
    lines = render("table", COLUMNS, ROWS, footer=TOTAL, title="T", notes=["n"]).splitlines()
    assert lines[0] == "T" and lines[-1] == "n"
    head, rule, first, second, again, total = lines[1:7]
    assert rule == again and set(rule) == {"─"}
    end = head.index("wavefronts") + len("wavefronts")
    assert first[:end].endswith(" 1,048,576") and second[:end].endswith(" -") and total[:end].endswith(" 1,048,576")


@pytest.mark.parametrize(
    ("width", "hidden"), [(30, "ideal sectors, file:line"), (45, "ideal sectors"), (51, None), (200, None)]
)
def test_a_terminal_gets_what_fits_and_is_told_what_does_not(width, hidden):
    rows = [row | {"ideal_sectors": 5} for row in ROWS]
    text = render("table", COLUMNS, rows, footer=TOTAL, console=terminal(width, no_color=True))
    assert all(cell_len(line) <= width for line in text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines())
    assert "…" not in text
    note = f"left out for want of width: {hidden} (--format csv has every column)"
    assert (note in " ".join(text.split())) if hidden else ("left out" not in text)


def test_conflicts_are_red_on_a_terminal_and_plain_elsewhere():
    red = "\x1b[1;31m"
    assert render("table", COLUMNS, ROWS, console=terminal(80)).count(red) == 1
    assert "\x1b" not in render("table", COLUMNS, ROWS, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_rules_are_drawn_in_ascii_where_the_encoding_asks(encoding):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    text = render("table", COLUMNS, ROWS, footer=TOTAL, title="T", console=Console(file=output))
    assert text.isascii() and "-----" in text
