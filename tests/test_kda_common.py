"""All KDA kernels: sizes refused alike, and bytes, registers and blocks per SM as the H200 had them."""

import json
from pathlib import Path

import numpy as np
import pytest

import validation
from kernels_py import registered
from kernels_py.kda_common import packed_problem, within_bounds
from kernels_py.kda_reference import Bounded
from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.errors import SimError
from simgpu.run import simulate

KERNELS = ("kda_b0", "kda_b1", "kda_b2", "kda_b3")
MEASURED = Path(validation.__file__).parent / "measured" / "h200"


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("sizes", "message"), [
    ({"tokens": 0}, "tokens is 0, below 1"),
    ({"sequences": -1}, "sequences is -1, below 1"),
    ({"heads": 0}, "heads is 0, below 1"),
    ({"seed": -1}, "seed is -1, below 0"),
    ({"tokens": 5_000_000_000}, "1 x 5000000000 tokens; tile_start is an int32"),
])  # fmt: skip
def test_every_kernel_refuses_what_no_launch_has(name, sizes, message):
    with pytest.raises(SimError, match=f"^{name}: {message}$"):
        registered()[name].launch(None, **sizes)


@pytest.mark.parametrize("name", KERNELS)
def test_bytes_registers_and_blocks_are_those_measured(name):
    """The twins allocate what the CUDA kernels do; where a twin names its registers, they are ptxas's."""
    made = registered()[name]
    runs = {run["case"]: run for run in json.loads((MEASURED / f"{name}.json").read_text())["runs"]}
    assert {run["variant"] for run in runs.values()} >= set(made.variants) - {"vec"}  # kda_b2: the same as kdsunion
    for case, run in runs.items():
        launch = made.launch(run["variant"], **{**run["params"], "tokens": 16, "sequences": 1, "heads": 1})
        assert launch.registers in (None, run["registers"]), case
        shared = run["static_shared_bytes"] + run["dynamic_shared_bytes"]
        assert simulate(launch, mode="addresses").shared_bytes == shared, case
        found = occupancy(load_gpu("h200"), threads=launch.threads, registers=run["registers"], shared_bytes=shared)
        assert found.blocks_per_sm == run["blocks_per_sm"], case


def test_every_named_variant_knows_its_registers():
    for name in KERNELS:
        made = registered()[name]
        assert all(made.launch(variant).registers for variant in made.variants), name


def test_a_wrong_element_is_named_with_its_bound():
    bound = Bounded(np.array([[1.0, 2.0], [3.0, 4.0]]), 0.5)
    assert within_bounds("k", {"x": bound}, {"x": np.array([[1.5, 1.6], [3.0, 4.4]])})
    with pytest.raises(SimError, match=r"^k: x\[1, 0\] is 7, expected 3 within 0.5; 2 of 4 elements are wrong$"):
        within_bounds("k", {"x": bound}, {"x": np.array([[1.0, 2.0], [7.0, np.nan]])})


def test_a_launch_makes_its_inputs_once():
    packed_problem.cache_clear()
    for name in KERNELS:
        simulate(registered()[name].launch(None, tokens=5, heads=1), mode="values")
    assert packed_problem.cache_info().misses == 1
