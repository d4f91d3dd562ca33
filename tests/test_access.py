"""The rules against the accesses measured by validation/access.py, on both implementations; and its own workings.

Fitted and fresh rows are compared alike; access.provenance.json says which rules the fresh ones are fresh to. The
counters are the hardware's where a row has them, else the columns of Nsight Compute's source page, where those say
the same.
"""

import gzip
import json
from collections import Counter
from functools import cache
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from implementations import both, cost_of_row

from simgpu.instructions import INSTRUCTIONS, NO_SOURCE, instruction
from simgpu.replay import replay
from simgpu.rules import cost, pairs_merge
from validation.access import SASS, kernel_name, launches, main, measured, metrics_of, packed
from validation.access_patterns import Pattern, patterns

SOURCE = {"wavefronts": "memory_l1_wavefronts_shared", "ideal": "memory_l1_wavefronts_shared_ideal",
          "sectors": "memory_l2_theoretical_sectors_global",
          "ideal_sectors": "memory_l2_theoretical_sectors_global_ideal"}
DATA, TAGS = "data_pipe_lsu_wavefronts_mem_shared_op", "t_sectors_pipe_lsu_mem_global_op"
COPIES = {"wavefronts": f"smsp__sass_l1tex_{DATA}_ldgsts", "sectors": f"smsp__sass_l1tex_{TAGS}_ldgsts"}
UNITS = {"lds": {"wavefronts": f"l1tex__{DATA}_ld"}, "sts": {"wavefronts": f"l1tex__{DATA}_st"},
         "ldg": {"sectors": f"l1tex__{TAGS}_ld"}, "cp.async.ca": COPIES,
         "cp.async.cg": COPIES | {"wavefronts": COPIES["wavefronts"] + "_cache_bypass"},
         "atoms": {"wavefronts": f"l1tex__{DATA}_atom"}, "atoms.cas": {"wavefronts": f"l1tex__{DATA}_atom"}}
CONFLICTS = {"lds": "ld", "sts": "st", "atoms": "atom"}  # of these the hardware's conflicts are wavefronts - ideal
# How many rows of a file are compared, and of how many of those some number has no rule. The latter may only shrink.
ROWS = {"access_source": (5312, 169), "access_fresh": (5942, 180), "access_units": (1173, 126), "access_sm80": (704, 0)}

TAG_ROWS = 4416  # of access_tags


@cache
def rows(name):
    with gzip.open(files("validation") / f"measured/h200/{name}.jsonl.gz", "rt") as lines:
        return [row for row in map(json.loads, lines) if row["op"] in INSTRUCTIONS]


def counters_of(name, row):
    """{field of Cost: the counter it equals} of one row."""
    known = instruction(row["op"])
    if name == "access_units":
        operation = row["op"].split(".")[0]
        return UNITS.get(known.family) or {"sectors": f"l1tex__{TAGS}_{operation}"}
    fields = dict(SOURCE)
    if known.family == "atomg" or not known.global_:
        del fields["sectors"]  # the source page counts a sector once however often an atomic sends it
    if known.family in ("lds", "sts") or known.widths == (8,) or not known.shared:
        del fields["ideal"]  # the source page fills lines up with active lanes, the hardware's conflicts do not
    if (known.family == "lds" and row["bytes_per_lane"] > 4) or not known.shared:
        del fields["wavefronts"]  # see test_the_source_page_merges_only_loads_free_of_conflicts
    if not known.global_:
        del fields["ideal_sectors"]
    if known.family == "cp.async.cg" and SOURCE["sectors"] not in row["counters"]:
        return {}  # access.provenance.json says which rows of these Nsight Compute reported nothing for
    return fields


def arguments(row):
    return (instruction(row["op"]), row["bytes_per_lane"], int(row["active_mask"], 16),
            row.get("shared_byte_offset"), row.get("global_byte_offset"))


def reference(group):
    return [cost(*arguments(row)) for row in group]


def compiled(group):
    """The costs of rows of one instruction and width."""
    known, width, *_ = arguments(group[0])
    shared, global_ = ([row.get(key) for row in group] for key in ("shared_byte_offset", "global_byte_offset"))
    columns = replay(known, width, [int(row["active_mask"], 16) for row in group],
                     np.array(shared, np.int32) if known.shared else None,
                     np.array(global_, np.int64) if known.global_ else None)
    return [cost_of_row(columns, row) for row in range(len(group))]


@pytest.mark.parametrize("costs", [reference, compiled])
@pytest.mark.parametrize("name", ROWS)
def test_every_number_equals_its_counter(costs, name):
    groups = {}
    for row in rows(name):
        if "source_bytes" not in row and instruction(row["op"]).proven and counters_of(name, row):
            groups.setdefault((row["op"], row["bytes_per_lane"]), []).append(row)
    compared = refused = 0
    for group in groups.values():
        for row, found in zip(group, costs(group), strict=True):
            compared += 1
            refused += found.unmodelled
            for field, counter in counters_of(name, row).items():
                number, count = getattr(found, field), row["counters"].get(counter, 0)
                assert number == count or (number is None and found.unmodelled), (field, number, count, row)
            if name == "access_units" and (word := CONFLICTS.get(instruction(row["op"]).family)):
                conflicts = row["counters"].get(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{word}", 0)
                assert found.wavefronts - found.ideal == conflicts, row
    assert (compared, refused) == ROWS[name]


def unread(row):
    """The row with no source where a zero-filling cp.async reads nothing."""
    sources = zip(row["global_byte_offset"], row.get("source_bytes", [1] * 32), strict=True)
    return row | {"global_byte_offset": [address if read else NO_SOURCE for address, read in sources]}


@pytest.mark.parametrize("costs", [reference, compiled])
def test_lines_are_the_tag_requests(costs):
    groups = {}
    for row in rows("access_tags"):
        if instruction(row["op"]).proven:
            groups.setdefault((row["op"], row["bytes_per_lane"]), []).append(unread(row))
    checked = 0
    for group in groups.values():
        for row, found in zip(group, costs(group), strict=True):
            assert found.lines == row["counters"].get("memory_l1_tag_requests_global", 0), row
            checked += 1
    assert checked == TAG_ROWS


@pytest.mark.parametrize("costs", [reference, compiled])
@pytest.mark.parametrize("name", ["access_source", "access_fresh"])
def test_a_lane_that_fills_everything_with_zeros_takes_part_on_the_shared_side_only(costs, name):
    groups = {}
    for row in rows(name):
        if row["op"] == "cp.async.ca" and "source_bytes" in row:
            groups.setdefault(row["bytes_per_lane"], []).append(unread(row))
    checked = 0
    for group in groups.values():
        for row, found in zip(group, costs(group), strict=True):
            numbers = {field: row["counters"].get(counter, 0) for field, counter in SOURCE.items()}
            assert numbers == {field: getattr(found, field) for field in SOURCE}, row
            checked += 1
    assert checked == 384


def test_zero_fill_past_l1_costs_the_passes_past_l1_and_those_through_it():
    checked = 0
    for row in rows("access_zero_fill"):
        known, width, mask, shared, global_ = arguments(row)
        reads = sum(1 << lane for lane in range(32) if mask >> lane & 1 and row["source_bytes"][lane])
        sectors = cost(known, width, reads, shared, global_).sectors if reads else 0
        assert sectors == row["counters"].get(COPIES["sectors"], 0), row
        past, through = (cost(instruction(name), width, mask, shared, global_) for name in (row["op"], "cp.async.ca"))
        if not past.unmodelled:
            assert past.wavefronts + through.wavefronts == row["counters"][COPIES["wavefronts"]], row
            checked += 1
    assert checked == 126


def test_the_source_page_merges_only_loads_free_of_conflicts():
    differ = 0
    for name in ("access_source", "access_fresh"):
        for row in rows(name):
            known, width, mask, shared, _ = arguments(row)
            if known.family != "lds" or width <= 4 or mask != 0xFFFFFFFF:
                continue
            hardware = cost(known, width, mask, shared)
            unmerged = cost(instruction("sts"), width, mask, shared)
            merges = pairs_merge(dict(enumerate(shared))) and hardware.wavefronts == hardware.ideal
            page = hardware.wavefronts if merges else unmerged.wavefronts
            assert page == row["counters"][SOURCE["wavefronts"]], row
            differ += page != hardware.wavefronts
    assert differ > 20


def test_code_compiled_for_sm80_costs_the_same():
    def key(row):
        return json.dumps([value for name, value in row.items() if name not in ("counters", "set")])

    sm90 = {key(row): row["counters"] for row in rows("access_source")}
    both_ways = [row for row in rows("access_sm80") if key(row) in sm90]
    assert len(both_ways) > 500
    assert all(row["counters"] == sm90[key(row)] for row in both_ways)


@both
def test_cp_async_past_l1_first_lane_wins_and_repeats_are_sent_again(cost):
    copy, full = instruction("cp.async.cg"), [16 * lane for lane in range(32)]
    one_target = cost(copy, 16, 0b11, [0] * 32, full)
    assert (one_target.wavefronts, one_target.sectors) == (1, 1)
    fed_twice = cost(copy, 16, 0b11, full, [0] * 32)  # one half of a sector to both halves of a block
    assert fed_twice.sectors == 2 and fed_twice.unmodelled
    two_blocks = cost(copy, 16, 0b10001, full, [0] * 32)  # blocks 0 and 2, which agree in parity
    assert (two_blocks.wavefronts, two_blocks.sectors) == (2, 2)


# ---- the harness -------------------------------------------------------------------------------------------


def test_the_plan_is_legal_and_reproducible():
    plan = list(patterns(7))
    assert plan == list(patterns(7)) != list(patterns(8))
    for row in plan:
        for addresses in filter(None, (row.shared, row.global_)):
            assert len(addresses) == 32 and all(0 <= a < 65536 and a % row.width == 0 for a in addresses), row
        assert 0 < row.mask <= 0xFFFFFFFF and (row.mask == 0xFFFFFFFF or "matrix" not in row.op), row
    assert {row.set for row in plan} == {"structured", "minimal", "random", "fresh"}
    assert all(count % 64 == 0 for count in Counter(map(kernel_name, plan)).values())


def test_launches_hold_one_instruction_and_fill_up_with_rows_without_lanes():
    loads = [Pattern("lds", width, "random", 1, (0,) * 32) for width in (4, 4, 4, 8)]
    first, second, third = launches(loads, 2)
    assert [row.mask for row in first + second + third] == [1, 1, 1, 0, 1, 0]
    assert {row.width for row in first + second} == {4} and {row.width for row in third} == {8}
    assert len(packed(first)) == 32 + 2 * 97 * 4 and packed(first).startswith(b"lds.4\0")


def test_a_profile_is_read_site_by_site(monkeypatch, tmp_path):
    launch = launches([Pattern("lds", 4, "random", 1 << k, (0,) * 32) for k in range(3)], 4)[0]
    listing = ["STS [R1], R2", "LDS R1, [R2]", "@P0 LDS R3, [R4]", "LDSM.16 R5, [R6]", "LDS R1, [R2]", "LDS R1, [R2]"]
    values = {0x10 * k: 10 + k for k in range(len(listing))}

    def metric(name):
        if name != SOURCE["wavefronts"]:
            return None
        at = list(values)
        return SimpleNamespace(num_instances=lambda: len(at), as_uint64=lambda k: values[at[k]],
                               correlation_ids=lambda: SimpleNamespace(as_uint64=lambda k: at[k]))

    action = SimpleNamespace(metric_by_name=metric, sass_by_pc=lambda pc: listing[pc // 0x10], name=lambda: "access")
    profiled = SimpleNamespace(num_actions=lambda: 1, action_by_idx=lambda _: action)
    report = SimpleNamespace(load_report=lambda _: SimpleNamespace(range_by_idx=lambda _: profiled))
    monkeypatch.setattr("validation.access.report_module", lambda: report)
    found = list(measured(tmp_path / "rep", [launch], metrics_of(launch)))
    assert [row["counters"] for row in found] == [{SOURCE["wavefronts"]: count} for count in (11, 12, 14)]
    assert [row["active_mask"] for row in found] == ["0x00000001", "0x00000002", "0x00000004"]
    assert all(any(row.op.startswith(op) for op in SASS) for row in patterns())


@pytest.mark.parametrize(("tools", "message"), [
    ([], "nvidia-smi not found: install the NVIDIA driver: this needs a machine with a GPU"),
    (["nvidia-smi", "nvcc"], "ncu not found: install Nsight Compute and put ncu on PATH"),
    (["nvidia-smi", "nvcc", "ncu"], "ncu failed with status 3: no permission"),
])
def test_a_measurement_that_fails_says_why_and_leaves_no_result(tools, message, tmp_path, monkeypatch):
    for tool in tools:
        (tmp_path / tool).write_text("#!/bin/sh\necho no permission >&2\nexit 3\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    run = CliRunner().invoke(main, ["measure", "/bin/sh", str(tmp_path / "out.jsonl"), "--most", "1"])
    assert (run.exit_code, run.output) == (2, f"error: {message}\n")
    assert not list(tmp_path.glob("*.json*l"))
