"""The table `conflicts` and `replay` print: a row per site, and the totals."""

from __future__ import annotations

from simgpu.cli.options import emit
from simgpu.counters import CounterTable, SiteCounters
from simgpu.report import Column

COLUMNS = (
    Column("site", "site", text=True),
    Column("where", "file:line", text=True, rank=3),
    Column("instruction", "instruction", text=True),
    Column("width", "bytes/\nlane", rank=5),
    Column("executed", "executed"),
    Column("requests", "requests", data_only=True),
    Column("wavefronts", "wavefronts"),
    Column("ideal", "ideal", rank=2),
    Column("excessive", "excessive", healthy=0),
    Column("wavefronts_per_instruction", "wavefronts/instr", data_only=True),
    Column("n_way", "n-way", healthy=1, rank=1),
    Column("sectors", "sectors"),
    Column("ideal_sectors", "ideal\nsectors", rank=4),
    Column("sectors_per_request", "sectors/\nrequest"),
    Column("lines", "lines", data_only=True),
    Column("bytes", "bytes", data_only=True),
    Column("unmodelled", "unmodelled", zero=False),
)


def emit_sites(fmt: str, table: CounterTable, *, title: str, notes: list[str], document: dict, allow: bool) -> None:
    """Print ``table`` with its totals; ``document`` is what JSON says besides ``sites``, ``total`` and ``work``."""
    total = table.total(allow_unmodelled=allow).as_dict()
    if unmodelled := total["unmodelled"]:
        left_out = "totals that would include them are left out (--allow-unmodelled)"
        totals = "totals sum what is known" if allow else left_out
        notes = [*notes, f"{no_rule(unmodelled)}: {totals}"]
    emit(
        fmt,
        COLUMNS,
        [_row(row) for row in table.sites],
        footer=total | {"where": "", "width": ""},
        notes=notes,
        title=title,
        document=document
        | {"sites": [row.as_dict() for row in table.sites], "total": total, "work": table.work},
    )


def no_rule(accesses: int) -> str:
    """What is said of accesses that no proven rule covers."""
    return f"{accesses:,} access{'es have' if accesses != 1 else ' has'} no proven rule (unmodelled)"


def _row(row: SiteCounters) -> dict:
    return row.as_dict() | {"where": f"{row.file}:{row.line}" if row.file else ""}
