"""simgpu replay, access, layout, occupancy, gpus, and what all commands share: help, refusals, formats."""

import csv
import io
import json
import re
from importlib import resources

import numpy as np
import pytest
from click.testing import CliRunner

from models.gpu import gpu_names, load_gpu
from models.occupancy import occupancy
from simgpu.cli import main
from simgpu.cli.main import COMMANDS
from simgpu.events import AccessEvent, Site
from simgpu.instructions import FULL_MASK, instruction
from simgpu.layout import tabulate
from simgpu.layout_spec import parse_layout
from simgpu.trace import TraceWriter

PATTERNS = str(resources.files("validation") / "measured" / "h200" / "patterns.jsonl")
FIT = ("--threads", "256", "--regs", "72", "--smem", "69632")


def run(*args: str, exit_code: int = 0, **kwargs):
    result = CliRunner().invoke(main, list(args), **kwargs)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result


def refused(*args: str, **kwargs) -> str:
    result = run(*args, exit_code=2, **kwargs)
    assert result.stdout == "" and result.stderr.count("\n") == 1 and result.stderr.startswith("Error: ")
    assert len(result.stderr) < 400
    return result.stderr


# ---- replay ----------------------------------------------------------------------------------------------------


def test_replay_prints_one_object_per_measured_access():
    with open(PATTERNS) as file:
        measured = [json.loads(line) for line in file]
    found = [json.loads(line) for line in run("replay", PATTERNS, "--format", "json").stdout.splitlines()]
    assert len(found) == len(measured)
    for case, row in zip(measured, found, strict=True):
        used = instruction(case["op"])
        assert {"wavefronts", "ideal", "sectors", "unmodelled"} <= row.keys() and row["op"] == case["op"]
        assert type(row["unmodelled"]) is bool
        assert used.shared or row["wavefronts"] is row["ideal"] is None
        assert used.global_ or row["sectors"] is None
        if case["op"] == "sts":
            assert row["wavefronts"] == case["counters"]["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st"]


def test_replay_reads_stdin_and_tables_have_a_row_per_site():
    with open(PATTERNS) as file:
        lines = "".join(line for line in file if json.loads(line)["op"] == "lds")
    piped = run("replay", "-", "--format", "csv", input=lines)
    rows = list(csv.DictReader(io.StringIO(piped.stdout)))
    assert [row["width"] for row in rows] == ["1", "2", "4", "8", "16", ""]
    assert int(rows[-1]["wavefronts"]) == sum(int(row["wavefronts"]) for row in rows[:-1])
    objects = [json.loads(line) for line in run("replay", "-", "--format", "json", input=lines).stdout.splitlines()]
    assert int(rows[-1]["wavefronts"]) == sum(row["wavefronts"] for row in objects)


def test_replay_leaves_out_totals_that_would_include_unmodelled_accesses(tmp_path):
    path = str(tmp_path / "t.trace")
    with TraceWriter(path, {}) as writer:
        for order, name in enumerate(("lds", "atom.shared.add.f32")):  # the latter has no proven rule
            site = Site(f"site{order}", "k.py", order, instruction(name), 4)
            shared = np.arange(32, dtype=np.int32).reshape(1, 1, 32) * 8
            masks = np.full((1, 1), FULL_MASK, np.uint32)
            writer.access(AccessEvent(site, masks, masks != 0, shared, None, np.arange(1), 1, order))
    totals = []
    for allow in ([], ["--allow-unmodelled"]):
        rows = list(csv.DictReader(io.StringIO(run("replay", path, "--format", "csv", *allow).stdout)))
        assert [row["wavefronts"] for row in rows[:2]] == ["2", ""]
        totals.append(rows[-1]["wavefronts"])
    assert totals == ["", "2"]
    objects = [json.loads(line) for line in run("replay", path, "--format", "json").stdout.splitlines()]
    assert [(row["wavefronts"], row["unmodelled"]) for row in objects] == [(2, False), (None, True)]


def test_replay_prints_nothing_of_a_file_that_turns_out_bad(tmp_path):
    with open(PATTERNS, "rb") as file:
        good = file.read()
    for name, data in (("half.jsonl", good[:-40]), ("latin.jsonl", good + b'{"\xe9": 1}\n'), ("empty.jsonl", b"")):
        path = tmp_path / name
        path.write_bytes(data)
        for fmt in ("json", "csv", "table"):
            assert name in refused("replay", str(path), "--format", fmt)
        assert "stdin" in refused("replay", "-", input=data)
    for path in (tmp_path, tmp_path / "none"):
        assert f"cannot read {str(path)!r}" in refused("replay", str(path))


def test_replay_refuses_a_damaged_trace(tmp_path):
    path = tmp_path / "t.trace"
    run("conflicts", "transpose", "--ctas", "1", "--save-trace", str(path))
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[data.index(b"shared.npy") + 200] ^= 0xFF
    for content in (data[:-1], data[:100], bytes(damaged), b"PK"):
        path.write_bytes(content)
        for fmt in ("table", "json"):
            assert "t.trace" in refused("replay", str(path), "--format", fmt)


# ---- access and layout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["lane * 128"], {"wavefronts": 32, "ideal": 1, "excessive": 31, "sectors": None}),
        (["lane*4", "--mask", "0xff"], {"wavefronts": 1, "mask": "0x000000ff"}),
        (["lane*16", "--op", "sts", "--width", "16"], {"wavefronts": 4, "ideal": 4}),
        (["lane*64", "--op", "ldg"], {"sectors": 32, "ideal_sectors": 4, "wavefronts": None}),
        (["lane%8*128 + lane//8*16", "--op", "ldmatrix"], {"op": "ldmatrix.x4", "width": 16, "wavefronts": 32}),
        (["lane*16", "--src", "lane*16 ^ 16", "--op", "cp.async.cg"], {"wavefronts": 4, "sectors": 16}),
    ],
)
def test_access_counts_one_warp(args, expected):
    document = json.loads(run("access", *args, "--format", "json").stdout)
    assert expected.items() <= document.items()
    picture = run("access", *args).stdout
    if expected.get("wavefronts"):
        plural = "s" * (expected["wavefronts"] != 1)
        assert f"{expected['wavefronts']} wavefront{plural} (ideal" in picture and "bank" in picture
    row = next(csv.DictReader(io.StringIO(run("access", *args, "--format", "csv").stdout)))
    assert row["wavefronts"] == str(document["wavefronts"] if document["wavefronts"] is not None else "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["open('f')"], "no call is allowed"),
        (["lane.real"], "column 1"),
        (["lane * 1.5"], "1.5"),
        (["lane +"], "expression 'lane +'"),
        (["line * 4"], "line"),
        (["lane * 3"], "lane 1: shared byte address 3 is not a non-negative multiple of 4"),
        (["4 - lane * 4"], "lane 2: shared byte address -4"),
        (["lane * 8192"], "lane 29: shared byte address 237568 lies beyond"),
        (["lane * 4", "--mask", "0x1ffffffff"], "mask 0x1ffffffff is not a 32-bit mask"),
        (["lane * 4", "--mask", "-1"], "not a 32-bit mask"),
        (["lane * 4", "--mask", "x"], "'x' is not an integer"),
        (["lane * 4", "--mask", "9" * 5000], "is not an integer"),
        (["lane * 4", "--mask", "0x" + "f" * 5000], "is not an integer of 64 bits"),
        (["lane * 4", "--width", "3"], "lds has no form of 3 bytes per lane"),
        (["lane * 4", "--width", "4", "--op", "ldmatrix"], "ldmatrix.x4 has no form of 4 bytes"),
        (["lane * 16", "--op", "ldmatrix", "--mask", "1"], "needs all 32 lanes"),
        (["lane * 4", "--op", "ldx"], "unknown instruction 'ldx'"),
        (["lane * 16", "--op", "cp.async.cg"], "--src"),
        (["lane * 4", "--src", "lane"], "--src is for cp.async"),
    ],
)
def test_access_refuses(args, message):
    assert message in refused("access", *args)


def test_layout_prints_offsets_and_banks():
    document = json.loads(run("layout", "K-SW128(8,64)", "--format", "json").stdout)
    table = tabulate(parse_layout("K-SW128(8,64)", 2))
    assert document["offsets"] == table.tolist() and document["shape"] == [8, 64]
    assert document["banks"][1][:8] == [4, 4, 5, 5, 6, 6, 7, 7]  # row 1: offset 72, the swizzle's first chunk
    padded = run("layout", "row(4,4,pad=1)", "--itemsize", "4", "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(padded)))
    assert rows[4] == {"coordinate": "1,0", "offset": "5", "bank": "5"} and len(rows) == 16
    assert "banks" in run("layout", "row(4,4)").stdout
    assert "row(4" in refused("layout", "row(4") and "elements" in refused("layout", "(9999,9999):(1,1)")


# ---- machines ----------------------------------------------------------------------------------------------------


def test_occupancy_is_the_models():
    document = json.loads(run("occupancy", "--gpu", "h200", *FIT, "--format", "json").stdout)
    fit = occupancy(load_gpu("h200"), threads=256, registers=72, shared_bytes=69632)
    assert document == json.loads(json.dumps(fit.as_dict()))
    assert {"blocks_per_sm", "limiter", "limits", "occupancy", "next_step"} <= document.keys()
    assert document["blocks_per_sm"] == 3 and document["limiter"] == "registers, shared"
    text = run("occupancy", "--gpu", "h200", *FIT).stdout
    assert fit.next_step.sentence in text and "0.375" in text
    carved = run("occupancy", "--gpu", "h200", *FIT, "--static-smem", "0x400", "--carveout", "100", "--format", "json")
    assert json.loads(carved.stdout)["limits"]["shared"] == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu", "h21", *FIT], "unknown GPU 'h21'; did you mean 'h20'?"),
        (["--threads", "1025", *FIT[2:]], "threads 1,025 is outside 1..1,024"),
        (["--threads", "x", *FIT[2:]], "'x' is not an integer"),
        ([*FIT[:4], "--smem", "999999"], "exceeds the 232,448 B"),
        ([*FIT[:4], "--smem", "-1"], "shared_bytes -1"),
        ([*FIT, "--carveout", "99"], "no carveout of 99 KB"),
        (FIT[2:], "Missing option '--threads'"),
    ],
)
def test_occupancy_refuses(args, message):
    assert message in refused("occupancy", *args)


def test_gpus_lists_every_gpu_and_every_source():
    rows = json.loads(run("gpus", "--format", "json").stdout)
    assert [row["name"] for row in rows] == list(gpu_names())
    for name in gpu_names():
        facts = json.loads(run("gpus", name, "--format", "json").stdout)
        assert {row["fact"] for row in facts} == set(load_gpu(name).quantities) and all(row["source"] for row in facts)
        assert name in run("gpus").stdout
    assert "did you mean 'h200'" in refused("gpus", "h200x")


# ---- what all commands share -----------------------------------------------------------------------------------


def test_help_lists_the_commands_and_shows_how_each_is_called():
    text = run("--help").stdout
    assert all(f"\n  {command} " in text for command in COMMANDS) and "Examples:" in text
    for command in COMMANDS:
        _, examples = run(command, "--help").stdout.split("Examples:\n")
        assert f"\n  simgpu {command}" in f"\n{examples}"
    assert run("--version").stdout.startswith("simgpu, version")


def test_a_mistyped_command_is_answered_with_the_nearest():
    assert "Did you mean 'conflicts'?" in refused("conflict")
    assert "No such option" in refused("--nothing")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_survives_an_encoding_without_box_characters(encoding):
    for args in (["gpus"], ["conflicts", "transpose", "--ctas", "1"], ["access", "lane*4"], ["layout", "row(2,2)"]):
        result = CliRunner(charset=encoding).invoke(main, args)
        assert result.exit_code == 0 and result.stdout.isascii() and result.stdout.strip()


def test_a_terminal_gets_colours_and_its_own_width():
    for width in (80, 100):
        environment = {"FORCE_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm-256color", "NO_COLOR": None}
        result = CliRunner(env=environment).invoke(main, ["conflicts", "transpose", "--ctas", "1"], color=True)
        assert re.search(r"\x1b\[1;31m *992\x1b", result.stdout)
        plain = CliRunner(env=environment | {"NO_COLOR": "1"}).invoke(main, ["conflicts", "transpose", "--ctas", "1"])
        assert max(map(len, plain.stdout.splitlines())) <= width
