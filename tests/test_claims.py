"""The ledger of claims: numbers out of model and measurement, verdicts that follow them, refusals."""

import csv
import io
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from simgpu.cli import main
from simgpu.cli.claims import select
from simgpu.errors import SimError
from validation import claims
from validation.claim_values import Range, Reading, exact, measured_value, model_value
from validation.claims import CONFIRMED, REFUTED, UNSETTLED, Claim, evaluate, judge, read_claims

VALIDATION = Path(claims.__file__).parent
H200 = VALIDATION / "measured" / "h200"
LEDGER = {claim.id: claim for claim in read_claims(VALIDATION / "claims.toml")}
KDA = (("heads", 8), ("tokens", 8192))


@cache
def found(name):
    return evaluate(LEDGER[name], H200)


def run(*arguments):
    return CliRunner().invoke(main, ["claims", *map(str, arguments)])


def altered(folder, kernel, change):
    """The measured runs of ``kernel`` in ``folder``, each changed by ``change(run)``."""
    document = json.loads((H200 / f"{kernel}.json").read_text(encoding="utf-8"))
    for entry in document["runs"]:
        change(entry)
    folder.mkdir(parents=True)
    (folder / f"{kernel}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


# ---- the shipped ledger ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEDGER)
def test_where_both_sides_have_a_number_they_agree(name):
    finding = found(name)
    assert finding.model is not None or finding.measured is not None
    if None not in (finding.model, finding.measured):
        assert finding.model.value == pytest.approx(finding.measured.value, rel=1e-12)
        assert finding.measured.low == finding.measured.high


@pytest.mark.parametrize("name, verdict, value", [
    ("gemm-loads-A1", CONFIRMED, 32),
    ("gemm-loads-A3", CONFIRMED, 8),
    ("gemm-B-plain", CONFIRMED, 4),
    ("gemm-B-plain-ldsm", REFUTED, 8),
    ("gemm-B-swizzled", REFUTED, 1),
    ("gemm-bytes-A3", CONFIRMED, 1),
    ("gemm-bandwidth-A3", UNSETTLED, 75),
    ("gemm-bandwidth-A1", UNSETTLED, 100),
    ("b1-stage-128", CONFIRMED, 8),
    ("b1-stage-132", REFUTED, 2),
    ("b1-stage-best", CONFIRMED, 1),
    ("b2-noalias-bytes", UNSETTLED, 76),
    ("b3-l6-bytes", CONFIRMED, 100.75),
    ("b3-l7-blocks", CONFIRMED, 3),
    ("b3-l8-loads", CONFIRMED, 4),
    ("b3-k1-stride8", REFUTED, 8),
    ("b3-k1-vec8", CONFIRMED, 2),
    ("b3-atomics-before", CONFIRMED, 256),
    ("unsplit-occupancy", CONFIRMED, 12.5),
    ("occupancy-76KB", REFUTED, 2),
    ("occupancy-76000B", CONFIRMED, 3),
    ("occupancy-57KB", REFUTED, 3),
    ("occupancy-85-registers", REFUTED, 2),
    ("ldmatrix-row-major", REFUTED, 2),
])
def test_what_the_model_makes_of_a_claim(name, verdict, value):
    assert found(name).verdict == verdict
    assert found(name).model.value == pytest.approx(value)


@pytest.mark.parametrize("name, verdict", [
    ("b0-l13-time", REFUTED),
    ("b0-l12-time", REFUTED),
    ("b3-l8-time", REFUTED),
    ("b3-l8-registers", UNSETTLED),
    ("rank-atomics", CONFIRMED),
    ("rank-step-B2", CONFIRMED),
    ("rank-step-B3", REFUTED),
    ("rank-step-B1", UNSETTLED),
])
def test_what_only_a_measurement_can_tell(name, verdict):
    assert found(name).verdict == verdict
    assert found(name).model is None


@pytest.mark.parametrize("name", LEDGER)
def test_every_criterion_can_be_met_and_missed(name):
    claim = LEDGER[name]
    inside = exact(max(claim.at_least, min(claim.at_most, 0)))
    outside = exact(claim.at_most + 1 if claim.at_most < 1e300 else claim.at_least - 1)
    met, missed = judge(claim, inside, inside).verdict, judge(claim, outside, outside).verdict
    if claim.unmeasured:
        assert met == missed == UNSETTLED
    else:
        assert (met, missed) == (CONFIRMED, UNSETTLED if claim.inconclusive else REFUTED)


def test_a_verdict_says_why_unless_the_number_does():
    for name in LEDGER:
        if found(name).verdict == UNSETTLED:
            assert found(name).why


# ---- another kernel, another measurement -----------------------------------------------------------------------------


def test_another_parameter_changes_the_verdict():
    claim = LEDGER["b1-stage-132"]
    reading = replace(claim.of[0], kernel="kda_b1@movm", params=(*KDA, ("stage_stride", 136), ("stage_vec", 2)))
    assert evaluate(replace(claim, of=(reading,)), H200).verdict == CONFIRMED


def test_another_gpu_changes_the_verdict():
    assert evaluate(LEDGER["occupancy-76000B"], H200, "a100-80g").verdict == REFUTED
    assert found("occupancy-76000B").verdict == CONFIRMED


def test_a_count_measured_otherwise_changes_the_verdict(tmp_path):
    def double(run):
        for name in ("l1_wavefronts_shared", "l1_wavefronts_shared_excessive"):
            row = run["sites"]["stage.store"]
            row[name] = 2 * row.get(name, 0)

    finding = evaluate(LEDGER["b1-stage-128"], altered(tmp_path / "m", "kda_b1", double))
    assert (finding.verdict, finding.measured.value, finding.model.value) == (UNSETTLED, 16, 8)
    assert finding.why == "the model and the measurement disagree"


@pytest.mark.parametrize("factor, verdict", [(1, REFUTED), (0.89, CONFIRMED), (0.8776, UNSETTLED), (0.5, REFUTED)])
def test_a_time_measured_otherwise_changes_the_verdict(tmp_path, factor, verdict):
    def scale(run):
        median = run["time"]["median_us"] * (factor if run["variant"] == "l13" else 1)
        run["time"] = {"median_us": median, "low_us": median * 0.999, "high_us": median * 1.001}

    folder = altered(tmp_path / "m", "kda_b2", scale)
    assert evaluate(LEDGER["b0-l13-time"], folder).verdict == verdict


@pytest.mark.parametrize("name, kernel, key, value", [
    ("b3-l7-blocks", "kda_b3", "blocks_per_sm", 2),
    ("b3-l7-bytes", "kda_b3", "dynamic_shared_bytes", 72 * 1024),
    ("b3-l8-registers", "kda_b3", "registers", 74),
])
def test_a_launch_measured_otherwise_changes_the_verdict(tmp_path, name, kernel, key, value):
    folder = altered(tmp_path / "m", kernel, lambda run: run.update({key: value}))
    assert evaluate(LEDGER[name], folder).verdict != found(name).verdict


def test_the_drivers_answer_counts(tmp_path):
    text = (H200 / "occupancy.csv").read_text(encoding="utf-8")
    (tmp_path / "occupancy.csv").write_text(text.replace("64,0,256,58368,3", "64,0,256,58368,4"), encoding="utf-8")
    assert found("occupancy-57KB").measured == exact(3)
    assert evaluate(LEDGER["occupancy-57KB"], tmp_path).verdict == UNSETTLED


def test_a_single_access_is_found_by_its_addresses(tmp_path):
    line = {"op": "ldmatrix.x4", "bytes_per_lane": 16, "active_mask": "0xffffffff",
            "shared_byte_offset": [32 * lane + 48 for lane in range(32)],
            "counters": {"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld": 16,
                         "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld": 12}}
    path = tmp_path / "patterns.jsonl"
    for shift, expected in ((0, 4), (128, 4)):
        moved = line | {"shared_byte_offset": [address + shift for address in line["shared_byte_offset"]]}
        path.write_text(json.dumps(moved) + "\n", encoding="utf-8")
        assert measured_value(LEDGER["ldmatrix-row-major"].of[0], tmp_path) == exact(expected)
    path.write_text(json.dumps(line | {"shared_byte_offset": [32 * lane for lane in range(32)]}) + "\n")
    with pytest.raises(SimError, match="was not measured"):
        measured_value(LEDGER["ldmatrix-row-major"].of[0], tmp_path)


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_a_claims_number_is_of_sums_scaled_and_may_be_a_change():
    a, b, c = (Reading("time", f"k@{name}") for name in "abc")
    values = {a: Range(10, 9, 12), b: exact(5), c: Range(20, 16, 25)}
    assert Claim("x", "", "", "", (a, b), (c,)).combine(values) == Range(0.75, 14 / 25, 17 / 16)
    assert Claim("x", "", "", "", (a,), times=2).combine(values) == Range(20, 18, 24)
    assert Claim("x", "", "", "", (b,), (b,), percent=True).combine(values) == exact(0)
    with pytest.raises(SimError, match=r"claim x: divided by time, which is 0"):
        Claim("x", "", "", "", (a,), (b,)).combine({a: exact(1), b: exact(0)})


times = st.floats(1, 1e6)


@given(st.lists(times, min_size=3, max_size=3), st.lists(times, min_size=3, max_size=3), st.booleans())
def test_the_range_of_a_quotient_holds_every_quotient(above, below, percent):
    over, under = Reading("time", "k@a"), Reading("time", "k@b")
    claim = Claim("x", "", "", "", (over,), (under,), percent=percent)
    ranges = [Range(values[1], values[0], values[2]) for values in (sorted(above), sorted(below))]
    whole = claim.combine(dict(zip((over, under), ranges, strict=True)))
    for a in above:
        for b in below:
            one = claim.combine({over: exact(a), under: exact(b)}).value
            assert whole.low <= one <= whole.high


@given(times, times, times, times)
def test_a_range_is_inside_outside_or_across(a, b, c, d):
    (low, high), (least, most) = sorted((a, b)), sorted((c, d))
    holds = Claim("x", "", "", "", (), at_least=least, at_most=most).holds(Range(low, low, high))
    if holds:
        assert least * (1 - 1e-9) <= low <= high <= most * (1 + 1e-9)
    elif holds is None:
        assert low <= most * (1 + 1e-9) and high >= least * (1 - 1e-9)
    else:
        assert high < least or low > most


def test_model_and_measurement_must_say_the_same():
    claim = Claim("x", "", "", "", (), at_least=2, at_most=2)
    assert judge(claim, exact(2), exact(3)).verdict == UNSETTLED
    assert judge(claim, exact(3), exact(3)).verdict == REFUTED
    assert judge(claim, None, None).why == "neither modelled nor measured"


def test_bytes_of_ldmatrix_are_those_of_its_matrices():
    assert model_value(Reading("bytes", "hgemm_ladder@A3", ("B.ldsm",), (("k", 128), ("m", 512), ("n", 256))),
                       "h200") == exact(256 * 2 * 128)  # 8 warps x 8 k16 steps x 4 ldmatrix.x2


@pytest.mark.parametrize("reading, words", [
    (Reading("n_way", "kda_b1@movm", ("stage.stor",), KDA), ("no site 'stage.stor'", "did you mean 'stage.store'")),
    (Reading("n_way", "kda_b1@movn", (), KDA), ("no variant 'movn'",)),
    (Reading("n_way", "kda_b1@movm", ("dv.store",), KDA), ("wavefronts does not apply",)),
    (Reading("n_way", "kda_b1@movm", (), (("tokns", 8),)), ("no parameter 'tokns'",)),
    (Reading("blocks", "transpose@plain", (), ()), ("does not say its registers",)),
])
def test_a_reading_of_what_is_not_there_is_refused(reading, words):
    with pytest.raises(SimError) as refusal:
        model_value(reading, "h20")
    assert all(word in str(refusal.value) for word in words)


def test_a_launch_that_was_not_measured_is_refused():
    with pytest.raises(SimError, match=r"kda_b1@movm,heads=3,tokens=8192 was not measured"):
        measured_value(Reading("time", "kda_b1@movm", (), (("heads", 3), ("tokens", 8192))), H200)
    with pytest.raises(SimError, match="claim x: the driver was not asked"):
        query = (("registers", 85), ("shared_bytes", 0), ("threads", 256))
        evaluate(Claim("x", "", "", "", (Reading("blocks", query=query),)), H200)


# ---- the file --------------------------------------------------------------------------------------------------------

ENTRY = {"id": "x", "section": "s", "text": "t", "document": "1", "kernel": "transpose@pad1", "quantity": "n_way",
         "sites": ["tile.load"], "expect": 1}


def toml(*entries):
    """Entries as TOML, whose strings, numbers and lists are JSON's."""
    def spell(value):
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{key} = {spell(item)}" for key, item in value.items()) + " }"
        if isinstance(value, list):
            return f"[{', '.join(map(spell, value))}]"
        return json.dumps(value)

    return "\n".join("[[claim]]\n" + "\n".join(f"{key} = {spell(value)}" for key, value in entry.items())
                     for entry in entries)


@pytest.mark.parametrize("entry, words", [
    (ENTRY | {"verdict": "confirmed"}, ("unknown key 'verdict'",)),
    (ENTRY | {"quantity": "n_ways"}, ("unknown quantity 'n_ways'", "did you mean 'n_way'")),
    ({key: value for key, value in ENTRY.items() if key != "expect"}, ("no criterion",)),
    ({key: value for key, value in ENTRY.items() if key != "text"}, ("text",)),
    ({key: value for key, value in ENTRY.items() if key != "kernel"}, ("of a kernel, an occupancy query or",)),
    (ENTRY | {"expect": "one"}, ("expect is 'one', not a number",)),
    (ENTRY | {"times": True}, ("times is True",)),
    (ENTRY | {"why": ["no"]}, ("why is a table",)),
    (ENTRY | {"sites": 3}, ("claim x",)),
    (ENTRY | {"over": 3}, ("claim x",)),
    (ENTRY | {"kernel": 3}, ("claim x",)),
    (ENTRY | {"text": 3}, ("text is 3",)),
    (ENTRY | {"kernel": "", "query": {"threads": 256}}, ("claim x", "n_way of threads")),
    (ENTRY | {"kernel": "", "quantity": "blocks", "query": {"threads": 256}}, ("blocks of threads",)),
    (ENTRY | {"kernel": "", "quantity": "time", "access": {"op": "lds", "width": 4, "shared": "0"}}, ("time of op",)),
    (ENTRY | {"set": {"rows": [1]}}, ("rows is [1]",)),
])
def test_a_damaged_claim_is_refused_in_one_line(tmp_path, entry, words):
    path = tmp_path / "ledger.toml"
    path.write_text(toml(entry), encoding="utf-8")
    result = run("--ledger", path)
    assert result.exit_code == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert all(word in result.stderr for word in ("ledger.toml", *words)), result.stderr


@pytest.mark.parametrize("text", ["[[claim]", "[claims]", "claim = 3", "params = 3", toml(ENTRY, ENTRY)])
def test_a_damaged_ledger_is_refused(tmp_path, text):
    path = tmp_path / "ledger.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SimError, match=r"ledger\.toml"):
        read_claims(path)


def test_a_ledger_of_ones_own(tmp_path):
    path = tmp_path / "ledger.toml"
    size = "[params]\ntranspose = { rows = 64, cols = 64 }\n"
    ratio = {"of": [{}, {"kernel": "transpose@plain"}], "over": {}, "expect": 32, "rounding": 1}
    path.write_text(size + toml(ENTRY | ratio | {"set": {"cols": 96}}), encoding="utf-8")
    (claim,) = read_claims(path)
    assert (claim.at_least, claim.at_most) == (31, 33)
    assert {reading.params for reading in claim.of} == {(("cols", 96), ("rows", 64))}
    finding = evaluate(replace(claim, unmeasured="of a size that nobody measured"), H200)
    assert finding.model == exact(33) and finding.verdict == UNSETTLED


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_table_is_grouped_and_fits_120_columns():
    result = run()
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 120
    sections = list(dict.fromkeys(claim.section for claim in LEDGER.values()))
    assert [line for line in result.stdout.splitlines() if line in sections] == sections
    counts = re.search(r"^(\d+) claims: (\d+) confirmed, (\d+) refuted, (\d+) cannot", result.stdout, re.M)
    total, *parts = map(int, counts.groups())
    assert total == len(LEDGER) == sum(parts) and min(parts) > 0


def test_csv_and_json_hold_every_claim():
    rows = list(csv.DictReader(io.StringIO(run("--format", "csv").stdout)))
    document = json.loads(run("--format", "json").stdout)
    assert [row["id"] for row in rows] == [row["id"] for row in document["claims"]] == list(LEDGER)
    assert [row["verdict"] for row in rows] == [found(name).verdict for name in LEDGER]
    assert sum(document["verdicts"].values()) == len(LEDGER)
    strict = json.dumps(document, allow_nan=False)  # an open bound is null, not Infinity
    assert json.loads(strict) == document


def test_ids_choose_claims():
    def ids(*wanted):
        return [claim.id for claim in select(list(LEDGER.values()), wanted)]

    assert ids("b3-l8-time") == ["b3-l8-time", "b3-l8-time-a1d"]
    assert ids("b3-l7", "b1-bytes") == ["b1-bytes", "b3-l7-bytes", "b3-l7-blocks"]
    assert ids() == list(LEDGER)
    result = run("b1-stage-13x")
    assert result.exit_code == 2 and "did you mean 'b1-stage-132'" in result.stderr


def test_a_damaged_measurement_is_refused_with_the_claim(tmp_path):
    folder = altered(tmp_path / "m", "kda_b1", lambda run: run.pop("time"))
    result = run("b1-stage-best-time", "--measured", folder)
    assert result.exit_code == 2 and "claim b1-stage-best-time" in result.stderr and "'time'" in result.stderr
    folder = altered(tmp_path / "n", "kda_b1", lambda run: run["sites"].pop("stage.store"))
    result = run("b1-stage-128", "--measured", folder)
    assert result.exit_code == 2 and "stage.store" in result.stderr
    assert run("b1-bytes", "--measured", tmp_path / "none").exit_code == 2
    assert run("b1-bytes", "--gpu", "h2000").exit_code == 2
