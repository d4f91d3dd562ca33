"""The measured rates: how they are worked out, and that the GPU file quotes them."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from models.gpu import load_gpu
from validation import rates

MEASURED = Path(str(files("validation"))) / "measured" / "h200" / rates.NAME
H200 = load_gpu("h200")


def measured(case: str) -> dict:
    return next(run for run in rates.read(MEASURED) if run["case"] == case)


def test_every_case_was_measured_once_and_moved_the_right_data():
    assert [run["case"] for run in rates.read(MEASURED)] == list(rates.CASES)
    origin = json.loads(MEASURED.with_suffix(".provenance.json").read_text(encoding="utf-8"))
    assert origin["gpu"] == "NVIDIA H200" and {"driver", "nvcc", "commit", "flags", "sources"} <= set(origin)


@pytest.mark.parametrize(("stride", "lines"), [(0, 4), (8, 8), (16, 16), (32, 32), (64, 32)])
def test_l1_looks_up_a_line_a_clock(stride, lines):
    clocks = rates.clocks_per_request(measured(f"load,l1=1,own=1,kb=128,ctas=1,passes=64,stride={stride}"))
    assert clocks == pytest.approx(lines / H200.l1_lines_per_clk, rel=0.1) and clocks >= lines


def test_the_gpu_file_quotes_what_was_measured():
    fastest, fewest = measured("load,kb=49152,stride=0"), measured("load,kb=16384,stride=64")
    assert H200.l2_read_bytes_per_clk == round(rates.rate(fastest)[0] * 1000 / H200.clock_boost_mhz)
    requests = rates.rate(fewest)[0] * 1000 / 32 / H200.clock_boost_mhz
    assert H200.l2_requests_per_clk == round(requests)
    turns, unit = rates.rate(measured("red,words=1,apart=1,lanes=32,ctas=4,repeats=16"))
    assert unit == "updates of a word/us"
    assert H200.l2_atomic_clk == round(H200.clock_boost_mhz / turns, 2)
    assert H200.dram_copy_gb_per_s == round(rates.rate(measured("copy,kb=524288"))[0])


def test_words_of_a_sector_take_turns_together_and_sectors_apart():
    turn = H200.clock_boost_mhz / H200.l2_atomic_clk
    for words in (1, 2, 8):  # of one sector: a warp's lanes on different words go together
        assert rates.rate(measured(f"red,words={words},apart=1,lanes=32,ctas=4,repeats={16 * words}"))[0] == \
               pytest.approx(turn, rel=0.01)
    one_lane = rates.rate(measured("red,words=8,apart=1,lanes=1,ctas=4,repeats=128"))[0]
    assert 8 * one_lane == pytest.approx(turn, rel=0.01)


def test_the_command_prints_a_row_a_case():
    result = CliRunner().invoke(rates.main, [])
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 3 + len(rates.CASES)


def test_one_line_and_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for arguments, message in ((["--gpu", "h2"], "h2/rates.jsonl"), (["--out", str(tmp_path)], "nvidia-smi not found")):
        result = CliRunner().invoke(rates.main, arguments)
        assert result.exit_code == 2 and message in result.output and result.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
