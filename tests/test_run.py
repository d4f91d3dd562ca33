"""Runs: modes, batches, threads and sinks must not change what is counted or computed."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels_py import find
from simgpu.counters import CounterSink
from simgpu.errors import DataDependent, SimError
from simgpu.launch import Launch
from simgpu.run import VERIFY_WARPS, simulate
from simgpu.tensor import GlobalTensor, bfloat16, float32, int32


def batches_of(patch, warps):
    patch.setattr("simgpu.run.BATCH_WARPS", warps)
    patch.setattr("simgpu.run.BATCH_WARPS_WITH_VALUES", warps)


# ---- a kernel made of random accesses ---------------------------------------------------------------------

ROWS = 12  # of the random kernel's tensors
STEPS = ("load", "store", "atomic", "ldmatrix", "copy", "sync", "mma")


def random_kernel(seed, threads, grid):
    """Accesses whose addresses and masks differ from CTA to CTA, warp to warp and lane to lane, all in bounds."""
    random = np.random.default_rng(seed)
    lanes = -(-threads // 32) * 32
    steps = random.choice(STEPS, 8)
    place = random.integers(0, ROWS, (8, grid, lanes))
    on = random.random((8, grid, lanes)) < random.choice([0.0, 0.5, 1.0], (8, grid, 1))
    warps = np.repeat(random.random((8, grid, lanes // 32)) < 0.6, 32, -1)  # whole warps, for matrices
    warps[..., threads // 32 * 32 :] = False

    def body(cta, src, dst):
        cta_number = cta.bx + cta.grid[0] * cta.by
        tile = cta.shared("tile", bfloat16, (ROWS, 8))
        for row in range(ROWS):  # every CTA has a warp, though maybe not 32 threads
            cta.store(tile[row, 0], np.ones((1, 1, 1, 8), bfloat16), vec=8, site="fill")
        bins = cta.shared("bins", int32, (ROWS,))
        for i in range(ROWS):
            cta.store(bins[i], 0, site="clear")
        cta.sync()
        for i, step in enumerate(steps):
            at = place[i, cta_number, cta.tid]
            if step in ("ldmatrix", "mma"):
                with cta.where(warps[i, cta_number, cta.tid]):
                    if step == "mma":
                        cta.mma(np.zeros((32, 4, 2), bfloat16), np.zeros((32, 2, 2), bfloat16), np.zeros(4, float32))
                    else:
                        cta.ldmatrix(tile[at, 0], 4, site=f"ldmatrix {i}")
                continue
            if step == "sync":
                cta.cp_async_commit()
                cta.cp_async_wait()
                cta.sync()
                continue
            with cta.where(on[i, cta_number, cta.tid]):
                if step == "load":
                    cta.store(dst[cta_number, cta.tid], cta.load(src[at, at % 8 // 4 * 4], site=f"load {i}"))
                elif step == "store":
                    cta.store(tile[at, 0], np.ones((1, 1, 1, 8), bfloat16), vec=8, site=f"store {i}")
                elif step == "atomic":
                    cta.red_add(bins[at], at, site=f"atomic {i}")
                else:
                    copy = cta.shared(f"copy {i}", float32, (ROWS, 4))
                    cta.cp_async(copy[at, 0], src[at, 0], src_bytes=np.where(at == 5, 8, 16), site=f"copy {i}")

    data = random.random((ROWS, 8)).astype(np.float32)
    tensors = GlobalTensor("src", float32, (ROWS, 8), init=data), GlobalTensor("dst", float32, (grid, lanes))
    return Launch(body, (grid,), threads, tensors)


@example(seed=2, threads=1, grid=2, batch=1, workers=1)  # a site that CTA 0 executes later than CTA 1
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), threads=st.integers(1, 100), grid=st.integers(1, 9), batch=st.integers(1, 20),
    workers=st.integers(1, 3),
)
def test_neither_mode_nor_batch_nor_threads_change_counters_or_values(seed, threads, grid, batch, workers):
    launch = random_kernel(seed, threads, grid)
    whole = simulate(launch, mode="values")
    assert (whole.values, whole.ctas) == (True, grid)
    with pytest.MonkeyPatch.context() as patch:
        batches_of(patch, batch)
        pieces = simulate(launch, mode="values")
        assert pieces.table == whole.table and pieces.shared_bytes == whole.shared_bytes
        assert all(pieces.arrays[name].tobytes() == whole.arrays[name].tobytes() for name in whole.arrays)
        addresses = simulate(launch, mode="addresses", threads=workers)
    assert (addresses.values, addresses.arrays) == (False, {})
    assert addresses.table == whole.table and addresses.shared_bytes == whole.shared_bytes


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), first=st.integers(1, 6))
def test_the_first_ctas_of_a_grid_count_as_a_grid_of_their_own(seed, first):
    launch = random_kernel(seed, 64, 6)
    part = simulate(launch, ctas=first, mode="addresses")
    alone = simulate(Launch(launch.body, first, 64, launch.args), mode="addresses")
    assert part.ctas == first and part.table == alone.table


# ---- mode auto --------------------------------------------------------------------------------------------


def chase(cta, src, dst):
    """The second address is the first load's value."""
    value = cta.load(src[cta.load(src[cta.tid], site="index")], site="data")
    cta.store(dst[cta.bx, cta.tid], value, site="result")


def chasing(grid=4):
    data = np.random.default_rng(0).permutation(32).astype(np.int32)
    src, dst = GlobalTensor("src", int32, (32,), init=data), GlobalTensor("dst", int32, (grid, 32))
    return Launch(chase, grid, 32, (src, dst))


class Order:
    """A sink that keeps what it hears, and how often it was told to forget."""

    def __init__(self):
        self.heard, self.restarts = [], 0

    def access(self, event):
        self.heard.append((event.site.name, event.order, event.ctas.tolist()))

    def work(self, event):
        self.heard.append((event.kind, event.order, None))

    def restart(self):
        self.heard, self.restarts = [], self.restarts + 1


def test_auto_turns_to_values_when_addresses_depend_on_data():
    launch, sink, counter = chasing(), Order(), CounterSink()
    found = simulate(launch, sinks=[sink, counter])
    source = launch.args[0].init
    assert found.values and found.checked == 0
    assert (found.arrays["dst"] == source[source]).all()
    assert found.table == simulate(launch, mode="values").table == counter.table()
    assert sink.restarts == 1
    assert [name for name, _, _ in sink.heard] == ["index", "data", "result"]
    with pytest.raises(DataDependent, match=r"test_run.py:\d+: tensor 'src' is indexed with a loaded value"):
        simulate(launch, mode="addresses")


def test_auto_finds_out_from_the_first_cta_what_only_values_show():
    def body(cta, wrong):
        cta.load(cta.shared("tile", float32, (32,))[cta.lane], site="get") if wrong else None

    found = simulate(Launch(body, 3, 32, (False,)))
    assert (found.values, found.checked) == (False, 1)
    with pytest.raises(SimError, match="which nobody wrote"):
        simulate(Launch(body, 3, 32, (True,)))
    simulate(Launch(body, 3, 32, (True,)), mode="addresses")


def test_auto_leaves_memory_too_large_for_a_first_look_alone():
    huge = GlobalTensor("huge", float32, (2**17, 2**15), init=lambda: pytest.fail("nobody needs these 16 GB"))
    found = simulate(Launch(lambda cta, t: cta.load(t[2**17 - 1, cta.lane], site="get"), 2, 32, (huge,)))
    assert (found.values, found.checked, found.table["get"].sectors) == (False, 0, 8)


def test_auto_checks_the_result_of_a_small_launch():
    def launch(grid, right):
        return Launch(lambda cta: None, grid, 32, check=lambda arrays: right)

    assert simulate(launch(VERIFY_WARPS, True)).values
    assert not simulate(launch(VERIFY_WARPS + 1, True)).values
    assert not simulate(launch(VERIFY_WARPS, False), ctas=1).values  # a part of the grid proves nothing
    with pytest.raises(SimError, match="the result is wrong"):
        simulate(launch(VERIFY_WARPS, False))
    assert not simulate(launch(2, False), mode="addresses").values


# ---- arguments, sinks, progress ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ctas": 0}, "0 CTAs asked for"), ({"ctas": 5}, r"5 CTAs asked for; the grid \(4, 1, 1\) has 4"),
     ({"mode": "fast"}, "mode 'fast' is none of auto, values, addresses")],
)
def test_arguments_out_of_range(options, words):
    with pytest.raises(SimError, match=words):
        simulate(chasing(), **options)


@pytest.mark.parametrize("mode", ["values", "addresses"])
def test_sinks_hear_every_event_in_program_order_and_progress_every_batch(mode):
    def body(cta, out):
        cta.store(out[cta.tid], 1, site="first")
        cta.sync()
        with cta.where(cta.bx > 2):
            cta.store(out[cta.tid], 2, site="second")

    sink, steps = Order(), []
    with pytest.MonkeyPatch.context() as patch:
        batches_of(patch, 4)
        launch = Launch(body, 5, 64, (GlobalTensor("out", int32, (64,)),))
        simulate(launch, mode=mode, sinks=[sink], threads=2, progress=lambda *step: steps.append(step))
    assert sink.heard == [
        ("first", 1, [0, 1]), ("barrier", 2, None),
        ("first", 1, [2, 3]), ("barrier", 2, None), ("second", 3, [2, 3]),
        ("first", 1, [4]), ("barrier", 2, None), ("second", 3, [4]),
    ]  # fmt: skip
    assert steps == [(2, 5), (4, 5), (5, 5)]


def test_infinities_and_nans_are_values_not_warnings():
    def body(cta, out):
        zero = np.zeros((1, 1, 32), np.float32)
        cta.store(out[0, cta.lane], np.float32(1) / zero)
        cta.store(out[1, cta.lane], zero / zero)

    with np.errstate(all="raise"):
        found = simulate(Launch(body, 1, 32, (GlobalTensor("out", float32, (2, 32)),)), mode="values").arrays["out"]
    assert np.isinf(found[0]).all() and np.isnan(found[1]).all()


# ---- memory -----------------------------------------------------------------------------------------------

# VmHWM is the peak of this program alone: ru_maxrss would begin with that of the process that started it.
PEAK = """
from kernels_py import find
from simgpu.run import simulate
kernel, variant = find("transpose@xor")
found = simulate(kernel.launch(variant, rows=65536, cols=65536), ctas=40_000, threads=2)
assert found.table["tile.load"].executed == 40_000 * 32
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat_on_a_grid_of_millions_of_ctas():
    """Two 16 GB matrices; 40,000 of 4 million CTAs are more batches than are ever in the air at once."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, env=os.environ, check=True)
    assert int(run.stdout) < 500_000  # KiB; the bound of the project is 1 GB


def test_shared_memory_is_that_of_the_cta_that_allocates_most():
    def body(cta):
        cta.shared("tile", float32, (256 if (cta.bx == 1).any() else 32,))

    with pytest.MonkeyPatch.context() as patch:
        batches_of(patch, 1)
        assert simulate(Launch(body, 3, 32), mode="values").shared_bytes == 1024


def test_a_batch_of_one_cta_per_warp_is_a_batch_still():
    kernel, variant = find("patterns@column")
    table = simulate(kernel.launch(variant, ctas=1000), mode="addresses").table
    assert (table["read"].executed, table["read"].wavefronts) == (1000, 32000)
