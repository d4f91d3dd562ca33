"""What the commands about a launch share: from its name and settings to a launch, and what is said of its run."""

from __future__ import annotations

import re
import reprlib

from kernels_py import find
from models.gpu import GPU
from models.occupancy import Occupancy
from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.report import counted
from simgpu.run import Result


def configure(name: str, settings: tuple[str, ...]) -> Launch:
    """The launch that KERNEL[@VARIANT] and its ``--set NAME=VALUE`` settings describe."""
    kernel, variant = find(name)
    return kernel.launch(variant, **kernel.parse(variant, pairs(settings)))


def pairs(settings: tuple[str, ...], option: str = "--set") -> dict[str, str]:
    """The NAME=VALUE settings of ``option``, as texts by name; of a name given twice the last one holds."""
    found = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise SimError(f"{option} {setting!r} is not NAME=VALUE")
        found[name] = text
    return found


def ctas_of(text: str, launch: Launch) -> int | None:
    if text == "all":
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text) or not 1 <= int(text) <= launch.ctas:
        raise SimError(
            f"--ctas {reprlib.repr(text)} is neither 'all' nor a number from 1 to {launch.ctas}, the CTAs of the grid"
        )
    return int(text)


def dims(dims: tuple[int, int, int]) -> str:
    return "x".join(map(str, dims))


def occupancy_line(result: Result, fit: Occupancy, registers: int | None) -> str:
    blocks = f"{'up to ' if registers is None else ''}{fit.blocks_per_sm} blocks/SM ({fit.occupancy:.1%})"
    known = "registers unknown (--regs N)" if registers is None else f"{registers} registers"
    used = f"{result.launch.threads} threads, {result.shared_bytes:,} B shared, {known}"
    return f"occupancy: {blocks}, limited by {fit.limiter}, with {used}. {fit.next_step.sentence}"


def coverage(result: Result) -> str:
    how = (
        "with values"
        if result.values
        else "addresses only" + (", CTA 0 checked with values first" if result.checked else "")
    )
    return f"emulated {result.ctas:,} of {counted(result.launch.ctas, 'CTA')}, {how}"


def provenance(gpu: GPU) -> str:
    """How the rules that counted are known for this GPU."""
    if gpu.name == "h200":
        return "rules: measured on an H200"
    if gpu.compute_capability == "9.0":
        return "rules: inferred for this GPU, measured on an H200 (the same GH100 SM)"
    known = "documented and checked against published measurements"
    return f"rules: measured on an H200; for compute capability {gpu.compute_capability} {known}"
