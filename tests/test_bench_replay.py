"""The benchmark of the replay: its contenders agree, and one that does not stops it."""

import shutil

import click
import pytest
from click.testing import CliRunner

from validation.bench_replay import Entry, main, race


@pytest.mark.skipif(shutil.which("cc") is None, reason="the yardstick is compiled C")
def test_all_contenders_agree_and_every_case_has_a_row():
    result = CliRunner().invoke(main, ["--accesses", "600", "--repeat", "1"])
    assert result.exit_code == 0, result.output
    for load in ("LDS.32", "LDS.128"):
        rows = [line for line in result.output.splitlines() if f" {load} " in line]
        assert [row.count("x)") for row in rows] == [5, 5, 5, 4]  # tensor-layouts has no layout for random addresses


def test_a_contender_that_counts_wrong_is_refused():
    field = {"right": Entry(10, lambda: 30), "wrong": Entry(5, lambda: 14)}
    with pytest.raises(click.ClickException, match="wrong counts 14 wavefronts, not 15"):
        race(field, lambda accesses: 3 * accesses, repeat=1)
