"""Global accesses in L1: the cache by itself, and passes, sectors and requests against what the H200 counted."""

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py import registered
from models.gpu import load_gpu
from models.l1 import L1Sink, Traffic, lines_of_a_block
from models.work import data_wavefronts
from simgpu.launch import Launch
from simgpu.run import simulate
from simgpu.tensor import GlobalTensor, float32

MEASURED = Path(str(files("validation"))) / "measured" / "h200"
H200 = load_gpu("h200")
LANE = np.arange(32)


def traffic(body, capacity: int = 2048, ctas: int = 1) -> Traffic:
    """What one CTA of one warp asks for; ``body`` takes the CTA and a tensor of 2**16 floats."""
    x = GlobalTensor("x", float32, (2**16,), init=lambda: np.zeros(2**16, np.float32))
    sink = L1Sink()
    simulate(Launch(body, grid=ctas, block=32, args=(x,)), mode="addresses", sinks=(sink,))
    return sink.traffic(capacity)


# ---- one access, and one after another -------------------------------------------------------------------------------


def test_a_line_that_stayed_is_not_asked_for_again():
    def twice(cta, x):
        for _ in range(2):
            cta.load(x[cta.lane], site="x.load")

    assert traffic(twice) == Traffic(passes=2, read_sectors=4, requests=1)


def test_sectors_come_one_by_one():
    def halves(cta, x):
        with cta.where(cta.lane < 16):
            cta.load(x[cta.lane], site="x.low")
        cta.load(x[cta.lane], site="x.all")

    assert traffic(halves) == Traffic(passes=2, read_sectors=4, requests=2)


def test_the_line_unused_for_longest_makes_room():
    def lines(order):
        def body(cta, x):
            for line in order:
                cta.load(x[32 * line + cta.lane], site="x.load")
        return body

    assert traffic(lines([0, 1, 0, 2, 0]), capacity=2).read_sectors == 12  # 1 goes, not 0
    assert traffic(lines([0, 1, 2, 0, 1, 2]), capacity=2).read_sectors == 24
    assert traffic(lines([0, 1, 2, 0, 1, 2]), capacity=3).read_sectors == 12


def test_a_store_goes_on_once_and_fills_nothing():
    def body(cta, x):
        for _ in range(2):
            cta.store(x[cta.lane], 1.0, site="x.store")
        cta.load(x[cta.lane], site="x.load")

    assert traffic(body) == Traffic(passes=3, read_sectors=4, written_sectors=4, requests=2)


def test_a_copy_past_l1_asks_once_a_wavefront():
    def copy(cta, x):
        tile = cta.shared("tile", float32, (32, 32))
        cta.cp_async(tile[cta.lane // 8, cta.lane % 8 * 4], x[4 * cta.lane], site="whole.rows")
        cta.cp_async(tile[cta.lane, 0], x[4 * cta.lane], site="a.row.a.chunk")

    assert traffic(copy) == Traffic(passes=2, read_sectors=16 + 32, requests=4 + 32)


def test_atomics_go_past_l1():
    def body(cta, x):
        cta.red_add(x[cta.lane], 1.0, site="x.add")

    assert traffic(body) == Traffic(passes=1, written_sectors=4, requests=1)


@pytest.mark.parametrize(("stride", "passes"), [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1)])
def test_global_words_meet_on_the_banks_of_shared_memory(stride, passes):
    def body(cta, x):
        cta.load(x[stride * cta.lane], site="x.load")

    assert traffic(body).passes == passes


def test_one_cta_is_heard_from_the_middle_and_work_by_nobody():
    def body(cta, x):
        cta.load(x[32 * cta.bx + cta.lane], site="x.load")
        cta.sync()

    assert traffic(body, ctas=9) == Traffic(passes=1, read_sectors=4, requests=1)
    assert traffic(lambda cta, x: cta.sync()) == Traffic()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 31))
def test_the_cache_is_a_list_in_order_of_use(order, capacity):
    def body(cta, x):
        for line in order:
            cta.load(x[32 * line + cta.lane], site="x.load")

    held, missed = [], 0
    for line in order:
        missed += line not in held
        held = [line, *(other for other in held if other != line)][:capacity]
    assert traffic(body, capacity) == Traffic(passes=len(order), read_sectors=4 * missed, requests=missed)


def test_what_shared_memory_leaves_is_l1():
    assert lines_of_a_block(H200, 1, 0) == 2048
    assert lines_of_a_block(H200, 8, 4096) == (256 - 64) * 8 // 8
    assert lines_of_a_block(H200, 1, 232448) == (256 - 228) * 8


# ---- against the H200 ------------------------------------------------------------------------------------------------

STRIDED = ("l12", "b0=1", "frag", "pad136", "sw128", "sunion")  # B0's rows at a stride: the cache is an approximation


def shares():
    """(case, demand over counter) of each measured launch that is soon emulated, by the name of the demand."""
    for kernel in ("transpose", "kda_b0", "kda_b1", "kda_b2", "kda_b3"):
        for run in json.loads((MEASURED / f"{kernel}.json").read_text(encoding="utf-8"))["runs"]:
            if run["params"].get("sequences", 1) > 1:
                continue  # tiles that are not full: eight CTAs do not stand for all
            launch = registered()[kernel].launch(run["variant"], **run["params"])
            blocks = min(run["blocks_per_sm"], -(-launch.ctas // H200.sm_count))
            sink = L1Sink()
            result = simulate(launch, ctas=min(8, launch.ctas), mode="addresses", sinks=(sink,))
            found = sink.traffic(lines_of_a_block(H200, blocks, result.shared_bytes)) * launch.ctas
            passes = found.passes + data_wavefronts(result.table) * launch.ctas / result.ctas
            totals = run["totals"]
            yield f"{kernel}@{run['case']}", {
                "read": found.read_sectors / totals["l1tex__m_xbar2l1tex_read_sectors.sum"],
                "written": found.written_sectors / totals["l1tex__m_l1tex2xbar_write_sectors.sum"],
                "requests": found.requests / totals["lts__t_requests_srcunit_tex.sum"],
                "passes": passes / totals["l1tex__data_pipe_lsu_wavefronts.sum"],
            }


def test_l2_is_asked_for_what_the_model_says():
    found = dict(shares())
    plain = {case: share for case, share in found.items() if not any(word in case for word in STRIDED)}
    assert len(found) == 82 and len(plain) == 68
    reads = np.array([share["read"] for share in plain.values()])
    assert np.mean(abs(reads - 1) < 0.01) > 0.8
    assert reads.min() > 0.75 and reads.max() < 1.05
    assert all(0.9 < share["read"] < 1.45 for case, share in found.items() if case not in plain)
    assert np.median([share["requests"] for share in found.values()]) == pytest.approx(1, abs=0.1)
    assert np.median([share["written"] for share in found.values()]) == pytest.approx(1, abs=0.01)
    # Hardly ever more than the counter: what else uses the pipe is not known.
    passes = np.array([share["passes"] for share in found.values()])
    assert passes.max() < 1.01 and np.median(passes) > 0.9
