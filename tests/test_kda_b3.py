"""KDA backward B3: outputs within the reference's bounds, bits that must agree, conflicts, bytes, wrong layouts."""

from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py import kda_b3_chunk
from kernels_py.kda_b3 import kda_b3, ladder
from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.errors import SimError
from simgpu.run import simulate
from simgpu.tensor import SharedTensor

VARIANTS = tuple(kda_b3.variants)
HEADS = 2


@lru_cache
def run(variant, **params):
    """Two sequences of 37 tokens: six tiles of which two hold 5 rows. ``simulate`` checks every output."""
    return simulate(kda_b3.launch(variant, **{"tokens": 37, "sequences": 2, "heads": HEADS} | params), mode="values")


@lru_cache
def full_tile(variant, **params):
    """Counters of one full tile and one head."""
    return simulate(kda_b3.launch(variant, **{"tokens": 16, "heads": 1} | params), mode="addresses").table


def output(variant, name, **params):
    found = run(variant, **params).arrays[name]
    native = kda_b3.parameters(variant)["native"] or name == "dbeta"
    return found if native else found.swapaxes(0, 1)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_within_the_bounds(variant):
    assert run(variant).values


@pytest.mark.parametrize("param", [{"opt7": 0}, {"tile": 0}, {"tile": 1}, {"scratch_stride": 132}, {"union": 0},
                                   {"opt2": 0}, {"epilogue": 0}, {"k1": 0}, {"k1": 1}, {"fold": 0}],
                         ids=lambda param: "{}={}".format(*next(iter(param.items()))))
def test_single_parameters_keep_the_outputs_right(param):
    assert run("a1d", **param).values


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 50), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9), st.sampled_from(VARIANTS))
def test_any_lengths_and_heads(tokens, sequences, heads, seed, variant):
    simulate(kda_b3.launch(variant, tokens=tokens, sequences=sequences, heads=heads, seed=seed), mode="values")


def test_rungs_share_their_bits_as_documented():
    for name in ("dq", "dk"):
        for variants in (("l6", "opt2", "l7", "fold", "vec8"), ("l7c", "l8", "atomics", "a1d")):
            first, *others = (output(variant, name) for variant in variants)
            assert all(np.array_equal(first, other) for other in others), name
    for name in ("dg", "dbeta"):
        first, *others = (output(variant, name) for variant in VARIANTS)
        assert all(np.array_equal(first, other) for other in others), name


def test_norms_cached_or_computed_again_by_the_same_threads_are_the_same_bits():
    for name in ("dq", "dk", "dg"):
        assert np.array_equal(output("vec8", name), output("vec8", name, opt7=0))


@pytest.mark.parametrize(("variant", "layout"), [("a1d", "K-INTER"), ("l6", "K-INTER"), ("l7", None)])
def test_a_wrong_layout_of_the_matrix_reads_gives_a_wrong_result(monkeypatch, variant, layout):
    def misread(cta, tiles, tile, row, column, site):
        plan = kda_b3_chunk.Plan(1, 1, 1, 1, 2, 1, 1, 1, kda_b3_chunk.TILE_LAYOUTS.index(layout), 128)
        view = SharedTensor("view", tiles.dtype, tiles.shape, kda_b3_chunk.tile_layout(plan), base=tiles.base)
        return cta.ldmatrix(view[tile, row, column], 4, site=site)

    monkeypatch.setattr(kda_b3_chunk, "matrix", misread)
    with pytest.raises(SimError, match=r"kda_b3: d\w+\[.*\] is .*, expected .* elements are wrong"):
        simulate(kda_b3.launch(variant, tokens=16), mode="values")


class GlobalRows:
    """Listens for the rows of [T, H, D] tensors that each CTA touches."""

    def __init__(self, launch):
        self.extents, base = [], 0
        for tensor in launch.tensors:
            if len(tensor.shape) == 3 and tensor.name != "p":
                self.extents.append((base, base + tensor.nbytes, tensor.nbytes // tensor.shape[0]))
            base += -(-tensor.nbytes // 256) * 256
        self.rows = set()

    def access(self, event):
        columns = event.rows()
        if "global" not in columns:
            return
        lanes = (columns["mask"][:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)
        cta = np.broadcast_to(columns["cta"][:, None], lanes.shape)[lanes]
        address = columns["global"][lanes]
        for first, end, row in self.extents:
            here = (address >= first) & (address < end)
            self.rows |= set(zip(cta[here].tolist(), ((address[here] - first) // row).tolist(), strict=True))

    def work(self, event):
        pass


def test_phantom_rows_are_neither_read_nor_written():
    launch = kda_b3.launch("a1d", tokens=37, sequences=2, heads=HEADS)
    listener = GlobalRows(launch)
    simulate(launch, mode="values", sinks=[listener])
    tiles = [range(first, first + rows) for first, rows in ((0, 16), (16, 16), (32, 5), (37, 16), (53, 16), (69, 5))]
    assert listener.rows == {(tile + 6 * head, token) for tile, tokens in enumerate(tiles) for token in tokens
                             for head in range(HEADS)}


# ---- bytes, blocks, counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "kilobytes", "blocks"), [("l6", 100.75, 2), ("opt2", 92.75, 2), ("l7", 68.75, 3),
                                                              ("a1d", 68.75, 3)])
def test_shared_memory_and_blocks_of_the_documents(variant, kilobytes, blocks):
    shared = run(variant).shared_bytes
    assert shared == kilobytes * 1024
    for gpu in ("h20", "h200"):
        found = occupancy(load_gpu(gpu), threads=256, registers=kda_b3.launch(variant).registers, shared_bytes=shared)
        assert found.blocks_per_sm == blocks


@pytest.mark.parametrize(("registers", "blocks"), [(72, 3), (74, 3), (80, 3), (81, 2), (85, 2)])
def test_three_blocks_end_at_80_registers_not_at_85(registers, blocks):
    found = occupancy(load_gpu("h20"), threads=256, registers=registers, shared_bytes=70400)
    assert found.blocks_per_sm == blocks


@pytest.mark.parametrize(("k1", "stride", "ways"), [(0, 128, 8), (0, 132, 4), (1, 128, 2), (1, 132, 2), (2, 128, 1)])
def test_conflicts_of_k1(k1, stride, ways):
    table = full_tile("a1d", k1=k1, scratch_stride=stride)
    for site in ("gc.lds", "dqd.lds", "dki.lds", "dkd.lds", "dkr.lds", "dgc.sts", "moved.sts"):
        assert table[f"K1.{site}"].n_way == ways, site


@pytest.mark.parametrize(("tile", "read", "written"), [(0, 8, 1), (1, 1, 8), (2, 1, 1)])
def test_conflicts_of_the_bf16_tiles(tile, read, written):
    """Row-major tiles conflict where matrices are read, K-INTER where rows are written, K-SW128 nowhere."""
    table = full_tile("a1d", tile=tile)
    assert (table["A.ldsm"].n_way, table["B.ldsm"].n_way) == (read, read)
    assert {table[f"R1.{name}.sts"].n_way for name in ("dvcorr", "kd", "ki")} == {written}


def test_l8_takes_a_quarter_of_the_epilogue_loads_and_has_no_conflicts_to_remove():
    def loads(variant):
        return [row for row in full_tile(variant).sites if row.site.startswith("E.") and row.site.endswith(".lds")]

    assert sum(row.executed for row in loads("l7c")) == 4 * sum(row.executed for row in loads("l8"))
    assert {row.n_way for variant in ("l7c", "l8") for row in loads(variant)} == {1}
    operands = [sum(row.wavefronts for row in loads(variant) if row.site in ("E.qd.lds", "E.kd.lds", "E.ki.lds"))
                for variant in ("l7c", "l8")]
    assert operands[0] == operands[1]  # the bytes stay


def test_atomics_by_warp_are_8_a_cta_instead_of_256():
    lanes = {variant: full_tile(variant)["dA_log.red"].bytes // 4 for variant in ("l8", "atomics")}
    assert lanes == {"l8": 256, "atomics": 8}


def test_strided_columns_waste_sectors_and_head_major_outputs_do_not():
    strided, vec8, native = (full_tile(variant) for variant in ("fold", "vec8", "a1d"))
    for site, excess in (("K1.q.ldg", 8), ("K1.dq.stg", 8), ("K1.dkd_base.ldg", 8)):
        assert strided[site].sectors == excess * strided[site].ideal_sectors
    assert vec8["K1.dq.stg"].sectors == 2 * vec8["K1.dq.stg"].ideal_sectors
    for variant in ("atomics", "a1d"):
        assert full_tile(variant)["K1.dq.stg"].sectors == native["K1.dq.stg"].ideal_sectors


def test_addresses_alone_count_what_a_run_with_values_counts():
    for variant in ("l6", "a1d"):
        launch = kda_b3.launch(variant, tokens=37, sequences=2, heads=HEADS)
        assert simulate(launch, mode="addresses").table == run(variant).table


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("params", "message"), [
    ({"k1": 3}, "k1 is 3; it is 0 to 2"),
    ({"union": 2}, "union is 2; it is 0 to 1"),
    ({"scratch_stride": 130}, "scratch_stride is 130"),
    ({"tokens": 0}, "tokens is 0, below 1"),
])
def test_choices_without_code_are_refused(params, message):
    with pytest.raises(SimError, match=message):
        kda_b3.launch("a1d", **params)


def test_each_rung_adds_one_step():
    rungs = list(ladder().values())
    for before, after in pairwise(rungs):
        assert sum(before[name] != after[name] for name in before) == 1
