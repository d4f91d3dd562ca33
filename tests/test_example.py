"""The README's worked example, tests/stencil.py: from a CUDA snippet to a table, and to a better block shape."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from simgpu.cli import main

FILE = Path(__file__).parent / "stencil.py"
README = (FILE.parent.parent / "README.md").read_text(encoding="utf-8")


def sites(*args: str) -> dict[str, dict]:
    run = CliRunner().invoke(main, ["conflicts", f"{FILE}:stencil", "--format", "json", *args])
    assert run.exit_code == 0, run.output
    return {row["site"]: row for row in json.loads(run.output)["sites"]}


def by_hand(n: int, width: int, dy: int, dx: int) -> int:
    """Wavefronts of reading tile[ty + dy][tx + dx] at every inner point: per warp, the words of its fullest bank."""
    words = defaultdict(lambda: defaultdict(set))
    for row in range(1, n - 1):
        for column in range(1, n - 1):
            ty, tx = row % (256 // width), column % width
            warp = (row // (256 // width), column // width, (ty * width + tx) // 32)
            word = (ty + 1 + dy) * (width + 2) + tx + 1 + dx
            words[warp][word % 32].add(word)
    return sum(max(map(len, banks.values())) for banks in words.values())


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("site, dy, dx", [("read.up", -1, 0), ("read.right", 0, 1), ("read.centre", 0, 0)])
def test_the_table_is_what_counting_by_hand_gives(width, site, dy, dx):
    found = sites("--set", "n=64", "--set", f"width={width}", "--mode", "addresses")
    assert found[site]["wavefronts"] == by_hand(64, width, dy, dx)


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_the_result_is_right(width):
    sites("--set", "n=64", "--set", f"width={width}", "--mode", "values")  # refused if check() is not content


def test_a_wrong_result_is_refused(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(FILE.read_text().replace("* 0.2", "* 0.25"))
    run = CliRunner().invoke(main, ["conflicts", f"{wrong}:stencil", "--set", "n=64", "--mode", "values"])
    assert run.exit_code == 2 and "the result is wrong" in run.output


def test_sixteen_wide_blocks_conflict_and_wide_ones_do_not():
    narrow, wide = sites(), sites("--set", "width=32")
    assert narrow["tile.store"]["n_way"] == 2
    assert all(row["excessive"] in (0, None) for row in wide.values())
    assert narrow["x.left"]["sectors"] > 2 * wide["x.left"]["sectors"]


def test_the_readme_shows_this_very_file():
    assert f"```python\n{FILE.read_text(encoding='utf-8')}```" in README
