"""cp.async: values, zero-fill, groups of each thread, and reads before the wait, against a model of one thread."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.run import simulate
from simgpu.tensor import GlobalTensor, bfloat16, float32, int32, uint8

WARPS, SLOTS = 2, 3
THREADS = 32 * WARPS


def emulate(body, *args, grid=1, block=32, mode="values"):
    return simulate(Launch(body, grid, block, args), mode=mode)


# ---- values and zero-fill ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from((("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16))),
    dtype=st.sampled_from((uint8, bfloat16, float32)),
    seed=st.integers(0, 2**32 - 1),
    zero_fill=st.booleans(),
)
def test_a_copy_moves_bytes_and_fills_the_rest_with_zeros(form, dtype, seed, zero_fill):
    cache, width = form
    random, count = np.random.default_rng(seed), width // dtype.itemsize
    data = random.integers(1, 100, (2, THREADS, count)).astype(dtype)
    place, on = random.permutation(THREADS), random.random((2, THREADS)) < 0.8
    copied = random.integers(0, count + 1, (2, THREADS)) * dtype.itemsize if zero_fill else None

    def body(cta, src, dst):
        tile = cta.shared("tile", dtype, (THREADS, count))
        for i in range(count):
            cta.store(tile[cta.tid, i], dtype.type(101))
        with cta.where(on[cta.bx, cta.tid]):
            kept = None if copied is None else copied[cta.bx, cta.tid]
            cta.cp_async(tile[place[cta.tid], 0], src[cta.bx, cta.tid, 0], width, cache=cache, src_bytes=kept)
        cta.cp_async_commit()
        cta.cp_async_wait(0)
        cta.sync()
        for i in range(count):
            cta.store(dst[cta.bx, cta.tid, i], cta.load(tile[cta.tid, i]))

    src = GlobalTensor("src", dtype, data.shape, init=data)
    dst = GlobalTensor("dst", dtype, data.shape)
    found = emulate(body, src, dst, grid=2, block=THREADS).arrays["dst"]
    expected = np.full_like(data, 101)
    for block, thread in np.ndindex(2, THREADS):
        if on[block, thread]:
            kept = count if copied is None else copied[block, thread] // dtype.itemsize
            expected[block, place[thread], :kept] = data[block, thread, :kept]
            expected[block, place[thread], kept:] = 0
    assert found.tobytes() == expected.tobytes()


def test_a_lane_that_copies_nothing_may_point_anywhere_and_a_short_one_past_the_end():
    data = np.arange(1, 11, dtype=np.float32)

    def body(cta, src, dst):
        tile = cta.shared("tile", float32, (32, 4))
        copied = np.clip(4 * (10 - 4 * cta.lane), 0, 16)
        cta.cp_async(tile[cta.lane, 0], src[4 * cta.lane], 16, src_bytes=copied)
        cta.cp_async_commit()
        cta.cp_async_wait()
        cta.store(dst[cta.lane, 0], cta.load(tile[cta.lane, 0], vec=4), vec=4)

    src, dst = GlobalTensor("src", float32, (10,), init=data), GlobalTensor("dst", float32, (32, 4))
    found = emulate(body, src, dst).arrays["dst"].reshape(-1)
    assert found[:10].tolist() == data.tolist() and (found[10:] == 0).all()


def test_a_copy_that_is_not_zero_filled_may_not_run_past_the_end():
    def body(cta, src):
        tile = cta.shared("tile", float32, (32, 4))
        cta.cp_async(tile[cta.lane, 0], src[4 * np.minimum(cta.lane, 2)], 16)

    with pytest.raises(SimError, match=r"lane 2: 16 bytes at byte 32 of 'src' run past its end \(40 bytes\)"):
        emulate(body, GlobalTensor("src", float32, (10,)))


@pytest.mark.parametrize(
    ("src_bytes", "message"), [(17, "17"), (-4, "-4"), (6, "6"), (np.full(32, 2.0), "float64, not an integer")]
)
def test_src_bytes_is_whole_elements_of_the_copy(src_bytes, message):
    def body(cta, src):
        cta.cp_async(cta.shared("tile", float32, (32, 4))[cta.lane, 0], src[0], 16, src_bytes=src_bytes)

    with pytest.raises(SimError, match=rf"src_bytes (is )?{message}"):
        emulate(body, GlobalTensor("src", float32, (32,)), mode="addresses")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes": 8}, r"cp.async.cg has no form of 8 bytes per lane \(it has 16\)"),
        ({"bytes": 2, "cache": "ca"}, "cp.async.ca has no form of 2 bytes"),
        ({"cache": "cs"}, "cp.async has no cache mode 'cs'"),
    ],
)
def test_forms_that_do_not_exist_are_refused(options, message):
    def body(cta, src):
        cta.cp_async(cta.shared("tile", float32, (32, 4))[cta.lane, 0], src[0], **options)

    with pytest.raises(SimError, match=message):
        emulate(body, GlobalTensor("src", float32, (32,)))


def test_a_copy_goes_from_global_to_shared_in_one_dtype():
    src = GlobalTensor("src", float32, (32,))
    with pytest.raises(SimError, match="copies global to shared memory of one dtype"):
        emulate(lambda cta, src: cta.cp_async(src[cta.lane], src[cta.lane]), src)
    with pytest.raises(SimError, match="copies global to shared memory of one dtype"):
        emulate(lambda cta, src: cta.cp_async(cta.shared("t", int32, (32, 4))[cta.lane, 0], src[0]), src)


@pytest.mark.parametrize(
    "cache, filled, unmodelled, sectors", [("cg", 8, 10, None), ("ca", 8, 0, 160), ("ca", 16, 0, 160)]
)
def test_zero_filling_lanes_are_counted_where_a_rule_covers_them(cache, filled, unmodelled, sectors):
    """By the warp, so that counters do not depend on which CTAs a batch holds."""

    def body(cta, src):
        tile = cta.shared("tile", float32, (64, 4))
        short = (cta.bx == 3) & (cta.tid == 40)
        src_bytes = np.where(short, 16 - filled, 16)
        cta.cp_async(tile[cta.tid, 0], src[4 * cta.tid], 16, cache=cache, src_bytes=src_bytes, site="copy")

    row = emulate(body, GlobalTensor("src", float32, (256,)), grid=5, block=64, mode="addresses").table["copy"]
    assert (row.executed, row.unmodelled, row.sectors) == (10, unmodelled, sectors)


# ---- groups -----------------------------------------------------------------------------------------------


class Thread:
    """What one thread's copies may still be doing: a model of cp.async groups as the PTX ISA describes them."""

    def __init__(self):
        self.groups, self.open = [], set()  # closed groups, oldest first, and the slots of the one not committed
        self.slots = {}

    def copy(self, slot, value):
        self.open.add(slot)
        self.slots[slot] = value

    def commit(self):
        self.groups.append(self.open)
        self.open = set()

    def wait(self, pending):
        self.groups = self.groups[max(0, len(self.groups) - pending) :]

    def in_flight(self, slot):
        return any(slot in group for group in (*self.groups, self.open))


steps = st.one_of(
    st.tuples(st.just("copy"), st.integers(0, SLOTS - 1)),
    st.tuples(st.just("commit"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 2)),
    st.tuples(st.just("read"), st.integers(0, SLOTS - 1)),
)
TWICE = [("copy", 0), ("commit", 0), ("copy", 0), ("commit", 0), ("wait", 1), ("read", 0)]
APART = [(("copy", 0), "all"), (("commit", 0), "warp 0"), (("wait", 0), "all"), (("read", 0), "warp 0"),
         (("read", 0), "all")]
masks = st.sampled_from(("all", "all", "warp 0", "warp 1", "even lanes", "first half"))


@settings(max_examples=150, deadline=None)
@example(program=APART)  # warp 1 committed nothing
@example(program=[(step, "all") for step in TWICE])  # what landed lies under a copy that has not
@given(program=st.lists(st.tuples(steps, masks), min_size=3, max_size=14))
def test_groups_of_each_thread_follow_the_model(program):
    """Threads commit and wait under different masks; a read finds the last copy's value or is refused, as modelled."""
    tid = np.arange(THREADS)
    choose = {"all": tid >= 0, "warp 0": tid < 32, "warp 1": tid >= 32, "even lanes": tid % 2 == 0,
              "first half": tid % 32 < 16}
    threads, expected, refusal = [Thread() for _ in tid], [], None
    for number, ((step, operand), mask) in enumerate(program):
        active = [threads[t] for t in tid if choose[mask][t]]
        if step == "copy":
            for t in np.flatnonzero(choose[mask]):
                threads[t].copy(operand, THREADS * number + t)
        elif step == "read":
            for words, bad in (
                ("which nobody wrote", lambda thread, slot: slot not in thread.slots),
                ("before the wait", lambda thread, slot: thread.in_flight(slot)),
            ):
                faults = [t for t in tid if choose[mask][t] and bad(threads[t], operand)]
                if faults and refusal is None:
                    refusal = f"warp {faults[0] // 32}, lane {faults[0] % 32}: reads shared byte .* {words}"
            if refusal:
                break
            expected.append([threads[t].slots[operand] if choose[mask][t] else 0 for t in tid])
        else:
            for thread in active:
                thread.commit() if step == "commit" else thread.wait(operand)

    def body(cta, src):
        slots = cta.shared("slots", int32, (SLOTS, THREADS, 4))
        for number, ((step, operand), mask) in enumerate(program):
            with cta.where(choose[mask][cta.tid]):
                if step == "copy":
                    cta.cp_async(slots[operand, cta.tid, 0], src[number, cta.tid, 0], site=f"copy {number}")
                elif step == "commit":
                    cta.cp_async_commit()
                elif step == "wait":
                    cta.cp_async_wait(operand)
                else:
                    read.append(cta.load(slots[operand, cta.tid, 0], site=f"read {number}"))

    read = []
    data = np.repeat(np.arange(len(program) * THREADS, dtype=np.int32), 4).reshape(len(program), THREADS, 4)
    launch = Launch(body, 1, THREADS, (GlobalTensor("src", int32, data.shape, init=data),))
    if refusal:
        with pytest.raises(SimError) as caught:
            simulate(launch, mode="values")
        assert re.search(refusal, str(caught.value)), (refusal, str(caught.value))
    else:
        simulate(launch, mode="values")
    assert [values.reshape(-1).tolist() for values in read] == expected


def test_a_negative_number_of_groups_is_refused():
    with pytest.raises(SimError, match=r"wait_group -1"):
        emulate(lambda cta: cta.cp_async_wait(-1))


@pytest.mark.parametrize("mistake", ["no wait", "one group too few", "no commit", "other warp"])
def test_data_used_before_its_wait_is_refused_with_its_place(mistake):
    def body(cta, src):
        tile = cta.shared("pad", float32, (4,)), cta.shared("tile", float32, (64, 4))
        cta.cp_async(tile[1][cta.tid, 0], src[cta.tid, 0])
        if mistake != "no commit":
            cta.cp_async_commit()
        if mistake == "other warp":
            with cta.where(cta.warp == 0):
                cta.cp_async_wait()
        elif mistake != "no wait":
            cta.cp_async_wait(1 if mistake == "one group too few" else 0)
        cta.sync()
        cta.load(tile[1][cta.tid, 1], site="use")

    lane, byte = ("warp 1, lane 0", 16 + 32 * 16 + 4) if mistake == "other warp" else ("warp 0, lane 0", 20)
    wanted = rf"site 'use' \(test_emulator_async.py:\d+\): CTA 0, {lane}: reads shared byte {byte} \('tile'\) before"
    with pytest.raises(SimError, match=wanted):
        emulate(body, GlobalTensor("src", float32, (64, 4)), block=64)
