"""The rules against what Nsight Compute counted: every measured pattern, on both implementations."""

import json
from collections import defaultdict
from importlib.resources import files

import pytest
from implementations import both

from simgpu.instructions import instruction

WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_"
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_"
COPY_WAVEFRONTS = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts"
COPY_SECTORS = "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts"
OPERATION = {"lds": "ld", "ldmatrix": "ld", "ldg": "ld", "sts": "st", "stmatrix": "st", "stg": "st",
             "atoms": "atom", "atoms.cas": "atom"}

# How many of the measured patterns have a rule for every number. May grow; shrinking is a loss.
MODELLED = {
    "lds": 192, "sts": 192, "ldg": 120, "stg": 120, "cp.async.ca": 210, "cp.async.cg": 70,
    "ldmatrix.x1": 24, "ldmatrix.x2": 24, "ldmatrix.x4": 24,
    "ldmatrix.x1.trans": 24, "ldmatrix.x2.trans": 24, "ldmatrix.x4.trans": 24,
    "stmatrix.x1": 24, "stmatrix.x2": 24, "stmatrix.x4": 24, "stmatrix.x4.trans": 24,
    "atom.shared.add.u32": 20, "red.shared.add.u32": 20, "atom.shared.exch.b32": 20, "atom.shared.cas.b32": 20,
    "atom.global.add.u32": 20, "red.global.add.u32": 18,
}


def measured():
    found = defaultdict(list)
    for line in (files("validation") / "measured/h200/patterns.jsonl").read_text().splitlines():
        pattern = json.loads(line)
        found[pattern["op"]].append(pattern)
    return found


PATTERNS = measured()
each_instruction = pytest.mark.parametrize("name", sorted(PATTERNS))


def expected(name):
    """{field of Cost, or "conflicts": the counter it equals} for one instruction."""
    known = instruction(name)
    if known.family.startswith("cp.async"):
        return {"wavefronts": COPY_WAVEFRONTS, "sectors": COPY_SECTORS}
    operation = OPERATION.get(known.family) or name.split(".")[0]  # atom or red
    if known.shared:
        return {"wavefronts": WAVEFRONTS + operation, "conflicts": CONFLICTS + operation}
    return {"sectors": SECTORS + operation}


def costs(cost, name):
    """(pattern, its cost) of every measured pattern of the instruction."""
    for pattern in PATTERNS[name]:
        yield pattern, cost(instruction(name), pattern["bytes_per_lane"], int(pattern["active_mask"], 16),
                            pattern.get("shared_byte_offset"), pattern.get("global_byte_offset"))


@both
@each_instruction
def test_every_number_equals_its_counter(cost, name):
    different, compared = [], 0
    for pattern, found in costs(cost, name):
        counted = {field: pattern["counters"].get(counter, 0) for field, counter in expected(name).items()}
        predicted = {"wavefronts": found.wavefronts, "sectors": found.sectors}
        if found.wavefronts is not None:
            # ncu counts one conflict per extra turn; a turn of compare-and-swap is two wavefronts.
            predicted["conflicts"] = (found.wavefronts - found.ideal) // (2 if name == "atom.shared.cas.b32" else 1)
        for field, count in counted.items():
            if predicted.get(field) is None:
                assert found.unmodelled, f"{field} is missing but the access is not called unmodelled: {pattern}"
                continue
            compared += 1
            if predicted[field] != count:
                different.append((field, predicted[field], count, pattern))
    assert not different, f"{len(different)} of {compared} differ, the first: {different[0]}"
    assert compared >= MODELLED[name]


@both
@each_instruction
def test_the_modelled_share_does_not_shrink(cost, name):
    assert sum(not found.unmodelled for _, found in costs(cost, name)) >= MODELLED[name]


def test_every_pattern_file_instruction_has_a_pinned_share():
    assert set(PATTERNS) == set(MODELLED)
    assert sum(map(len, PATTERNS.values())) == 1272
