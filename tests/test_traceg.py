"""Accel-Sim traces: hand-made files in the documented format, against the same accesses counted directly."""

import gzip
import itertools
import json
import lzma
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from simgpu.cli import main
from simgpu.errors import SimError
from simgpu.instructions import FULL_MASK, LANES, instruction
from simgpu.recorded import count, read_recorded
from simgpu.rules import cost
from simgpu.traceg import decode

BASE = 0x7F8125000000
HEADER = f"""-kernel name = _Z9transposePfS_
-kernel id = 1
-grid dim = (2,3,1)
-block dim = (32,2,1)
-shmem = 4096
-nregs = 20
-binary version = 80
-cuda stream id = 0
-shmem base_addr = {BASE:#018x}
-local mem base_addr = 0x00007f8123000000
-nvbit version = 1.7
-accelsim tracer version = {{version}}
-enable lineinfo = {{lineinfo}}

#traces format = [line_num] PC mask dest_num [reg_dests] opcode src_num [reg_srcs] mem_width [adrrescompress?] ...

"""


def trace(*instructions: str, version: int = 5, lineinfo: int = 0, cta: str = "0,0,0", warp: int = 0) -> str:
    """A file of one warp."""
    lines = "".join(f"{line} \n" for line in instructions)
    body = f"\n#BEGIN_TB\n\nthread block = {cta}\n\nwarp = {warp}\ninsts = {len(instructions)}\n{lines}\n#END_TB\n"
    return HEADER.format(version=version, lineinfo=lineinfo) + body


@pytest.fixture
def table(tmp_path):
    """The counters of a trace, by site."""

    def counted(text: str, name: str = "kernel-1.traceg"):
        file = tmp_path / name
        file.write_text(text, encoding="ascii")
        return {row.site: row for row in count(read_recorded(str(file))).sites}

    return counted


def test_every_address_mode_and_the_instructions_between(table):
    rows = table(
        trace(
            "0000 ffffffff 1 R1 IMAD.MOV.U32 2 R255 R255 0 0",
            "0010 ffffffff 1 R4 LDG.E 1 R2 4 1 0x7f0000000000 4 0",
            "0020 ffffffff 0 STS 2 R6 R4 4 1 0x0 128 0",
            "0030 00000007 1 R5 LDS 1 R7 4 0 0x0000000000000000 0x0000000000000080 0x0000000000000100 0",
            "0040 80000003 1 R5 LDS.64 1 R7 8 2 0x8 256 -248 0",
            "0050 ffffffff 0 BAR.SYNC.DEFER_BLOCKING 0 0 0",
            "0060 00000000 0 STG.E.128 2 R2 R8 16 1 0x0 -77 0",
        )
    )
    assert list(rows) == ["0x0010 LDG.E", "0x0020 STS", "0x0030 LDS", "0x0040 LDS.64", "0x0060 STG.E.128"]
    assert (rows["0x0010 LDG.E"].sectors, rows["0x0010 LDG.E"].bytes) == (4, 128)
    assert (rows["0x0020 STS"].wavefronts, rows["0x0020 STS"].ideal) == (32, 1)
    assert rows["0x0030 LDS"].wavefronts == 3
    lanes = [8, 264] + [0] * 29 + [16]
    assert rows["0x0040 LDS.64"].wavefronts == cost(instruction("lds"), 8, 0x80000003, lanes).wavefronts
    assert (rows["0x0060 STG.E.128"].executed, rows["0x0060 STG.E.128"].sectors) == (1, 0)


def encoded(mode: int, mask: int, addresses: list[int]) -> str:
    """The documented compressions, as the tracer writes them."""
    active = [addresses[lane] for lane in range(LANES) if mask >> lane & 1]
    if mode == 0:
        return "0 " + " ".join(f"{address:#018x}" for address in active)
    return f"2 {active[0]:#x} " + " ".join(str(b - a) for a, b in itertools.pairwise(active))


@given(
    mode=st.sampled_from([0, 2]),
    mask=st.integers(1, FULL_MASK),
    words=st.lists(st.integers(0, 4095), min_size=LANES, max_size=LANES),
    generic=st.booleans(),
)
def test_any_access_costs_what_its_addresses_cost(tmp_path_factory, mode, mask, words, generic):
    offsets = [16 * word for word in words]
    written = [offset + BASE * generic for offset in offsets]
    file = tmp_path_factory.mktemp("traceg") / "k.traceg"
    file.write_text(trace(f"0100 {mask:08x} 1 R4 LDS.128 1 R2 16 {encoded(mode, mask, written)} 0"))
    (row,) = count(read_recorded(str(file))).sites
    expected = cost(instruction("lds"), 16, mask, offsets)
    assert (row.wavefronts, row.ideal, row.executed) == (expected.wavefronts, expected.ideal, 1)
    assert row.bytes == 16 * mask.bit_count()


@pytest.mark.parametrize(
    "opcode, name, width",
    [
        ("LDS.U.128", "lds", 16),
        ("LDS.S16", "lds", 2),
        ("STS.U8", "sts", 1),
        ("LDG.E.64.CONSTANT.SYS", "ldg", 8),
        ("STG.E.U16", "stg", 2),
        ("LDSM.16.M88", "ldmatrix.x1", 16),
        ("LDSM.16.M88.4", "ldmatrix.x4", 16),
        ("LDSM.16.MT88.2", "ldmatrix.x2.trans", 16),
        ("STSM.16.MT88.4", "stmatrix.x4.trans", 16),
        ("ATOMS.ADD", "atom.shared.add.u32", 4),
        ("ATOMS.EXCH.64", "atom.shared.exch.b64", 8),
        ("ATOMS.CAS", "atom.shared.cas.b32", 4),
        ("ATOMG.E.ADD.STRONG.GPU", "atom.global.add.u32", 4),
        ("ATOMG.E.ADD.64.STRONG.GPU", "atom.global.add.u64", 8),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "red.global.add.f32", 4),
        ("REDG.E.ADD.STRONG.GPU", "red.global.add.u32", 4),
    ],
)
def test_opcodes(opcode, name, width):
    found, bytes_per_lane, _ = decode(opcode)
    assert (found.name, bytes_per_lane, found.proven) == (name, width, True)


UNMODELLED = ["LD.E.128", "ST.E.U8", "LDL.LU", "STL.64", "ATOM.E.ADD.STRONG.GPU", "ATOMS.POPC.INC.32", "LDG.E.256"]
UNMODELLED += ["ATOMS.ADD.S32.SPIN", "ATOMG.E.MAX.F16x2.RN", "RED.E.MIN.S32.STRONG.GPU", "LDSM.8.M816.2", "CCTL.IVALL"]


@pytest.mark.parametrize("opcode", UNMODELLED)
def test_what_has_no_rule_is_listed_as_unmodelled_and_keeps_totals_from_being_told(table, tmp_path, opcode):
    text = trace(f"0010 ffffffff 0 {opcode} 2 R2 R4 4 1 0xfff72c 0 0", "0020 ffffffff 1 R1 LDS 1 R2 4 1 0x0 4 0")
    row = table(text)[f"0x0010 {opcode}"]
    assert (row.executed, row.unmodelled, row.wavefronts, row.sectors) == (1, 1, None, None)
    whole = count(read_recorded(str(tmp_path / "kernel-1.traceg")))
    assert None in (whole.total().wavefronts, whole.total().sectors)
    assert whole.total(allow_unmodelled=True).wavefronts == 1
    # Its bytes per lane may be a number that no rule of shared memory has room for: those must never see it.
    assert decode(opcode)[0].family == "ldg"


def test_tma_has_an_address_format_of_its_own(table):
    rows = table(trace("0010 00000001 0 UTMALDG.2D 2 R2 R3 0 7 0 zzz", "0020 00000001 0 UBLKCP 1 R4 4 3 1 0x10 0"))
    assert [row.unmodelled for row in rows.values()] == [1, 1]


def test_the_two_lines_of_a_copy_are_one_cp_async(table):
    shared = "0010 ffffffff 0 LDGSTS.E.BYPASS.128 2 R6 R8 16 1 0x0 16 0"
    global_ = "0010 ffffffff 0 LDGSTS.E.BYPASS.128 2 R6 R8 16 1 0x7f0000000000 16 0"
    (both,) = table(trace(shared, global_)).values()
    assert (both.instruction, both.executed, both.unmodelled) == ("cp.async.cg", 1, 0)
    assert (both.wavefronts, both.sectors) == (4, 16)
    (through_l1,) = table(trace(*(line.replace(".BYPASS", "") for line in (shared, global_)))).values()
    assert through_l1.instruction == "cp.async.ca"
    (one,) = table(trace(global_, global_)).values()
    assert (one.instruction, one.executed, one.unmodelled) == ("LDGSTS.E.BYPASS.128", 2, 2)
    (zfill,) = table(trace(*(line.replace(".128", ".128.ZFILL") for line in (shared, global_)))).values()
    assert zfill.unmodelled == 2


def test_source_lines_and_old_tracers(table):
    assert list(table(trace("42 0010 ffffffff 1 R1 LDS 1 R2 4 1 0x0 4 0", lineinfo=1))) == ["0x0010 LDS (line 42)"]
    old = trace("0 0 0 3 0010 ffffffff 1 R1 LDS 1 R2 4 1 0x0 4", version=2)
    assert list(table(old)) == ["0x0010 LDS"]


@pytest.mark.parametrize("suffix, opener", [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files_count_the_same_and_damage_is_refused(tmp_path, suffix, opener):
    file = tmp_path / f"kernel-1.traceg{suffix}"
    with opener(file, "wt") as stream:
        stream.write(trace("0020 ffffffff 0 STS 2 R6 R4 4 1 0x0 128 0"))
    assert count(read_recorded(str(file))).total().wavefronts == 32
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(SimError, match=r"kernel-1\.traceg"):
        count(read_recorded(str(file)))
    file.write_bytes(b"plain text")
    with pytest.raises(SimError, match="not a whole"):
        count(read_recorded(str(file)))


STS = "0020 ffffffff 0 STS 2 R6 R4 4 1 0x0 128 0"


@pytest.mark.parametrize(
    "text, message",
    [
        (trace("0020 ffffffff 0 STS 2 R6 R4 4 1 0x39000 4 0"), "line 24: STS: lane 0: shared address 0x39000 is"),
        (trace("0020 ffffffff 0 STS 2 R6 R4 4 1 0x7f8125038fc4 4 0"), r"line 24: STS: lane 15: .* window at 0x7f8125"),
        (trace("0020 ffffffff 0 STS 2 R6 R4 4 1 0x2 4 0"), "line 24: sts: lane 0: shared byte address 2 is not"),
        (trace("0020 0000ffff 0 LDSM.16.M88.4 1 R4 16 1 0x0 16 0"), "line 24: ldmatrix.x4 needs all 32 lanes"),
        (trace("0020 0f0fffff 0 STS 2 R6 R4 4 1 0x0 4 0"), "line 24: .* is not PC mask"),
        (trace("0020 ffffffff 0 STS 2 R6 R4 4 2 0x0 4 4"), "line 24: .* is not PC mask"),
        (trace("0020 ffffffff 0 STS 2 R6 R4 4 3 0x0 4 4"), "line 24: .* is not PC mask"),
        (trace("0020 ffffffff 0 STS"), "line 24: .* is not PC mask"),
        (trace("0020 1ffffffff 0 STS 2 R6 R4 4 1 0x0 128 0"), "line 24: .* is not PC mask"),
        (trace(STS).replace("insts = 1", "insts = 2"), "line 26: warp 0 has 1 more"),
        (trace(STS).replace("insts = 1", "insts = 0"), "line 24: .* before 'insts ='"),
        (trace(STS).replace("warp = 0\n", ""), "line 23: .* before 'warp ='"),
        (trace(STS, cta="2,0,0"), r"line 20: thread block \(2, 0, 0\) lies outside the grid"),
        (trace(STS).replace("#END_TB", ""), "line 26: the file ends inside a thread block"),
        (trace(STS).replace("#BEGIN_TB", "#BEGIN_TB\n#BEGIN_TB"), "line 19: #BEGIN_TB inside"),
        (trace(STS).replace("(2,3,1)", "(2,3)"), "line 3: grid dim '.2,3.' is not understood"),
        (HEADER.format(version=5, lineinfo=0) + "0 0 0 0 " + STS, "line 17: .* must go through post-traces-processing"),
        (HEADER.format(version=5, lineinfo=0), "no memory accesses"),
        (trace("µ"), r"line 24: not ASCII"),
    ],
)
def test_refusals_name_the_line(tmp_path, text, message):
    file = tmp_path / "k.traceg"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SimError, match=message):
        count(read_recorded(str(file)))


@given(
    line=st.text(st.sampled_from("0123456789abcdefx -RSTLDGM.=,#\n\x1b"), max_size=60),
    at=st.integers(0, 40),
    cut=st.integers(0, 20),
)
def test_a_damaged_line_is_refused_or_counted_but_never_crashes(tmp_path_factory, line, at, cut):
    file = tmp_path_factory.mktemp("traceg") / "k.traceg"
    sts = STS[:at] + line + STS[at + cut :]
    file.write_text(trace(sts))
    try:
        table = count(read_recorded(str(file)))
    except SimError as error:
        assert str(error).startswith(str(file)) and "\n" not in str(error)
    else:
        assert all(row.site.isprintable() for row in table.sites)


def test_the_example_trace_is_a_transpose_without_a_pad():
    rows = count(read_recorded(str(Path(__file__).parent / "transpose.traceg"))).sites
    assert [(row.wavefronts, row.ideal, row.sectors) for row in rows] == [
        (None, None, 8),
        (2, 2, None),
        (64, 2, None),
        (None, None, 8),
    ]


def test_the_command_line_counts_a_trace(tmp_path):
    file = tmp_path / "k.traceg"
    warps = "\n".join(f"warp = {warp}\ninsts = 1\n{STS}" for warp in range(2))
    blocks = "".join(
        f"#BEGIN_TB\nthread block = {x},{y},0\ncluster rank = 0\n{warps}\n#END_TB\n" for x in range(2) for y in range(3)
    )
    file.write_text(HEADER.format(version=5, lineinfo=0) + blocks)
    run = CliRunner().invoke(main, ["replay", str(file), "--format", "csv"])
    assert run.exit_code == 0, run.output
    assert "0x0020 STS" in run.output and ",12," in run.output
    lines = CliRunner().invoke(main, ["replay", str(file), "--format", "json"]).output.splitlines()
    assert [json.loads(line)["wavefronts"] for line in lines] == [32] * 12
    refused = CliRunner().invoke(main, ["replay", str(tmp_path / "none.traceg")])
    assert refused.exit_code == 2
    assert refused.output == f"Error: cannot read '{tmp_path}/none.traceg': No such file or directory\n"
