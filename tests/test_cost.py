"""The cost model: properties of the sharing law, demands held against ncu's counters, bounds against measured times."""

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.cost import estimate, fits_l2, time_of_sharing
from models.gpu import gpu_names, load_gpu
from models.l1 import Traffic
from models.work import ContentionSink, Work, work_of
from simgpu.counters import CounterTable, SiteCounters
from simgpu.errors import SimError
from simgpu.instructions import instruction
from simgpu.launch import Launch
from simgpu.rules import cost as rule
from simgpu.run import simulate
from simgpu.tensor import GlobalTensor, float32
from validation.predictions import pairs, predict, predicted_side

MEASURED = Path(str(files("validation"))) / "measured" / "h200"
H200 = load_gpu("h200")
TIMES = st.lists(st.floats(0.01, 1000), min_size=1, max_size=6)


def work(**changes) -> Work:
    demand = {"ctas": 1320, "data_wavefronts": 1e6, "copy_wavefronts": 0, "lines": 1e4,
              "traffic": Traffic(read_sectors=1e5, requests=1e4), "tensor_bytes": 2**20, "dram_bytes": 2**20,
              "mma_flop": 0, "contended": 0}
    return Work(**(demand | changes))


# ---- the sharing law -------------------------------------------------------------------------------------------------


@given(TIMES, st.integers(1, 32))
def test_sharing_lies_between_the_longest_time_and_the_sum(times, customers):
    total = time_of_sharing(times, customers)
    assert max(times) * (1 - 1e-9) <= total <= sum(times) * (1 + 1e-9)
    assert time_of_sharing(times, customers + 1) <= total * (1 + 1e-9)
    assert time_of_sharing(times, 1) == pytest.approx(sum(times))


@given(st.floats(0.01, 100), st.integers(1, 6), st.integers(1, 32))
def test_equal_units_follow_the_closed_form(time, units, customers):
    assert time_of_sharing([time] * units, customers) == pytest.approx(time * (customers + units - 1) / customers)


# ---- demands ---------------------------------------------------------------------------------------------------------


def test_clocks_of_the_fragment_loop_are_its_wavefronts():
    """The micro-benchmark reads nothing but shared memory: one wavefront takes one clock of its SM."""
    checked = 0
    for run in json.loads((MEASURED / "smem_to_reg.json").read_text(encoding="utf-8"))["runs"]:
        if run["params"]["mma"]:
            continue
        loads = {name: row for name, row in run["sites"].items() if name.split(".")[1] in ("lds", "ldsm")}
        wavefronts = sum(row["l1_wavefronts_shared"] for row in loads.values())
        per_tile = wavefronts / 132 / run["params"]["iterations"]
        apart = 0.01 if run["params"]["ctas"] == 1 else 0.02  # two CTAs of an SM do not start and end together
        assert run["clocks_per_iteration"]["median"] == pytest.approx(per_tile, rel=apart), run["case"]
        checked += 1
    assert checked == 16


def test_demand_grows_with_the_grid():
    row = SiteCounters("copy", "", 1, "cp.async.cg", 16, 4, 4, 8, 4, 64, 64, 16, 2048)
    cta = Traffic(passes=2, read_sectors=32, requests=8)
    half = work_of(CounterTable((row,), {"mma.m16n8k8": 3, "barrier": 9, "shfl.down": 5}), ctas=2, grid=4,
                   tensor_bytes=10**9, traffic=cta)
    assert (half.data_wavefronts, half.copy_wavefronts, half.lines) == (4 * 2 + 10, 16, 32)
    assert half.traffic == Traffic(passes=8, read_sectors=128, requests=32)
    assert half.mma_flop == 2 * 3 * 2048
    assert half.dram_bytes == 128 * 32  # no more than is asked for
    assert work_of(CounterTable((row,), {}), ctas=1, grid=1, tensor_bytes=96, traffic=cta).dram_bytes == 96


# ---- atomics ---------------------------------------------------------------------------------------------------------


def add_at(indices: np.ndarray) -> Launch:
    """Each warp of each CTA adds at its own row of ``indices``, int[ctas, warps, 32]."""
    ctas, warps, _ = indices.shape
    target = GlobalTensor("target", float32, (64,), init=np.zeros(64, np.float32))

    def body(cta, target):
        place = np.asarray(indices)[cta.ctas]
        with cta.where(place >= 0):
            cta.red_add(target[np.maximum(place, 0)], 1.0, site="add")

    return Launch(body, grid=ctas, block=32 * warps, args=(target,))


@settings(deadline=None, max_examples=30)  # each example runs the emulator
@given(st.integers(0, 2**32 - 1), st.integers(1, 64))
def test_contention_is_the_rule_added_up_by_sector(seed, spread):
    indices = np.random.default_rng(seed).integers(-1, spread, (2, 2, 32))
    sink, expected = ContentionSink(), Counter()
    simulate(add_at(indices), mode="addresses", sinks=(sink,))
    for warp in indices.reshape(-1, 32):
        for sector in range(8):
            mask = sum(1 << lane for lane in range(32) if warp[lane] >= 0 and warp[lane] // 8 == sector)
            expected[sector] += rule(instruction("red.global.add.f32"), 4, mask, global_=list(warp * 4)).sectors
    assert sink.busiest == max(expected.values())


def test_contention_counts_what_all_ctas_share_once_for_each():
    sink = ContentionSink()
    simulate(add_at(np.zeros((7, 2, 32), int)), mode="addresses", sinks=(sink,))
    assert sink.busiest == 7 * 2 * 32
    sink.restart()
    assert sink.busiest == 0


# ---- estimates -------------------------------------------------------------------------------------------------------


@settings(deadline=None)  # the first of each GPU reads its file
@given(st.sampled_from(gpu_names()), st.integers(1, 32), st.integers(1, 5000), st.floats(1, 1e8), st.floats(1.01, 10))
def test_more_demand_never_takes_less_time(name, blocks, ctas, wavefronts, factor):
    gpu = load_gpu(name)
    small = estimate(work(ctas=ctas, data_wavefronts=wavefronts), blocks, gpu)
    large = estimate(work(ctas=ctas, data_wavefronts=wavefronts * factor), blocks, gpu)
    assert large.us >= small.us * (1 - 1e-9)
    assert small.bound_us <= small.us * (1 + 1e-9) <= small.serial_us * (1 + 1e-6)


def test_one_cta_too_many_takes_a_whole_turn():
    per_cta = 1000
    full, over = (estimate(work(ctas=n, data_wavefronts=n * per_cta), 4, H200) for n in (132, 133))
    assert over.time_of("data pipe") == pytest.approx(2 * full.time_of("data pipe"))
    assert full.fill == 1 and over.fill == pytest.approx(133 / 264)
    assert full.time_of("data pipe") == pytest.approx(per_cta / 1980)


def test_throughputs_are_those_of_the_gpu():
    flop = 1e12
    tensor = {name: estimate(work(ctas=load_gpu(name).sm_count, mma_flop=flop), 1, load_gpu(name)).time_of("tensor")
              for name in ("h200", "h20", "a100-80g")}
    assert tensor["h20"] == pytest.approx(flop / (1024 * 78 * 1980))  # its own peak, not what mma.sync reaches
    assert tensor["h200"] == pytest.approx(flop / (2576 * 132 * 1980))
    assert tensor["a100-80g"] == pytest.approx(flop / (2048 * 108 * load_gpu("a100-80g").clock_boost_mhz))


def test_l2_takes_the_longer_of_its_bytes_and_its_requests():
    whole = Traffic(read_sectors=3e6, written_sectors=1e6, requests=1e6)
    single = Traffic(read_sectors=1e6, requests=1e6)
    assert estimate(work(traffic=whole), 1, H200).time_of("L2") == pytest.approx(4e6 * 32 / 6048 / 1980)
    assert estimate(work(traffic=single), 1, H200).time_of("L2") == pytest.approx(1e6 / 80 / 1980)
    a100 = load_gpu("a100-80g")  # of which only the bytes are known
    us = 1e6 * 32 / 5120 / a100.clock_boost_mhz
    assert estimate(work(traffic=single), 1, a100).time_of("L2") == pytest.approx(us)


def test_l1_looks_up_a_line_a_clock():
    assert estimate(work(lines=132e3), 1, H200).time_of("L1 tags") == pytest.approx(1e3 / 1980)


def test_atomics_take_turns():
    assert estimate(work(contended=1000), 1, H200).time_of("atomics") == pytest.approx(3480 / 1980)
    a100 = load_gpu("a100-80g")
    assert estimate(work(contended=1000), 1, a100).time_of("atomics") == pytest.approx(1000 / a100.clock_boost_mhz)


def test_a_repeated_launch_finds_small_tensors_in_the_l2():
    small, large = work(), work(tensor_bytes=2**30, dram_bytes=2**30)
    assert fits_l2(small, H200) and not fits_l2(large, H200)
    assert estimate(small, 1, H200, warm=True).time_of("DRAM") == 0 < estimate(small, 1, H200).time_of("DRAM")
    assert estimate(large, 1, H200, warm=True).time_of("DRAM") == pytest.approx(2**30 / 3959e3)


def test_an_estimate_says_what_it_does_not_know():
    said = " ".join(estimate(work(contended=9, unmodelled=("x.add",)), 1, load_gpu("a100-80g")).unknown)
    for phrase in ("not traced", "latency", "what of a launch's traffic L2 answers", "take turns", "--warm", "x.add"):
        assert phrase in said


def test_every_time_has_a_source():
    full = work(copy_wavefronts=1, mma_flop=1, contended=2)
    for name in gpu_names():
        for unit in estimate(full, 1, load_gpu(name)).units:
            assert unit.source and unit.rate and unit.provenance in ("measured", "documented", "inferred"), unit


def test_no_block_is_refused():
    with pytest.raises(SimError, match="h200: 0 blocks"):
        estimate(work(), 0, H200)


# ---- against measured times ------------------------------------------------------------------------------------------

QUICK = [pair for pair in pairs() if pair.kernel not in ("hgemm_ladder", "smem_to_reg")]


@pytest.mark.parametrize("pair", QUICK, ids=[f"{pair.kernel}:{pair.before}->{pair.after}" for pair in QUICK])
def test_directions_are_right_or_the_miss_is_explained(pair):
    found = predict(pair)
    assert found.right == (not pair.why), f"{found.predicted:+.1%} predicted, {found.measured:+.1%} measured"
    for name, median in zip((pair.before, pair.after), found.medians, strict=True):
        # L1 keeps more of B0's strided rows than a cache of the same size that all warps use in step.
        slack = 1.1 if "b0=1" in name else 1
        assert predicted_side(pair.kernel, name).estimate.bound_us <= slack * median


def test_blocks_on_an_sm_are_the_drivers():
    runs = {run["case"]: run for run in json.loads((MEASURED / "kda_b2.json").read_text(encoding="utf-8"))["runs"]}
    names = {name for pair in pairs() if pair.kernel == "kda_b2" for name in (pair.before, pair.after)}
    assert {name: predicted_side("kda_b2", name).fit.blocks_per_sm for name in names} == \
           {name: runs[name]["blocks_per_sm"] for name in names}
