"""The compiled replay: equal to the reference access by access, and true to what the rules imply."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import NUMBERS, cost_of_row

from simgpu import replay as replay_module
from simgpu.errors import SimError
from simgpu.instructions import FULL_MASK, INSTRUCTIONS, NO_SOURCE, instruction
from simgpu.replay import Totals, replay, totals
from simgpu.replay_conflicts import merge_exchange
from simgpu.rules import cost, group_lanes

LANES = np.arange(32)
FORMS = [(known, width) for known in INSTRUCTIONS.values() for width in known.widths]
SHARED_FORMS = [form for form in FORMS if form[0].shared]
STORES = [form for form in FORMS if form[0].family == "sts"]
SHARED_VECTORS, GLOBAL_VECTORS = 1 << 13, 1 << 38  # windows of addresses, in vectors of the access's width

# ---- accesses that collide in every way a rule distinguishes -------------------------------------------------


@st.composite
def vectors(draw, window):
    """32 vector indices below about ``window``: repeats, one bank, strides, XOR swizzles, runs, or anything."""
    base = draw(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, window // 2)))
    few = st.lists(st.integers(0, draw(st.sampled_from([1, 2, 3, 9, 40, 300]))), min_size=32, max_size=32)
    offsets = draw(st.one_of(
        few,
        few.map(lambda rows: [32 * row for row in rows]),
        few.map(lambda halves: [half // 2 * 32 + half % 2 for half in halves]),
        st.permutations(range(32)),
        st.builds(lambda stride, start: [stride * (lane + start) for lane in LANES.tolist()],
                  st.integers(0, 70), st.integers(0, 9)),
        st.builds(lambda xor, pitch, row: [(lane % row ^ lane // row & xor) + lane // row * pitch
                                           for lane in LANES.tolist()],
                  st.integers(0, 7), st.integers(0, 40), st.sampled_from([4, 8, 16])),
        st.builds(lambda values, run: [values[lane // run] for lane in LANES.tolist()],
                  few, st.sampled_from([2, 4, 8])),
        st.builds(lambda values, step: [values[lane & ~step] for lane in LANES.tolist()],
                  few, st.sampled_from([1, 2, 4])),
        st.lists(st.integers(0, window // 2), min_size=32, max_size=32),
    ))
    return base + np.array(offsets, np.int64)


masks = st.one_of(
    st.just(FULL_MASK), st.integers(0, FULL_MASK), st.sampled_from([0, 1, 1 << 31, 0x55555555, 0x33333333, 0xFFFF]),
    st.integers(0, 32).map(lambda lanes: (1 << lanes) - 1))


@st.composite
def columns(draw, form):
    """(masks, shared, global) of 1 to 5 accesses, each repeated: more than are sorted side by side, sometimes."""
    known, width = form
    n, times = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 40]))
    mask = [FULL_MASK if known.matrices else draw(masks) for _ in range(n)]
    shared = [draw(vectors(SHARED_VECTORS)) * width for _ in range(n if known.shared else 0)]
    global_ = [draw(vectors(GLOBAL_VECTORS)) * width for _ in range(n if known.global_ else 0)]
    if known.shared and known.global_:
        fills = draw(st.just(0) | masks)
        global_ = [np.where(fills >> np.arange(32) & 1, NO_SOURCE, row) for row in global_]
    return (np.tile(np.array(mask, np.uint32), times),
            np.tile(np.array(shared, np.int32), (times, 1)) if known.shared else None,
            np.tile(np.array(global_, np.int64), (times, 1)) if known.global_ else None)


def each(forms):
    return pytest.mark.parametrize("form", forms, ids=[f"{known.name} {width}" for known, width in forms])


def numbers(found):
    return [column.tolist() for column in found.arrays()]


def seeded(form, n, seed=0):
    """n accesses in small windows: (masks, shared, global)."""
    known, width = form
    rng = np.random.default_rng(seed)
    active = np.full(n, FULL_MASK) if known.matrices else rng.integers(0, FULL_MASK, n, endpoint=True)
    shared, global_ = (width * rng.integers(0, window, (n, 32)) * rng.integers(0, 3, (n, 1)) for window in (128, 64))
    if known.shared and known.global_:
        global_[rng.random(global_.shape) < 0.02] = NO_SOURCE
    return active.astype(np.uint32), shared.astype(np.int32), global_


def one_repeat(ordinary):
    """496 rows of 32 ``ordinary`` addresses: in each, another pair of lanes shares an address."""
    one, other = np.triu_indices(32, 1)
    rows = np.tile(ordinary, (len(one), 1))
    rows[np.arange(len(one)), other] = rows[np.arange(len(one)), one]
    return rows


# ---- the reference, access by access -------------------------------------------------------------------------


@each(FORMS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_access_costs_what_the_reference_says(form, data):
    active, shared, global_ = data.draw(columns(form))
    found = replay(*form, active, shared, global_)
    answers = {}
    for row, mask in enumerate(active.tolist()):
        sides = [None if side is None else side[row].tolist() for side in (shared, global_)]
        key = repr((mask, sides))
        if key not in answers:
            answers[key] = cost(*form, mask, *sides)
        assert cost_of_row(found, row) == answers[key]


@each(FORMS)
def test_a_row_that_is_the_one_before_moved_costs_what_the_reference_says(form):
    """By whole lines it costs the same, and is not computed again; by less, or on one side only, it may not."""
    active, shared, global_ = seeded(form, 40)
    moves = np.array([[0, 0], [128, 0], [0, 128], [128, 256], [-128, -128], [32, 64], [64, 32]]) + 512
    repeated = np.repeat(np.arange(40), len(moves))
    by_shared, by_global = np.tile(moves, (40, 1)).T[:, :, None]
    shared, sources = shared[repeated] + by_shared.astype(np.int32), global_[repeated]
    global_ = np.where(sources == NO_SOURCE, NO_SOURCE, sources + by_global)
    check = [side if used else None for side, used in ((shared, form[0].shared), (global_, form[0].global_))]
    found = replay(*form, active[repeated], *check)
    for row, mask in enumerate(active[repeated].tolist()):
        sides = (None if side is None else side[row].tolist() for side in check)
        assert cost_of_row(found, row) == cost(*form, mask, *sides)


@each(FORMS)
def test_totals_are_the_sums_in_blocks_and_threads_too(form, monkeypatch):
    monkeypatch.setattr(replay_module, "ROWS_PER_THREAD", 50)
    monkeypatch.setattr(replay_module, "ROWS_PER_SUM", 70)
    active, shared, global_ = seeded(form, 333)
    found = replay(*form, active, shared, global_)

    def known(column):
        return 0 if column is None else int(column[column >= 0].sum())

    def unknown(column):
        return 0 if column is None else int((column < 0).sum())

    sums = Totals(accesses=333, unmodelled=int(found.unmodelled.sum()),
                  max_wavefronts=0 if found.wavefronts is None else max(0, int(found.wavefronts.max())),
                  unknown_wavefronts=unknown(found.wavefronts), unknown_sectors=unknown(found.sectors),
                  unknown_lines=unknown(found.lines),
                  **{name: known(getattr(found, name)) for name in NUMBERS})
    assert sums.accesses == sums.unmodelled or sums.wavefronts + sums.sectors > 0
    for threads in (1, 2, 3):
        assert totals(*form, active, shared, global_, threads=threads) == sums
        assert numbers(replay(*form, active, shared, global_, threads=threads)) == numbers(found)


@each([form for form in FORMS if form[0].family.startswith("cp.async")])
def test_a_repeat_between_any_two_lanes_counts_as_in_the_reference(form):
    width, ordinary = form[1], form[1] * LANES
    active = np.full(496, FULL_MASK, np.uint32)
    for shared, global_ in ((one_repeat(ordinary), np.tile(ordinary, (496, 1))),
                            (np.tile(ordinary, (496, 1)), one_repeat(ordinary)),
                            (one_repeat(ordinary), one_repeat(ordinary + 128 * width))):
        found = replay(*form, active, shared, global_)
        for row in range(496):
            assert cost_of_row(found, row) == cost(*form, FULL_MASK, shared[row].tolist(), global_[row].tolist())


# ---- what the rules imply -------------------------------------------------------------------------------------


@each(SHARED_FORMS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), rows=st.integers(0, 1000))
def test_shifting_shared_memory_by_whole_rows_changes_nothing(form, data, rows):
    active, shared, global_ = data.draw(columns(form))
    shifted = replay(*form, active, shared + np.int32(128 * rows), global_)
    assert numbers(shifted) == numbers(replay(*form, active, shared, global_))


@each(STORES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_store_does_not_care_which_lane_of_a_group_writes_what(form, data):
    active, shared, _ = data.draw(columns(form))
    group = group_lanes(form[1])
    order = np.concatenate([first + np.array(data.draw(st.permutations(range(group))))
                            for first in range(0, 32, group)])
    bits = active[:, None] >> LANES.astype(np.uint32) & 1
    reordered = (bits[:, order].astype(np.uint64) << LANES.astype(np.uint64)).sum(axis=1).astype(np.uint32)
    assert numbers(replay(*form, reordered, shared[:, order])) == numbers(replay(*form, active, shared))


@each(STORES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), kept=st.integers(0, FULL_MASK))
def test_dropping_lanes_never_raises_the_cost_of_a_store(form, data, kept):
    active, shared, _ = data.draw(columns(form))
    fewer = replay(*form, active & np.uint32(kept), shared)
    assert (fewer.wavefronts <= replay(*form, active, shared).wavefronts).all()


def test_the_network_sorts_every_aligned_group():
    """By the 0-1 principle: all 0-1 inputs of 8 and 16; of 32, all with both halves sorted, as the merge gets them."""
    comparators, sorts_groups_of = merge_exchange(32)

    def run(inputs, first, last):
        for low, high in comparators[first:last]:
            inputs[low], inputs[high] = inputs[[low, high]].min(axis=0), inputs[[low, high]].max(axis=0)
        return inputs

    for group in (8, 16):
        every = (np.arange(1 << group) >> np.arange(group)[:, None] & 1).astype(np.int8)
        result = run(np.tile(every, (32 // group, 1)), 0, sorts_groups_of[group])
        assert (np.diff(result.reshape(-1, group, 1 << group), axis=1) >= 0).all()
    halves = np.tri(17, 16, -1, np.int8)[:, ::-1].T  # column k: 16 - k zeros, then k ones
    merged = run(np.vstack([np.repeat(halves, 17, axis=1), np.tile(halves, 17)]), sorts_groups_of[16], None)
    assert (np.diff(merged, axis=0) >= 0).all()


# ---- arguments ------------------------------------------------------------------------------------------------


def test_any_integer_array_in_any_order_counts_the_same():
    form = (instruction("cp.async.cg"), 16)
    active, shared, global_ = seeded(form, 100)
    expected = numbers(replay(*form, active, shared, global_))
    frozen = shared.copy()
    frozen.flags.writeable = False
    assert numbers(replay(*form, active.tolist(), frozen, np.asfortranarray(global_))) == expected
    wider = active.astype(np.int64), shared.astype(np.int64), global_.astype(np.float64).astype(np.int32)
    assert numbers(replay(*form, *wider)) == expected
    assert numbers(replay(*form, active[::2], shared[::2], global_[::2])) == [column[::2] for column in expected]


def test_inactive_lanes_may_hold_anything():
    addresses = np.full((1, 32), -(2**40) + 1)
    addresses[0, :4] = 0, 4, 128, 132
    assert replay(instruction("lds"), 4, [0xF], shared=addresses).wavefronts.tolist() == [2]


def test_no_accesses_cost_nothing():
    nothing = np.zeros((0, 32), np.int32)
    assert totals(instruction("lds"), 4, [], shared=nothing) == Totals()
    assert len(replay(instruction("lds"), 4, [], shared=nothing).wavefronts) == 0


def bad(value, lane=3, access=17):
    addresses = np.tile(16 * LANES, (40, 1))
    addresses[access, lane] = value
    return addresses


FULL, GOOD = [FULL_MASK] * 40, np.tile(16 * LANES, (40, 1))
REFUSED = [
    ("lds", 3, FULL, GOOD, None, "lds has no form of 3 bytes per lane"),
    ("lds", 4, [*FULL[:5], 1 << 32, *FULL[6:]], GOOD, None, "access 5: mask 0x100000000 is not a 32-bit mask"),
    ("lds", 4, [*FULL[:5], 1 << 70, *FULL[6:]], GOOD, None, f"access 5: mask {1 << 70:#x} is not a 32-bit mask"),
    ("lds", 4, [*FULL[:5], -1, *FULL[6:]], GOOD, None, "access 5: mask -0x1 is not a 32-bit mask"),
    ("lds", 4, np.full(40, 1.5), GOOD, None, "active masks must be n integers, not float64 of shape (40,)"),
    ("lds", 4, FULL_MASK, GOOD, None, "active masks must be n integers, not int64 of shape ()"),
    ("ldmatrix.x4", 16, [*FULL[:7], 0xFFFF, *FULL[8:]], GOOD, None,
     "access 7: ldmatrix.x4 needs all 32 lanes active, or none (mask 0x0000ffff)"),
    ("ldmatrix.x1", 16, FULL, bad(8, lane=31), None,
     "access 17: lane 31: shared byte address 8 is not a non-negative multiple of 16"),
    ("lds", 4, FULL, bad(6), None, "access 17: lane 3: shared byte address 6 is not a non-negative multiple of 4"),
    ("sts", 2, FULL, bad(-2), None, "access 17: lane 3: shared byte address -2 is not a non-negative multiple of 2"),
    ("atom.shared.cas.b32", 4, FULL, bad(2), None,
     "access 17: lane 3: shared byte address 2 is not a non-negative multiple of 4"),
    ("ldg", 8, FULL, None, bad(12), "access 17: lane 3: global byte address 12 is not a non-negative multiple of 8"),
    ("atom.global.add.f32", 4, FULL, None, bad(-4),
     "access 17: lane 3: global byte address -4 is not a non-negative multiple of 4"),
    ("cp.async.ca", 16, FULL, GOOD, bad(8),
     "access 17: lane 3: global byte address 8 is not a non-negative multiple of 16"),
    ("cp.async.cg", 16, FULL, bad(8, lane=4), bad(8, access=20),
     "access 17: lane 4: shared byte address 8 is not a non-negative multiple of 16"),
    ("cp.async.cg", 16, FULL, GOOD, None, "cp.async.cg needs 32 global byte addresses per access"),
    ("lds", 4, FULL, GOOD[:7], None,
     "shared byte addresses must be integers of shape (40, 32), not int64 of shape (7, 32)"),
    ("lds", 4, FULL, GOOD / 2, None,
     "shared byte addresses must be integers of shape (40, 32), not float64 of shape (40, 32)"),
    ("lds", 4, FULL, bad(1 << 31), None, "access 17: lane 3: shared byte address 2147483648 does not fit int32"),
]


@pytest.mark.parametrize("count", [replay, totals])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("name", "width", "active", "shared", "global_", "message"), REFUSED,
                         ids=[f"{case[0]}: {case[-1]}" for case in REFUSED])
def test_refused_with_the_access_the_lane_and_the_value(
        count, threads, name, width, active, shared, global_, message, monkeypatch):
    monkeypatch.setattr(replay_module, "ROWS_PER_THREAD", 5)
    monkeypatch.setattr(replay_module, "ROWS_PER_SUM", 4)
    with pytest.raises(SimError) as refusal:
        count(instruction(name), width, active, shared, global_, threads=threads)
    assert str(refusal.value).startswith(message)


def test_fewer_than_one_thread_is_refused():
    with pytest.raises(SimError, match="threads must be at least 1, not 0"):
        totals(instruction("lds"), 4, FULL, shared=GOOD, threads=0)
