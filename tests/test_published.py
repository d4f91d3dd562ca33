"""The published cases: every one holds, each could fail, and a case that does not hold together is refused."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from simgpu.cli import main
from simgpu.cli.validate import SHIPPED
from simgpu.errors import SimError
from validation.published import KINDS, PUBLISHED, Access, compare_case, count, read_cases

CASES = read_cases(SHIPPED / PUBLISHED)
GOOD = """[[case]]
id = "column"
gpu = "h20"
source = "somewhere"
pattern = "a column"
[[case.access]]
site = "read"
op = "lds"
width = 4
shared = "128 * lane + 4 * i"
vary = { i = 4 }
executed = "2 * 8"
[[case.published]]
kind = "hardware"
quantity = "excessive"
value = 500
noise = 0.5
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_published_case_holds_and_would_fail_with_another_number(case):
    assert {row.verdict for row in compare_case(case).comparisons} <= {"equal", "within noise"}
    for number, value in enumerate(case.published):
        executed = max((row.executed for row in map(count, case.access)), default=64)
        off = dataclasses.replace(value, value=value.value + 1 + value.rounding + 100 * value.noise * executed)
        wrong = (*case.published[:number], off, *case.published[number + 1:])
        verdicts = [row.verdict for row in compare_case(dataclasses.replace(case, published=wrong)).comparisons]
        assert verdicts[number] == "different" and verdicts.count("different") == 1


def test_cases_are_many_of_every_kind_and_say_where_they_come_from():
    assert all(case.source and case.pattern for case in CASES)
    assert len([case for case in CASES if case.stands_for("h20")]) >= 10
    assert len([case for case in CASES if case.stands_for("a100-80g")]) >= 10
    kinds = {value.kind for case in CASES for value in case.published}
    assert kinds <= set(KINDS) and kinds >= {"sass", "derived", "hardware", "driver", "arithmetic"}


@pytest.mark.parametrize("gpu, there, absent", [
    ("a100-80g", {"a100-80g", "a800"}, {"h20"}), ("a800", {"a100-80g", "a800"}, {"h20"}),
    ("h20", {"h20"}, {"a800"}), ("all", {"h20", "a800", "any"}, set()),
])
def test_validate_picks_the_cases_of_a_chip_and_says_each_kind(gpu, there, absent):
    result = CliRunner().invoke(main, ["validate", PUBLISHED, "--gpu", gpu, "--format", "json"])
    document = json.loads(result.stdout)
    found = {case["gpu"] for case in document["cases"]}
    assert result.exit_code == 0 and found >= there and not found & absent
    assert all(row["kind"] in KINDS for case in document["cases"] for row in case["comparisons"])
    assert document["total"]["sites"] == sum(len(case["comparisons"]) for case in document["cases"])


def one(tmp_path, text):
    (tmp_path / "cases.toml").write_text(text)
    return [compare_case(case) for case in read_cases(tmp_path)]


def test_noise_is_a_share_of_the_instructions(tmp_path):
    # 16 instructions of 31 conflicts each make 496; half a conflict per instruction allows 8 more.
    assert one(tmp_path, GOOD)[0].comparisons[0].verdict == "within noise"
    assert one(tmp_path, GOOD.replace("value = 500", "value = 504"))[0].comparisons[0].verdict == "within noise"
    assert one(tmp_path, GOOD.replace("value = 500", "value = 505"))[0].comparisons[0].verdict == "different"


def test_variations_share_the_executions():
    both = count(Access("lds", 4, 8, shared="4 * lane * (1 + 31 * bad)", vary={"bad": 2}))
    assert (both.executed, both.wavefronts, both.ideal) == (8, 4 * 1 + 4 * 32, 8)


@pytest.mark.parametrize("old, new, words", [
    ('kind = "hardware"', 'kind = "guess"', "kind 'guess' is none of"),
    ('kind = "hardware"', 'kind = "sass"', "state their noise"),
    ("noise = 0.5", "", "state their noise"),
    ('id = "column"', 'id = "column"\ncolour = "red"', "unknown key 'colour'"),
    ('source = "somewhere"\n', "", "source"),
    ('quantity = "excessive"', 'quantity = "speed"', "unknown quantity 'speed'"),
    ('quantity = "excessive"', 'quantity = "excessive"\nsites = ["write"]', "no site 'write'"),
    ('executed = "2 * 8"', 'executed = "2 * 7"', "do not share out"),
    ('executed = "2 * 8"', 'executed = "lane"', "unknown name 'lane'"),
    ("shared =", "global =", "lds needs shared address"),
    ("128 * lane + 4 * i", "128 * lane + j", "unknown name 'j'"),
    ("128 * lane + 4 * i", "128 * lane + i", "not a non-negative multiple of 4"),
    ("width = 4", "width = 3", "no form of 3 bytes"),
    ('op = "lds"', 'op = "ldx"', "unknown instruction 'ldx'"),
    ("[[case.access]]", "[case.occupancy]\nthreads = 1\n[[case.access]]", "needs published values, and accesses or"),
    ("[[case]]", "[[cases]]", "unknown table"),
    ("[[case]]", "[[case", "cases.toml"),
])
def test_a_case_that_does_not_hold_together_is_refused(tmp_path, old, new, words):
    with pytest.raises(SimError) as refusal:
        one(tmp_path, GOOD.replace(old, new, 1))
    assert words in str(refusal.value)


def test_like_borrows_accesses_and_ids_are_unique(tmp_path):
    like = GOOD[:GOOD.index("[[case.access]]")].replace("column", "again") + 'like = "column"\n'
    like += GOOD[GOOD.index("[[case.published]]"):]
    first, second = one(tmp_path, GOOD + like)
    assert first.comparisons == second.comparisons and second.case == "again"
    with pytest.raises(SimError, match="has no accesses of its own"):
        one(tmp_path, like)
    with pytest.raises(SimError, match="'column' is there twice"):
        one(tmp_path, GOOD + GOOD)
