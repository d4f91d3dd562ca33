"""The GEMM ladder's Python twins: the right product, the same bits from every rung, the counts that were measured."""

import json
from pathlib import Path

import numpy as np
import pytest

import validation
from kernels_py.gemm_tile import RUNGS, Tiles
from kernels_py.hgemm_ladder import hgemm_ladder
from kernels_py.smem_to_reg import smem_to_reg
from simgpu.errors import SimError
from simgpu.run import simulate

MEASURED = Path(validation.__file__).parent / "measured" / "h200"
SMALL = {"m": 128, "n": 256, "k": 96}
COLUMNS = {
    "executed": "executed",
    "wavefronts": "l1_wavefronts_shared",
    "ideal": "l1_wavefronts_shared_ideal",
    "sectors": "l2_theoretical_sectors_global",
    "ideal_sectors": "l2_theoretical_sectors_global_ideal",
}


def measured(kernel: str, **wanted) -> list:
    """The measured runs of ``kernel`` whose parameters agree with ``wanted``."""
    runs = json.loads((MEASURED / f"{kernel}.json").read_text())["runs"]
    return [pytest.param(run, id=run["case"]) for run in runs
            if all(run["params"][key] == value for key, value in wanted.items())]


def counted(table) -> dict:
    """The emulator's counters in the measured data's words; what an instruction does not use counts as 0 there."""
    return {row.site: {name: getattr(row, column) or 0 for column, name in COLUMNS.items()} for row in table.sites}


@pytest.fixture(scope="module")
def reference():
    return simulate(hgemm_ladder.launch("A1", **SMALL), mode="values").arrays["C"]


# ---- results -------------------------------------------------------------------------------------------------------


def test_the_product_is_numpys():
    """Integers up to 4 in magnitude: every float32 sum is exact, whatever its order."""
    launch = hgemm_ladder.launch("A3", **SMALL)
    rng = np.random.default_rng(7)
    for tensor in launch.tensors[:2]:
        object.__setattr__(tensor, "init", rng.integers(-4, 5, tensor.shape).astype(tensor.dtype))
    arrays = simulate(launch, mode="values").arrays
    expected = arrays["A"].astype(np.float32) @ arrays["B"].astype(np.float32)
    assert np.array_equal(arrays["C"], expected.astype(arrays["C"].dtype)) and expected.any()


@pytest.mark.parametrize("variant", RUNGS)
@pytest.mark.parametrize("change", [{}, {"swizzle": 0}, {"stages": 4}, {"stages": 2, "staged": 1}], ids=str)
def test_every_variant_gives_the_same_bits(reference, variant, change):
    arrays = simulate(hgemm_ladder.launch(variant, **SMALL, **change), mode="values").arrays
    assert np.array_equal(arrays["C"].view(np.uint16), reference.view(np.uint16))


def test_a_fragment_in_the_wrong_order_is_a_wrong_result(monkeypatch):
    """Registers 1 and 2 of A exchanged: the counts stay the same, the product does not."""
    right = Tiles._lds_a
    monkeypatch.setattr(Tiles, "_lds_a", lambda *arguments: right(*arguments)[..., [0, 2, 1, 3], :])
    with pytest.raises(SimError, match="the result is wrong"):
        simulate(hgemm_ladder.launch("A1", m=128, n=128, k=64), mode="values")


@pytest.mark.parametrize("variant", smem_to_reg.variants)
@pytest.mark.parametrize("mma", [0, 1])
def test_the_micro_benchmark_is_exact(variant, mma):
    simulate(smem_to_reg.launch(variant, iterations=4, sms=1, mma=mma), mode="values")  # its check raises otherwise


@pytest.mark.parametrize(("host", "bad", "message"), [
    (hgemm_ladder, {"m": 100}, "m 100 and n 4096 must be multiples of 128, k 4096 of 32"),
    (hgemm_ladder, {"k": 32, "stages": 3}, "k 32 is 1 k-tiles of 32; 3 stages need 2"),
    (hgemm_ladder, {"stages": 5}, "stages is 5; it is 1 to 4"),
    (hgemm_ladder, {"stages": 1, "staged": 1}, "a staged epilogue needs two stages"),
    (smem_to_reg, {"iterations": 3}, "iterations 3 must be even, 2 to 32768"),
    (smem_to_reg, {"mma": 2}, "mma is 2; it is 0 or 1"),
])
def test_bad_parameters_are_refused_in_one_line(host, bad, message):
    with pytest.raises(SimError, match=message):
        host.launch(None, **bad)


# ---- the documents' table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "loads", "wavefronts"),
                         [("A1", 32, 32), ("A2", 24, 24), ("A2L", 8, 24), ("A3", 8, 24)])
def test_shared_loads_of_a_warp_and_k16_step(variant, loads, wavefronts):
    """128 x 128 x 96 is one CTA of 8 warps and 6 k16 steps."""
    table = simulate(hgemm_ladder.launch(variant, m=128, n=128, k=96), mode="addresses").table
    rows = [row for row in table.sites if row.site.startswith(("A.lds", "B.lds"))]
    assert sum(row.executed for row in rows) == 8 * 6 * loads
    assert sum(row.wavefronts for row in rows) == sum(row.ideal for row in rows) == 8 * 6 * wavefronts


# ---- against the measurement ---------------------------------------------------------------------------------------


def by_site(run) -> dict:
    return {site: {name: row.get(name, 0) for name in COLUMNS.values()} for site, row in run["sites"].items()}


@pytest.mark.parametrize("run", measured("hgemm_ladder", m=512) + measured("hgemm_ladder", m=1024, swizzle=1, stages=3))
def test_counts_equal_nsight_compute(run):
    table = simulate(hgemm_ladder.launch(run["variant"], **run["params"]), mode="addresses").table
    assert counted(table) == by_site(run)


@pytest.mark.parametrize("run", measured("smem_to_reg", ctas=1, mma=0))
def test_the_micro_benchmarks_counts_equal_nsight_compute(run):
    """Every iteration reads alike, so four emulated ones stand for all of them."""
    launch = smem_to_reg.launch(run["variant"], **{**run["params"], "iterations": 4})
    counts = counted(simulate(launch, mode="addresses").table)
    for site in (site for site in counts if ".lds" in site):
        counts[site] = {name: run["params"]["iterations"] // 4 * count for name, count in counts[site].items()}
    assert counts == by_site(run)
