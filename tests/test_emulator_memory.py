"""Loads, stores, atomics, masks, layouts and unions of the emulator, held against per-lane loops in plain Python."""

import numpy as np
import pytest
import tensor_layouts as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.run import simulate
from simgpu.tensor import (
    GlobalTensor,
    Tensor,
    bfloat16,
    float16,
    float32,
    float64,
    int8,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
)

DTYPES = (bfloat16, float16, float32, float64, int8, int32, int64, uint8, uint16, uint32)

blocks = st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3))
grids = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))


def emulate(body, *args, grid=1, block=32, mode="values", **options):
    """The global tensors of ``body<<<grid, block>>>(*args)``."""
    return simulate(Launch(body, grid, block, args), mode=mode, **options).arrays


def threads_of(block):
    """(tid, (x, y, z)) of every thread of a block, x fastest (CUDA C++ Programming Guide, "Thread Hierarchy")."""
    x, y, z = block
    return [(tid, (tid % x, tid // x % y, tid // x // y)) for tid in range(x * y * z)]


# ---- where threads are ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(grid=grids, block=blocks, batch=st.integers(1, 64))
def test_every_thread_of_every_cta_stores_its_own_coordinates(grid, block, batch):
    places = GlobalTensor("places", int32, (grid[2], grid[1], grid[0], np.prod(block), 7))

    def body(cta, places):
        for i, value in enumerate((cta.tx, cta.ty, cta.tz, cta.bx, cta.by, cta.bz, cta.warp * 32 + cta.lane)):
            cta.store(places[cta.bz, cta.by, cta.bx, cta.tid, i], value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simgpu.run.BATCH_WARPS_WITH_VALUES", batch)
        found = emulate(body, places, grid=grid, block=block)["places"]
    for bz, by, bx in np.ndindex(grid[::-1]):
        for tid, xyz in threads_of(block):
            assert found[bz, by, bx, tid].tolist() == [*xyz, bx, by, bz, tid]


# ---- loads and stores -------------------------------------------------------------------------------------


def data_of(dtype, shape, seed=0):
    random = np.random.default_rng(seed)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return random.integers(-128, 128, shape).astype(dtype)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    vec=st.sampled_from((1, 2, 4, 8, 16)),
    grid=st.integers(1, 3),
    threads=st.integers(1, 96),
    seed=st.integers(0, 2**32 - 1),
)
def test_vectors_travel_through_shared_memory_under_random_masks_and_permutations(dtype, vec, grid, threads, seed):
    """global -> shared (thread t to slot p[t]) -> global (thread t from slot q[t]), masked at each end."""
    if vec * dtype.itemsize > 16:
        vec = 16 // dtype.itemsize
    random = np.random.default_rng(seed)
    lanes = -(-threads // 32) * 32
    put, get = random.permutation(lanes) % threads, random.integers(0, threads, lanes)
    put[:threads] = random.permutation(threads)
    loads, stores = random.random((2, grid, lanes)) < 0.7
    source = data_of(dtype, (grid, threads * vec), seed)

    def body(cta, src, dst):
        slots = cta.shared("slots", dtype, (threads * vec,))
        cta.store(slots[vec * cta.tid], np.zeros((1, 1, 1, vec) if vec > 1 else (1, 1, 1), dtype), vec=vec)
        with cta.where(loads[cta.bx, cta.tid]):
            value = cta.load(src[cta.bx, vec * cta.tid], vec=vec)
        cta.store(slots[vec * put[cta.tid]], value, vec=vec)
        cta.sync()
        value = cta.load(slots[vec * get[cta.tid]], vec=vec)
        with cta.where(stores[cta.bx, cta.tid]):
            cta.store(dst[cta.bx, vec * cta.tid], value, vec=vec)

    empty = data_of(dtype, (grid, threads * vec), seed + 1)
    src = GlobalTensor("src", dtype, source.shape, init=source)
    found = emulate(body, src, GlobalTensor("dst", dtype, empty.shape, init=empty), grid=grid, block=threads)["dst"]

    expected = empty.copy()
    for block in range(grid):
        slots = {int(put[t]): source[block, vec * t : vec * t + vec] if loads[block, t] else np.zeros(vec, dtype)
                 for t in range(threads)}
        for t in range(threads):
            if stores[block, t]:
                expected[block, vec * t : vec * t + vec] = slots[int(get[t])]
    assert found.dtype == dtype
    assert found.tobytes() == expected.tobytes()


def test_lanes_that_are_off_receive_zero_and_write_nothing():
    src = GlobalTensor("src", float32, (32,), init=np.arange(1, 33, dtype=np.float32))
    dst = GlobalTensor("dst", float32, (2, 32))

    def body(cta, src, dst):
        with cta.where(cta.lane % 2 == 0):
            value = cta.load(src[cta.lane])
            with cta.where(cta.lane < 8):
                cta.store(dst[1, cta.lane], value)
            assert (cta.active == (cta.lane % 2 == 0)).all()  # the outer mask is back
        cta.store(dst[0, cta.lane], value)

    found = emulate(body, src, dst)["dst"]
    even = np.arange(32) % 2 == 0
    assert found[0].tolist() == np.where(even, np.arange(1, 33), 0).tolist()
    assert np.flatnonzero(~np.isnan(found[1])).tolist() == [0, 2, 4, 6]


def test_a_divergent_loop_ends_lane_by_lane():
    steps = GlobalTensor("steps", int32, (64,))

    def body(cta, steps):
        left, count = cta.tid % 7, np.zeros_like(cta.tid)
        while cta.any(left > 0):
            with cta.where(left > 0):
                count = np.where(cta.active, count + 1, count)
                left = np.where(cta.active, left - 1, left)
        cta.store(steps[cta.tid], count)

    assert emulate(body, steps, block=64)["steps"].tolist() == [t % 7 for t in range(64)]


@pytest.mark.parametrize(
    "value",
    [3.0, np.float32(3), np.full((1, 1, 1), 3, np.float32), np.full((1, 2, 1), 3, np.float32),
     np.full((1, 1, 32), 3, np.float32), np.full((32,), 3, np.float32), np.full((2, 32), 3, np.float32),
     np.full((3, 2, 32), 3, np.float32)],
    ids=lambda value: str(np.shape(value)),
)
def test_values_broadcast_over_ctas_warps_and_lanes(value):
    dst = GlobalTensor("dst", float32, (3, 64))

    def body(cta, dst):
        tile = cta.shared("tile", float32, (64,))
        cta.store(tile[cta.tid], value)
        cta.store(dst[cta.bx, cta.tid], cta.load(tile[cta.tid]))

    assert (emulate(body, dst, grid=3, block=64)["dst"] == 3).all()


def test_one_address_for_all_lanes_is_read_by_all_and_keeps_one_of_the_writes():
    dst = GlobalTensor("dst", int32, (2, 32))

    def body(cta, dst):
        one = cta.shared("one", int32, (2,))
        cta.store(one[0], cta.lane)
        cta.store(one[1], 7)
        cta.store(dst[0, cta.lane], cta.load(one[0]))
        cta.store(dst[1, cta.lane], cta.load(one[1]))

    winner, same = emulate(body, dst)["dst"]
    assert len(set(winner.tolist())) == 1 and 0 <= winner[0] < 32
    assert (same == 7).all()


# ---- layouts ----------------------------------------------------------------------------------------------

SWIZZLED = tl.compose(tl.Swizzle(3, 3, 3), tl.Layout((16, 64), (64, 1)))
LAYOUTS = {
    "column-major": (tl.Layout((16, 64), (1, 16)), lambda r, c: r + 16 * c),
    "swizzle": (SWIZZLED, lambda r, c: 64 * r + (c ^ (r % 8) << 3)),
    "callable": (lambda r, c: 64 * r + (c ^ (r % 8) << 3), lambda r, c: 64 * r + (c ^ (r % 8) << 3)),
    "padded": (lambda r, c: 72 * r + c, lambda r, c: 72 * r + c),
    "displaced": (lambda r, c: 64 * r + c + 8, lambda r, c: 64 * r + c + 8),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("memory", ["shared", "global"])
def test_a_layout_places_every_element_where_it_says(name, memory):
    layout, offset = LAYOUTS[name]
    data = np.arange(1024, dtype=np.uint16).reshape(16, 64)

    def through_shared(cta, src, dst):
        tile = cta.shared("tile", uint16, (16, 64), layout)
        flat = cta.shared("flat", uint16, (tile.nbytes // 2,), alias_of=tile)
        for row in range(16):
            cta.store(tile[row, cta.tid], cta.load(src[row, cta.tid]))
        cta.sync()
        for row in range(16):
            cta.store(dst[row, cta.tid], cta.load(flat[offset(row, cta.tid)]))

    if memory == "shared":
        src = GlobalTensor("src", uint16, (16, 64), init=data)
        found = emulate(through_shared, src, GlobalTensor("dst", uint16, (16, 64)), block=64)["dst"]
        assert np.array_equal(found, data)
    else:
        tensor = GlobalTensor("t", uint16, (16, 64), layout, init=data)
        raw = tensor.initial_bytes().view(np.uint16)
        assert all(raw[offset(r, c)] == data[r, c] for r in range(16) for c in range(64))
        assert np.array_equal(tensor.array(tensor.initial_bytes()), data)


def test_a_wrong_layout_gives_a_wrong_result():
    data = np.arange(1024, dtype=np.float32).reshape(32, 32)

    def body(cta, src, dst, read):
        tile = cta.shared("tile", float32, (32, 32), lambda r, c: 32 * r + (c ^ r))
        view = cta.shared("view", float32, (32, 32), read, alias_of=tile)
        cta.store(tile[cta.ty, cta.tx], cta.load(src[cta.ty, cta.tx]))
        cta.sync()
        cta.store(dst[cta.ty, cta.tx], cta.load(view[cta.tx, cta.ty]))

    def run(read):
        src = GlobalTensor("src", float32, (32, 32), init=data)
        return emulate(body, src, GlobalTensor("dst", float32, (32, 32)), read, block=(32, 32))["dst"]

    assert np.array_equal(run(lambda r, c: 32 * r + (c ^ r)), data.T)
    assert not np.array_equal(run(None), data.T)


# ---- unions -----------------------------------------------------------------------------------------------


def test_a_union_shares_bytes_and_their_state():
    out = GlobalTensor("out", uint16, (2, 32))

    def body(cta, out):
        words = cta.shared("words", float32, (32,))
        halves = cta.shared("halves", uint16, (32, 2), alias_of=words)
        cta.store(words[cta.lane], cta.lane.astype(np.float32))
        for i in (0, 1):  # bytes written as one type may be read as another
            cta.store(out[i, cta.lane], cta.load(halves[cta.lane, i]))
        assert cta.shared_bytes == 128

    low, high = emulate(body, out)["out"]
    bits = np.arange(32, dtype=np.float32).view(np.uint32)
    assert (low + (high.astype(np.uint32) << 16)).tolist() == bits.tolist()


def test_a_union_over_neighbours_spans_them():
    def body(cta):
        a = cta.shared("a", bfloat16, (24,))
        b = cta.shared("b", float32, (8,))
        whole = cta.shared("whole", uint8, (80,), alias_of=(b, a))
        inner = cta.shared("inner", uint8, (16,), alias_of=a)
        again = cta.shared("again", uint8, (48,), alias_of=(inner, a))  # a union of unions is as large as the largest
        middle = cta.shared("middle", uint8, (16,), alias_of=b)
        last = cta.shared("last", uint8, (80,), alias_of=(whole, middle))
        after = cta.shared("after", float32, (4,))
        assert [t.base for t in (a, b, whole, inner, again, middle, last, after)] == [0, 48, 0, 0, 0, 48, 0, 80]
        assert cta.shared_bytes == 96

    assert simulate(Launch(body, 1, 32), mode="values").shared_bytes == 96


# ---- atomics ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    operation=st.sampled_from(("add", "red", "exch", "cas")),
    memory=st.sampled_from(("shared", "global")),
    threads=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_atomics_take_turns_in_lane_order(operation, memory, threads, seed):
    random = np.random.default_rng(seed)
    lanes = -(-threads // 32) * 32
    place, value = random.integers(0, 4, lanes), random.integers(-3, 4, lanes).astype(np.int32)
    compare, on = random.integers(-3, 4, lanes).astype(np.int32), random.random(lanes) < 0.8

    def body(cta, bins, found):
        cells = bins
        if memory == "shared":
            cells = cta.shared("cells", int32, (4,))
            for i in range(4):
                cta.store(cells[i], 0)
        old = np.zeros((1, 1, 1), np.int32)
        with cta.where(on[cta.tid]):
            ref, new = cells[place[cta.tid]], value[cta.tid]
            if operation == "red":
                cta.red_add(ref, new)
            elif operation == "add":
                old = cta.atomic_add(ref, new)
            elif operation == "exch":
                old = cta.atomic_exch(ref, new)
            else:
                old = cta.atomic_cas(ref, compare[cta.tid], new)
        cta.store(found[cta.tid], old)
        if memory == "shared":
            for i in range(4):
                cta.store(bins[i], cta.load(cells[i]))

    bins = GlobalTensor("bins", int32, (4,), init=np.zeros(4, np.int32))
    arrays = emulate(body, bins, GlobalTensor("found", int32, (threads,)), block=threads)
    cells, found = [0] * 4, [0] * threads
    for t in range(threads):
        if on[t]:
            old = cells[place[t]]
            found[t] = 0 if operation == "red" else old
            if operation in ("add", "red"):
                cells[place[t]] = old + int(value[t])
            elif operation == "exch" or old == compare[t]:
                cells[place[t]] = int(value[t])
    assert arrays["bins"].tolist() == cells
    assert arrays["found"].tolist() == found


@pytest.mark.parametrize("dtype", [uint32, float32])
def test_a_global_sum_over_ctas(dtype):
    total = GlobalTensor("total", dtype, (1,), init=np.zeros(1, dtype))

    def body(cta, total):
        cta.red_add(total[0], (cta.bx * 64 + cta.tid).astype(dtype))

    assert emulate(body, total, grid=7, block=64)["total"][0] == sum(range(7 * 64))


def test_unsigned_atomics_wrap():
    cell = GlobalTensor("cell", uint32, (1,), init=np.full(1, 2**32 - 1, np.uint32))

    def body(cta, cell):
        with cta.where(cta.lane < 3):
            cta.atomic_add(cell[0], 1)

    assert emulate(body, cell)["cell"][0] == 2


# ---- global memory ----------------------------------------------------------------------------------------


def test_what_nobody_wrote_in_global_memory_shows():
    dst = GlobalTensor("dst", float32, (64,))

    def body(cta, dst):
        cta.store(dst[2 * cta.lane], 1.0)

    found = emulate(body, dst)["dst"]
    assert (found[::2] == 1).all() and np.isnan(found[1::2]).all()


def test_a_byte_offset_moves_addresses_not_data():
    def body(cta, src, dst):
        cta.store(dst[cta.lane], cta.load(src[cta.lane], site="load"))

    def run(offset):
        data = np.arange(32, dtype=np.float32)
        src = GlobalTensor("src", float32, (32,), init=data, byte_offset=offset)
        result = simulate(Launch(body, 1, 32, (src, GlobalTensor("dst", float32, (32,)))), mode="values")
        assert np.array_equal(result.arrays["dst"], data)
        return result.table["load"].sectors

    assert (run(0), run(32), run(4), run(28)) == (4, 4, 5, 5)


class Addresses:
    """A sink that keeps the global addresses of every access."""

    def __init__(self):
        self.seen = []

    def access(self, event):
        self.seen.append(event.rows()["global"])

    def work(self, event):
        pass

    def restart(self):
        self.seen.clear()


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32])
def test_addresses_beyond_four_gigabytes_do_not_wrap(kind):
    """Neither within a tensor, nor in the sum of a tensor's base and an offset that fits 31 bits by itself."""
    large = GlobalTensor("large", float32, (3, 2**30))
    medium = GlobalTensor("medium", uint8, (2**31 - 2**10,))
    small = GlobalTensor("small", uint8, (2**31 - 2**10,))
    sink = Addresses()

    def body(cta, *tensors):
        lane = cta.lane.astype(kind)
        cta.load(large[2 + 0 * lane, 2**30 - 1 - lane])
        cta.load(small[2**31 - 2**10 - 1 - lane])

    simulate(Launch(body, 1, 32, (large, medium, small)), mode="addresses", sinks=[sink])
    lane = np.arange(32)
    assert sink.seen[0][0].tolist() == (4 * (3 * 2**30 - 1 - lane)).tolist()
    base = 12 * 2**30 + 2**31 - 2**10
    assert sink.seen[1][0].tolist() == (base + 2**31 - 2**10 - 1 - lane).tolist()


def test_tensors_lie_apart_each_on_its_alignment():
    tensors = (
        GlobalTensor("a", uint8, (256,), byte_offset=4),
        GlobalTensor("b", uint8, (1,)),
        GlobalTensor("c", uint8, (512,), byte_offset=8),
        GlobalTensor("d", uint8, (1,)),
    )
    sink = Addresses()

    def body(cta, *tensors):
        for tensor in tensors:
            cta.load(tensor[0], site=tensor.name)

    simulate(Launch(body, 1, 32, tensors), mode="addresses", sinks=[sink])
    assert [int(rows[0, 0]) for rows in sink.seen] == [4, 512, 768 + 8, 1536]


def test_narrow_coordinates_do_not_wrap_either():
    def body(cta, t):
        cta.load(t[cta.lane.astype(np.uint8), np.int8(3)], site="load")

    sink = Addresses()
    tensor = GlobalTensor("t", float32, (32, 1000))
    simulate(Launch(body, 1, 32, (tensor,)), mode="addresses", sinks=[sink])
    assert sink.seen[0][0].tolist() == [4 * (1000 * lane + 3) for lane in range(32)]


def test_offsets_of_strided_and_tabulated_tensors_agree():
    coordinates = np.meshgrid(np.arange(8), np.arange(16), indexing="ij")
    strided = Tensor("a", float32, (8, 16), tl.Layout((8, 16), (20, 1)))
    tabulated = Tensor("b", float32, (8, 16), lambda r, c: 20 * r + (c ^ 0))
    assert strided.strides == (20, 1) and strided.nbytes == tabulated.nbytes == 4 * (7 * 20 + 16)
    assert np.array_equal(strided.offset(coordinates), tabulated.offset(coordinates))


# ---- Python numbers ----------------------------------------------------------------------------------------


def test_python_numbers_must_fit_the_element():
    def body(cta, value):
        cta.store(cta.shared("t", uint8, (32,))[cta.lane], value)

    for value in (256, -1, 1.5, float("nan")):
        with pytest.raises(SimError, match=r"'t' of uint8 cannot hold"):
            emulate(body, value)
    emulate(body, 255)
    emulate(body, True)


def test_a_predicated_block_is_executed_by_warps_without_an_active_lane():
    def body(cta, x, predicated):
        with cta.where(cta.tid < 40, predicated=predicated):
            cta.load(x[cta.tid], site="outer")
            with cta.where(cta.tid < 3):
                cta.load(x[cta.tid], site="inner")

    x = GlobalTensor("x", float32, (128,), init=lambda: np.zeros(128, np.float32))
    for mode in ("values", "addresses"):
        tables = [
            simulate(Launch(body, grid=3, block=128, args=(x, predicated)), mode=mode).table
            for predicated in (False, True)
        ]
        # Four warps of 128 threads: two have a lane below 40, and only the predicated block is executed by the others.
        assert [table["outer"].executed for table in tables] == [3 * 2, 3 * 4]
        assert [table["inner"].executed for table in tables] == [3 * 1, 3 * 1]
        assert {table["outer"].sectors for table in tables} == {3 * 5}
