"""Occupancy against the driver's answers, published Nsight Compute output, and its own promises."""

import csv
import json
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.gpu import gpu_names, load_gpu
from models.occupancy import occupancy
from simgpu.errors import SimError

H200 = load_gpu("h200")
MEASURED = files("validation") / "measured" / "h200" / "occupancy.csv"


def test_every_answer_of_the_driver():
    with MEASURED.open() as file:
        rows = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert len(rows) == 3102
    wrong = [row for row in rows if row["max_active_blocks_per_sm"] != occupancy(
        H200, threads=row["threads_per_block"], registers=row["registers_per_thread"],
        shared_bytes=row["dynamic_shared_bytes"], static_shared_bytes=row["static_shared_bytes"]).blocks_per_sm]
    assert wrong == []


@pytest.mark.parametrize(("gpu", "kernel", "limits", "percent"), [
    # G4, G6 and G12 of validation/measured/public_cases.json; the rest from the same collection of ncu reports,
    # github.com/nideyongbao/CUDA_GEMM baselines: tc_04_wgmma_tma_ws, cc_07_warptile, a800_ccbf16_10_doublebuffer.
    pytest.param("a800", (256, 66, 0, 36864, 132), {"registers": 3, "shared": 3, "warps": 8}, 37.5, id="G4"),
    pytest.param("h20", (128, 63, 0, 4096, 100), {"registers": 8, "shared": 20, "warps": 16}, 50, id="G6"),
    pytest.param("a800", (512, 40, 0, 0, 16), {"registers": 3, "shared": 16, "warps": 4, "blocks": 32}, 75, id="G12"),
    pytest.param("h20", (256, 154, 98304, 128, 100), {"registers": 1, "shared": 1, "warps": 8}, 12.5, id="wgmma"),
    pytest.param("h20", (128, 211, 0, 8192, 64), {"registers": 2, "shared": 7, "warps": 16}, 12.5, id="warptile"),
    pytest.param("a800", (128, 120, 0, 12544, 100), {"registers": 4, "shared": 7, "warps": 16}, 25, id="doublebuffer"),
])
def test_block_limits_that_ncu_printed(gpu, kernel, limits, percent):
    threads, registers, dynamic, static, carveout = kernel
    got = occupancy(load_gpu(gpu), threads=threads, registers=registers, shared_bytes=dynamic,
                    static_shared_bytes=static, carveout_kb=carveout)
    assert limits.items() <= got.limits.items()
    assert 100 * got.occupancy == percent


@pytest.mark.parametrize("name", gpu_names())
def test_public_register_limits(name):
    def limit(threads, registers):
        return occupancy(load_gpu(name), threads=threads, registers=registers, shared_bytes=0).limits["registers"]

    assert limit(224, 92) == 2  # I15: 7 warps of 96 registers, 5 warps a partition; 3 without the partitions
    assert limit(256, 90) == 2  # G15: forcing a third block spills
    assert limit(128, 85) == 5  # I16: what the spreadsheet says for the register file these GPUs share with 5.0


@pytest.mark.parametrize("name", gpu_names())
def test_opt_in_limit_is_reached_and_not_exceeded(name):  # I17: the reserve is subtracted once
    gpu = load_gpu(name)
    assert occupancy(gpu, threads=32, registers=32, shared_bytes=gpu.shared_bytes_per_block).blocks_per_sm == 1
    with pytest.raises(SimError, match="may opt in to"):
        occupancy(gpu, threads=32, registers=32, shared_bytes=gpu.shared_bytes_per_block + 1)


@pytest.mark.parametrize(("shared", "registers", "blocks"), [
    (76800, 80, 3), (76801, 80, 2), (76800, 81, 2), (57344, 64, 4), (57345, 64, 3), (57344, 65, 3),
])
def test_steps_of_256_threads_on_gh100(shared, registers, blocks):
    assert occupancy(load_gpu("h20"), threads=256, registers=registers, shared_bytes=shared).blocks_per_sm == blocks


@pytest.mark.parametrize("name", gpu_names())
def test_granules(name):  # the expected numbers come from compiling cuda_occupancy.h of CUDA 12.9
    gpu = load_gpu(name)
    most = {"9.0": 20096, "8.0": 14208}[gpu.compute_capability]

    def limit(resource, registers, shared):
        return occupancy(gpu, threads=32, registers=registers, shared_bytes=shared).limits[resource]

    assert (limit("registers", 72, 0), limit("registers", 73, 0)) == (28, 24)
    assert (limit("shared", 32, most), limit("shared", 32, most + 1)) == (11, 10)


@pytest.mark.parametrize(("kernel", "sentence"), [
    ({"threads": 256, "registers": 64, "shared_bytes": 68608},
     "3 blocks; 4 needs shared memory <= 57,344 B: 11.0 KB less; registers <= 64"),
    ({"threads": 256, "registers": 90, "shared_bytes": 1000},
     "2 blocks; 3 needs shared memory <= 76,800 B; registers <= 80: 10 fewer"),
    ({"threads": 256, "registers": 255, "shared_bytes": 115713},
     "1 block; 2 needs shared memory <= 115,712 B: 1 B less; registers <= 128: 127 fewer"),
    ({"threads": 32, "registers": 255, "shared_bytes": 116000},
     "1 block; 2 needs shared memory <= 115,712 B: 288 B less; registers <= 255"),
    ({"threads": 32, "registers": 10, "shared_bytes": 0},
     "32 blocks; 33 is impossible: an SM holds 32 blocks"),
    ({"threads": 1000, "registers": 32, "shared_bytes": 0},
     "2 blocks; 3 is impossible: 3 x 32 warps, and an SM holds 64"),
    ({"threads": 256, "registers": 66, "shared_bytes": 36864, "carveout_kb": 132},
     "3 blocks; 4 needs shared memory <= 32,768 B: 4.0 KB less (or a carveout of 164 KB); registers <= 64: 2 fewer"),
    ({"threads": 32, "registers": 32, "shared_bytes": 0, "carveout_kb": 8},
     "8 blocks; 9 needs a carveout of 16 KB; registers <= 168"),
])
def test_next_step_in_words(kernel, sentence):
    assert occupancy(H200, **kernel).next_step.sentence == sentence


@pytest.mark.parametrize(("change", "message"), [
    ({"threads": 0}, "h200: threads 0 is outside 1..1,024"),
    ({"threads": 1025}, "h200: threads 1,025 is outside 1..1,024"),
    ({"threads": 128.0}, "h200: threads 128.0 is not a whole number"),
    ({"registers": 0}, "h200: registers 0 is outside 1..255"),
    ({"registers": 256}, "h200: registers 256 is outside 1..255"),
    ({"threads": 288, "registers": 255}, "288 threads with 255 registers each: the 9 warps of a block take more than"),
    ({"shared_bytes": -1}, "h200: shared_bytes -1 is below 0"),
    ({"static_shared_bytes": 49153}, "h200: static_shared_bytes 49,153 is outside 0..49,152"),
    ({"shared_bytes": 200000, "static_shared_bytes": 40000},
     "h200: shared memory of 240,000 B a block (40,000 static) exceeds the 232,448 B"),
    ({"carveout_kb": 48}, "h200: no carveout of 48 KB (there are 0, 8, 16, 32, 64, 100, 132, 164, 196, 228)"),
    ({"carveout_kb": 0}, "a carveout of 0 KB does not hold one block: 1,024 B with"),
    ({"shared_bytes": 8192, "carveout_kb": 8}, "a carveout of 8 KB does not hold one block: 9,216 B with"),
])
def test_what_the_driver_refuses(change, message):
    with pytest.raises(SimError) as caught:
        occupancy(H200, **{"threads": 128, "registers": 32, "shared_bytes": 0} | change)
    assert message in str(caught.value)


def test_json_ready():
    got = occupancy(H200, threads=256, registers=72, shared_bytes=68 * 1024).as_dict()
    assert json.loads(json.dumps(got)) == got
    assert got["limits"] == {"blocks": 32, "warps": 8, "registers": 3, "shared": 3}
    assert (got["blocks_per_sm"], got["limiter"], got["occupancy"]) == (3, "registers, shared", 0.375)
    assert got["next_step"]["blocks"] == 4


# ---- properties over all kernels that launch ------------------------------------------------------------


@st.composite
def kernels(draw):
    """The name of a GPU and the keyword arguments of a launch it accepts, with or without a carveout."""
    name = draw(st.sampled_from(["h20", "a100-80g"]))
    gpu = load_gpu(name)
    threads = draw(st.integers(1, 1024))
    per_partition = -(-threads // 32 // gpu.sm_partitions) or 1
    most = min(255, gpu.sm_registers // gpu.sm_partitions // per_partition // 256 * 8)
    static = draw(st.sampled_from([0, 100, 16384]) | st.integers(0, 49152))
    carveout = draw(st.none() | st.sampled_from([kb for kb in gpu.shared_carveouts_kb if 1024 * kb >= static + 1152]))
    room = (gpu.shared_bytes_per_sm if carveout is None else 1024 * carveout) - 1024 - static
    dynamic = draw(st.integers(0, max(0, room)) | st.integers(0, max(0, min(room, 12288))))
    return name, {"threads": threads, "registers": draw(st.integers(1, most)), "shared_bytes": dynamic,
                  "static_shared_bytes": static, "carveout_kb": carveout}


@given(kernels())
def test_blocks_are_the_least_limit_and_fit_the_sm(case):
    gpu, kernel = load_gpu(case[0]), case[1]
    got = occupancy(gpu, **kernel)
    assert got.blocks_per_sm == min(got.limits.values()) >= 1
    assert got.limiter.split(", ") == [name for name, n in got.limits.items() if n == got.blocks_per_sm]
    assert got.warps_per_sm == got.blocks_per_sm * -(-kernel["threads"] // 32) <= gpu.sm_warps
    assert got.occupancy == got.warps_per_sm / gpu.sm_warps
    total = kernel["shared_bytes"] + kernel["static_shared_bytes"] + gpu.shared_bytes_reserved
    assert got.blocks_per_sm * total <= gpu.shared_bytes_per_sm
    assert got.warps_per_sm * 32 * kernel["registers"] <= gpu.sm_registers


@given(kernels(), st.integers(0, 254), st.integers(0, 65536), st.integers(0, 31))
def test_asking_for_less_never_costs_a_block(case, registers, shared, warps):
    gpu, kernel = load_gpu(case[0]), case[1]
    less = kernel | {"registers": max(1, kernel["registers"] - registers),
                     "shared_bytes": max(0, kernel["shared_bytes"] - shared),
                     "threads": max(1, kernel["threads"] - 32 * warps)}
    assert occupancy(gpu, **less).blocks_per_sm >= occupancy(gpu, **kernel).blocks_per_sm


@given(kernels())
def test_threads_count_in_whole_warps(case):
    gpu, kernel = load_gpu(case[0]), case[1]
    whole = kernel | {"threads": -(-kernel["threads"] // 32) * 32}
    assert occupancy(gpu, **whole) == occupancy(gpu, **kernel)


@given(kernels())
def test_next_step_is_enough_and_not_one_byte_or_register_too_little(case):
    gpu, kernel = load_gpu(case[0]), case[1]
    now = occupancy(gpu, **kernel)
    step = now.next_step
    assert step.blocks == now.blocks_per_sm + 1
    if step.obstacle:  # then nothing helps
        slim = kernel | {"registers": 1, "shared_bytes": 0, "static_shared_bytes": 0, "carveout_kb": None}
        assert occupancy(gpu, **slim).blocks_per_sm == now.blocks_per_sm
        assert step.shared_bytes is step.registers is None
        return
    static = kernel["static_shared_bytes"]
    total = kernel["shared_bytes"] + static
    if step.shared_bytes is None:
        assert step.blocks * gpu.shared_bytes_reserved > 1024 * kernel["carveout_kb"]
    else:
        best = kernel | {"static_shared_bytes": 0, "shared_bytes": step.shared_bytes, "registers": step.registers}
        assert occupancy(gpu, **best).blocks_per_sm >= step.blocks
        assert occupancy(gpu, **best | {"shared_bytes": step.shared_bytes + 1}).blocks_per_sm < step.blocks
        if step.registers < gpu.thread_registers:
            more = best | {"registers": step.registers + 1, "shared_bytes": 0}
            assert occupancy(gpu, **more).blocks_per_sm < step.blocks
        assert step.shared_less == max(0, total - step.shared_bytes)
    assert step.registers_less == max(0, kernel["registers"] - step.registers)
    if step.carveout_kb is not None:
        assert step.carveout_kb > kernel["carveout_kb"]
        raised = kernel | {"registers": min(kernel["registers"], step.registers)}
        assert occupancy(gpu, **raised | {"carveout_kb": step.carveout_kb}).blocks_per_sm >= step.blocks
        below = max(kb for kb in gpu.shared_carveouts_kb if kb < step.carveout_kb)
        assert occupancy(gpu, **raised | {"carveout_kb": below}).blocks_per_sm < step.blocks


@pytest.mark.parametrize("name", gpu_names())
def test_unknown_registers_limit_nothing(name):
    gpu = load_gpu(name)
    fit = occupancy(gpu, threads=256, registers=None, shared_bytes=4096)
    assert fit.limits["registers"] is None and fit.limiter == "warps" and fit.blocks_per_sm == gpu.sm_warps // 8
    assert occupancy(gpu, threads=1024, registers=None, shared_bytes=0).blocks_per_sm == gpu.sm_warps // 32
