"""simgpu liveness: live ranges, the packer against brute force, hand-made unions, and plans the emulator confirms."""

import json
from functools import partial
from itertools import combinations, permutations

import networkx as nx
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py import registered
from simgpu import GlobalTensor, Launch, float32, simulate
from simgpu.aliasing import assign
from simgpu.cli import main
from simgpu.errors import SimError
from simgpu.liveness import analyse, confirm, stab
from simgpu.placement import PlacedCTA, Plan, moved, slice_extents
from simgpu.tensor import SharedTensor

SMALL = {
    "hgemm_ladder": {"m": 128, "n": 128, "k": 96},
    "kda_b1": {"tokens": 21, "heads": 1},
    "kda_b2": {"tokens": 21, "heads": 1},
    "kda_b3": {"tokens": 21, "heads": 1},
}


def launch_of(text: str) -> Launch:
    name, variant = text.split("@")
    return registered()[name].launch(variant, **SMALL.get(name, {}))


# ---- the packer ------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw) -> nx.Graph:
    count = draw(st.integers(1, 6))
    graph = nx.Graph()
    for node in range(count):
        graph.add_node(str(node), size=draw(st.integers(1, 12)) * 16, align=16 * draw(st.sampled_from([1, 1, 2, 4])))
    for one, other in combinations(graph, 2):
        if draw(st.booleans()):
            graph.add_edge(one, other)
    return graph


def least_span(graph: nx.Graph) -> int:
    best = None
    for order in permutations(graph):
        at: dict[str, int] = {}
        for node in order:
            floor = max((at[other] + graph.nodes[other]["size"] for other in graph[node] if other in at), default=0)
            at[node] = -(-floor // graph.nodes[node]["align"]) * graph.nodes[node]["align"]
        span = max(at[node] + graph.nodes[node]["size"] for node in graph)
        best = span if best is None else min(best, span)
    return best


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_small_graphs_are_packed_as_tightly_as_can_be(graph):
    found = assign(graph)
    size, align = graph.nodes(data="size"), graph.nodes(data="align")
    assert found.proven and found.span == least_span(graph) >= found.bound
    assert found.span == max(found.offsets[node] + size[node] for node in graph)
    assert all(found.offsets[node] % align[node] == 0 for node in graph)
    for one, other in graph.edges:
        low, high = sorted((one, other), key=found.offsets.__getitem__)
        assert found.offsets[low] + size[low] <= found.offsets[high]


def test_a_ring_needs_more_than_its_heaviest_clique():
    ring = nx.cycle_graph(5)
    nx.set_node_attributes(ring, 10, "size")
    nx.set_node_attributes(ring, 1, "align")
    found = assign(nx.relabel_nodes(ring, str))
    assert (found.span, found.bound, found.proven) == (30, 20, True)


def test_a_large_graph_may_stay_unproven_and_says_so():
    ring = nx.cycle_graph(15)
    nx.set_node_attributes(ring, 10, "size")
    nx.set_node_attributes(ring, 1, "align")
    found = assign(nx.relabel_nodes(ring, str))
    assert (found.span, found.bound, found.proven) == (30, 20, False)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=5))
def test_stab_takes_the_fewest_places(spans):
    gaps = [(after, after + length) for after, length in spans]
    places = range(13)
    chosen = stab(gaps, places)
    assert all(any(after < place <= until for place in chosen) for after, until in gaps)
    fewer = combinations(places, len(chosen) - 1) if chosen else ()
    assert not any(all(any(after < place <= until for place in some) for after, until in gaps) for some in fewer)


# ---- placement -------------------------------------------------------------------------------------------------------


def test_slices_move_apart():
    tensor = SharedTensor("x", float32, (3, 4), lambda i, j: 4 * i + (j ^ i), base=64)
    assert slice_extents(tensor) == [(0, 16), (16, 32), (32, 48)]
    apart = moved(tensor, (160, 32, 96))
    at = apart.base + 4 * np.asarray(apart.offset(tuple(np.indices((3, 4)))))
    own = 4 * np.asarray(tensor.offset(tuple(np.indices((3, 4)))))
    assert (at - own).tolist() == [[160] * 4, [32 - 16] * 4, [96 - 32] * 4]


def test_interleaved_slices_do_not():
    tensor = SharedTensor("x", float32, (2, 4), lambda i, j: i + 2 * j)
    assert slice_extents(tensor) is None
    with pytest.raises(SimError, match="cannot be placed apart"):
        moved(tensor, (0, 64))


def test_a_plan_beyond_the_blocks_limit_is_refused():
    plan = Plan({"tile": (230000,)})
    with pytest.raises(SimError, match="exceed the 232448"):
        simulate(registered()["transpose"].launch("pad1"), ctas=1, make=partial(PlacedCTA, plan=plan))


# ---- live ranges -----------------------------------------------------------------------------------------------------


def launch(body, out: int = 256, block: int = 64) -> Launch:
    x = GlobalTensor("x", float32, (1024,), init=lambda: np.arange(1024, dtype=np.float32))
    return Launch(body, grid=1, block=block, args=(x, GlobalTensor("y", float32, (out,))))


def phases(cta, x, y):
    """``a`` is dead where ``b`` begins, in the same epoch; ``c`` is live from the first to the last."""
    a, b, c = (cta.shared(name, float32, (64,)) for name in "abc")
    cta.store(c[cta.tid], cta.load(x[cta.tid]), site="c.put")
    cta.store(a[cta.tid], cta.load(x[64 + cta.tid]), site="a.put")
    cta.sync()
    first = cta.load(a[63 - cta.tid], site="a.get")
    cta.store(b[cta.tid], first, site="b.put")
    cta.sync()
    second = cta.load(b[63 - cta.tid], site="b.get")
    cta.store(y[cta.tid], second + cta.load(c[63 - cta.tid], site="c.get"))


def test_a_union_within_an_epoch_takes_a_barrier():
    found = analyse(launch(phases))
    assert [(block.name, block.nbytes) for block in found.ranges.blocks] == [("c", 256), ("a", 256), ("b", 256)]
    assert [[(found.ranges.epoch(first), found.ranges.epoch(last)) for first, last in block.segments]
            for block in found.ranges.blocks] == [[(0, 2)], [(0, 1)], [(1, 2)]]
    assert found.declared == found.free.span == 768 and found.least.span == found.least.bound == 512
    assert found.least.shared == (("a", "b"),)
    assert [place.split(" (")[0] for place in found.least.barriers] == ["b.put"]
    assert confirm(found.launch, found.ctas, found.least.plan).holds


def test_without_that_barrier_the_plan_races():
    found = analyse(launch(phases))
    bare = Plan(found.least.plan.offsets)
    outcome = confirm(found.launch, found.ctas, bare)
    assert outcome.equal and not outcome.holds
    assert {finding.kind for finding in outcome.findings} == {"read-write"}


def test_a_union_of_what_is_live_at_once_changes_the_result():
    found = analyse(launch(phases))
    wrong = Plan(found.least.plan.offsets | {"c": found.least.plan.offsets["b"]}, found.least.plan.barriers)
    assert not confirm(found.launch, found.ctas, wrong).equal


def test_a_warp_that_only_follows_itself_needs_no_barrier():
    def body(cta, x, y):
        a, b = (cta.shared(name, float32, (64,)) for name in "ab")
        cta.store(a[cta.tid], cta.load(x[cta.tid]))
        cta.store(b[cta.tid], cta.load(a[cta.tid]) + 1)
        cta.store(y[cta.tid], cta.load(b[cta.tid]))

    found = analyse(launch(body))
    assert (found.least.span, found.least.barriers) == (256, ())
    assert confirm(found.launch, found.ctas, found.least.plan).holds


def test_no_barrier_can_stand_in_divergent_code():
    def body(cta, x, y):
        a, b = (cta.shared(name, float32, (64,)) for name in "ab")
        cta.store(a[cta.tid], 1.0)
        cta.sync()
        with cta.where(cta.warp == 0):
            value = cta.load(a[63 - cta.lane])
            cta.store(b[cta.lane], value)
            cta.store(y[cta.lane], cta.load(b[cta.lane]))

    found = analyse(launch(body))
    assert found.least.span == found.declared == 512  # b takes 64 words though 32 are used


def test_stores_nobody_reads_are_told():
    def body(cta, x, y):
        a = cta.shared("a", float32, (2, 2, 64))
        for i in range(2):
            for j in range(2):
                cta.store(a[np.full(cta.shape, i), np.full(cta.shape, j), cta.tid], 1.0, site="put")
        cta.load(a[np.zeros(cta.shape, int), np.zeros(cta.shape, int), cta.tid])
        cta.shared("idle", float32, (8,))

    found = analyse(launch(body))
    assert [(block.name, block.unread) for block in found.ranges.blocks] == [("a[0]", 256), ("a[1]", 512)]
    assert found.ranges.blocks[1].last_read == "" and found.ranges.untouched == ("idle",)
    whole = analyse(launch(body), whole=True)
    assert [(block.name, block.unread) for block in whole.ranges.blocks] == [("a", 768)]


def test_a_copy_lives_until_its_wait():
    def body(cta, x, y):
        a = cta.shared("a", float32, (256,))
        cta.cp_async(a[4 * cta.tid], x[4 * cta.tid])
        cta.cp_async_commit()
        cta.sync()
        cta.cp_async_wait()

    (block,) = analyse(launch(body)).ranges.blocks
    assert block.segments == ((1, 4),) and block.unread == 1024


def test_a_copy_nobody_waits_for_lives_to_the_end():
    def body(cta, x, y):
        a, b = (cta.shared(name, float32, (256,)) for name in "ab")
        cta.cp_async(a[4 * cta.tid], x[4 * cta.tid])
        cta.sync()
        cta.store(b[cta.tid], 1.0)
        cta.store(y[cta.tid], cta.load(b[cta.tid]))

    found = analyse(launch(body))
    assert found.least.span == found.declared and confirm(found.launch, found.ctas, found.least.plan).holds


def test_views_move_together():
    found = analyse(launch_of("kda_b2@noalias"))
    assert "S + S_t" in [block.name for block in found.ranges.blocks]
    offsets = found.least.plan.offsets
    assert offsets["S"] == offsets["S_t"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_plans_of_random_programs_hold(data):
    """Tensors of several vector widths, so that a thread's bytes in one are another warp's in the next."""
    names = "abcd"
    vec = {name: data.draw(st.sampled_from([1, 2, 4])) for name in names}
    steps = data.draw(st.lists(st.tuples(st.sampled_from(["put", "get", "sync"]), st.sampled_from(names)), max_size=16))

    def body(cta, x, y):
        tensors = {name: cta.shared(name, float32, (64 * vec[name],)) for name in names}
        written, kept = set(), np.zeros(cta.shape, np.float32)
        for number, (verb, name) in enumerate(steps):
            at = tensors[name][vec[name] * cta.tid]
            if verb == "sync":
                cta.sync()
            elif verb == "put":
                value = cta.load(x[vec[name] * cta.tid + 4 * number], vec=vec[name], site=f"x {number}")
                cta.store(at, value, vec=vec[name], site=f"put {number}")
                written.add(name)
            elif name in written:
                value = cta.load(at, vec=vec[name], site=f"get {number}")
                kept = 2 * kept + (value if vec[name] == 1 else value.sum(-1))
        cta.store(y[cta.tid], kept.astype(np.float32))

    found = analyse(launch(body))
    for packing in (found.free, found.least):
        outcome = confirm(found.launch, found.ctas, packing.plan)
        assert outcome.holds, outcome.findings
        assert outcome.shared_bytes <= max(packing.span, 1024)  # a tensor nobody uses lies at 0
    assert found.least.span <= found.free.span <= found.declared
    assert not found.free.barriers


# ---- the hand-made unions, found -------------------------------------------------------------------------------------


def test_b2_is_packed_at_least_as_well_as_by_hand():
    by_hand = simulate(launch_of("kda_b2@kdsunion"), ctas=1).shared_bytes
    found = analyse(launch_of("kda_b2@noalias"))
    assert found.declared == 77824 and by_hand == 69632
    assert found.least.span == found.least.bound == 53248 and found.least.proven
    assert len(found.least.barriers) == 1
    outcome = confirm(found.launch, found.ctas, found.least.plan)
    assert outcome.holds and outcome.shared_bytes == found.least.span
    assert outcome.wavefronts[0] == outcome.wavefronts[1] > 0


def test_b3_is_packed_at_least_as_well_as_by_hand_where_operands_may_be_computed_again():
    by_hand = simulate(launch_of("kda_b3@l7"), ctas=1).shared_bytes
    found = analyse(launch_of("kda_b3@l6"), recompute=["operands"])
    assert found.declared == 103168 and by_hand == 70400
    assert found.least.span == found.least.bound == 68288 and found.least.barriers == ()
    outcome = confirm(found.launch, found.ctas, found.least.plan)
    assert outcome.holds and outcome.shared_bytes == found.least.span
    kept = analyse(launch_of("kda_b3@l6"))
    assert kept.least.span > by_hand
    assert confirm(kept.launch, kept.ctas, kept.least.plan).holds


@pytest.mark.parametrize("kernel", ["kda_b1@roundtrip", "kda_b2@sunion", "kda_b3@l8", "hgemm_ladder@bcf_dbf"])
def test_other_plans_hold(kernel):
    found = analyse(launch_of(kernel))
    assert found.least.bound <= found.least.span <= found.free.span <= found.declared
    assert confirm(found.launch, found.ctas, found.least.plan).holds
    assert confirm(found.launch, found.ctas, found.free.plan).holds


def test_what_cannot_be_computed_again():
    with pytest.raises(SimError, match=r"written by cp\.async\.cg"):
        analyse(launch_of("kda_b3@l6"), recompute=["tiles"])
    with pytest.raises(SimError, match="no shared tensor 'nothing'"):
        analyse(launch_of("kda_b3@l6"), recompute=["nothing"])

    def body(cta, x, y):
        a = cta.shared("a", float32, (64,))
        cta.store(a[cta.tid], 1.0)
        cta.load(a[cta.tid])

    with pytest.raises(SimError, match="read in the epoch of its stores"):
        analyse(launch(body), recompute=["a"])


def test_single_unions_save_what_they_say():
    unions = {union.tensor: union for union in analyse(launch_of("kda_b2@noalias")).unions}
    assert unions["stage"].over == ("S + S_t",) and unions["stage"].span == 53248
    assert len(unions["stage"].barriers) == 1


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*arguments: str):
    return CliRunner().invoke(main, ["liveness", *arguments])


def test_command():
    small = ("--set", "tokens=20", "--set", "heads=1")
    result = command("kda_b2@noalias", *small)
    assert result.exit_code == 0, result.output
    assert "alone enough for 4 blocks/SM: stage over S + S_t (53,248 B, 1 barrier more)" in result.output
    assert "confirmed: 2 CTAs emulated under the plan" in result.output
    document = json.loads(command("kda_b2@noalias", *small, "--gpu", "h200", "--format", "json").output)
    assert [(step["bytes"], step["blocks"]) for step in document["steps"]] == [(77824, 2), (77824, 2), (53248, 4)]
    assert document["confirmed"] and len(document["barriers"]) == 1
    assert ["S + S_t", "do"] in document["interference"] and ["S + S_t", "stage[0]"] not in document["interference"]
    registers = command("kda_b2@noalias", *small, "--regs", "128", "--format", "json").output
    assert [step["blocks"] for step in json.loads(registers)["steps"]] == [2, 2, 2]


def test_command_takes_recomputation():
    result = command("kda_b3@l6", "--set", "tokens=20", "--set", "heads=1", "--recompute", "operands", "--regs", "80")
    assert result.exit_code == 0
    assert "operands is computed right before it is read" in result.output and "68,288" in result.output


@pytest.mark.parametrize("arguments", [("transpose", "--recompute", "none"), ("transpose", "--ctas", "0"),
                                       ("transpose", "--gpu", "none")])
def test_command_refuses(arguments):
    result = command(*arguments)
    assert result.exit_code == 2 and result.output.count("\n") == 1
