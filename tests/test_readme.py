"""The README stays true: its commands print what it shows, and its kernel runs."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from simgpu.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ simgpu (.*?)\n(.*?)```", README, re.S)
KERNEL = re.search(r"becomes `(\w+\.py)`:\n\n```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("command, output", EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_commands_print_what_the_readme_shows(command, output):
    run = CliRunner().invoke(main, shlex.split(command))
    assert run.exit_code == 0, run.output
    assert run.output == output


def test_the_readme_shows_commands():
    assert len(EXAMPLES) >= 4


def test_the_readmes_kernel_runs_without_registration(tmp_path):
    (tmp_path / KERNEL[1]).write_text(KERNEL[2], encoding="utf-8")
    ways = []
    for settings in ([], ["--set", "pad=1"]):
        run = CliRunner().invoke(main, ["conflicts", f"{tmp_path / KERNEL[1]}:column", "--format", "json", *settings])
        ways += [row["n_way"] for row in json.loads(run.output)["sites"] if row["site"] == "tile.load"]
    assert ways == [32, 1]
