"""KDA backward B2 and B0: right outputs, the same bits, the S bug and what it reaches, the documents' claims."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import validation
from kernels_py import find, kda_b1, kda_b2
from kernels_py.kda_b0 import kda_b0
from kernels_py.kda_b2 import VARIANTS, expected
from kernels_py.kda_common import STATE_VIEWS, THREADS, tile_table
from kernels_py.kda_reference import BOUND, OUTPUTS, b2, b3, make_problem
from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.errors import SimError
from simgpu.run import simulate

RAGGED = {"tokens": 37, "sequences": 2, "heads": 2}  # tiles of 16, 16 and 5 rows, twice; the second starts at token 37
WHOLE = {"tokens": 16, "heads": 1}
CUDA = Path(validation.__file__).parent / "cuda"
BASES = ("dqd_base", "dkd_base")
kernel = kda_b2.kda_b2
right_variants = [variant for variant in VARIANTS if variant != "sinbug"]


@pytest.fixture(scope="module")
def ragged():
    """Every right variant's run with values over RAGGED, which the launch has held against the reference."""
    return {variant: simulate(kernel.launch(variant, **RAGGED), mode="values") for variant in right_variants}


@pytest.fixture(scope="module")
def sinbug():
    """The arrays that sinbug leaves, which nobody has checked."""
    return simulate(replace(kernel.launch("sinbug", **RAGGED), check=None), mode="values").arrays


@pytest.fixture(scope="module")
def whole():
    """Every variant's run for one full tile: eight warps run every instruction."""
    return {variant: simulate(kernel.launch(variant, **WHOLE), mode="addresses") for variant in VARIANTS}


@pytest.fixture(scope="module")
def problem():
    return make_problem([37, 37], heads=2, seed=0)


def bits(x):
    return x.view(np.uint32)


def one_tile(**parameters):
    return simulate(kernel.launch(None, **WHOLE, **parameters), mode="addresses").table


# ---- values ----------------------------------------------------------------------------------------------------------


def test_outputs_lie_within_the_bounds_of_the_reference(ragged, problem):
    assert np.abs(problem.tensors["S_in"].astype(np.float32)).mean(axis=(1, 2, 3)).min() > 0.01  # no state is zero
    for name, bound in expected(problem, b0=1).items():
        assert bound.holds(ragged["kdsunion"].arrays[name]).all()
        # The bound is no blank cheque: it is small beside the outputs themselves.
        assert np.median(bound.error) < 0.1 * np.abs(bound.value).mean(), name


def test_every_variant_gives_the_same_bits_and_p_those_of_its_b0(ragged):
    p = {}
    for variant, result in ragged.items():
        for name in (*BASES, "dbeta_part"):
            assert np.array_equal(bits(result.arrays[name]), bits(ragged["sinfix"].arrays[name])), (variant, name)
        b0 = kernel.parameters(variant)["b0"]
        assert ("p" in result.arrays) == bool(b0), variant
        if b0:
            first = p.setdefault(b0, result.arrays["p"])
            assert np.array_equal(bits(result.arrays["p"]), bits(first)), variant


@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 40), sequences=st.integers(1, 3), heads=st.integers(1, 2), seed=st.integers(0, 9),
       variant=st.sampled_from(sorted(right_variants)))
def test_any_lengths_and_heads(tokens, sequences, heads, seed, variant):
    result = simulate(kernel.launch(variant, tokens=tokens, sequences=sequences, heads=heads, seed=seed), mode="values")
    names = OUTPUTS["b2"][:3] if variant == "nob0" else OUTPUTS["b2"]
    assert all(np.isfinite(result.arrays[name]).all() for name in names)


@pytest.mark.parametrize("variant", kda_b0.variants)
def test_b0_by_itself(variant, problem):
    result = simulate(kda_b0.launch(variant, **RAGGED), mode="values")
    assert b2(problem, BOUND)["p"].holds(result.arrays["p"]).all()


@pytest.mark.parametrize(("view", "order"), [(0, "row"), (1, "col")])
def test_atoms_tiled_in_the_other_order_are_wrong_and_count_the_same(monkeypatch, view, order):
    right = simulate(kernel.launch("kdsunion", **RAGGED), mode="addresses").table
    views = list(STATE_VIEWS[0])
    views[view] = views[view][0], order
    monkeypatch.setitem(STATE_VIEWS, 0, tuple(views))
    with pytest.raises(SimError, match=r"kda_b2: dqd_base\[0, 0, 0\] is .*, expected .* elements are wrong"):
        simulate(kernel.launch("kdsunion", **RAGGED), mode="values")
    found = simulate(kernel.launch("kdsunion", **RAGGED), mode="addresses").table
    assert found["S.kdS.ldsm"] == right["S.kdS.ldsm"] and found["S.base.ldsm"] == right["S.base.ldsm"]


# ---- the S bug -------------------------------------------------------------------------------------------------------


def test_sinbug_is_refused_by_its_check():
    with pytest.raises(SimError, match=r"kda_b2: dqd_base\[0, 0, 0\] is .*, expected .* elements are wrong"):
        simulate(kernel.launch("sinbug", **WHOLE), mode="values")


def test_sinbug_multiplies_by_S_for_its_transpose_and_leaves_the_rest_alone(sinbug, ragged, problem):
    right = b2(problem, BOUND)
    flipped = b2(replace(problem, tensors={**problem.tensors, "S_in": problem.tensors["S_in"].swapaxes(-1, -2)}), BOUND)
    for name in BASES:
        assert (~right[name].holds(sinbug[name])).mean() > 0.95
        assert flipped[name].holds(sinbug[name]).all()
    for name in ("dbeta_part", "p"):
        assert np.array_equal(bits(sinbug[name]), bits(ragged["sinfix"].arrays[name]))


def test_sinbug_reaches_dq_dk_and_the_gates_but_neither_dbeta_nor_dv(sinbug, problem):
    """The documents name dq and the gates' gradients. dk takes dkd and is as wrong; dv is B1's, which B2 follows."""
    wrong = replace(problem, tensors={**problem.tensors, **{name: sinbug[name] for name in BASES}})
    bound, right, found = b3(problem, BOUND), b3(problem), b3(wrong)
    for name in ("dq", "dk", "dg"):
        assert (~bound[name].holds(found[name])).mean() > 0.5, name
    assert (np.abs(found["dA_log"] / right["dA_log"] - 1) > 0.01).all()  # its bound is loose
    assert np.array_equal(found["dbeta"], right["dbeta"])


def test_sinbug_is_right_where_no_state_comes_in(monkeypatch):
    problem = make_problem([16], heads=1, seed=0)
    problem.tensors["S_in"][...] = 0
    monkeypatch.setattr(kda_b2, "packed_problem", lambda *_: problem)
    arrays = simulate(kernel.launch("sinbug", **WHOLE), mode="values").arrays
    assert not arrays["dqd_base"].any() and not arrays["dkd_base"].any() and arrays["dbeta_part"].any()


def test_sinbug_counts_as_sinfix_does(whole):
    bug, fix = whole["sinbug"].table, whole["sinfix"].table
    assert bug["S.base.ldsm"].instruction == "ldmatrix.x4" and fix["S.base.ldsm"].instruction == "ldmatrix.x4.trans"
    rows = [{row.site: replace(row, instruction="", line=0) for row in table.sites} for table in (bug, fix)]
    assert rows[0] == rows[1] and bug.work == fix.work


# ---- phantom rows ----------------------------------------------------------------------------------------------------


class Rows:
    """A sink that collects (CTA, token, head) of every global access to a tensor of tokens, by tensor."""

    def __init__(self, launch):
        base, self.spans, self.seen = 0, [], {}
        for tensor in launch.tensors:
            self.spans.append((base, base + tensor.nbytes, tensor))
            base += -(-tensor.nbytes // 256) * 256

    def access(self, event):
        if event.global_ is None:
            return
        shape = (len(event.ctas), event.warps, 32)
        on = (np.broadcast_to(event.masks, shape[:2])[..., None] >> np.arange(32)) & 1 == 1
        address = np.broadcast_to(event.global_, shape)[on]
        base, _, tensor = next(span for span in self.spans if span[0] <= address[0] < span[1])
        if tensor.shape[:2] == (74, 2):
            row = (address - base) // tensor.dtype.itemsize // np.prod(tensor.shape[2:], dtype=int)
            cta = np.broadcast_to(event.ctas[:, None, None], shape)[on]
            found = np.unique(np.stack([cta, *np.unravel_index(row, (74, 2))], 1), axis=0)
            self.seen.setdefault(tensor.name, set()).update(map(tuple, found.tolist()))

    def work(self, event):
        pass


@pytest.mark.parametrize("variant", ["scalar", "sunion"])
def test_phantom_rows_are_neither_read_nor_written_and_every_other_row_is(variant):
    launch = kernel.launch(variant, **RAGGED)
    rows = Rows(launch)
    simulate(launch, mode="addresses", sinks=[rows])
    start, count = tile_table(37, 2)
    own = {(6 * head + tile, token, head) for head in range(2) for tile in range(6)
           for token in range(start[tile], start[tile] + count[tile])}
    assert rows.seen == dict.fromkeys(("k", "gc", "v", "do", "dvcorr", "dqd_base", "dkd_base", "dbeta_part"), own)


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_what_a_full_tile_costs(whole):
    table = whole["kdsunion"].table
    assert {row.site: row.executed / 8 for row in table.sites} == {
        "tile.start.load": 1, "tile.rows.load": 1, "S_in.cp": 8, "do.cp": 1, "R1.k.load": 1, "R1.gc.load": 2,
        "R1.kd.store": 1, "dvcorr.load": 2, "dvcorr.wide.store": 2, "dvcorr.bf16.store": 1, "v.load": 1,
        "S.base.ldsm": 8, "do.ldsm": 8, "dvcorr.ldsm": 8, "kd.ldsm": 8, "S.kdS.ldsm": 8, "p.dS.load": 64,
        "p.S.load": 64, "p.store": 1, "stage.store": 12, "stage.load": 4, "dqd_base.store": 2, "dkd_base.store": 2,
        "dbeta.dvcorr.load": 2, "dbeta.kdS.load": 2, "dbeta_part.store": 1,
    }  # fmt: skip
    conflicts = {row.site: row.n_way for row in table.sites if row.excessive}
    assert conflicts == {"S_in.cp": 8, "dvcorr.wide.store": 2, "p.S.load": 4, "stage.store": 4, "dbeta.dvcorr.load": 2,
                         "dbeta.kdS.load": 2}
    assert table.work == {"cp.async.commit": 8, "cp.async.wait": 8, "barrier": 24, "shfl.xor": 8 * (4 + 5 * 16 + 4),
                          "mma.m16n8k16": 8 * 2 * 3 * 8}
    assert table.total().unmodelled == 0
    assert whole["noalias"].table.work["barrier"] == 16  # the union's price: one barrier, and no other count


@pytest.mark.parametrize(("stride", "ways"), [(128, (8, 4)), (132, (4, 4)), (136, (8, 4))])
def test_scalar_stores_eight_columns_apart(stride, ways):
    """4-way, say the documents of 16 threads a row. A warp has two rows; only 132 puts them on different banks."""
    table = one_tile(narrow=1, stage_stride=stride)
    assert (table["dvcorr.wide.store"].n_way, table["dvcorr.bf16.store"].n_way) == ways
    assert table["dvcorr.wide.store"].executed == table["dvcorr.bf16.store"].executed == 64


def test_vectors_narrow_with_fewer_instructions_but_not_without_conflicts(whole):
    """A float4 by itself removes no conflict: eight lanes 32 bytes apart meet on half of the banks."""
    scalar, vec = whole["scalar"].table, whole["vec"].table
    sites = ("dvcorr.load", "dvcorr.wide.store", "dvcorr.bf16.store")
    assert [scalar[site].executed / vec[site].executed for site in sites] == [4, 4, 8]
    assert (scalar["dvcorr.wide.store"].wavefronts, vec["dvcorr.wide.store"].wavefronts) == (512, 128)
    assert vec["dvcorr.wide.store"].ideal == 64 and vec["dvcorr.bf16.store"].excessive == 0


@pytest.mark.parametrize(("variant", "width", "sectors", "ways"),
                         [("kdsunion", 2, 2, 4), ("l13", 8, 8, 16), ("l13_16bytes", 16, 16, 16)])
def test_how_p_reads_dS_and_S(whole, variant, width, sectors, ways):
    """Wider loads of dS move the same sectors in fewer instructions, and S's elements from 4 onto 16 of a bank."""
    dS, S = whole[variant].table["p.dS.load"], whole[variant].table["p.S.load"]
    assert (dS.width, dS.sectors_per_request, dS.sectors) == (width, sectors, 1024) and dS.sectors == dS.ideal_sectors
    assert (S.executed, S.n_way) == (512, ways)


def test_p_from_the_fragments_reads_no_shared_memory(whole):
    """It asks for each half of a sector by itself, but of 4,704 wavefronts of B2 no one is p's; folded, 2,048 are."""
    frag, folded, without = (whole[variant].table for variant in ("frag", "kdsunion", "nob0"))
    assert "p.S.load" not in [row.site for row in frag.sites]
    assert frag.total().wavefronts == without.total().wavefronts == 4704 == folded.total().wavefronts - 2048
    assert (frag["p.dS.load"].sectors, frag["p.dS.load"].ideal_sectors) == (2048, 1024)
    assert (frag.work["shfl.xor"], folded.work["shfl.xor"]) == (96, 704)


def test_the_way_to_few_wavefronts(whole):
    steps = ("sinfix", "vec", "frag", "pad136", "sw128")
    assert [whole[variant].table.total().wavefronts for variant in steps] == [7360, 6752, 4704, 4128, 2336]
    assert {row.site for row in whole["sw128"].table.sites if row.excessive} == {
        "dvcorr.wide.store", "dbeta.dvcorr.load", "dbeta.kdS.load"}


def test_l12_is_uncoalesced():
    """Folded into B1, 75% of all global sectors are the strided loads' excess. The documents have 73%."""
    b1 = simulate(kda_b1.kda_b1.launch("float2", **WHOLE), mode="addresses").table
    table = simulate(kda_b0.launch("l12", **WHOLE), mode="addresses").table
    S = table["p.S.load"]
    assert (S.sectors_per_request, S.sectors, S.ideal_sectors) == (32, 16384, 1024)
    assert table["p.dS.load"].n_way == 4
    total = b1.total().sectors + S.sectors + table["p.store"].sectors
    assert round((S.sectors - S.ideal_sectors) / total, 2) == 0.75


def test_b0_alone_costs_the_copy_of_S_again(whole):
    alone = simulate(kda_b0.launch("b0alone", **WHOLE), mode="addresses").table
    for row in alone.sites:
        assert row == whole["noalias"].table[row.site]
    assert {row.site for row in alone.sites} == {"S_in.cp", "p.dS.load", "p.S.load", "p.store"}


def test_addresses_do_not_depend_on_values(ragged):
    for variant, result in ragged.items():
        assert simulate(kernel.launch(variant, **RAGGED), mode="addresses").table == result.table


# ---- occupancy -------------------------------------------------------------------------------------------------------

SHARED = {"sinbug": 77824, "sinfix": 77824, "noalias": 77824, "pad136": 71168, "sw128": 71168, "sunion": 53760}


def test_shared_memory_and_blocks_per_sm(whole):
    """As the documents have it, 2 CTAs without the union and 3 with it; with all stages over S, 4."""
    for variant, result in whole.items():
        assert result.shared_bytes == SHARED.get(variant, 69632), variant
        for name, ladder in (("h20", {77824: 2, 53760: 4}), ("h200", {77824: 2, 53760: 4}), ("a100-80g", {53760: 3})):
            found = occupancy(load_gpu(name), threads=THREADS, registers=result.launch.registers,
                              shared_bytes=result.shared_bytes)
            assert found.blocks_per_sm == ladder.get(result.shared_bytes, 2 if "a100" in name else 3), (name, variant)
    assert simulate(kernel.launch("noalias", stage_stride=132, **WHOLE), mode="addresses").shared_bytes == 78848


def test_registers_allow_three_ctas_up_to_80_not_85():
    blocks = [occupancy(load_gpu("h20"), threads=THREADS, registers=n, shared_bytes=69632).blocks_per_sm
              for n in (80, 81, 85)]
    assert blocks == [3, 2, 2]


def test_stages_that_do_not_fit_are_refused():
    for parameters in ({"union": 1, "stage_stride": 196}, {"union": 2, "stage_stride": 176}):
        with pytest.raises(SimError, match="do not fit"):
            one_tile(**parameters)


# ---- parameters, and the CUDA twins ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("made", "parameters", "message"), [
    (kernel, {"sinfix": 2}, "sinfix is 2; it is one of 0, 1"),
    (kernel, {"union": 3}, "union is 3"),
    (kernel, {"narrow": 4}, "narrow is 4; it is one of 1, 8"),
    (kernel, {"b0": 3}, "b0 is 3; it is one of 0, 1, 2, 4, 8"),
    (kernel, {"b0": 2, "sinfix": 0}, "b0 2 takes S from the fragments of S^T"),
    (kernel, {"stage_stride": 130}, "stage_stride is 130; it is a multiple of 4"),
    (kernel, {"tokens": 0}, "kda_b2: tokens is 0, below 1"),
    (kernel, {"tokens": 2**30, "sequences": 2}, "tile_start is an int32"),
    (kda_b0, {"width": 2}, "width is 2"),
    (kda_b0, {"width": 4, "l12": 1}, "1 needs width 1"),
    (kda_b0, {"heads": 0}, "kda_b0: heads is 0, below 1"),
])  # fmt: skip
def test_bad_parameters_are_refused_by_name(made, parameters, message):
    with pytest.raises(SimError, match=re.escape(message)):
        made.launch(None, **parameters)


def test_registered():
    assert find("kda_b2@sinbug") == (kernel, "sinbug") and find("kda_b0@l12") == (kda_b0, "l12")


@pytest.mark.parametrize(("name", "made", "fields"), [
    ("kda_b2", kernel, ("sinfix", "union", "narrow", "b0", "stage_stride", "swizzle")),
    ("kda_b0", kda_b0, ("width", "l12")),
])
def test_the_cuda_twins_have_the_same_variants_and_sites(name, made, fields):
    source = (CUDA / f"{name}.cu").read_text()
    table = source[source.index("kVariants[] = {"):]
    table = table[:table.index("};")]
    twins = {variant: dict(zip(fields, map(int, values.split(",")), strict=True))
             for variant, values in re.findall(r'\{"(\w+)", \{([\d, ]+)\}\}', table)}
    assert twins == {variant: {key: made.parameters(variant)[key] for key in fields} for variant in made.variants}
    sites = {row.site for variant in made.variants
             for row in simulate(made.launch(variant, **WHOLE), mode="addresses").table.sites}
    headers = re.findall(r'#include "(kda_state|kda_products).cuh"', source)
    written = source + "".join((CUDA / f"{header}.cuh").read_text() for header in {"kda_state", *headers})
    assert set(re.findall(r"// @site ([\w.]+)", written)) == sites
