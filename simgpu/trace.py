"""Trace files: every warp access of a run, to replay later or elsewhere.

A trace is a zip archive: ``manifest.json`` (format, version, sites, launch, rows per chunk) and, per chunk of
consecutive accesses, one ``.npy`` member per column. Chunks bound the memory of writer and reader; the archive's
checksums and closing directory show damage and truncation.

Columns of n accesses, in program order: ``site`` int32[n] (index into the manifest's sites), ``order`` int64[n],
``cta`` int64[n], ``warp`` int32[n], ``mask`` uint32[n], and byte addresses ``shared`` int32[n, 32] and ``global``
int64[n, 32] (-1 where the instruction does not use that memory, or a lane of a cp.async reads nothing).
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
LARGEST_MANIFEST = 1 << 26  # bytes; a site takes about 150
HEADER = 1 << 12  # bytes: more than numpy puts before the values of any of these columns
DAMAGE = (  # all that zipfile and numpy raise when bytes are not what they should be
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    MemoryError,
    OverflowError,
    RuntimeError,  # an encrypted member, an unknown compression method, endless nesting
    TypeError,
    ValueError,
)


class TraceWriter:
    """A sink that writes a trace; a context manager, so that only a finished file appears under its name.

    ``launch`` is what the reader should know about the run: any JSON object. Raises SimError when the file cannot be
    written, at the start where that shows at the start.
    """

    def __init__(self, path: str | Path, launch: dict):
        self.name, self.path, self.launch = str(path), Path(os.path.realpath(path)), launch
        if self.path.exists() and not self.path.is_file():
            raise SimError(f"cannot write trace {self.name!r}: it exists and is not a file")
        with self._writing():
            self._file = NamedTemporaryFile(  # noqa: SIM115 (closed by __exit__)
                dir=self.path.parent, prefix=f"{self.path.name[:100]}.", suffix=".part", delete=False
            )
        self._zip: zipfile.ZipFile | None = None
        self.restart()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SimError(f"cannot write trace {self.name!r}: {error.strerror}") from None

    def restart(self) -> None:
        """Forget everything written so far."""
        self._abandon()
        self._file.seek(0)
        self._file.truncate()
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self._sites: dict[Site, int] = {}
        self._rows: list[dict[str, np.ndarray]] = []
        self._pending = 0
        self._chunks: list[int] = []

    def _abandon(self) -> None:
        """Leave the archive as it is: one that was not closed would write its directory when collected."""
        if self._zip is not None:
            self._zip.fp = None

    def access(self, event: AccessEvent) -> None:
        rows = event.rows()
        count = len(rows["mask"])
        index = self._sites.setdefault(event.site, len(self._sites))
        same = {"site": index, "order": event.order, "shared": -1, "global": -1}
        rows = {name: np.broadcast_to(value, (count, *COLUMNS[name][1])) for name, value in same.items()} | rows
        self._rows.append(rows)
        self._pending += count
        if self._pending >= CHUNK_ROWS:
            self._flush()

    def work(self, event: WorkEvent) -> None:
        """Traces hold memory accesses only."""

    def _flush(self) -> None:
        if not self._pending:
            return
        for name, (dtype, _) in COLUMNS.items():
            column = np.concatenate([rows[name] for rows in self._rows]).astype(dtype, copy=False)
            with self._writing(), self._zip.open(_member(len(self._chunks), name), "w") as member:
                np.lib.format.write_array(member, column, allow_pickle=False)
        self._chunks.append(self._pending)
        self._rows, self._pending = [], 0

    def _finish(self) -> None:
        self._flush()
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "launch": self.launch,
            "sites": [asdict(site) | {"instruction": site.instruction.name} for site in self._sites],
            "chunks": self._chunks,
        }
        with self._writing():
            self._zip.writestr(MANIFEST, json.dumps(manifest, indent=1))
            self._zip.close()
            self._file.close()
            os.chmod(self._file.name, 0o666 & ~_umask())  # temporary files are private; a trace is a file like others
            os.replace(self._file.name, self.path)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._abandon()
            with suppress(OSError):  # what could not be written is about to be deleted
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
            manifest = json.loads(self._read(MANIFEST, LARGEST_MANIFEST))
        except OSError as error:
            raise SimError(f"cannot read {self.path!r}: {error.strerror or 'damaged'}") from None
        except DAMAGE:
            raise SimError(f"{self.path!r} is not a trace file, or it is truncated or damaged") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise SimError(f"{self.path!r} is not a trace file")
        if manifest.get("version") != VERSION:
            raise SimError(
                f"{self.path!r} is a trace of version {manifest.get('version')!r}; this simgpu reads version {VERSION}"
            )
        try:
            self.launch = manifest["launch"]
            self.sites = tuple(map(_site, manifest["sites"]))
            self._chunks = [_whole(rows) for rows in manifest["chunks"]]
        except (SimError, *DAMAGE) as error:
            raise SimError(f"{self.path!r}: damaged manifest: {error}") from None

    def __len__(self) -> int:
        """Accesses in the trace."""
        return sum(self._chunks)

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """The columns of each chunk of accesses."""
        for number, rows in enumerate(self._chunks):
            columns = {name: self._column(number, name, rows) for name in COLUMNS}
            if rows and (columns["site"].min() < 0 or columns["site"].max() >= len(self.sites)):
                raise SimError(f"{self.path!r}: chunk {number} is damaged: it names a site the manifest lacks")
            yield columns

    def _column(self, number: int, name: str, rows: int) -> np.ndarray:
        dtype, inner = COLUMNS[name]
        size = rows * np.dtype((dtype, inner)).itemsize
        try:
            column = np.lib.format.read_array(
                io.BytesIO(self._read(_member(number, name), size + HEADER)), allow_pickle=False
            )
        except (OSError, *DAMAGE) as error:
            raise SimError(f"{self.path!r}: chunk {number}, column {name}: truncated or damaged ({error})") from None
        if column.dtype != np.dtype(dtype) or column.shape != (rows, *inner):
            raise SimError(
                f"{self.path!r}: chunk {number}, column {name}: {column.dtype}{list(column.shape)} "
                f"is not {dtype}{[rows, *inner]}"
            )
        return column

    def _read(self, member: str, most: int) -> bytes:
        """A member whose checksum holds, and of at most ``most`` bytes: a damaged size must not fill the memory."""
        size = self._zip.getinfo(member).file_size
        if size > most:
            raise ValueError(f"{member} has {size} bytes")
        return self._zip.read(member)


def _site(entry: dict) -> Site:
    """A site of the manifest, refused unless it is one a writer could have written."""
    name, file = entry["name"], entry["file"]
    if not isinstance(name, str) or not isinstance(file, str):
        raise ValueError(f"site {name!r} of file {file!r}")
    site = Site(name, file, _whole(entry["line"]), instruction(entry["instruction"]), _whole(entry["width"]))
    site.instruction.require_width(site.width)
    return site


def _whole(number) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{number!r} is not a whole number")
    return number


def _member(chunk: int, column: str) -> str:
    return f"{chunk:06d}/{column}.npy"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
