"""KDA backward B1: right outputs, the same bits from every variant, the documents' claims as the rules see them."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import validation
from kernels_py import find, kda_b1
from kernels_py.kda_b1 import VARIANTS
from kernels_py.kda_common import STATE_VIEWS, THREADS, C, D, tile_table, tiled
from kernels_py.kda_reference import BOUND, b1, b2, make_problem
from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.errors import SimError
from simgpu.instructions import instruction
from simgpu.layout import cosize, is_injective, tabulate
from simgpu.rules import cost
from simgpu.run import simulate

OUTPUTS = ("dkr", "dvcorr", "dv")
RAGGED = {"tokens": 37, "sequences": 2, "heads": 2}  # tiles of 16, 16 and 5 rows, twice; the second starts at token 37
WHOLE = {"tokens": 16, "heads": 1}
kernel = kda_b1.kda_b1


@pytest.fixture(scope="module")
def ragged():
    """Every variant's run with values over RAGGED, which the launch has held against the reference."""
    return {variant: simulate(kernel.launch(variant, **RAGGED), mode="values") for variant in VARIANTS}


@pytest.fixture(scope="module")
def whole():
    """Every variant's counters for one full tile: eight warps run every instruction."""
    return {variant: simulate(kernel.launch(variant, **WHOLE), mode="addresses") for variant in VARIANTS}


def one_tile(**parameters):
    return simulate(kernel.launch(None, **WHOLE, **parameters), mode="addresses").table


# ---- values ----------------------------------------------------------------------------------------------------------


def test_outputs_lie_within_the_bounds_of_the_reference(ragged):
    problem = make_problem([37, 37], heads=2, seed=0)
    assert (problem.tensors["S_in"] != 0).any(axis=(2, 3)).all()
    expected = b1(problem, BOUND)
    for name in OUTPUTS:
        got = ragged["movm"].arrays[name]
        assert expected[name].holds(got).all()
        # The bound is no blank cheque: it is small beside the outputs themselves.
        assert np.median(expected[name].error) < 0.05 * np.abs(expected[name].value).mean()


def test_every_variant_gives_the_same_bits(ragged):
    for variant, result in ragged.items():
        for name in OUTPUTS:
            assert np.array_equal(result.arrays[name].view(np.uint32),
                                  ragged["roundtrip"].arrays[name].view(np.uint32)), (variant, name)


@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 40), sequences=st.integers(1, 3), heads=st.integers(1, 2), seed=st.integers(0, 9),
       variant=st.sampled_from(sorted(VARIANTS)))
def test_any_lengths_and_heads(tokens, sequences, heads, seed, variant):
    result = simulate(kernel.launch(variant, tokens=tokens, sequences=sequences, heads=heads, seed=seed), mode="values")
    assert all(np.isfinite(result.arrays[name]).all() for name in OUTPUTS)


@pytest.mark.parametrize("variant", ["movm", "sw128"])
def test_atoms_tiled_in_the_wrong_order_give_a_wrong_result_and_the_same_counts(monkeypatch, variant):
    swizzle = VARIANTS[variant].get("swizzle", 0)
    right = simulate(kernel.launch(variant, **RAGGED), mode="addresses").table
    plain, (atom, _) = STATE_VIEWS[swizzle]
    monkeypatch.setitem(STATE_VIEWS, swizzle, (plain, (atom, "col")))
    with pytest.raises(SimError, match=r"kda_b1: dvcorr\[0, 0, 0\] is .*, expected .* elements are wrong"):
        simulate(kernel.launch(variant, **RAGGED), mode="values")
    assert simulate(kernel.launch(variant, **RAGGED), mode="addresses").table == right


def test_the_plain_view_of_dS_cannot_be_read_transposed(monkeypatch):
    """Its rows run along values; the transposed read wants them along keys, and ldmatrix rows start on 16 bytes."""
    monkeypatch.setitem(STATE_VIEWS, 0, (STATE_VIEWS[0][0],) * 2)
    with pytest.raises(SimError, match=r"'dS.ldsm.trans'.*lane 1: byte address 2 .* not a multiple of 16"):
        simulate(kernel.launch("movm", **RAGGED), mode="values")


class Rows:
    """A sink that collects (site, CTA, token row) of every global access to a [T, H, D] tensor."""

    def __init__(self, launch):
        base, self.spans = 0, {}
        for tensor in launch.tensors:
            self.spans[tensor.name] = (base, tensor)
            base += -(-tensor.nbytes // 256) * 256
        self.seen = set()

    def access(self, event):
        owner = {"R1.k.load": "k", "R1.gc.load": "gc", "R1.gT.load": "gc"}.get(event.site.name)
        owner = owner or event.site.name.split(".")[0]
        base, tensor = self.spans.get(owner, (0, None))
        if event.global_ is None or tensor is None or tensor.shape[:2] != (74, 2):
            return
        shape = (len(event.ctas), event.warps, 32)
        on = (np.broadcast_to(event.masks, shape[:2])[..., None] >> np.arange(32)) & 1
        element = (np.broadcast_to(event.global_, shape) - base) // tensor.dtype.itemsize
        token, head = np.unravel_index(element // np.prod(tensor.shape[2:], dtype=int), tensor.shape[:2])
        for cta, warp, lane in np.argwhere(on):
            where = int(event.ctas[cta]), int(token[cta, warp, lane]), int(head[cta, warp, lane])
            self.seen.add((event.site.name, where))

    def work(self, event):
        pass

    def of(self, site):
        return {where for name, where in self.seen if name == site}


def test_phantom_rows_are_neither_read_nor_written_and_every_other_row_is():
    launch = kernel.launch("movm", **RAGGED)
    rows = Rows(launch)
    simulate(launch, mode="addresses", sinks=[rows])
    start, count = tile_table(37, 2)
    own = {(6 * head + tile, token, head) for head in range(2) for tile in range(6)
           for token in range(start[tile], start[tile] + count[tile])}
    last = {(6 * head + tile, start[tile] + count[tile] - 1, head) for head in range(2) for tile in range(6)}
    for site in ("U.cp", "do.cp", "R1.k.load", "R1.gc.load", "beta.load", *(f"{name}.store" for name in OUTPUTS)):
        assert rows.of(site) == own, site
    assert rows.of("R1.gT.load") == last


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzle", STATE_VIEWS)
def test_the_two_views_of_dS_are_transposes_over_the_same_bytes_without_padding(swizzle):
    plain, transposed = (tabulate(tiled(atom, (D, D), order)) for atom, order in STATE_VIEWS[swizzle])
    assert np.array_equal(plain, transposed.T)
    assert is_injective(plain) and cosize(plain) == D * D


# ---- counts, per warp and instruction --------------------------------------------------------------------------------


def test_what_a_full_tile_costs(whole):
    table = whole["movm"].table
    executed = {row.site: row.executed / 8 for row in table.sites}
    assert executed == {
        "tile.start.load": 1, "tile.rows.load": 1, "dS.cp": 8, "M.cp": 1 / 8, "INV.cp": 1 / 8, "U.cp": 1, "do.cp": 1,
        "R1.k.load": 1, "R1.gc.load": 2, "R1.gT.load": 2, "R1.kr.store": 1, "beta.load": 2, "U.ldsm": 8, "dS.ldsm": 8,
        "do.ldsm.trans": 1, "M.ldsm.trans": 1, "kr.ldsm": 8, "dS.ldsm.trans": 8, "INV.ldsm.trans": 1, "stage.store": 24,
        "stage.load": 6, "dkr.store": 2, "dvcorr.store": 2, "dv.store": 2,
    }  # fmt: skip
    conflicts = {row.site: row.n_way for row in table.sites if row.excessive}
    assert conflicts == {"dS.cp": 8, "M.cp": 8, "INV.cp": 8, "stage.store": 8}
    assert table.work == {"cp.async.commit": 8, "cp.async.wait": 8, "barrier": 16, "shfl.xor": 32, "movmatrix": 32,
                          "mma.m16n8k16": 8 * 2 * (8 + 1 + 8 + 1)}
    assert table.total().unmodelled == 0


def test_the_round_trip_of_dU_is_what_movmatrix_saves(whole):
    with_, without = whole["roundtrip"].table, whole["movm"].table
    assert [row for row in with_.sites if not row.site.startswith("dU.")] == list(without.sites)
    store, load = with_["dU.store"], with_["dU.load"]
    assert (store.executed / 8, store.n_way, load.executed / 8, load.n_way) == (4, 8, 8, 4)
    assert "movmatrix" not in with_.work


def test_the_fold_of_B0_adds_p_and_changes_nothing_else(whole, ragged):
    """l12's claim: S at a stride of 128 elements is a sector a lane, 2 bytes of its 32 used."""
    with_, without = whole["l12"].table, whole["movm"].table
    assert [row for row in with_.sites if not row.site.startswith("p.")] == list(without.sites)
    S, dS, p = (with_[site] for site in ("p.S.load", "p.dS.load", "p.store"))
    assert (S.executed / 8, S.sectors_per_request, dS.executed / 8, dS.n_way, p.executed / 8) == (64, 32, 64, 4, 1)
    problem = make_problem([37, 37], heads=2, seed=0)
    bound = b2(problem, BOUND)["p"]
    assert bound.holds(ragged["l12"].arrays["p"]).all()
    assert np.median(bound.error) < 0.01 * np.abs(bound.value).mean()
    assert all("p" not in result.arrays for variant, result in ragged.items() if variant != "l12")


@pytest.mark.parametrize("layout", [{"swizzle": 1}, {"union": 1}])
def test_B0_folds_into_the_other_layouts(layout):
    """The launch holds p against the reference; SW128 atoms spread a row of dS over the banks as INTER atoms do not."""
    result = simulate(kernel.launch("float2", **RAGGED, **layout, b0=1), mode="values")
    assert result.table["p.dS.load"].n_way == (1 if "swizzle" in layout else 4)


@pytest.mark.parametrize(("vec", "stride", "wavefronts"),
                         [(1, 128, 8), (1, 132, 2), (1, 136, 2), (2, 128, 8), (2, 132, 4), (2, 136, 2)])
def test_stage_strides(vec, stride, wavefronts):
    """The documents have 132 free of conflicts. Columns 2t put 4g + 2t on even banks only: two lanes on each."""
    row = one_tile(stage_stride=stride, stage_vec=vec)["stage.store"]
    assert row.wavefronts_per_instruction == wavefronts
    assert row.ideal == row.executed * vec


def test_the_best_stride():
    """Rows leave 16 bytes a lane, so a stride is a multiple of 4. No scalar store is free of conflicts then."""
    ways = {(vec, stride): one_tile(stage_stride=stride, stage_vec=vec)["stage.store"].n_way
            for vec in (1, 2) for stride in range(128, 161, 4)}
    assert min(way for (vec, _), way in ways.items() if vec == 1) == 2
    assert [stride for (vec, stride), way in ways.items() if vec == 2 and way == 1] == [136, 152]


def test_how_dS_comes_in(whole):
    """INTER atoms: 8 rows of an atom share a line of shared memory, and a sector's halves go to two of them."""
    costs = {variant: (row.instruction, row.wavefronts_per_instruction, row.sectors_per_request)
             for variant in ("float2", "sw128", "diagonal") for row in [whole[variant].table["dS.cp"]]}
    assert costs == {"float2": ("cp.async.cg", 32, 32), "sw128": ("cp.async.cg", 4, 16),
                     "diagonal": ("cp.async.ca", 4, 16)}
    for variant in costs:  # however it comes in, both reads are free of conflicts
        for site in ("dS.ldsm", "dS.ldsm.trans"):
            assert whole[variant].table[site].excessive == 0


def test_ldmatrix_on_a_row_major_16x16_tile_is_two_way():
    """The documents say 4-way. Eight rows of 32 bytes span 256 bytes: every bank is asked twice."""
    lane = np.arange(32)
    rows = (32 * (lane % 16) + 16 * (lane // 16)).tolist()
    found = cost(instruction("ldmatrix.x4"), 16, 0xFFFFFFFF, shared=rows)
    assert (found.wavefronts, found.ideal) == (8, 4)


def test_addresses_do_not_depend_on_values(ragged):
    for variant, result in ragged.items():
        assert simulate(kernel.launch(variant, **RAGGED), mode="addresses").table == result.table


# ---- occupancy -------------------------------------------------------------------------------------------------------

SHARED = {"roundtrip": 74752, "movm": 70656, "pad132": 71424, "float2": 72192, "sw128": 72192, "diagonal": 72192,
          "union": 46080, "union_sw128": 46080, "l12": 70656}


def test_shared_memory_and_blocks_per_sm(whole):
    """The documents' 74 KB is the round trip's (73.0 KB; 73.75 with stride 132). Over dS the stages are free."""
    assert {variant: result.shared_bytes for variant, result in whole.items()} == SHARED
    assert all(result.launch.registers for result in whole.values())
    assert simulate(kernel.launch("roundtrip", stage_stride=132, **WHOLE), mode="addresses").shared_bytes == 75520
    for name, blocks in (("h20", (3, 4)), ("h200", (3, 4)), ("a100-80g", (2, 3))):
        for variant, result in whole.items():
            found = occupancy(load_gpu(name), threads=THREADS, registers=result.launch.registers,
                              shared_bytes=result.shared_bytes)
            assert found.blocks_per_sm == blocks["union" in variant], (name, variant)
    step = occupancy(load_gpu("h200"), threads=THREADS, registers=56, shared_bytes=SHARED["union"]).next_step
    assert (step.shared_less, step.registers_less) == (512, 8)  # a fifth block is 512 bytes and 8 registers away


def test_a_stage_that_does_not_fit_over_dS_is_refused():
    with pytest.raises(SimError, match="stage"):
        one_tile(union=1, stage_stride=176)


# ---- parameters, and the CUDA twin -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("parameters", "message"), [
    ({"movm": 2}, "movm is 2; it is 0 or 1"),
    ({"b0": 4}, "b0 is 4; it is 0 or 1"),
    ({"stage_vec": 4}, "stage_vec is 4; it is 1 or 2"),
    ({"stage_stride": 130}, "stage_stride is 130; it is a multiple of 4"),
    ({"stage_stride": 124}, "stage_stride is 124"),
    ({"swizzle": 1, "diagonal": 1}, "diagonal 1 is the copy into INTER atoms"),
    ({"tokens": 0}, "tokens is 0, below 1"),
    ({"heads": -1}, "heads is -1, below 1"),
    ({"tokens": 2**30, "sequences": 2}, "tile_start is an int32"),
    ({"heads": 70000, "tokens": 1}, "the limit is 65535"),
])  # fmt: skip
def test_bad_parameters_are_refused_by_name(parameters, message):
    with pytest.raises(SimError, match=re.escape(message)):
        kernel.launch(None, **parameters)


def test_registered():
    assert find("kda_b1@union") == (kernel, "union")


def test_the_cuda_twin_has_the_same_variants_and_sites(whole, ragged):
    cuda = Path(validation.__file__).parent / "cuda"
    source = (cuda / "kda_b1.cu").read_text()
    table = source[source.index("kVariants[] = {"):]
    table = table[:table.index("};")]
    fields = ("movm", "stage_stride", "stage_vec", "swizzle", "diagonal", "union", "b0")
    twins = {name: dict(zip(fields, map(int, values.split(",")), strict=True))
             for name, values in re.findall(r'\{"(\w+)", \{([\d, ]+)\}\}', table)}
    ours = {name: {key: kernel.parameters(name)[key] for key in fields} for name in VARIANTS}
    assert twins == ours
    sites = {row.site for result in (*whole.values(), *ragged.values()) for row in result.table.sites}
    written = source + (cuda / "kda_state.cuh").read_text() + (cuda / "kda_products.cuh").read_text()
    assert set(re.findall(r"// @site ([\w.]+)", written)) == sites
    sizes = re.search(r"kC = (\d+), kD = (\d+), kThreads = (\d+);", (cuda / "kda_common.cuh").read_text())
    assert sizes.groups() == (str(C), str(D), str(THREADS))
