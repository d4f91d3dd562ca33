"""simgpu conflicts: the table, its formats, traces, and kernels of the user's own."""

import csv
import io
import json
import os
import signal

import pytest
from click.testing import CliRunner

from kernels_py import registered
from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.cli import main

OWN = """
import os, signal
import numpy as np
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, float32

@kernel(wide={"stride": 2})
def strided(*, stride: int = 1) -> Launch:
    return Launch(read, grid=3, block=64, args=(stride,), registers=40)

def read(cta, stride):
    words = cta.shared("words", float32, (64 * stride,))
    cta.store(words[cta.tid * stride], 1.0, site="fill")
    cta.load(words[cta.tid * stride], site="read")

def large(*, bytes: int = 200000):
    def body(cta):
        words = cta.shared("words", float32, (bytes // 4,))
        cta.store(words[cta.lane], 1.0)
    return Launch(body, grid=1, block=32)

def filled():
    def body(cta, src):
        words = cta.shared("words", float32, (256,))
        cta.cp_async(words[cta.lane * 4], src[cta.lane * 4], 16, src_bytes=8, site="filled")
        cta.cp_async(words[128 + cta.lane * 4], src[cta.lane * 4], 16, site="copied")
        cta.cp_async_commit()
        cta.cp_async_wait()
        cta.load(words[cta.lane], site="read")
    return Launch(body, grid=2, block=32, args=(GlobalTensor("src", float32, (128,)),))

def raising():
    def body(cta):
        words = cta.shared("words", float32, (32,))
        cta.store(words[cta.lane], 1.0)
        [][7]
    return Launch(body, grid=1, block=32)

def bad_host(): return [][7]

def leaving(): raise SystemExit(0)

def interrupted():
    def body(cta):
        words = cta.shared("words", float32, (32,))
        cta.store(words[cta.lane], 1.0)
        os.kill(os.getpid(), signal.SIGINT)
        cta.store(words[cta.lane], 1.0)
    return Launch(body, grid=1, block=32)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str, exit_code: int = 0):
    result = CliRunner().invoke(main, ["conflicts", *args])
    assert result.exit_code == exit_code, result.output
    return result


def refused(*args: str) -> str:
    """The one line of a refusal; nothing else may have been written."""
    before = sorted(os.listdir())
    result = run(*args, exit_code=2)
    assert result.stdout == "" and result.stderr.count("\n") == 1 and result.stderr.startswith("Error: ")
    assert len(result.stderr) < 300
    after = [name for name in os.listdir() if name != "__pycache__"]
    assert sorted(after) == [name for name in before if name != "__pycache__"]
    return result.stderr


def test_the_table_says_what_the_textbook_says():
    document = json.loads(run("transpose@plain", "--ctas", "4", "--format", "json").stdout)
    rows = {row["site"]: row for row in document["sites"]}
    assert (rows["tile.load"]["wavefronts"], rows["tile.load"]["excessive"]) == (4 * 32 * 32, 4 * 32 * 31)
    assert rows["tile.load"]["n_way"] == 32 and rows["tile.store"]["excessive"] == 0
    assert rows["src.load"]["sectors_per_request"] == rows["dst.store"]["sectors_per_request"] == 4
    rows = json.loads(run("transpose@pad1", "--ctas", "4", "--format", "json").stdout)["sites"]
    assert {row["excessive"] for row in rows} == {0, None}


def test_totals_are_sums_and_ratios_of_sums():
    document = json.loads(run("transpose", "--ctas", "4", "--format", "json").stdout)
    total, sites = document["total"], document["sites"]
    for name in ("executed", "wavefronts", "ideal", "excessive", "sectors", "ideal_sectors", "lines"):
        assert total[name] == sum(row[name] or 0 for row in sites)
    assert total["sectors_per_request"] == 4  # of the requests to global memory, not of all instructions
    assert total["n_way"] == 16.5
    assert (document["ctas"], document["ctas_in_grid"], document["gpu"]) == (4, 16384, "h20")


def test_every_format_shows_every_site():
    sites = ["src.load", "tile.store", "tile.load", "dst.store"]
    table = run("transpose", "--ctas", "2").stdout
    markdown = run("transpose", "--ctas", "2", "--format", "md").stdout
    for site in sites:
        assert site in table and f"| {site} | transpose.py:" in markdown
    assert max(map(len, table.splitlines()[:9])) <= 140
    assert "32" in table and "wavefronts" in table and "unmodelled" not in table
    rows = list(csv.DictReader(io.StringIO(run("transpose", "--ctas", "2", "--format", "csv").stdout)))
    assert [row["site"] for row in rows] == [*sites, "total"]
    assert " ".join(rows[0]) == (
        "site where instruction width executed requests wavefronts ideal excessive wavefronts_per_instruction n_way "
        "sectors ideal_sectors sectors_per_request lines bytes unmodelled"
    )


def test_a_kernel_of_ones_own_needs_no_registration():
    table = run("own.py:strided", "--format", "csv").stdout
    doubled = run("own.py:strided@wide", "--format", "csv").stdout
    assert doubled == run("./own.py:strided", "--set", "stride=0x2", "--format", "csv").stdout
    count = [list(csv.DictReader(io.StringIO(text)))[1] for text in (table, doubled)]
    assert [row["n_way"] for row in count] == ["1.0", "2.0"] and count[0]["where"].startswith("own.py:")


def test_a_name_the_output_cannot_hold_is_escaped():
    os.rename("own.py", "tuil\xe9.py")
    for fmt in ("table", "csv", "md"):
        result = CliRunner(charset="ascii").invoke(main, ["conflicts", "tuil\xe9.py:strided", "--format", fmt])
        assert result.exit_code == 0 and "tuil\\xe9.py:" in result.stdout


def test_the_occupancy_line_is_the_models():
    fit = occupancy(load_gpu("h20"), threads=64, registers=40, shared_bytes=256)
    text = run("own.py:strided").stdout
    assert f"occupancy: {fit.blocks_per_sm} blocks/SM ({fit.occupancy:.1%}), limited by {fit.limiter}, with 64" in text
    assert "40 registers" in text and fit.next_step.sentence in text
    other = occupancy(load_gpu("a100-40g"), threads=64, registers=255, shared_bytes=256)
    text = run("own.py:strided", "--regs", "255", "--gpu", "a100-40g").stdout
    assert f"{other.blocks_per_sm} blocks/SM" in text and "255 registers" in text and "capability 8.0" in text


def test_unknown_registers_are_said_to_be_unknown():
    assert "registers unknown (--regs N)" in run("transpose", "--ctas", "1").stdout
    document = json.loads(run("transpose", "--ctas", "1", "--format", "json").stdout)
    assert document["registers"] is None and document["occupancy"]["limits"]["registers"] is None
    assert document["occupancy"]["limiter"] == "warps"


def test_totals_with_unmodelled_accesses_are_left_out_unless_allowed():
    left_out = json.loads(run("own.py:filled", "--format", "json").stdout)
    rows = {row["site"]: row for row in left_out["sites"]}
    assert rows["filled"]["unmodelled"] == 2 and rows["filled"]["wavefronts"] is None
    assert left_out["total"]["wavefronts"] is None and left_out["total"]["excessive"] is None
    allowed = json.loads(run("own.py:filled", "--allow-unmodelled", "--format", "json").stdout)
    assert allowed["total"]["wavefronts"] == rows["copied"]["wavefronts"] + rows["read"]["wavefronts"] > 0
    assert "2 accesses have no proven rule (unmodelled): totals that would" in run("own.py:filled").stdout
    assert "totals sum what is known" in run("own.py:filled", "--allow-unmodelled").stdout


@pytest.mark.parametrize("kernel", ["own.py:filled", "own.py:strided", "transpose", "transpose@vec4"])
def test_a_saved_trace_replays_to_the_same_table(kernel):
    count = () if kernel.startswith("own") else ("--ctas", "3")
    online = run(kernel, *count, "--format", "csv", "--save-trace", "t.trace").stdout
    replayed = CliRunner().invoke(main, ["replay", "t.trace", "--format", "csv"])
    assert replayed.stdout == online and os.stat("t.trace").st_mode & 0o777 == 0o666 & ~umask()
    table = CliRunner().invoke(main, ["replay", "t.trace"]).stdout
    assert ("totals that would include them" in table) == (kernel == "own.py:filled")


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trnspose"], "unknown kernel 'trnspose'; did you mean 'transpose'?"),
        (["transpose@pda1"], "has no variant 'pda1'; did you mean 'pad1'?"),
        (["transpose", "--gpu", "h2o"], "unknown GPU 'h2o'; did you mean 'h20'?"),
        (["transpose", "--set", "row=3"], "no parameter 'row'; did you mean 'rows'?"),
        (["transpose", "--set", "rows"], "--set 'rows' is not NAME=VALUE"),
        (["transpose", "--set", "rows=many"], "parameter rows: 'many' is not a number"),
        (["transpose", "--set", "layout=odd"], "layout 'odd' is none of plain"),
        (["transpose", "--ctas", "0"], "--ctas '0'"),
        (["transpose", "--ctas", "16385"], "a number from 1 to 16384"),
        (["transpose", "--ctas", "9" * 5000], "the CTAs of the grid"),
        (["transpose", "--regs", "0"], "'--regs': 0 is not in the range"),
        (["transpose", "--format", "xml"], "'xml' is not one of"),
        (["transpose", "--fromat", "csv"], "--fromat"),
        (["transpose", "more"], "unexpected extra argument"),
        ([], "Missing argument 'KERNEL'"),
        (["missing.py:f"], "no kernel file 'missing.py'"),
        (["own.py:stridde"], "own.py has no function 'stridde'; did you mean 'strided'?"),
        (["broken.py:f"], "SyntaxError"),
        (["leaving.py:f"], "leaving.py (leaving.py:2): SystemExit: 0"),
        (["own.py:leaving"], "kernel 'leaving' (own.py:41): SystemExit: 0"),
        (["own.py:bad_host@wide"], "kernel 'bad_host' has no variant 'wide'\n"),
        (["own.py:bad_host"], "IndexError: list index out of range"),
        (["own.py:raising", "--save-trace", "t.trace"], "IndexError: list index out of range"),
        (["own.py:large", "--set", "bytes=240000"], "exceed the 232448 a block may have"),
        (["own.py:large", "--gpu", "a100-80g", "--save-trace", "t.trace"], "exceed the 166912 a block may have"),
        (["transpose", "--ctas", "1", "--save-trace", "no/t.trace"], "cannot write trace 'no/t.trace': No such file"),
        (["transpose", "--ctas", "1", "--save-trace", "."], "cannot write trace '.'"),
    ],
)
def test_bad_input_is_refused_in_one_line(args, message):
    assert message in refused(*args)


def test_no_trace_is_left_when_the_occupancy_is_refused():
    """1,024 threads of 255 registers: known only after the whole run."""
    with open("own.py", "w") as file:
        file.write(OWN.replace("block=64", "block=1024").replace("64 * stride", "1024 * stride"))
    assert "registers" in refused("own.py:strided", "--regs", "255", "--save-trace", "t.trace")


def test_an_interrupt_leaves_neither_output_nor_trace():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        result = run("own.py:interrupted", "--save-trace", "t.trace", exit_code=1)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert result.stdout == "" and "Aborted!" in result.stderr and "Traceback" not in result.stderr
    assert not [name for name in os.listdir() if "trace" in name]


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_registered_kernel_is_listed_with_its_variants(name):
    rows = {row["kernel"]: row for row in json.loads(CliRunner().invoke(main, ["kernels", "--format", "json"]).stdout)}
    assert rows[name]["variants"] == list(registered()[name].variants) and rows[name]["summary"]
    assert name in CliRunner().invoke(main, ["kernels"]).stdout
