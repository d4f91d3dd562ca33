"""Differences that are understood: which, where, and why. They are printed with their reason and fail nothing.

A file of them is TOML::

    [[exception]]
    gpu = "h200"
    kernel = "transpose"
    case = "*,rows=1000,cols=1500"     # a shell pattern over the case
    site = "src.load"                  # likewise
    column = "executed"
    why = "..."

One that explains nothing is itself an error: the difference is gone, and so must the exception be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path

from simgpu.errors import SimError
from validation.compare import Comparison, Outcome
from validation.toml_file import read_toml


@dataclass(frozen=True)
class Explained:
    """Why the ``column`` of ``site`` differs in the cases of ``kernel`` on ``gpu`` that match ``case``."""

    gpu: str
    kernel: str
    case: str
    site: str
    column: str
    why: str

    def covers(self, outcome: Outcome, comparison: Comparison) -> bool:
        """Whether ``comparison``, one of ``outcome``'s, is a difference that this explains.

        >>> wrong = Comparison("src.load", "executed", 47000, 48128)
        >>> outcome = Outcome("h200", "transpose", "xor,rows=1000,cols=1500", (wrong,))
        >>> Explained("h200", "transpose", "*,rows=1000,*", "src.load", "executed", "...").covers(outcome, wrong)
        True
        """
        return (
            comparison.verdict == "different"
            and (self.gpu, self.kernel, self.column) == (outcome.gpu, outcome.kernel, comparison.column)
            and fnmatchcase(outcome.case, self.case)
            and fnmatchcase(comparison.site, self.site)
        )


def read_exceptions(path: Path) -> list[Explained]:
    """The exceptions of the TOML file ``path``; :class:`SimError` for a key that is missing, unknown or no text."""
    document = read_toml(path)
    entries = document.pop("exception", [])
    if document or not isinstance(entries, list):
        raise SimError(f"{path}: only [[exception]] tables are known, not {', '.join(document) or 'exception = ...'}")
    names = {entry.name for entry in fields(Explained)}
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or set(entry) != names or not all(isinstance(v, str) for v in entry.values()):
            raise SimError(f"{path}: exception {number} needs the texts {', '.join(sorted(names))} and nothing else")
    return [Explained(**entry) for entry in entries]


def explain(
    outcomes: Iterable[Outcome], exceptions: Sequence[Explained], *, complete: bool = True
) -> list[Outcome]:
    """The outcomes, with every difference that an exception covers marked as explained.

    Raises :class:`SimError` for an exception about a compared kernel that covers no difference, unless the outcomes are
    not ``complete``: some cases of a kernel only.
    """
    used: set[Explained] = set()
    explained = []
    for outcome in outcomes:
        rows = []
        for comparison in outcome.comparisons:
            covering = [exception for exception in exceptions if exception.covers(outcome, comparison)]
            used.update(covering)
            rows.append(replace(comparison, why=covering[0].why) if covering else comparison)
        explained.append(replace(outcome, comparisons=tuple(rows)))
    compared = {(outcome.gpu, outcome.kernel) for outcome in explained}
    for exception in exceptions:
        if complete and (exception.gpu, exception.kernel) in compared and exception not in used:
            raise SimError(f"the exception for {exception.gpu} {exception.kernel} {exception.case}, site "
                           f"{exception.site}, {exception.column} explains no difference: delete it")
    return explained
