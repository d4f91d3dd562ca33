"""The ledger of claims: what the design documents say of the kernels, beside what the model and the H200 say.

``claims.toml`` holds the claims, never a verdict nor a value of ours. One looks like this::

    [[claim]]
    id = "b3-l8-loads"
    section = "2. B3"
    text = "epilogue of four outputs a thread: shared loads / 4"
    document = "4"                                   # as the document prints it
    quantity = "executed"                            # claim_values.QUANTITIES
    sites = ["E.qd.lds", "E.kd.lds", "E.ki.lds"]     # all that have the quantity if left out
    of = { kernel = "kda_b3@l7c" }                   # of one launch, or the sum of a list of them,
    over = { kernel = "kda_b3@l8" }                  # divided by another
    expect = 4                                       # the criterion; or at_least, at_most
    why = { confirmed = "..." }                      # shown with that verdict

The tables ``of`` and ``over`` inherit ``quantity``, ``sites``, ``kernel`` and ``set`` (kernel parameters) of the claim;
``[params]`` of the file holds the size at which each kernel is taken. ``times`` scales the quotient, ``percent`` turns
it into a change. Counts are those of one CTA, so that a single emulated CTA stands beside a measured grid. In a
kernel's place may stand a ``query`` of the occupancy model and the driver, or a single ``access``.

The model and the measurement are judged apart, and the verdict is what both say. A time is judged by the whole range
that its rounds allow, first decile over last to last over first; a range across the bound settles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf, isclose, isfinite
from pathlib import Path
from typing import Any

from simgpu.errors import SimError
from simgpu.instructions import nearest
from validation.claim_values import COUNTS, QUANTITIES, RATIOS, Range, Reading, measured_value, model_value
from validation.toml_file import read_toml

CONFIRMED, REFUTED, UNSETTLED = "confirmed", "refuted", "cannot be settled here"
VERDICTS = (CONFIRMED, REFUTED, UNSETTLED)


# ---- a claim ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One claim; the module's description says what the fields of the file mean.

    ``inconclusive``: why a number outside the criterion does not refute (the kernel is not the documents' own, say).
    ``unmeasured``: why nothing was measured, and the model alone settles nothing. ``arithmetic``: nothing need be
    measured; where the driver was asked, its answer counts too. ``gpu``: the model's, if the claim names one.
    """

    id: str
    section: str
    text: str
    document: str
    of: tuple[Reading, ...]
    over: tuple[Reading, ...] = ()
    at_least: float = -inf
    at_most: float = inf
    times: float = 1
    percent: bool = False
    unit: str = ""
    gpu: str = ""
    inconclusive: str = ""
    unmeasured: str = ""
    arithmetic: bool = False
    why: Mapping[str, str] = field(default_factory=dict)

    def combine(self, values: Mapping[Reading, Range]) -> Range:
        """The claim's number out of its readings' values."""
        def total(readings: Sequence[Reading], end: str) -> float:
            return sum(getattr(values[reading], end) for reading in readings)

        def number(end: str, opposite: str) -> float:
            below = total(self.over, opposite) if self.over else 1
            if not below:
                raise SimError(f"claim {self.id}: divided by {self.over[0].quantity}, which is 0")
            quotient = self.times * total(self.of, end) / below
            return 100 * (quotient - 1) if self.percent else quotient

        return Range(number("value", "value"), number("low", "high"), number("high", "low"))

    def holds(self, found: Range) -> bool | None:
        """Whether ``found`` meets the criterion; None where its range reaches across the bound."""
        inside = [_at_most(self.at_least, end) and _at_most(end, self.at_most) for end in (found.low, found.high)]
        if all(inside):
            return True
        across = _at_most(found.low, self.at_most) and _at_most(self.at_least, found.high)
        return None if across else False

    def spell(self, found: Range | None) -> str:
        """A number of the claim for people, with its range where it has one.

        >>> Claim("c", "", "", "", (), percent=True).spell(Range(19.64, 17.38, 25.51))
        '+19.6% (+17.4 to +25.5)'
        """
        if found is None:
            return "-"
        spelled = f"{found.value:+.1f}%" if self.percent else f"{round(found.value, 2):,g}{self.unit}"
        if isclose(found.low, found.high):
            return spelled
        low, high = (f"{end:+.1f}" if self.percent else f"{end:.4g}" for end in (found.low, found.high))
        return f"{spelled} ({low} to {high})"


def _at_most(a: float, b: float) -> bool:
    return a <= b or isclose(a, b, rel_tol=1e-9)


@dataclass(frozen=True)
class Finding:
    """A claim with the model's number, the measured one, the verdict and the reason for it."""

    claim: Claim
    model: Range | None
    measured: Range | None
    verdict: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        numbers = {}
        for name, found in (("model", self.model), ("measured", self.measured)):
            ends = (None,) * 3 if found is None else (found.value, found.low, found.high)
            numbers |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
        head = {name: getattr(self.claim, name) for name in ("id", "section", "text", "document")}
        bounds = {name: getattr(self.claim, name) for name in ("at_least", "at_most")}
        head |= {name: bound if isfinite(bound) else None for name, bound in bounds.items()}
        head["unit"] = "%" if self.claim.percent else self.claim.unit.strip()
        return head | numbers | {"verdict": self.verdict, "why": self.why}


def judge(claim: Claim, model: Range | None, measured: Range | None) -> Finding:
    """The verdict: what the model and the measurement say, if they say the same.

    >>> claim = Claim("c", "", "4-way", "4", (), at_least=4, at_most=4)
    >>> judge(claim, Range(4, 4, 4), Range(4, 4, 4)).verdict, judge(claim, Range(8, 8, 8), Range(8, 8, 8)).verdict
    ('confirmed', 'refuted')
    >>> judge(claim, None, Range(4.1, 3.9, 4.3)).why
    'the noise reaches across the bound'
    """
    said = [claim.holds(found) for found in (model, measured) if found is not None]
    if claim.unmeasured:
        verdict, why = UNSETTLED, claim.unmeasured
    elif not said:
        verdict, why = UNSETTLED, "neither modelled nor measured"
    elif None in said:
        verdict, why = UNSETTLED, "the noise reaches across the bound"
    elif len(set(said)) > 1:
        verdict, why = UNSETTLED, "the model and the measurement disagree"
    elif said[0]:
        verdict, why = CONFIRMED, claim.why.get(CONFIRMED, "")
    elif claim.inconclusive:
        verdict, why = UNSETTLED, claim.inconclusive
    else:
        verdict, why = REFUTED, claim.why.get(REFUTED, "")
    return Finding(claim, model, measured, verdict, why)


def evaluate(claim: Claim, measured: Path, gpu: str = "h20") -> Finding:
    """Run the model on ``gpu``, look up what ``measured`` (a folder such as measured/h200) holds, and judge.

    Raises :class:`~simgpu.errors.SimError`, naming the claim, for a kernel, parameter or site that is not there, and
    for a launch that was not measured.
    """
    try:
        ours = _side(claim, lambda reading: model_value(reading, claim.gpu or gpu))
        theirs = None if claim.unmeasured else _side(claim, lambda reading: measured_value(reading, measured))
        if theirs is None and not (claim.unmeasured or claim.arithmetic):
            raise SimError("the driver was not asked")
    except SimError as error:
        raise SimError(f"claim {claim.id}: {error}") from None
    return judge(claim, ours, theirs)


def _side(claim: Claim, value: Callable[[Reading], Range | None]) -> Range | None:
    """The claim's number on one side; None where the side lacks one of its readings."""
    values = {reading: value(reading) for reading in (*claim.of, *claim.over)}
    return None if None in values.values() else claim.combine(values)


# ---- the file --------------------------------------------------------------------------------------------------------

READING = {"kernel", "quantity", "sites", "set", "query", "access"}
CRITERION = {"expect", "rounding"}
ASKED, ANSWERED = {"threads", "registers", "shared_bytes"}, ("blocks", "occupancy")  # of an occupancy query
ACCESS = {"op", "width", "shared"}


def read_claims(path: Path) -> list[Claim]:
    """The claims of a ledger; :class:`~simgpu.errors.SimError` names the file, the claim and what is wrong."""
    document = read_toml(path, ("params", "claim"))
    sizes, entries = document.get("params", {}), document.get("claim", [])
    if not isinstance(sizes, dict) or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise SimError(f"{path}: params is a table by kernel, claim an array of tables")
    claims = [_claim(entry, sizes, f"{path}: claim {entry.get('id', number)}")
              for number, entry in enumerate(entries, 1)]
    ids = [claim.id for claim in claims]
    if repeated := {name for name in ids if ids.count(name) > 1}:
        raise SimError(f"{path}: claim {min(repeated)!r} is there twice")
    return claims


def _claim(entry: Mapping[str, Any], sizes: Mapping[str, Mapping], place: str) -> Claim:
    known = {part.name for part in fields(Claim)} | READING | CRITERION
    if unknown := set(entry) - known:
        raise SimError(f"{place}: unknown key {min(unknown)!r}{nearest(min(unknown), known)}")
    if not {"expect", "at_least", "at_most"} & set(entry):
        raise SimError(f"{place}: no criterion: expect, at_least or at_most")
    parts = {key: value for key, value in entry.items() if key not in READING | CRITERION}
    shared = {key: value for key, value in entry.items() if key in READING}
    for key in ("expect", "rounding", "at_least", "at_most", "times"):
        if type(entry.get(key, 0)) not in (int, float):
            raise SimError(f"{place}: {key} is {entry[key]!r}, not a number")
    for name in (part.name for part in fields(Claim) if part.type == "str"):
        if not isinstance(entry.get(name, ""), str):
            raise SimError(f"{place}: {name} is {entry[name]!r}, not a text")
    if "expect" in entry:
        half = entry.get("rounding", 0)
        parts |= {"at_least": entry["expect"] - half, "at_most": entry["expect"] + half}
    if not set(parts.get("why", {})) <= {CONFIRMED, REFUTED}:
        raise SimError(f"{place}: why is a table of {CONFIRMED} and {REFUTED}")
    try:
        for side in ("of", "over"):
            tables = entry.get(side, [{}] if side == "of" else [])
            parts[side] = tuple(_reading(shared | table, sizes, place)
                                for table in (tables if isinstance(tables, list) else [tables]))
        return Claim(**parts)
    except (TypeError, AttributeError) as error:
        raise SimError(f"{place}: {str(error).partition('__init__() ')[2] or error}") from None


def _reading(table: Mapping[str, Any], sizes: Mapping[str, Mapping], place: str) -> Reading:
    if unknown := set(table) - READING:
        raise SimError(f"{place}: unknown key {min(unknown)!r} of a reading{nearest(min(unknown), READING)}")
    quantity, kernel = table.get("quantity"), table.get("kernel", "")
    query, access = table.get("query", {}), table.get("access", {})
    if quantity not in QUANTITIES:
        raise SimError(f"{place}: unknown quantity {quantity!r}{nearest(str(quantity), QUANTITIES)}")
    if sum(map(bool, (kernel, query, access))) != 1:
        raise SimError(f"{place}: a reading is of a kernel, an occupancy query or an access")
    for what, keys, answers in ((query, ASKED, ANSWERED), (access, ACCESS, (*COUNTS, *RATIOS))):
        if what and (set(what) != keys or quantity not in answers):
            raise SimError(f"{place}: {quantity} of {', '.join(what)}; a query of {', '.join(sorted(ASKED))} has "
                           f"{' and '.join(ANSWERED)}, an access of {', '.join(sorted(ACCESS))} has counts")
    params = sizes.get(kernel.partition("@")[0], {}) | table.get("set", {})
    return Reading(quantity, kernel, tuple(table.get("sites", ())), _items(params), _items(query), _items(access))


def _items(table: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    for name, value in table.items():
        if not isinstance(value, (int, float, str)):
            raise TypeError(f"{name} is {value!r}, neither a number nor a text")
    return tuple(sorted(table.items()))
