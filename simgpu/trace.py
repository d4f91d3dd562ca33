"""Trace files: every warp access of a run, to replay later or elsewhere.

A trace is a zip archive: ``manifest.json`` (format, version, sites, launch, rows per chunk) and, per chunk of
consecutive accesses, one ``.npy`` member per column. Chunks bound the memory of writer and reader; the archive's
checksums and closing directory show damage and truncation.

Columns of n accesses, in program order: ``site`` int32[n] (index into the manifest's sites), ``order`` int64[n],
``cta`` int64[n], ``warp`` int32[n], ``mask`` uint32[n], ``shared`` int32[n, 32] and ``global`` int64[n, 32] byte addresses (-1
where the instruction does not use that memory).
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from simgpu.errors import SimError
from simgpu.events import AccessEvent, Site, WorkEvent
from simgpu.instructions import instruction

FORMAT, VERSION = "simgpu-trace", 1
CHUNK_ROWS = 1 << 16  # about 26 MB of columns
COLUMNS = {
    "site": ("<i4", ()),
    "order": ("<i8", ()),
    "cta": ("<i8", ()),
    "warp": ("<i4", ()),
    "mask": ("<u4", ()),
    "shared": ("<i4", (32,)),
    "global": ("<i8", (32,)),
}
MANIFEST = "manifest.json"


class TraceWriter:
    """A sink that writes a trace; a context manager, so that only a finished file appears under its name.

    ``launch`` is what the reader should know about the run: any JSON object.
    """

    def __init__(self, path: str | Path, launch: dict):
        self.path, self.launch = Path(path), launch
        try:
            self._file = NamedTemporaryFile(  # noqa: SIM115 (closed by __exit__)
                dir=self.path.parent, prefix=self.path.name, suffix=".part", delete=False)
        except OSError as error:
            raise SimError(f"cannot write trace {str(path)!r}: {error.strerror}") from None
        self.restart()

    def restart(self) -> None:
        """Forget everything written so far."""
        self._file.seek(0)
        self._file.truncate()
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self._sites: dict[Site, int] = {}
        self._rows: list[dict[str, np.ndarray]] = []
        self._chunks: list[int] = []

    def access(self, event: AccessEvent) -> None:
        rows = event.rows()
        count = len(rows["mask"])
        index = self._sites.setdefault(event.site, len(self._sites))
        rows |= {"site": np.full(count, index), "order": np.full(count, event.order)}
        self._rows.append(rows)
        if sum(len(rows["mask"]) for rows in self._rows) >= CHUNK_ROWS:
            self._flush()

    def work(self, event: WorkEvent) -> None:
        """Traces hold memory accesses only."""

    def _flush(self) -> None:
        count = sum(len(rows["mask"]) for rows in self._rows)
        if not count:
            return
        for name, (dtype, inner) in COLUMNS.items():
            parts = [rows.get(name, np.broadcast_to(-1, (len(rows["mask"]), *inner))) for rows in self._rows]
            with self._zip.open(_member(len(self._chunks), name), "w") as member:
                np.lib.format.write_array(member, np.concatenate(parts).astype(dtype), allow_pickle=False)
        self._chunks.append(count)
        self._rows = []

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self._flush()
                sites = [asdict(site) | {"instruction": site.instruction.name} for site in self._sites]
                manifest = {
                    "format": FORMAT,
                    "version": VERSION,
                    "launch": self.launch,
                    "sites": sites,
                    "chunks": self._chunks,
                }
                self._zip.writestr(MANIFEST, json.dumps(manifest, indent=1))
                self._zip.close()
                self._file.close()
                os.replace(self._file.name, self.path)
        finally:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)


class TraceReader:
    """A trace file opened for replay: ``sites``, ``launch``, and :meth:`chunks`.

    Raises SimError for a file that is no trace, of another version, truncated, or damaged.
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        try:
            self._zip = zipfile.ZipFile(path)
            manifest = json.loads(self._zip.read(MANIFEST))
        except OSError as error:
            raise SimError(f"cannot read {self.path!r}: {error.strerror}") from None
        except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError):
            raise SimError(f"{self.path!r} is not a trace file, or it is truncated or damaged") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise SimError(f"{self.path!r} is not a trace file")
        if manifest.get("version") != VERSION:
            raise SimError(
                f"{self.path!r} is a trace of version {manifest.get('version')!r}; this simgpu reads version {VERSION}"
            )
        try:
            self.launch = manifest["launch"]
            self.sites = tuple(
                Site(s["name"], s["file"], s["line"], instruction(s["instruction"]), s["width"])
                for s in manifest["sites"]
            )
            self._chunks = [int(rows) for rows in manifest["chunks"]]
        except (KeyError, TypeError, ValueError) as error:
            raise SimError(f"{self.path!r}: damaged manifest: {error}") from None

    def __len__(self) -> int:
        """Accesses in the trace."""
        return sum(self._chunks)

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """The columns of each chunk of accesses."""
        for number, rows in enumerate(self._chunks):
            columns = {name: self._column(number, name, rows) for name in COLUMNS}
            if columns["site"].min() < 0 or columns["site"].max() >= len(self.sites):
                raise SimError(f"{self.path!r}: chunk {number} is damaged: it names a site the manifest lacks")
            yield columns

    def _column(self, number: int, name: str, rows: int) -> np.ndarray:
        dtype, inner = COLUMNS[name]
        try:
            with self._zip.open(_member(number, name)) as member:
                column = np.lib.format.read_array(member, allow_pickle=False)
        except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, OSError) as error:
            raise SimError(f"{self.path!r}: chunk {number}, column {name}: truncated or damaged ({error})") from None
        if column.dtype != np.dtype(dtype) or column.shape != (rows, *inner):
            raise SimError(
                f"{self.path!r}: chunk {number}, column {name}: {column.dtype}{list(column.shape)} "
                f"is not {dtype}{[rows, *inner]}"
            )
        return column


def _member(chunk: int, column: str) -> str:
    return f"{chunk:06d}/{column}.npy"
