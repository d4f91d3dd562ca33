"""Pictures: the schedule obeys the banks and has the wavefronts the rules count, measured cases included."""

import json
from collections import defaultdict
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from simgpu.errors import SimError
from simgpu.instructions import FULL_MASK, INSTRUCTIONS, instruction
from simgpu.layout import parse_layout, tabulate
from simgpu.picture import (
    SCHEDULED,
    bank_rows,
    is_scheduled,
    lane_ranges,
    layout_grid,
    render_banks,
    render_layout,
    schedule,
    sector_rows,
)
from simgpu.rules import cost

PATTERNS = resources.files("validation") / "measured" / "h200" / "patterns.jsonl"
CASES = [json.loads(line) for line in PATTERNS.read_text().splitlines()]


def access(case):
    return (instruction(case["op"]), case["bytes_per_lane"], int(case["active_mask"], 16),
            case.get("shared_byte_offset"), case.get("global_byte_offset"))


def plain(picture):
    """What a pipe shows."""
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(picture, soft_wrap=True)
    return capture.get().splitlines()


def check_schedule(ins, width, mask, shared):
    served = schedule(ins, width, mask, shared)
    counted = cost(ins, width, mask, shared)
    atomic = ins.family.startswith("atoms")
    passes = 2 if ins.family == "atoms.cas" else 1
    waves = defaultdict(list)
    for one in served:
        waves[one.wavefront].append(one)
    assert sorted(waves) == list(range(counted.wavefronts))
    assert sum(members[0].turn == 0 for members in waves.values()) == counted.ideal
    for members in waves.values():
        assert len({(one.group, one.turn) for one in members}) == 1
        for bank in range(32):
            here = [one for one in members if one.word % 32 == bank]
            assert len({one.lane if atomic else one.word for one in here}) <= 1
    lanes = range(8 * ins.matrices) if ins.matrices else range(32)
    asked = [(lane, word) for lane in lanes if mask >> lane & 1
             for word in range(shared[lane] // 4, (shared[lane] + width - 1) // 4 + 1)]
    assert sorted((one.lane, one.word) for one in served) == sorted(asked * passes)
    for one in served:  # within a bank the words go in the order of their first lanes
        before = [other for other in served if (other.group, other.word % 32) == (one.group, one.word % 32)
                  and other.turn < one.turn]
        if not atomic:
            assert all(min(o.lane for o in before if o.word == word) < one.lane for word in {o.word for o in before})


# ---- the schedule --------------------------------------------------------------------------------------------


def test_the_schedule_has_the_wavefronts_of_every_measured_case():
    checked = defaultdict(int)
    for case in CASES:
        ins, width, mask, shared, _ = access(case)
        if is_scheduled(ins):
            waves = {one.wavefront for one in schedule(ins, width, mask, shared)}
            # each measured launch holds one wavefront that belongs to no access
            assert len(waves) == case["counters"]["l1tex__data_pipe_lsu_wavefronts_mem_shared"] - 1
            check_schedule(ins, width, mask, shared)
            checked[ins.family] += 1
    assert set(checked) == set(SCHEDULED)


@st.composite
def shared_accesses(draw):
    ins = draw(st.sampled_from([ins for ins in INSTRUCTIONS.values() if is_scheduled(ins)]))
    width = draw(st.sampled_from(ins.widths))
    mask = FULL_MASK if ins.matrices else draw(st.integers(0, FULL_MASK))
    slots = draw(st.sampled_from((4, 40, 400)))
    shared = [width * draw(st.integers(0, slots)) for _ in range(32)]
    return ins, width, mask, shared


@settings(max_examples=60, deadline=None)
@given(shared_accesses())
def test_the_schedule_obeys_banks_and_groups(case):
    check_schedule(*case)


def test_paired_loads_share_a_group_and_stores_do_not():
    pairs = [16 * (lane // 2) for lane in range(32)]
    assert len({one.group for one in schedule(instruction("lds"), 16, FULL_MASK, pairs)}) == 2
    assert len({one.group for one in schedule(instruction("sts"), 16, FULL_MASK, pairs)}) == 4


@pytest.mark.parametrize(("name", "width", "shared", "message"), [
    ("ldg", 4, [0] * 32, "ldg: which wavefront serves which lane is not known"),
    ("cp.async.cg", 16, [0] * 32, "cp.async.cg: which wavefront"),
    ("atom.shared.add.f32", 4, [0] * 32, "atom.shared.add.f32: which wavefront"),
    ("lds", 3, [0] * 32, "no form of 3 bytes"),
    ("lds", 4, [0] * 31, "needs 32 shared byte addresses"),
    ("lds", 4, None, "needs 32 shared byte addresses"),
    ("lds", 4, [0] * 31 + [2], "lane 31: shared byte address 2"),
])
def test_what_has_no_schedule_is_refused(name, width, shared, message):
    with pytest.raises(SimError, match=message):
        schedule(instruction(name), width, FULL_MASK, shared)


# ---- one access drawn ----------------------------------------------------------------------------------------


def test_a_two_way_conflict_as_a_pipe_shows_it():
    lines = plain(render_banks(instruction("lds"), 4, 0b10111, [0, 128, 0, 4, 8] + [0] * 27))
    assert lines[0] == "lds, 4 B a lane, 4 active lanes: 2 wavefronts (ideal 1, excessive 1)"
    assert lines[2].split() == ["wavefront", "lanes", "bank", *map(str, range(32))]
    assert lines[3].split() == ["0", "0-31", "0+", ".", "4", *["."] * 29]
    assert lines[4].split() == ["1", "0-31", "!", "1", *["."] * 31]
    assert lines[5:] == ["+ more lanes on the same word", "! a wavefront that bank conflicts cost",
                         "order within a bank: by first lane (the hardware's is unpublished)"]


def test_every_measured_access_is_drawn_within_120_columns():
    for case in CASES[::7]:
        ins, width, mask, shared, global_ = access(case)
        lines = plain(render_banks(ins, width, mask, shared, global_))
        assert max(map(len, lines)) <= 120
        drawn = sum(line.lstrip()[:1].isdigit() for line in lines)
        expected = 0
        if ins.shared:
            expected += len(bank_rows(ins, width, mask, shared))
        if ins.global_:
            expected += len(sector_rows(width, mask, global_))
        assert drawn == expected


def test_a_bank_row_is_a_wavefront():
    rows = bank_rows(instruction("sts"), 8, FULL_MASK, [256 * lane for lane in range(32)])
    assert len(rows) == 32
    assert [row.excessive for row in rows] == ([False] + [True] * 15) * 2
    assert [row.lanes[0] for row in rows] == [row.lanes[1] for row in rows] == [(lane,) for lane in range(32)]


def test_cp_async_gets_a_map_of_shared_memory_instead_of_wavefronts():
    ins = instruction("cp.async.cg")
    shared = [16 * (lane ^ 1) for lane in range(32)]
    rows = bank_rows(ins, 16, FULL_MASK, shared)
    assert [row.label.strip() for row in rows] == ["0", "128", "256", "384"]
    assert rows[1].lanes[:8] == ((9,),) * 4 + ((8,),) * 4
    text = "\n".join(plain(render_banks(ins, 16, FULL_MASK, shared, [0] * 32)))
    assert "wavefronts unmodelled (no proven rule)" in text
    assert "which wavefront serves which lane is not known" in text


@given(st.sampled_from((1, 2, 4, 8, 16)), st.integers(0, FULL_MASK),
       st.lists(st.integers(0, 99), min_size=32, max_size=32))
def test_the_sector_map_is_what_the_rule_counts(width, mask, slots):
    addresses = [slot * width for slot in slots]
    rows = sector_rows(width, mask, addresses)
    sectors = [touched for row in rows for touched in row.touched if touched]
    assert len(sectors) == cost(instruction("ldg"), width, mask, global_=addresses).sectors
    active = [lane for lane in range(32) if mask >> lane & 1]
    assert sum(sectors) == width * len({addresses[lane] for lane in active})
    for row in rows:
        for sector, lanes in enumerate(row.lanes):
            assert lanes == tuple(lane for lane in active if addresses[lane] // 32 == row.line // 32 + sector)


@given(st.sets(st.integers(0, 31)))
def test_lane_ranges_name_exactly_the_lanes(lanes):
    text = lane_ranges(sorted(lanes))
    named = set()
    for part in text.split(",") if text else []:
        span, _, step = part.partition(" by ")
        first, _, last = span.partition("-")
        named |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    assert named == lanes


# ---- one layout drawn ----------------------------------------------------------------------------------------


def test_a_small_layout_is_drawn_whole():
    lines = plain(render_layout(tabulate(parse_layout("(3,4):(36,1)")), 4, "padded"))
    assert lines[0] == "padded: shape (3,4); 4-byte elements; spans 76 elements, 304 B"
    offsets, banks = lines[2:7], lines[8:13]
    assert offsets[0] == "element offsets"
    assert [line.split() for line in offsets[1:4]] == [
        ["0", "1", "2", "3"], ["0", "0", "1", "2", "3"], ["1", "36", "37", "38", "39"]]
    assert banks[0] == "banks"
    assert banks[3].split() == ["1", "4", "5", "6", "7"]
    assert not any("not shown" in line for line in lines)


def test_swizzled_rows_are_drawn_by_the_vector():
    grid = layout_grid(tabulate(parse_layout("K-SW128(64,64)")), itemsize=2)
    assert grid.run == 8
    assert grid.offsets[1].tolist() == [72, 64, 88, 80, 104, 96, 120, 112]
    assert grid.banks[1].tolist() == [4, 0, 12, 8, 20, 16, 28, 24]
    assert layout_grid(tabulate(parse_layout("MN-SW128(64,64)")), itemsize=2).run == 1


def test_big_layouts_are_cut_and_say_so():
    lines = plain(render_layout(tabulate(parse_layout("col(100,200)")), 4))
    assert max(map(len, lines)) <= 120
    assert "not shown: rows from 32 on (68 of 100); columns from 19 on (181 of 200)" in lines
    assert "not shown: rows from 32 on (68 of 100); columns from 29 on (171 of 200)" in lines


def test_odd_shapes_are_drawn():
    assert plain(render_layout(tabulate(parse_layout("8:33")), 4))[4].split() == [str(33 * i) for i in range(8)]
    cube = plain(render_layout(tabulate(parse_layout("row(2,2,4)")), 4))
    assert [line.split()[0] for line in cube[4:8]] == ["0,0", "0,1", "1,0", "1,1"]
    assert "some coordinates share an offset" in plain(render_layout(tabulate(parse_layout("(4,4):(1,1)")), 4))[0]


def test_the_terminal_gets_one_hue_per_bank():
    console = Console(width=120, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(render_layout(tabulate(parse_layout("row(2,32)")), 4), soft_wrap=True)
    hues = {piece.split("m")[0] for piece in capture.get().split("48;2;")[1:]}
    assert len(hues) == 32
