"""Explore the parameters of a kernel: the full product of their values, emulated, ranked, none dropped in silence.

``launch_of(**parameters)``, such as :meth:`Kernel.launch <simgpu.launch.Kernel.launch>`, is the kernel of a
combination. Combinations run through joblib, so a cluster is one line away; whatever runs them,
the outcomes come in the order of the product::

    with joblib.parallel_config(backend="dask"):  # after dask.distributed.Client(...)
        explore(kernel.launch, product({"pad": [0, 1, 2], "rows": [8, 16]}))

>>> from kernels_py import find
>>> outcomes = explore(find("patterns")[0].launch, product({"stride": [32, 1, 2]}))
>>> [(outcome.parameters, outcome.wavefronts) for outcome in rank(outcomes, lambda outcome: 1)[0]]
[({'stride': 1}, 2), ({'stride': 2}, 4), ({'stride': 32}, 64)]
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed

import simgpu
from simgpu.errors import SimError
from simgpu.launch import Kernel, Launch
from simgpu.run import SHARED_LIMIT, simulate

MOST_COMBINATIONS = 1_000_000

# ---- the space -------------------------------------------------------------------------------------------------------

RANGE = re.compile(r"(-?\w+):(-?\w+)(?::(-?\w+))?")


def axis(kernel: Kernel, variant: str | None, text: str) -> tuple[str, list]:
    """``NAME=V1,V2,...`` or ``NAME=LO:HI[:STEP]`` (integers, HI included) as the name and its values, typed.

    A comma within brackets separates nothing, so a value may be ``Swizzle<3,3,3>`` or ``row(32,32)``. Raises SimError
    for a parameter the kernel does not have, a value that is not of its type, an empty range, and a value given twice.

    >>> host = Kernel("k", lambda *, pad=0, layout="": None)
    >>> axis(host, None, "pad=0:8:4"), axis(host, None, "layout=Sw<1,2,3>,xor")
    (('pad', [0, 4, 8]), ('layout', ['Sw<1,2,3>', 'xor']))
    """
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise SimError(f"--over {text!r} is not NAME=V1,V2,... or NAME=LO:HI[:STEP]")
    span = None if isinstance(kernel.parameters(variant).get(name), str) else RANGE.fullmatch(values)
    if span:
        low, high, step = (_integer(text, part) for part in (span[1], span[2], span[3] or "1"))
        if step < 1 or low > high:
            raise SimError(f"--over {text!r}: a range counts up from LO to HI by a STEP of at least 1")
        if (high - low) // step >= MOST_COMBINATIONS:
            raise SimError(f"--over {text!r}: more than {MOST_COMBINATIONS:,} values")
        texts = [str(value) for value in range(low, high + 1, step)]
    else:
        texts = _split(values)
    parsed = [kernel.parse(variant, {name: each})[name] for each in texts]
    twice = [value for i, value in enumerate(parsed) if value in parsed[:i]] if not span else []
    if twice:
        raise SimError(f"--over {text!r}: {twice[0]!r} is there twice")
    return name, parsed


def _integer(text: str, part: str) -> int:
    """An end or the step of a range."""
    try:
        return int(part, 0)
    except ValueError:
        raise SimError(f"--over {text!r}: {part!r} is not an integer") from None


def _split(values: str) -> list[str]:
    """At the commas outside (), <> and []."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "(<[") - (letter in ")>]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def product(axes: Mapping[str, Sequence]) -> list[dict[str, Any]]:
    """Every combination of the axes' values, the last axis fastest.

    >>> product({"pad": [0, 1], "vec": [4]})
    [{'pad': 0, 'vec': 4}, {'pad': 1, 'vec': 4}]
    """
    count = prod(len(values) for values in axes.values())
    if count > MOST_COMBINATIONS:
        raise SimError(f"{count:,} combinations are too many (at most {MOST_COMBINATIONS:,})")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


# ---- one combination, and all of them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one combination costs, or why there is no such kernel (``refusal``; the numbers are None then).

    ``wavefronts``, ``ideal`` (shared memory) and ``sectors`` (global memory) are totals over the emulated CTAs, of
    which there were ``ctas`` of ``grid_ctas``; accesses without a proven rule, ``unmodelled`` of them, add nothing.
    ``shared_bytes`` and ``threads`` are a block's, ``registers`` a thread's where the launch tells.
    """

    parameters: dict[str, Any]
    refusal: str | None = None
    wavefronts: int | None = None
    ideal: int | None = None
    sectors: int | None = None
    unmodelled: int = 0
    shared_bytes: int | None = None
    threads: int | None = None
    registers: int | None = None
    ctas: int | None = None
    grid_ctas: int | None = None

    @property
    def excessive(self) -> int | None:
        """Wavefronts beyond the ideal: bank conflicts."""
        return None if self.wavefronts is None else self.wavefronts - self.ideal


def evaluate(
    launch_of: Callable[..., Launch], parameters: dict, ctas: int | None = None, shared_limit: int = SHARED_LIMIT
) -> Outcome:
    """Emulate one combination; what the kernel or the device refuses becomes the outcome's refusal."""
    try:
        launch = launch_of(**parameters)
        result = simulate(launch, ctas=ctas, shared_limit=shared_limit)
    except SimError as error:
        return Outcome(parameters, refusal=" ".join(str(error).split()))
    total = result.table.total(allow_unmodelled=True)
    return Outcome(
        parameters,
        None,
        total.wavefronts or 0,
        total.ideal or 0,
        total.sectors or 0,
        total.unmodelled,
        result.shared_bytes,
        launch.threads,
        launch.registers,
        result.ctas,
        launch.ctas,
    )


def explore(
    launch_of: Callable[..., Launch],
    combinations: Sequence[dict],
    *,
    ctas: int | None = None,
    shared_limit: int = SHARED_LIMIT,
    jobs: int | None = None,
    journal: Journal | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """The outcome of every combination, in their order.

    ``ctas`` emulates that many CTAs of each (None: all). ``jobs`` processes share the work (None: as
    ``joblib.parallel_config`` says, else one); ``launch_of`` must then be importable or picklable there. What
    ``journal`` holds is not run again, and what is run is written to it at once. Raises SimError when ``ctas`` are
    parts of grids of different sizes: their wavefronts do not compare.
    """
    outcomes = [journal.finished.get(key(parameters)) if journal else None for parameters in combinations]
    pending = [place for place, outcome in enumerate(outcomes) if outcome is None]

    def hear(place: int, outcome: Outcome) -> None:
        outcomes[place] = outcome
        if journal:
            journal.append(outcome)
        if progress:
            progress(place + 1, len(outcomes))

    def task(place: int):
        return launch_of, combinations[place], ctas, shared_limit

    if pending:
        first, *others = pending
        hear(first, evaluate(*task(first)))  # compiles the replay before many processes would
        spread = Parallel(n_jobs=jobs, return_as="generator")(delayed(evaluate)(*task(place)) for place in others)
        for place, outcome in zip(others, spread, strict=True):
            hear(place, outcome)
    grids = sorted({outcome.grid_ctas for outcome in outcomes if outcome.refusal is None})
    if ctas is not None and len(grids) > 1:
        raise SimError(f"{ctas} CTAs are parts of grids of {grids[0]:,} to {grids[-1]:,} CTAs, whose wavefronts do not "
                       "compare: emulate all")
    return outcomes


def rank(
    outcomes: Iterable[Outcome], blocks: Callable[[Outcome], int], *, allow_unmodelled: bool = False
) -> tuple[list[Outcome], list[Outcome]]:
    """The outcomes from the best on, and those refused, in their order.

    Fewest wavefronts first, then fewest bytes of shared memory, then most ``blocks`` per SM; ties stay in order. A
    combination that ``blocks`` refuses (SimError), or some of whose accesses have no proven rule, is refused.
    """
    ranked, refused = [], []
    for outcome in outcomes:
        if outcome.refusal is None and outcome.unmodelled and not allow_unmodelled:
            outcome = replace(outcome, refusal=f"{outcome.unmodelled:,} accesses have no proven rule "
                                               "(--allow-unmodelled totals what is known)")
        try:
            if outcome.refusal is None:
                ranked.append(((outcome.wavefronts, outcome.shared_bytes, -blocks(outcome)), outcome))
                continue
        except SimError as error:
            outcome = replace(outcome, refusal=str(error))
        refused.append(outcome)
    return [outcome for _, outcome in sorted(ranked, key=lambda pair: pair[0])], refused


# ---- finished combinations on disk -----------------------------------------------------------------------------------

FORMAT = 1  # of the journal


def key(parameters: Mapping[str, Any]) -> str:
    """One text for one combination."""
    return json.dumps(parameters, sort_keys=True)


def fingerprint(kernel: Kernel, *facts) -> str:
    """A digest of ``facts`` and of the sources an outcome rests on.

    These are simgpu's own and every module loaded from the folder of the kernel's file: what the kernel imports from
    elsewhere is not watched. Raises SimError for a host function that was written in no file.
    """
    try:
        folder = Path(inspect.getsourcefile(kernel.host)).resolve().parent
    except TypeError:
        raise SimError(f"kernel {kernel.name!r} has no source file, so a changed one could not be told") from None
    loaded = {Path(getattr(module, "__file__", None) or "").resolve() for module in list(sys.modules.values())}
    files = {path for path in loaded if path.parent == folder and path.suffix == ".py"}
    files |= set(Path(simgpu.__file__).resolve().parent.glob("*.py"))
    digest = hashlib.sha256(json.dumps([kernel.name, *facts], default=str).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Journal:
    """JSON lines in ``path``: a header with the search's ``fingerprint``, then an outcome a line.

    A line is appended in one write, and one that a crash cut short is dropped. Raises SimError for a file that is no
    journal, or that of another search.
    """

    def __init__(self, path: str | Path, fingerprint: str):
        self.path, self.finished = Path(path), {}
        header = json.dumps({"simgpu search": FORMAT, "fingerprint": fingerprint}) + "\n"
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            whole = data.rfind(b"\n") + 1
            if not whole and not header.encode().startswith(data):
                raise SimError(f"{self.path} is not a journal of simgpu search")
            self._read(data[:whole].decode("utf-8", "replace").splitlines(), header)
            if whole < len(data):
                os.truncate(self.path, whole)
            if not whole:
                self._write(header)
        except OSError as error:
            raise SimError(f"{self.path}: {error.strerror or error}") from error

    def _read(self, lines: list[str], header: str) -> None:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if number > 1:
                    outcome = Outcome(**row)
                    self.finished[key(outcome.parameters)] = outcome
                elif "simgpu search" not in row:
                    raise ValueError
            except (ValueError, TypeError):
                what = "not an outcome" if number > 1 else "not the header of a journal of simgpu search"
                raise SimError(f"{self.path}, line {number}: {what}") from None
            if number == 1 and row != json.loads(header):
                raise SimError(f"{self.path} holds another search: the kernel, the space, an option or simgpu itself "
                               "has changed since; name another file")

    def append(self, outcome: Outcome) -> None:
        """Add one finished combination."""
        self.finished[key(outcome.parameters)] = outcome
        self._write(json.dumps(asdict(outcome)) + "\n")

    def _write(self, line: str) -> None:
        data = line.encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if os.write(file, data) < len(data):
                raise SimError(f"{self.path}: the disk is full")
        finally:
            os.close(file)
