"""TOML files of this folder: read in one place, refused in one line."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from simgpu.errors import SimError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path, tables: Collection[str] | None = None) -> dict[str, Any]:
    """What the TOML file ``path`` says; ``tables`` are the only top-level names it may use, if given.

    Raises :class:`~simgpu.errors.SimError`, naming the file, for one that cannot be read, is no UTF-8 or no TOML, or
    uses another name.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SimError(f"{path}: {error}") from None
    if tables is not None and (unknown := set(document) - set(tables)):
        raise SimError(f"{path}: unknown table {min(unknown)!r} (known: {', '.join(tables)})")
    return document
