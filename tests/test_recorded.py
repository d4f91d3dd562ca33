"""JSON lines: counted as the rules count them, and every way to get one wrong is refused with its line and lane."""

import io
import json
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simgpu import recorded
from simgpu.errors import SimError
from simgpu.instructions import instruction
from simgpu.recorded import LONGEST_LINE, SHARED_BYTES, count, read_recorded
from simgpu.rules import cost

PATTERNS = resources.files("validation") / "measured" / "h200" / "patterns.jsonl"
LINES = PATTERNS.read_text().splitlines()
GOOD = {"op": "lds", "bytes_per_lane": 4, "active_mask": "0xffffffff", "shared_byte_offset": list(range(0, 128, 4))}


def read(data: bytes | str, file: str = "f") -> list[tuple]:
    """(site, wavefronts, ideal, sectors, unmodelled) of every access, in order."""
    data = data.encode() if isinstance(data, str) else data
    found = []
    for chunk in read_recorded(file, io.BytesIO(data)):
        rows = [None] * len(chunk.masks)
        for site, numbers, columns in chunk.counted():
            lists = [None if c is None else c.tolist() for c in (columns.wavefronts, columns.ideal, columns.sectors)]
            for k, row in enumerate(numbers):
                rows[row] = (site, *(c and c[k] for c in lists), bool(columns.unmodelled[k]))
        found += rows
    return found


def test_measured_lines_cost_what_the_rules_say_in_order(monkeypatch):
    monkeypatch.setattr(recorded, "CHUNK_LINES", 100)
    found = read("\n".join(LINES))
    assert len(found) == len(LINES)
    for line, (site, wavefronts, ideal, sectors, unmodelled) in zip(LINES, found, strict=True):
        case = json.loads(line)
        executed, mask = instruction(case["op"]), int(case["active_mask"], 0)
        sides = case.get("shared_byte_offset"), case.get("global_byte_offset")
        expected = cost(executed, case["bytes_per_lane"], mask, *sides)
        assert (site.name, site.width, unmodelled) == (case["op"], case["bytes_per_lane"], expected.unmodelled)
        for number, wanted in ((wavefronts, expected.wavefronts), (ideal, expected.ideal), (sectors, expected.sectors)):
            assert (None if number == -1 else number) == wanted
        if case["op"] == "lds":
            assert wavefronts == case["counters"]["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld"]


def test_the_table_is_the_sum_of_the_accesses():
    shared = [line for line in LINES if json.loads(line)["op"] in ("lds", "sts")]
    table = count(read_recorded("f", io.BytesIO("\n".join(shared).encode())))
    found = read("\n".join(shared))
    assert sum(row.executed for row in table.sites) == len(shared)
    assert sum(row.wavefronts for row in table.sites) == sum(row[1] for row in found)
    assert [(row.site, row.width) for row in table.sites] == list(dict.fromkeys((r[0].name, r[0].width) for r in found))


def line(**changes) -> str:
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not ...})


@pytest.mark.parametrize(
    "text",
    [
        line(),
        line() + "\r\n" + line() + "\r\n",
        "\ufeff" + line(),
        "\n\n" + line() + "\n  \n",
        line(active_mask=0xFFFFFFFF),
        line(active_mask="0b" + "1" * 32),
        line(active_mask=...),
        line(counters={"anything": [1, {"at": "all"}]}, note=None),
        line(shared_byte_offset=[4 * lane for lane in range(16)] + [None, -1, 2.5, "x"] * 4, active_mask="0xffff"),
    ],
)
def test_what_is_accepted(text):
    assert {row[1:] for row in read(text)} == {(1, 1, None, False)}


def offsets(value, lane: int = 5) -> list:
    return [*GOOD["shared_byte_offset"][:lane], value, *GOOD["shared_byte_offset"][lane + 1 :]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no accesses"),
        ("\n \r\n", "no accesses"),
        ("{", "not a JSON object: "),
        (line()[: len(line()) // 2], "not a JSON object: "),
        ("[1]", "not a JSON object but list"),
        ("3", "not a JSON object but int"),
        ("null", "not a JSON object but NoneType"),
        (line() + line(), "not a JSON object: Extra data"),
        ("[" * 100_000, "nested too deeply|not a JSON object"),
        (b"\xff\xfe" + line().encode("utf-16-le"), "not UTF-8 .byte 1."),
        (line().encode()[:-1] + b'"\xe9": 1}', "not UTF-8"),
        (" " * LONGEST_LINE + line(), "longer than"),
        ("PK\x03\x04", "a trace is read from a file"),
        (line(op=...), "no 'op'"),
        (line(op=3), "op 3 is not a string"),
        (line(op="ldz"), "unknown instruction 'ldz'; did you mean 'lds'"),
        (line(op="x" * 5000), "no instruction 'xxxx"),
        (line(bytes_per_lane=...), "no 'bytes_per_lane'"),
        (line(bytes_per_lane=3), "lds has no form of 3 bytes"),
        (line(bytes_per_lane=4.0), "bytes_per_lane 4.0 is not an integer"),
        (line(bytes_per_lane=True), "bytes_per_lane True is not an integer"),
        (line(bytes_per_lane=10**400), "no instruction 'lds' of 1000"),
        (line(active_mask="0x1ffffffff"), "active_mask '0x1ffffffff' is not a 32-bit mask"),
        (line(active_mask="0x" + "f" * 9000), "is not a 32-bit mask"),
        (line(active_mask=-1), "active_mask -1 is not"),
        (line(active_mask=4294967295.0), "active_mask 4294967295.0 is not"),
        (line(active_mask=True), "active_mask True is not"),
        (line(active_mask=None), "active_mask None is not"),
        (line(active_mask="all"), "active_mask 'all' is not"),
        (line(op="ldmatrix.x4", bytes_per_lane=16, active_mask="0x1"), "needs all 32 lanes"),
        (line(shared_byte_offset=...), "no 'shared_byte_offset'"),
        (line(shared_byte_offset={}), "shared_byte_offset {} is not a list"),
        (line(shared_byte_offset=[0] * 31), "31 addresses, not 32"),
        (line(shared_byte_offset=offsets(2)), "lane 5: shared byte address 2 is not a non-negative multiple of 4"),
        (line(shared_byte_offset=offsets(-4)), "lane 5: shared_byte_offset -4"),
        (line(shared_byte_offset=offsets(SHARED_BYTES)), f"lane 5: shared_byte_offset {SHARED_BYTES}"),
        (line(shared_byte_offset=offsets(4.0)), "lane 5: shared_byte_offset 4.0"),
        (line(shared_byte_offset=offsets(float("nan"))), "NaN is not JSON"),
        (line(shared_byte_offset=offsets(True)), "lane 5: shared_byte_offset True"),
        (line(shared_byte_offset=offsets(None)), "lane 5: shared_byte_offset None"),
        (line(shared_byte_offset=offsets("8")), "lane 5: shared_byte_offset '8'"),
        (line(shared_byte_offset=offsets(10**30)), "lane 5: shared_byte_offset 1000"),
        (line().replace("124]", "9" * 5000 + "]"), "not a JSON object: "),
        (line(op="ldg", global_byte_offset=offsets(2**63)), "lane 5: global_byte_offset 9223372036854775808"),
        (line(op="ldg", shared_byte_offset=...), "no 'global_byte_offset'"),
        ('{"op": "sts", ' + line()[1:], "key 'op' occurs twice"),
    ],
)
def test_what_is_refused(text, message):
    text = text.encode() if isinstance(text, str) else text
    blank = not text.strip()
    with pytest.raises(SimError, match=message) as refused:
        read(text)
    assert str(refused.value).startswith("f: " if blank or text.startswith(b"PK") else "f: line 1: ")
    assert len(str(refused.value)) < 400
    if not blank:  # the same after good lines
        with pytest.raises(SimError, match=r"^f: line 3: "):
            read(line().encode() + b"\n\n" + text.replace(b"PK", b"K"))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_noise_is_read_as_json_or_refused(data):
    """Bytes inserted into, replaced in or cut from a good line: never another exception than SimError."""
    good = bytearray(line().encode())
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, min(len(good), start + 4)))
    noise = data.draw(st.binary(max_size=4) | st.sampled_from([b"NaN", b"[", b"1e9", b"\\ud800", b'"', b"-"]))
    good[start:stop] = noise
    try:
        found = read(bytes(good))
    except SimError as error:
        assert str(error).startswith("f: ")
    else:
        lines = [one for one in bytes(good).split(b"\n") if one.strip()]
        assert [json.loads(one)["op"] for one in lines] == [row[0].name for row in found]


def test_a_file_of_many_chunks_keeps_order_and_reports_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "CHUNK_LINES", 3)
    path = tmp_path / "f.jsonl"
    strides = [4, 8, 128, 4, 64, 8, 4]
    path.write_text("\n".join(line(shared_byte_offset=[s * lane for lane in range(32)]) for s in strides) + "\n")
    seen = []
    chunks = list(read_recorded(str(path), progress=lambda done, total: seen.append((done, total))))
    wavefronts = np.concatenate([columns.wavefronts for chunk in chunks for _, _, columns in chunk.counted()])
    assert wavefronts.tolist() == [1, 2, 32, 1, 16, 2, 1]
    assert len(seen) == 2 and seen[0] < seen[1] and {total for _, total in seen} == {path.stat().st_size}


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(SimError, match=f"cannot read .*{reason}"):
            next(read_recorded(str(path)))
    (tmp_path / "text.trace").write_text(line())
    with pytest.raises(SimError, match="not a trace file"):
        next(read_recorded(str(tmp_path / "text.trace")))
