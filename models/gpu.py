"""The GPUs simgpu knows: one TOML file each, every value with its unit, its provenance and its source.

A file in ``models/gpus`` has a table per unit of the chip and one line per fact::

    [shared]
    bytes_per_sm = { value = 233472, unit = "B/SM", provenance = "measured", source = "query" }

and a ``[sources]`` table that spells out what ``query`` is. :func:`load_gpu` checks the file against the
fields of :class:`GPU` (table ``shared``, key ``bytes_per_sm`` is the field ``shared_bytes_per_sm``) and
refuses it with the file and the key when something is missing, unknown, or in another unit.

Provenance. *measured*: read from the device itself, or from a measurement on it that ``validation/measured``
holds. *documented*: stated by NVIDIA, or a reading that somebody else published; the source says which.
*inferred*: argued from another GPU; the source says from which and why. What could not be established is
left out of the file, and its field is None.

KB and MB are 1,024 and 1,048,576 bytes, as NVIDIA uses them for memories on the chip; GB, GB/s and TFLOP/s are decimal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from simgpu.errors import SimError
from simgpu.instructions import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROVENANCES = ("measured", "documented", "inferred")


@dataclass(frozen=True)
class Quantity:
    """One fact about a GPU: a value in a unit, how it is known, and where it is written."""

    value: int | float | str | tuple[int, ...]
    unit: str
    provenance: str
    source: str


def _fact(kind: type, unit: str) -> Any:
    return field(metadata={"kind": kind, "unit": unit})


def _optional(kind: type, unit: str) -> Any:
    return field(default=None, metadata={"kind": kind, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU. The fields are what code computes with; ``quantities`` is the same with units and sources.

    Fields that end in ``_clk`` count SM clock cycles, ``*_per_clk`` are per SM clock (of the whole GPU for ``l2``,
    of one SM for ``shared`` and ``tensor``). A field is None where nothing reliable is known.

    >>> gpu = load_gpu("h20")
    >>> gpu.sm_count, gpu.shared_bytes_per_sm
    (78, 233472)
    >>> gpu.quantities["shared.bytes_per_sm"].provenance
    'documented'
    """

    name: str
    title: str

    compute_capability: str = _fact(str, "version")
    sm_count: int = _fact(int, "SM")
    sm_threads: int = _fact(int, "thread/SM")
    sm_warps: int = _fact(int, "warp/SM")
    sm_blocks: int = _fact(int, "block/SM")
    sm_registers: int = _fact(int, "register/SM")
    sm_partitions: int = _fact(int, "partition/SM")  # each with a scheduler and its share of the registers
    sm_fp32_lanes: int = _fact(int, "lane/SM")

    block_threads: int = _fact(int, "thread/block")
    block_registers: int = _fact(int, "register/block")
    thread_registers: int = _fact(int, "register/thread")
    register_granule: int = _fact(int, "register/warp")  # a warp's registers are allocated in multiples of this

    shared_bytes_per_sm: int = _fact(int, "B/SM")
    shared_bytes_per_block: int = _fact(int, "B/block")  # the most a kernel may opt in to
    shared_bytes_per_block_default: int = _fact(int, "B/block")  # without opting in; also the limit of static arrays
    shared_bytes_reserved: int = _fact(int, "B/block")  # the driver takes this from every block
    shared_granule_bytes: int = _fact(int, "B")  # a block's shared memory is allocated in multiples of this
    shared_carveouts_kb: tuple[int, ...] = _fact(tuple, "KB/SM")
    shared_bytes_per_clk: int = _fact(int, "B/clk/SM")
    shared_latency_clk: float | None = _optional(float, "clk")

    l1_kb: int = _fact(int, "KB/SM")  # L1 and shared memory together
    l1_line_bytes: int = _fact(int, "B")
    l1_sector_bytes: int = _fact(int, "B")
    l1_latency_clk: float | None = _optional(float, "clk")
    l1_lines_per_clk: int = _fact(int, "line/clk/SM")  # that its tag stage looks up
    l2_mb: int = _fact(int, "MB")
    l2_read_bytes_per_clk: int | None = _optional(int, "B/clk")
    l2_requests_per_clk: int | None = _optional(int, "request/clk")  # of a line each, however few of its sectors
    l2_atomic_clk: float = _fact(float, "clk")  # from one atomic on a sector to the next

    dram_gb: int = _fact(int, "GB")
    dram_gb_per_s: int = _fact(int, "GB/s")
    dram_copy_gb_per_s: int | None = _optional(int, "GB/s")  # what a copy reaches, bytes read plus bytes written

    clock_boost_mhz: int = _fact(int, "MHz")
    tensor_bf16_tflops: float = _fact(float, "TFLOP/s")  # dense
    tensor_bf16_flop_per_clk: int = _fact(int, "FLOP/clk/SM")  # dense
    fp32_tflops: float = _fact(float, "TFLOP/s")  # outside the tensor cores

    quantities: Mapping[str, Quantity] = field(compare=False, repr=False)


FACTS: Mapping[str, Field] = MappingProxyType({
    fact.name.replace("_", ".", 1): fact for fact in fields(GPU) if "unit" in fact.metadata
})


def gpu_names() -> tuple[str, ...]:
    """The names :func:`load_gpu` knows, sorted.

    >>> gpu_names()
    ('a100-40g', 'a100-80g', 'a800', 'h100', 'h20', 'h20-3e', 'h200')
    """
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir()
                        if entry.name.endswith(".toml")))


@cache
def load_gpu(name: str) -> GPU:
    """The GPU called ``name`` (upper or lower case).

    Raises :class:`~simgpu.errors.SimError` for an unknown name, with the nearest known one, and for a file that
    does not say what :class:`GPU` needs.

    >>> load_gpu("A100-80G").dram_gb_per_s
    2039
    >>> load_gpu("h2000")
    Traceback (most recent call last):
    simgpu.errors.SimError: unknown GPU 'h2000'; did you mean 'h200'?
    """
    known, wanted = gpu_names(), name.lower()
    if wanted not in known:
        begun = [full for full in known if full.startswith(wanted)]  # a100: a100-40g, though a800 is more alike
        raise SimError(f"unknown GPU {name!r}{nearest(wanted, begun or known)}")
    file = _folder() / f"{wanted}.toml"
    return parse_gpu(file.read_text(encoding="utf-8"), wanted, file.name)


def _folder():
    return files("models") / "gpus"


def parse_gpu(text: str, name: str, origin: str) -> GPU:
    """The GPU that the TOML ``text`` describes; ``origin`` is the file name that errors begin with.

    Raises :class:`~simgpu.errors.SimError`, naming ``origin`` and the key, for text that is no TOML, a missing or
    unknown key, another unit than the field's, a value that is not a positive number of its kind, an unknown
    provenance, and a source that ``[sources]`` does not spell out.

    >>> parse_gpu('title = "x"', "x", "x.toml")
    Traceback (most recent call last):
    simgpu.errors.SimError: x.toml: missing compute.capability
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SimError(f"{origin}: not TOML: {error}") from None
    title, sources = data.pop("title", ""), data.pop("sources", {})
    if not isinstance(title, str) or not title:
        raise SimError(f"{origin}: missing title")
    found = {}
    for section, table in data.items():
        for key in table if isinstance(table, dict) else [""]:
            path = f"{section}.{key}".rstrip(".")
            if path not in FACTS:
                raise SimError(f"{origin}: unknown key {path}{nearest(path, FACTS)}")
            found[path] = table[key]
    quantities = {}
    for path, fact in FACTS.items():
        if path in found:
            quantities[path] = _quantity(found[path], fact.metadata, sources, f"{origin}: {path}")
        elif fact.default is not None:  # an optional fact defaults to None, the others have no default
            raise SimError(f"{origin}: missing {path}")
    values = {FACTS[path].name: quantity.value for path, quantity in quantities.items()}
    return GPU(name=name, title=title, quantities=quantities, **values)


def _quantity(entry: Any, wanted: Mapping[str, Any], sources: Mapping[str, str], place: str) -> Quantity:
    """One checked entry of a file; ``place`` is the file and the key."""
    if not isinstance(entry, dict):
        raise SimError(f"{place}: {entry!r} is not a table of value, unit, provenance and source")
    keys = ("value", "unit", "provenance", "source")
    for key in keys:
        if key not in entry:
            raise SimError(f"{place}: missing {key}")
    if extra := sorted(set(entry) - set(keys)):
        raise SimError(f"{place}: unknown key {extra[0]}")
    if entry["unit"] != wanted["unit"]:
        raise SimError(f"{place}: unit {entry['unit']!r} (expected {wanted['unit']!r})")
    if entry["provenance"] not in PROVENANCES:
        raise SimError(f"{place}: provenance {entry['provenance']!r} (expected one of {', '.join(PROVENANCES)})")
    source = sources.get(entry["source"]) if isinstance(entry["source"], str) else None
    if not isinstance(source, str) or not source:
        raise SimError(f"{place}: source {entry['source']!r} is not spelled out in [sources]")
    return Quantity(_value(entry["value"], wanted["kind"], place), entry["unit"], entry["provenance"], source)


def _value(value: Any, kind: type, place: str) -> int | float | str | tuple[int, ...]:
    if kind is str and isinstance(value, str) and value:
        return value
    if kind is int and type(value) is int and value > 0:  # type() is exact: True is an int too
        return value
    if kind is float and type(value) in (int, float) and 0 < value < float("inf"):
        return float(value)
    if kind is tuple and isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    expected = {str: "a text", int: "a positive whole number", float: "a positive number",
                tuple: "a list of whole numbers"}[kind]
    raise SimError(f"{place}: value {value!r} is not {expected}")
