"""simgpu as a process: what it imports, pipes that close, disks that fill, terminals, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes, signals and limits as POSIX has them")
SIMGPU = [sys.executable, "-c", "from simgpu.cli import main; main(prog_name='simgpu')"]


def run(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([*SIMGPU, *args], capture_output=True, text=True, timeout=60, **kwargs)


def test_the_machine_commands_do_not_wait_for_numba():
    script = (
        "import sys; from simgpu.cli import main\n"
        "main('occupancy --threads 256 --regs 64 --smem 0'.split(), standalone_mode=False)\n"
        "main(['gpus'], standalone_mode=False)\n"
        "print(sorted({'numba', 'llvmlite'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and "blocks" in done.stdout


@pytest.mark.parametrize("args", ["gpus", "kernels", "replay {} --format json"])
def test_a_reader_that_leaves_is_no_error(args, tmp_path):
    lines = tmp_path / "many.jsonl"
    access = {"op": "lds", "bytes_per_lane": 4, "shared_byte_offset": [0] * 32}
    lines.write_text((json.dumps(access) + "\n") * 2000)
    process = subprocess.Popen([*SIMGPU, *args.format(lines).split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) in (0, 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*SIMGPU, "gpus"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("Error: cannot write the output")
    assert done.stderr.count("\n") == 1


def test_a_full_disk_leaves_no_trace(tmp_path):
    resource = pytest.importorskip("resource")
    path = str(tmp_path / "t.trace")
    limit = 50_000  # bytes

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = run("conflicts", "transpose", "--ctas", "400", "--save-trace", path, preexec_fn=limited)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr.startswith(f"Error: cannot write trace {path!r}: ") and done.stderr.count("\n") == 1


def test_an_interrupt_from_outside_leaves_nothing(tmp_path):
    """SIGINT from outside, while the trace is growing."""
    process = subprocess.Popen(
        [*SIMGPU, "conflicts", "transpose", "--set", "rows=60000", "--set", "cols=60000", "--save-trace", "t.trace"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while process.poll() is None and not any(file.stat().st_size for file in tmp_path.glob("t.trace.*.part")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "" and err.strip() == "Aborted!"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [80, 120])
def test_a_real_terminal_gets_a_table_of_its_width_in_colour(columns):
    pty = pytest.importorskip("pty")
    main_end, terminal = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "LINES")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(
        [*SIMGPU, "conflicts", "transpose", "--ctas", "64"], stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    output = b""
    try:
        while piece := os.read(main_end, 4096):
            output += piece
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(main_end)
    assert process.wait(60) == 0
    assert b"\x1b[1;31m" in output and "──" in output.decode()
    rule = next(line for line in output.decode().splitlines() if line.startswith("──"))
    assert len(rule.rstrip()) <= columns


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_pipe_gets_no_progress_no_colour_and_its_own_encoding(encoding):
    done = run("conflicts", "transpose", "--ctas", "64", env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    assert done.stdout.isascii() == (encoding == "ascii")
