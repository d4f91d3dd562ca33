"""What the device would refuse is refused with the site, the CTA, the lane and the address, in one line."""

import re

import numpy as np
import pytest

from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.run import simulate
from simgpu.tensor import GlobalTensor, Tensor, bfloat16, float32, float64, int32, uint8, uint16


def refused(body, *args, grid=1, block=32, mode="values", **options):
    """The message with which ``body<<<grid, block>>>(*args)`` is refused."""
    with pytest.raises(SimError) as caught:
        simulate(Launch(body, grid, block, args), mode=mode, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def here(message):
    """Without the line number, which is not what a test is about."""
    return re.sub(r"test_refusals\.py:\d+", "FILE:LINE", message)


@pytest.fixture(params=["values", "addresses"])
def mode(request):
    return request.param


# ---- addresses --------------------------------------------------------------------------------------------


def test_a_misaligned_vector_in_shared_memory(mode):
    def body(cta):
        tile = cta.shared("tile", float32, (256,))
        with cta.where((cta.bx == 3) & (cta.warp == 1)):
            cta.store(tile[cta.lane * 4 + (cta.lane >= 7)], np.zeros((1, 1, 1, 4), np.float32), vec=4, site="put")

    assert here(refused(body, grid=5, block=64, mode=mode)) == (
        "site 'put' (FILE:LINE): CTA 3, warp 1, lane 7: byte address 116 ('tile' starts at 0) is not a multiple of 16"
    )


def test_a_vector_in_a_displaced_global_tensor(mode):
    def body(cta, first, src):
        cta.load(src[2 * cta.lane], vec=2, site="get")

    tensors = GlobalTensor("first", uint8, (300,)), GlobalTensor("src", float32, (64,), byte_offset=4)
    assert here(refused(body, *tensors, mode=mode)) == (
        "site 'get' (FILE:LINE): CTA 0, warp 0, lane 0: byte address 516 ('src' starts at 516) is not a multiple of 8"
    )


def test_a_vector_whose_row_pitch_breaks_its_alignment(mode):
    def body(cta):
        tile = cta.shared("tile", bfloat16, (16, 32), lambda r, c: 33 * r + c)
        cta.ldmatrix(tile[cta.lane % 16, cta.lane // 16 * 8], site="rows")

    assert "lane 1: byte address 66 ('tile' starts at 0) is not a multiple of 16" in refused(body, mode=mode)


def test_a_shared_tensor_aligned_to_less_than_the_access(mode):
    def body(cta):
        cta.shared("pad", uint8, (4,))
        tile = cta.shared("tile", float32, (128,), align=4)
        cta.store(tile[4 * cta.lane], np.zeros((1, 1, 1, 4), np.float32), vec=4, site="put")

    assert "lane 0: byte address 4 ('tile' starts at 4) is not a multiple of 16" in refused(body, mode=mode)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_out_of_bounds(mode, axis, shared):
    """Also where the address would still lie within the tensor: a row too long is the next row's beginning."""

    def body(cta, src):
        tensor = cta.shared("tile", float32, (8, 16)) if shared else src
        place = [cta.lane % 8, cta.lane % 16]
        place[axis] = np.where((cta.lane == 9) & (cta.bx == 1), tensor.shape[axis], place[axis])
        cta.store(tensor[tuple(place)], 0.0, site="put")

    name, extent = "tile" if shared else "src", 16 if axis else 8
    assert here(refused(body, GlobalTensor("src", float32, (8, 16)), grid=2, mode=mode)) == (
        f"site 'put' (FILE:LINE): CTA 1, warp 0, lane 9: index {axis} of '{name}' is {extent}, outside 0..{extent - 1}"
    )


def test_a_negative_index(mode):
    message = refused(lambda cta, src: cta.load(src[cta.lane - 1]), GlobalTensor("src", float32, (32,)), mode=mode)
    assert "CTA 0, warp 0, lane 0: index 0 of 'src' is -1, outside 0..31" in message


def test_a_vector_past_the_end(mode):
    message = refused(
        lambda cta, src: cta.load(src[4 * cta.lane], vec=4), GlobalTensor("src", float32, (127,)), mode=mode
    )
    assert "lane 31: 16 bytes at byte 496 of 'src' run past its end (508 bytes)" in message


def test_lanes_that_are_off_may_point_anywhere(mode):
    def body(cta, src):
        tile = cta.shared("tile", float32, (16,))
        with cta.where(cta.lane < 4):
            cta.store(tile[cta.lane * 4], np.zeros((1, 1, 1, 4), np.float32), vec=4)
            cta.load(tile[cta.lane * 4], vec=4)
        with cta.where(cta.lane % 2 == 0):
            cta.load(src[cta.lane], vec=2)
            with cta.where(cta.lane > 8):
                cta.load(src[cta.lane - 9 + (cta.lane % 2 == 0)], vec=2)

    simulate(Launch(body, 1, 32, (GlobalTensor("src", float32, (32,)),)), mode=mode)


def test_an_index_that_is_no_integer(mode):
    message = refused(lambda cta, src: cta.load(src[cta.lane / 2]), GlobalTensor("src", float32, (32,)), mode=mode)
    assert "index 0 of 'src' is float64, not an integer" in message


def test_a_wrong_number_of_coordinates_names_the_statement(mode):
    message = refused(lambda cta, src: cta.load(src[cta.lane]), GlobalTensor("src", float32, (32, 2)), mode=mode)
    assert here(message) == "FILE:LINE: tensor 'src' has 2 dimensions, indexed with 1"


def test_coordinates_of_more_than_one_value_per_lane(mode):
    def body(cta, src):
        cta.load(src[cta.lane[..., None] + np.arange(4)])

    message = refused(body, GlobalTensor("src", float32, (64,)), mode=mode)
    assert "the coordinates of 'src' have shape [1, 1, 32, 4], not one per lane, [1, 1, 32]" in message


def test_a_tensor_that_is_no_argument_of_the_launch(mode):
    hidden = GlobalTensor("hidden", float32, (32,))
    message = refused(lambda cta: cta.load(hidden[cta.lane]), mode=mode)
    assert here(message).startswith("FILE:LINE: tensor 'hidden' is no argument of the launch")


# ---- shared memory ----------------------------------------------------------------------------------------


def test_shared_memory_above_the_limit(mode):
    def body(cta):
        cta.shared("a", float32, (20000,))
        cta.shared("b", float32, (38113,))

    assert "'b': 232452 bytes of shared memory exceed the 232448 a block may have" in refused(body, mode=mode)
    assert "80000 bytes of shared memory exceed the 49152" in refused(body, mode=mode, shared_limit=49152)
    fits = Launch(lambda cta: cta.shared("a", uint8, (232448,)), 1, 32)
    assert simulate(fits, mode=mode).shared_bytes == 232448


def test_one_name_for_two_shared_tensors(mode):
    def body(cta):
        cta.shared("a", float32, (32,))
        cta.shared("a", float32, (32,))

    assert here(refused(body, mode=mode)) == "FILE:LINE: shared tensor 'a' is allocated twice"


def test_a_union_larger_than_what_it_lies_over(mode):
    def body(cta):
        a, b = cta.shared("a", uint8, (32,)), cta.shared("b", uint8, (32,))
        cta.shared("both", uint8, (64,), alias_of=(a, b))
        cta.shared("more", uint8, (65,), alias_of=(a, b))

    assert "shared tensor 'more': 65 bytes do not fit the bytes 0..64 of a, b" in refused(body, mode=mode)


def test_a_union_over_tensors_that_are_not_neighbours(mode):
    def body(cta):
        a, _, c = (cta.shared(name, uint8, (32,)) for name in "abc")
        cta.shared("both", uint8, (16,), alias_of=(a, c))

    assert "do not fit" in refused(body, mode=mode)


@pytest.mark.parametrize("dtype", [uint8, uint16, float32, float64])
def test_reading_shared_memory_nobody_wrote(dtype):
    def body(cta):
        cta.shared("pad", uint8, (16,))
        tile = cta.shared("tile", dtype, (64,))
        with cta.where((cta.tid != 37) | (cta.bx != 2)):
            cta.store(tile[cta.tid], 1)
        cta.sync()
        cta.load(tile[63 - cta.tid], site="get")

    byte = 16 + 37 * np.dtype(dtype).itemsize
    assert here(refused(body, grid=4, block=64)) == (
        f"site 'get' (FILE:LINE): CTA 2, warp 0, lane 26: reads shared byte {byte} ('tile'), which nobody wrote"
    )


def test_one_unwritten_byte_of_a_vector_is_enough():
    def body(cta):
        tile = cta.shared("tile", uint8, (32, 16))
        for i in range(16):
            with cta.where((cta.lane != 6) | (i != 13)):
                cta.store(tile[cta.lane, i], i)
        cta.load(tile[cta.lane, 0], vec=16, site="get")

    assert "lane 6: reads shared byte 96 ('tile'), which nobody wrote" in refused(body)


def test_one_address_for_all_lanes_is_refused_only_where_a_lane_reads_it():
    def body(cta, other):
        cell = cta.shared("cell", float32, (1,))
        with cta.where(cta.bx == 0):
            cta.store(cell[0], 1.0)
        with cta.where((cta.bx == 0) | ((cta.warp == 1) & (cta.lane == 4) if other else False)):
            cta.load(cell[0], site="get")

    simulate(Launch(body, 2, 64, (False,)), mode="values")
    assert "CTA 1, warp 1, lane 4: reads shared byte 0" in refused(body, True, grid=2, block=64)


def test_an_atomic_reads_too():
    message = refused(lambda cta: cta.red_add(cta.shared("bins", int32, (32,))[cta.lane], 1, site="add"))
    assert here(message).startswith("site 'add' (FILE:LINE): CTA 0, warp 0, lane 0: reads shared byte 0 ('bins')")


def test_ldmatrix_of_rows_nobody_wrote():
    def body(cta):
        tile = cta.shared("tile", bfloat16, (16, 8))
        with cta.where(cta.lane < 10):
            cta.store(tile[cta.lane % 16, 0], np.zeros((1, 1, 1, 8), bfloat16), vec=8)
        cta.ldmatrix(tile[cta.lane % 8, 0], 1)
        cta.ldmatrix(tile[cta.lane % 16, 0], 2, site="rows")

    assert "lane 10: reads shared byte 160 ('tile'), which nobody wrote" in refused(body)


# ---- barriers ---------------------------------------------------------------------------------------------


def test_a_barrier_in_divergent_code(mode):
    def body(cta):
        with cta.where((cta.bx != 1) | (cta.tid != 45)):
            cta.sync()

    assert here(refused(body, grid=3, block=64, mode=mode)) == (
        "FILE:LINE: CTA 1, warp 1, lane 13: the barrier is in divergent code: this lane does not reach it"
    )


def test_a_barrier_whole_ctas_skip_or_threads_that_do_not_exist(mode):
    def body(cta):
        cta.sync()
        with cta.where(cta.bx == 1):
            cta.sync()
        with cta.where(cta.tid < 40):
            cta.sync()

    found = simulate(Launch(body, 3, 40), mode=mode)
    assert found.table.work == {"barrier": 2 * 3 + 2 + 2 * 3}  # warps


# ---- instructions that do not exist -----------------------------------------------------------------------


@pytest.mark.parametrize("vec", [3, 5, 8])
def test_a_vector_width_that_does_not_exist(mode, vec):
    message = refused(lambda cta, src: cta.load(src[0], vec=vec), GlobalTensor("src", float32, (64,)), mode=mode)
    assert f"ldg has no form of {4 * vec} bytes per lane (it has 1, 2, 4, 8, 16)" in message
    assert here(message).startswith("site 'src.ld:")


def test_an_atomic_that_does_not_exist(mode):
    message = refused(lambda cta, src: cta.atomic_add(src[0], 1.0), GlobalTensor("src", float64, (64,)), mode=mode)
    assert "atom.global.add.f64 is not emulated" in message


def test_one_site_name_for_two_instructions(mode):
    def body(cta, src):
        cta.load(src[0], site="get")
        cta.load(src[0], vec=2, site="get")

    message = refused(body, GlobalTensor("src", float32, (64,)), mode=mode)
    assert here(message).endswith(
        "site 'get' names two instructions: ldg of 4 bytes at FILE:LINE and ldg of 8 at FILE:LINE"
    )


def test_a_memory_operation_on_something_else(mode):
    message = refused(lambda cta, src: cta.load(src), GlobalTensor("src", float32, (64,)), mode=mode)
    assert here(message) == "FILE:LINE: a memory operation takes tensor[coordinates], not GlobalTensor"


# ---- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "vec", "words"),
    [
        (np.zeros(32, np.float64), 1, "stores float64 into 'out' of float32; use .astype"),
        (np.zeros(32, bfloat16), 1, "stores bfloat16 into 'out' of float32; use .astype"),
        (np.zeros(32, np.int32), 1, "stores int32 into 'out' of float32; use .astype"),
        (np.zeros((1, 1, 32, 2), np.float32), 1, "a value of shape [1, 1, 32, 2] is not [1, 2, 32]"),
        (np.zeros((1, 2, 32), np.float32), 2, "a value of shape [1, 2, 32] is not [1, 2, 32, 2]"),
    ],
)
def test_a_value_of_another_type_or_shape(value, vec, words):
    def body(cta, out):
        cta.store(out[vec * cta.tid], value, vec=vec, site="put")

    assert here(refused(body, GlobalTensor("out", float32, (128,)), block=64)) == f"site 'put' (FILE:LINE): {words}"


@pytest.mark.parametrize(
    ("what", "condition"),
    [("a branch", lambda cta: cta.where(np.ones((1, 1, 32, 2), bool)).__enter__()),
     ("a loop", lambda cta: cta.any(np.ones(31, bool))),
     ("a vote", lambda cta: cta.ballot(np.ones((3, 32), bool)))],
)
def test_a_condition_of_another_shape(mode, what, condition):
    assert here(refused(condition, mode=mode)).startswith(f"FILE:LINE: {what} takes one value per lane, [1, 1, 32]")


@pytest.mark.parametrize("shape", [(), (0,), (4, -1), (2.0,)])
def test_a_tensor_of_no_shape(shape):
    with pytest.raises(SimError, match=r"tensor 't': shape .* needs positive integers"):
        Tensor("t", float32, shape)


def test_initial_data_of_another_type_or_shape():
    for data in (np.zeros(3, np.float32), np.zeros(4)):
        tensor = GlobalTensor("t", float32, (4,), init=data)
        message = refused(lambda cta, t: cta.load(t[0]), tensor)
        assert message.startswith("tensor 't': initial data is float") and message.endswith("not float32[4]")


def test_a_negative_byte_offset():
    with pytest.raises(SimError, match="byte offset -4 is negative"):
        GlobalTensor("t", float32, (4,), byte_offset=-4)


def test_more_global_memory_than_a_run_with_values_can_hold():
    message = refused(lambda cta, t: None, GlobalTensor("t", float32, (2**16, 2**15)))
    assert message.startswith("a run with values needs 8,589,934,592 bytes of global memory; the limit is")
