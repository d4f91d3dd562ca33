"""Traces: what is read is what was counted online, and a damaged file is refused or reads the same."""

import json
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py import registered
from simgpu import trace as trace_module
from simgpu.counters import CounterSink
from simgpu.errors import DataDependent, SimError
from simgpu.events import AccessEvent, Site
from simgpu.instructions import FULL_MASK, instruction
from simgpu.recorded import count, read_recorded
from simgpu.run import simulate
from simgpu.trace import COLUMNS, MANIFEST, VERSION, TraceReader, TraceWriter

SITES = [
    Site("a.load", "k.py", 3, instruction("lds"), 4),
    Site("b.store", "k.py", 4, instruction("sts"), 16),
    Site("c.copy", "k.py", 5, instruction("cp.async.cg"), 16),
    Site("d.rows", "k.py", 6, instruction("ldmatrix.x4"), 16),
    Site("e.load", "k.py", 7, instruction("ldg"), 8),
]


@st.composite
def events(draw) -> list[AccessEvent]:
    """A program of a few instructions over a batch, with every way to leave out the CTA or the warp axis."""
    ctas, warps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    program = []
    for order in range(draw(st.integers(1, 6))):
        site = draw(st.sampled_from(SITES))

        def shape(*inner):
            return (draw(st.sampled_from([1, ctas])), draw(st.sampled_from([1, warps])), *inner)

        masks = random.choice([0, 0x0F0F0F0F, FULL_MASK], shape()).astype(np.uint32)
        masks[-1, -1] = FULL_MASK  # the emulator tells nobody of an instruction that no warp executes
        issued = (masks != 0) | random.choice([False, True], masks.shape)
        if site.instruction.matrices:
            masks[masks != 0] = FULL_MASK
        sides = [
            (random.integers(0, 256, shape(32)) * site.width).astype(dtype) if used else None
            for used, dtype in ((site.instruction.shared, np.int32), (site.instruction.global_, np.int64))
        ]
        first = draw(st.integers(0, 5))
        numbers = np.arange(first, first + ctas)
        program.append(AccessEvent(site, masks, issued, *sides, numbers, warps, order))
    return program


@settings(max_examples=60, deadline=None)
@given(program=events(), rows=st.integers(1, 20))
def test_a_trace_counts_what_was_counted_online(tmp_path_factory, program, rows):
    path, online = tmp_path_factory.mktemp("t") / "t.trace", CounterSink()
    with pytest.MonkeyPatch.context() as patch, TraceWriter(path, {}) as writer:
        patch.setattr(trace_module, "CHUNK_ROWS", rows)  # many small chunks
        for event in program:
            online.access(event)
            writer.access(event)
        writer._flush()
    assert count(read_recorded(str(path))).sites == online.table().sites


SMALLER = {"hgemm_ladder": {"k": 128}, "smem_to_reg": {"iterations": 2}}  # fewer trips through the same sites


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_kernel_replays_to_the_table_of_its_run(tmp_path, name):
    kernel = registered()[name]
    for variant in kernel.variants or [None]:
        path, launch = tmp_path / f"{variant}.trace", kernel.launch(variant, **SMALLER.get(name, {}))
        with TraceWriter(path, {}) as writer:
            try:
                result = simulate(launch, ctas=1, mode="addresses", sinks=[writer])
            except DataDependent:
                writer.restart()
                result = simulate(launch, ctas=1, mode="values", sinks=[writer])
        assert result.table.sites
        assert count(read_recorded(str(path))).sites == result.table.sites


def write(path, orders=range(3), rows=20, **changes) -> None:
    """A trace of three sites and several chunks."""
    with pytest.MonkeyPatch.context() as patch, TraceWriter(path, {"kernel": "k"}) as writer:
        patch.setattr(trace_module, "CHUNK_ROWS", rows)
        for order in orders:
            site = SITES[order % 3]
            addresses = np.arange(32).reshape(1, 1, 32) * 16 * (order + 1)
            masks = np.full((1, 1), FULL_MASK, np.uint32)
            shared = addresses.astype(np.int32) if site.instruction.shared else None
            global_ = addresses.astype(np.int64) if site.instruction.global_ else None
            writer.access(AccessEvent(site, masks, masks != 0, shared, global_, np.arange(4), 4, order))
        writer._flush()


def read(path) -> tuple:
    reader = TraceReader(path)
    chunks = [{name: column.tolist() for name, column in chunk.items()} for chunk in reader.chunks()]
    return reader.launch, reader.sites, chunks


def test_columns_read_back_as_documented(tmp_path):
    write(tmp_path / "t.trace")
    launch, sites, chunks = read(tmp_path / "t.trace")
    assert launch == {"kernel": "k"} and sites == tuple(SITES[:3])
    assert [len(chunk["mask"]) for chunk in chunks] == [32, 16]
    assert chunks[0]["cta"][:5] == [0, 0, 0, 0, 1] and chunks[0]["warp"][:5] == [0, 1, 2, 3, 0]
    assert chunks[0]["global"][0] == [-1] * 32 and chunks[1]["global"][0][1] == 48
    assert chunks[0].keys() == COLUMNS.keys()
    assert len(TraceReader(tmp_path / "t.trace")) == 48


def test_every_truncation_is_refused(tmp_path):
    whole = tmp_path / "t.trace"
    write(whole)
    data, cut = whole.read_bytes(), tmp_path / "cut.trace"
    for length in sorted({*range(0, len(data), 37), *range(len(data) - 40, len(data))}):
        cut.write_bytes(data[:length])
        with pytest.raises(SimError):
            read(cut)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path, flip):
    whole, damaged = tmp_path / "t.trace", tmp_path / "damaged.trace"
    write(whole)
    data, expected = whole.read_bytes(), read(whole)
    refused = 0
    # Every byte of the closing directory, where zip keeps what it believes, and a sample of the members.
    directory = data.index(b"PK\x01\x02")
    places = [*range(0, directory, 17), *range(directory, len(data), 3)]
    for place in places:
        damaged.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
        try:
            assert read(damaged) == expected, f"byte {place} read as another table"
        except SimError as error:
            assert "damaged.trace" in str(error)
            refused += 1
    assert refused > len(places) // 2  # the rest are time stamps and attributes


def rewrite(path, member: str, data: bytes) -> None:
    """Replace a member of the archive, with a checksum that is right."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, old in members.items():
            archive.writestr(name, data if name == member else old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": VERSION + 1}, f"version {VERSION + 1}; this simgpu reads version {VERSION}"),
        ({"version": None}, "version None"),
        ({"format": "other"}, "is not a trace file"),
        ({"chunks": [32, 17]}, "chunk 1"),
        ({"chunks": [-1]}, "damaged manifest"),
        ({"chunks": [1.5]}, "damaged manifest"),
        ({"chunks": None}, "damaged manifest"),
        ({"sites": []}, "names a site the manifest lacks"),
        ({"sites": [{"name": "x"}]}, "damaged manifest"),
        ({"sites": [{"name": 1, "file": "f", "line": 1, "instruction": "lds", "width": 4}]}, "damaged manifest"),
        ({"sites": [{"name": "x", "file": "f", "line": 1, "instruction": "ldz", "width": 4}]}, "unknown instruction"),
        ({"sites": [{"name": "x", "file": "f", "line": 1, "instruction": "lds", "width": 3}]}, "no form of 3 bytes"),
        ({"sites": [{"name": "x", "file": "f", "line": True, "instruction": "lds", "width": 4}]}, "whole number"),
    ],
)
def test_a_manifest_no_writer_writes_is_refused(tmp_path, change, message):
    path = tmp_path / "t.trace"
    write(path)
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read(MANIFEST))
    rewrite(path, MANIFEST, json.dumps(manifest | change).encode())
    with pytest.raises(SimError, match=message):
        read(path)


def test_a_column_of_another_type_or_size_is_refused(tmp_path):
    for column, message in (
        (np.zeros(32, np.int64), r"int64\[32\] is not <u4\[32\]"),
        (np.zeros(31, np.uint32), r"uint32\[31\] is not <u4\[32\]"),
        (np.zeros(1 << 20, np.uint32), r"mask.npy has 4194432 bytes"),  # refused before it is read
    ):
        path, member = tmp_path / "t.trace", "000000/mask.npy"
        write(path)
        with zipfile.ZipFile(path, "a") as archive, archive.open("scratch", "w") as scratch:
            np.save(scratch, column)
        with zipfile.ZipFile(path) as archive:
            rewrite(path, member, archive.read("scratch"))
        with pytest.raises(SimError, match=rf"chunk 0, column mask: .*{message}"):
            read(path)


def test_rows_stand_in_program_order(tmp_path):
    """A CTA that takes a branch earlier in the program may be recorded after those that did not."""
    path = tmp_path / "t.trace"
    with TraceWriter(path, {}) as writer:
        for site, order in ((0, 9), (1, 5), (4, 7)):
            addresses = np.arange(32).reshape(1, 1, 32) * 16
            sides = (None, addresses) if site == 4 else (addresses.astype(np.int32), None)
            masks = np.full((1, 1), 1, np.uint32)
            writer.access(AccessEvent(SITES[site], masks, masks != 0, *sides, np.arange(1), 1, order))
    assert [row.site for row in count(read_recorded(str(path))).sites] == ["b.store", "e.load", "a.load"]


def test_nothing_appears_unless_the_block_is_left_well(tmp_path):
    path = tmp_path / "t.trace"
    for error in (SimError("stop"), KeyboardInterrupt()):
        with pytest.raises(type(error)), TraceWriter(path, {}):
            raise error
        assert not list(tmp_path.iterdir())
    path.write_text("what was there before")
    with pytest.raises(SimError), TraceWriter(path, {}):
        raise SimError("stop")
    assert path.read_text() == "what was there before" and len(list(tmp_path.iterdir())) == 1


def test_a_restart_forgets_a_longer_run(tmp_path):
    """The first run's archive, larger than the second's, must leave nothing behind."""
    path, once = tmp_path / "t.trace", tmp_path / "once.trace"
    write(once, range(1))
    with TraceWriter(path, {"kernel": "k"}) as writer:
        event = AccessEvent(
            SITES[1],
            np.full((1, 1), FULL_MASK, np.uint32),
            np.ones((1, 1), bool),
            np.random.default_rng(1).integers(0, 99, (50, 1, 32), np.int32) * 16,
            None,
            ctas=np.arange(50),
            warps=1,
            order=7,
        )
        for _ in range(20):
            writer.access(event)
            writer._flush()
        writer.restart()
        shared = np.arange(32, dtype=np.int32).reshape(1, 1, 32) * 16
        writer.access(AccessEvent(SITES[0], event.masks, event.issued, shared, None, np.arange(4), 4, 0))
    assert read(path) == read(once)
    assert path.stat().st_size < 4 * once.stat().st_size


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "t.trace", "/dev/null"):
        with pytest.raises(SimError, match="cannot write trace"):
            TraceWriter(path, {})
    assert not list(tmp_path.iterdir())
