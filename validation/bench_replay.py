"""How fast the replay counts wavefronts, against the same rule written elsewhere.

    python -m validation.bench_replay [--accesses N] [--repeat N] [--threads N]

Contenders, all given the same shared loads and all made to agree on the total before a clock runs:
:func:`simgpu.replay.totals` with one thread and with several; the plain C loop of ``bench/lds_rule.c`` on one
thread, the yardstick; the rule in vectorised numpy; and the bank-conflict analysis of the tensor-layouts package,
called once per access on the strided cases (it takes layouts, so random addresses are beyond it).
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from tensor_layouts import Layout
from tensor_layouts.analysis import per_group_bank_conflicts

from simgpu.instructions import FULL_MASK, LANES, instruction
from simgpu.replay import totals
from simgpu.rules import LINE, WORD, group_lanes

LDS = instruction("lds")
WINDOW = 64 * 1024  # bytes of shared memory the random addresses fall into
CHUNK = 1 << 13  # accesses numpy takes at a time: its temporaries stay in the cache
SLOW = 500  # accesses for the contender that needs a call for each


@dataclass(frozen=True)
class Case:
    """n shared loads: int32[n, 32] byte addresses, and their lane strides in words where they have one."""

    name: str
    width: int
    addresses: np.ndarray
    strides: np.ndarray | None = None

    def first(self, n: int) -> Case:
        return Case(self.name, self.width, self.addresses[:n], None if self.strides is None else self.strides[:n])


def cases(width: int, n: int) -> list[Case]:
    """The four benchmarked kinds of address: each access starts at its own row of shared memory."""
    rng = np.random.default_rng(0)
    rows = LINE * rng.integers(0, 256, (n, 1))
    vector = width // WORD  # words
    strides = {
        "conflict-free": np.full(n, vector),
        "strides 1..32, mixed": vector * rng.integers(1, 33, n),
        "32-way strided": np.full(n, 32),
    }
    found = [Case(name, width, (rows + WORD * words[:, None] * np.arange(LANES)).astype(np.int32), words)
             for name, words in strides.items()]
    return [*found, Case("random", width, width * rng.integers(0, WINDOW // width, (n, LANES), np.int32))]


# ---- the contenders: wavefronts of a case -------------------------------------------------------------------


def by_simgpu(case: Case, masks: np.ndarray, threads: int) -> int:
    return totals(LDS, case.width, masks, shared=case.addresses, threads=threads).wavefronts


def c_loop(folder: str) -> Callable[[Case, np.ndarray], int]:
    """Compile ``bench/lds_rule.c`` in ``folder`` and return the contender that calls it."""
    source, library = Path(__file__).parent / "bench" / "lds_rule.c", Path(folder) / "lds_rule.so"
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise click.ClickException(f"the yardstick needs a C compiler: {error}") from None
    function = ctypes.CDLL(str(library)).lds_wavefronts
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]

    def by_c(case: Case, masks: np.ndarray) -> int:
        ideal = ctypes.c_int64()
        return function(len(masks), masks.ctypes.data, case.addresses.ctypes.data, case.width, ctypes.byref(ideal))

    return by_c


def by_numpy(case: Case, masks: np.ndarray) -> int:
    if not (masks == FULL_MASK).all():
        raise ValueError("written for full warps only")
    return sum(_chunk(case.addresses[start:start + CHUNK], case.width) for start in range(0, len(masks), CHUNK))


def _chunk(addresses: np.ndarray, width: int) -> int:
    if (addresses.astype(np.uint32) % width).any() or (addresses < 0).any():
        raise ValueError("negative or misaligned address")
    group = group_lanes(width)
    if width == WORD:
        return _degrees(addresses, width, group)
    lanes = np.arange(LANES)
    merge = np.logical_or(*((addresses == addresses[:, lanes ^ step]).all(axis=1) for step in (1, 2)))
    return _degrees(addresses[~merge], width, group) + _degrees(addresses[merge], width, 2 * group)


def _degrees(addresses: np.ndarray, width: int, group: int) -> int:
    banks = LINE // width
    vectors = np.sort((addresses // width).reshape(-1, group), axis=1)
    first_of_vector = np.ones(vectors.shape, bool)
    first_of_vector[:, 1:] = vectors[:, 1:] != vectors[:, :-1]
    slots = vectors % banks + banks * np.arange(len(vectors))[:, None]
    distinct = np.bincount(slots[first_of_vector], minlength=banks * len(vectors))
    return int(distinct.reshape(-1, banks).max(axis=1).sum()) if len(vectors) else 0


def by_tensor_layouts(case: Case) -> int:
    wavefronts = 0
    for stride in case.strides.tolist():
        layout = Layout((LANES, case.width // WORD), (stride, 1))
        found = per_group_bank_conflicts(layout, element_bytes=WORD, group_size=group_lanes(case.width))
        wavefronts += sum(group["max_ways"] for group in found["groups"])
    return wavefronts


# ---- the race -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A contender on one case: ``run`` counts the wavefronts of ``accesses`` accesses."""

    accesses: int
    run: Callable[[], int]


def entries(case: Case, by_c: Callable[[Case, np.ndarray], int], threads: int) -> dict[str, Entry]:
    n = len(case.addresses)
    masks = np.full(n, FULL_MASK, np.uint32)
    field = {
        "simgpu, 1 thread": Entry(n, lambda: by_simgpu(case, masks, 1)),
        "C loop": Entry(n, lambda: by_c(case, masks)),
        f"simgpu, {threads} threads": Entry(n, lambda: by_simgpu(case, masks, threads)),
        "numpy": Entry(n, lambda: by_numpy(case, masks)),
    }
    if case.strides is not None:
        few = case.first(SLOW)
        field["tensor-layouts"] = Entry(len(few.addresses), lambda: by_tensor_layouts(few))
    return field


def race(field: dict[str, Entry], expected: Callable[[int], int], repeat: int) -> dict[str, float]:
    """Million accesses per second of each contender: medians of ``repeat`` rounds in which each runs once.

    ``expected(n)`` is the right total of the first n accesses. Raises ClickException if a contender disagrees.
    """
    for name, entry in field.items():
        answer = entry.run()
        if answer != expected(entry.accesses):
            raise click.ClickException(f"{name} counts {answer} wavefronts, not {expected(entry.accesses)}")
    seconds = {name: [] for name in field}
    for _ in range(repeat):
        for name, entry in field.items():
            start = time.perf_counter()
            entry.run()
            seconds[name].append(time.perf_counter() - start)
    return {name: field[name].accesses / statistics.median(times) / 1e6 for name, times in seconds.items()}


@click.command()
@click.option("--accesses", default=1 << 20, show_default=True, help="Warp accesses per case.")
@click.option("--repeat", default=9, show_default=True, help="Rounds; the table shows medians.")
@click.option("--threads", default=2, show_default=True, help="Threads of the threaded contender.")
def main(accesses: int, repeat: int, threads: int) -> None:
    """Race the replay of shared loads; the table gives million accesses per second and multiples of the C loop."""
    table = Table("load", "addresses", title=f"million warp accesses per second (x the C loop), {accesses:,} accesses")
    with tempfile.TemporaryDirectory() as folder:
        by_c = c_loop(folder)
        for width in (4, 16):
            for case in cases(width, accesses):
                masks = np.full(accesses, FULL_MASK, np.uint32)
                field = entries(case, by_c, threads)
                rates = race(field, lambda n, case=case, masks=masks: by_c(case, masks[:n]), repeat)
                for name in field:
                    if name not in [column.header for column in table.columns]:
                        table.add_column(name, justify="right")
                cells = [f"{rate:.3g} ({rate / rates['C loop']:.2g}x)" for rate in rates.values()]
                table.add_row(f"LDS.{8 * width}", case.name, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
