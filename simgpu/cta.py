"""The instructions of the ``cta`` a kernel is written against.

A per-thread value is a numpy array broadcastable to [ctas, warps, 32]; a value that does not depend on the CTA
stays [1, warps, 32] and costs that much. Inside ``with cta.where(cond):`` the lanes where ``cond`` is false
neither read, write nor emit an event.

With values, loads return real data and a wrong layout gives a wrong result. Without, they return
:data:`~simgpu.unknown.UNKNOWN`: addresses only, which is faster and takes no memory.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from simgpu import warp
from simgpu.access import MemoryAccess
from simgpu.errors import SimError
from simgpu.events import Site
from simgpu.instructions import INSTRUCTIONS, LANES, NO_SOURCE, nearest
from simgpu.lockstep import describe, pack_mask
from simgpu.tensor import Ref, SharedTensor
from simgpu.unknown import UNKNOWN, Unknown

REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


class CTA(MemoryAccess):
    """Shared memory, loads, stores, matrices, shuffles, asynchronous copies and barriers of a thread block."""

    shared_bytes = 0
    """Shared memory allocated so far: what occupancy is computed from."""

    # ---- shared memory -----------------------------------------------------------------------------------

    def shared(
        self,
        name: str,
        dtype,
        shape,
        layout=None,
        *,
        alias_of: SharedTensor | tuple[SharedTensor, ...] = (),
        align: int = 16,
    ) -> SharedTensor:
        """Allocate a tensor in shared memory, on a multiple of ``align`` bytes, after those allocated so far.

        ``alias_of`` (a tensor, or neighbours) places it over their bytes instead, as a union does. A layout that
        the run substitutes for ``name`` comes before ``layout``. Raises SimError when it does not fit there, or in
        the block's limit.
        """
        if name in self._extents:
            raise SimError(f"shared tensor {name!r} is allocated twice")
        over = (alias_of,) if isinstance(alias_of, SharedTensor) else tuple(alias_of)
        extents = sorted(self._extents[other.name] for other in over)
        base = extents[0][0] if over else -(-self.shared_bytes // align) * align
        room = max((stop for _, stop in extents), default=0)
        tensor = SharedTensor(name, dtype, shape, self._layouts.get(name, layout), base=base, align=align, over=over)
        end = base + tensor.nbytes
        if over:
            gaps = [start - stop for (_, stop), (start, _) in pairwise(extents)]
            if base % align or any(gap >= align for gap in gaps) or end > room:
                raise SimError(
                    f"shared tensor {name!r}: {tensor.nbytes} bytes do not fit the bytes "
                    f"{base}..{room} of {', '.join(other.name for other in over)}"
                )
        self._extents[name], self.tensors[name] = (base, end), tensor
        self.shared_bytes = max(self.shared_bytes, end)
        if end > self._shared_limit:
            raise SimError(
                f"shared tensor {name!r}: {end} bytes of shared memory exceed the {self._shared_limit} a block may have"
            )
        if self._shared:
            self._shared.reserve(self.shared_bytes)
        return tensor

    # ---- loads, stores, atomics --------------------------------------------------------------------------

    def load(self, ref: Ref, vec: int = 1, *, site: str | None = None):
        """Load ``vec`` consecutive elements per lane (LDS or LDG, 1 to 16 bytes): [c, w, 32], or [c, w, 32, vec].

        Inactive lanes receive 0.
        """
        op = "lds" if _shared(ref) else "ldg"
        width = ref.tensor.dtype.itemsize * vec
        place = self._site(site, "ld", ref.tensor, op, width)
        offset = self._access(place, ref, width)
        if not self._global:
            return UNKNOWN
        values = self._read(place, ref.tensor, offset, vec, self._mask)
        if self._mask is None:
            return values
        return np.where(self._mask[..., None] if vec > 1 else self._mask, values, values.dtype.type(0))

    def store(self, ref: Ref, value, vec: int = 1, *, site: str | None = None) -> None:
        """Store ``vec`` consecutive elements per lane (STS or STG); ``value`` [c, w, 32], or [c, w, 32, vec].

        Of active lanes that store to one address, one wins. Raises SimError when the value's dtype or shape
        is not what the tensor holds.
        """
        op = "sts" if _shared(ref) else "stg"
        width = ref.tensor.dtype.itemsize * vec
        place = self._site(site, "st", ref.tensor, op, width)
        offset = self._access(place, ref, width)
        if self._global:
            self._write(ref.tensor, offset, self._value(place, ref.tensor, value, vec), vec, self._mask)

    def atomic_add(self, ref: Ref, value, *, site: str | None = None):
        """atomicAdd; returns what each active lane found (lanes on one address take turns in lane order)."""
        return self._atomic("atom", "add", ref, value, None, site)

    def red_add(self, ref: Ref, value, *, site: str | None = None) -> None:
        """atomicAdd whose result nobody uses (RED)."""
        self._atomic("red", "add", ref, value, None, site)

    def atomic_exch(self, ref: Ref, value, *, site: str | None = None):
        """atomicExch; returns what each active lane found."""
        return self._atomic("atom", "exch", ref, value, None, site)

    def atomic_cas(self, ref: Ref, compare, value, *, site: str | None = None):
        """atomicCAS; returns what each active lane found."""
        return self._atomic("atom", "cas", ref, value, compare, site)

    def _atomic(self, verb: str, operation: str, ref: Ref, value, compare, site):
        memory, tensor = "shared" if _shared(ref) else "global", ref.tensor
        bits = 8 * tensor.dtype.itemsize
        kind = "b" if operation != "add" else "u" if tensor.dtype.kind in "iu" else "f"
        name = f"{verb}.{memory}.{operation}.{kind}{bits}"
        if name not in INSTRUCTIONS:
            raise SimError(f"{tensor.name!r}: {name} is not emulated{nearest(name, INSTRUCTIONS)}")
        place = self._site(site, f"{verb}.{operation}", tensor, name, tensor.dtype.itemsize)
        offset = self._access(place, ref, tensor.dtype.itemsize)
        if not self._global:
            return UNKNOWN
        self._require_readable(place, tensor, offset, tensor.dtype.itemsize, self._mask)
        value = self._value(place, tensor, value, 1)
        compare = None if compare is None else self._value(place, tensor, compare, 1)
        return self._bytes(tensor).atomic(self._at(tensor, offset), operation, value, compare, self._mask, self.shape)

    # ---- matrices ----------------------------------------------------------------------------------------

    def ldmatrix(self, ref: Ref, x: int = 4, *, trans: bool = False, site: str | None = None):
        """ldmatrix.xN[.trans]: lane 8i + r points at row r of matrix i. Returns a fragment [c, w, 32, x, 2].

        The lanes of inactive warps receive 0.
        """
        place = self._matrix_site("ldmatrix", ref, x, trans, site)
        offset = self._access(place, ref, 16, rows=8 * x)
        if not self._global:
            return UNKNOWN
        pointers = np.broadcast_to(offset, (*offset.shape[:2], LANES))[..., : 8 * x]
        lanes = None if self._mask is None else self._mask[..., : 8 * x]
        rows = self._read(place, ref.tensor, pointers, 8, lanes)
        values = warp.distribute(rows.reshape(*rows.shape[:2], x, 8, 8), trans)
        return values if lanes is None else np.where(self._mask[..., None, None], values, values.dtype.type(0))

    def stmatrix(self, ref: Ref, registers, x: int = 4, *, trans: bool = False, site: str | None = None) -> None:
        """stmatrix.xN[.trans], the inverse of :meth:`ldmatrix`; ``registers`` is a fragment [c, w, 32, x, 2]."""
        place = self._matrix_site("stmatrix", ref, x, trans, site)
        offset = self._access(place, ref, 16, rows=8 * x)
        if not self._global:
            return
        registers = np.asarray(registers)
        if registers.shape[-2:] != (x, 2) or registers.dtype != ref.tensor.dtype:
            raise SimError(
                f"{describe(place)}: a fragment of {registers.dtype}{list(registers.shape[-2:])} is not "
                f"{ref.tensor.dtype}[{x}, 2]"
            )
        matrices = warp.collect(np.broadcast_to(registers, (*self.shape, x, 2)), trans)
        rows = np.zeros((*self.shape, 8), ref.tensor.dtype)
        rows[:, :, : 8 * x] = matrices.reshape(*self.shape[:2], 8 * x, 8)
        self._write(ref.tensor, offset, rows, 8, self.active & (self.lane < 8 * x))

    def movmatrix(self, register):
        """movmatrix.trans: the warp's 8x8 matrix, one register [c, w, 32, 2] a lane, transposed."""
        self._whole_warps(None, "movmatrix")
        self._work("movmatrix")
        if isinstance(register, Unknown):
            return UNKNOWN
        return warp.distribute(warp.collect(register[..., None, :], False), True)[..., 0, :]

    def mma(self, a, b, c, k: int = 16):
        """mma.sync m16n8k16 (or k8) on fragments; see :func:`simgpu.warp.mma`."""
        self._whole_warps(None, "mma")
        self._work(f"mma.m16n8k{k}")
        return UNKNOWN if any(isinstance(x, Unknown) for x in (a, b, c)) else warp.mma(a, b, c, k)

    def _matrix_site(self, verb: str, ref: Ref, x: int, trans: bool, site: str | None) -> Site:
        name = f"{verb}.x{x}{'.trans' if trans else ''}"
        if name not in INSTRUCTIONS:
            raise SimError(f"{verb} has no form .x{x} (it has .x1, .x2, .x4)")
        if not _shared(ref) or ref.tensor.dtype.itemsize != 2:
            raise SimError(f"{name} on {ref.tensor.name!r}: it moves 16-bit elements of shared memory")
        place = self._site(site, "ldsm" if verb == "ldmatrix" else "stsm", ref.tensor, name, 16)
        self._whole_warps(place, name)
        return place

    def _whole_warps(self, place: Site | None, name: str) -> None:
        if self._mask is not None:
            self._refuse(
                place,
                self._mask.any(-1, keepdims=True) & ~self._mask,
                f"{name} needs all 32 lanes of a warp active; this one is not",
            )

    # ---- warp-wide operations ----------------------------------------------------------------------------

    def shfl(self, value, source, width: int = LANES):
        """shfl.sync.idx: the value of lane ``source`` of the segment of ``width`` lanes."""
        return self._shuffle("idx", value, source, width)

    def shfl_up(self, value, delta, width: int = LANES):
        """shfl.sync.up: the value ``delta`` lanes below; a lane's own at the segment's start."""
        return self._shuffle("up", value, delta, width)

    def shfl_down(self, value, delta, width: int = LANES):
        """shfl.sync.down: the value ``delta`` lanes above; a lane's own at the segment's end."""
        return self._shuffle("down", value, delta, width)

    def shfl_xor(self, value, lane_mask, width: int = LANES):
        """shfl.sync.bfly: the value of lane ``lane ^ lane_mask``."""
        return self._shuffle("xor", value, lane_mask, width)

    def warp_sum(self, value, width: int = LANES):
        """The butterfly sum over each segment of ``width`` lanes: log2(width) times shfl_xor and add."""
        step = width // 2
        while step:
            value = value + self.shfl_xor(value, step, width)
            step //= 2
        return value

    def reduce(self, value, operation: str = "add"):
        """redux.sync over a warp's active lanes: add, min, max, and, or, xor of 32-bit integers, [c, w, 1]."""
        if operation not in REDUCTIONS:
            raise SimError(f"redux.sync has no {operation!r}{nearest(operation, REDUCTIONS)}")
        self._work(f"redux.{operation}")
        if isinstance(value, Unknown):
            return UNKNOWN
        value = self._per_lane(value, "a reduction")
        if value.dtype.kind not in "iu" or value.dtype.itemsize != 4:
            raise SimError(f"redux.sync takes 32-bit integers, not {value.dtype} (for floats: warp_sum)")
        limits = np.iinfo(value.dtype)
        neutral = {"min": limits.max, "max": limits.min, "and": limits.max if limits.min == 0 else -1}.get(operation, 0)
        lanes = np.where(
            np.broadcast_to(self.active, (*self.active.shape[:2], LANES)), value, value.dtype.type(neutral)
        )
        return REDUCTIONS[operation].reduce(lanes, axis=-1, keepdims=True, dtype=value.dtype)

    def ballot(self, condition):
        """vote.sync.ballot: the mask of active lanes where ``condition`` holds, uint32[c, w, 1]."""
        self._work("vote.ballot")
        if isinstance(condition, Unknown):
            return UNKNOWN
        return pack_mask(self._per_lane(condition, "a vote").astype(bool, copy=False) & self.active)[..., None]

    def _shuffle(self, mode: str, value, operand, width: int):
        self._work(f"shfl.{mode}")
        if isinstance(operand, Unknown):
            return UNKNOWN
        source = warp.shuffle_source(mode, self._per_lane(operand, "a shuffle's lane operand"), width)
        if self._mask is not None:
            self._refuse(
                None,
                self._mask & ~warp.take_lanes(np.broadcast_to(self._mask, self.shape), source),
                "shfl reads lane {}, which is not active",
                source,
            )
        return UNKNOWN if isinstance(value, Unknown) else warp.take_lanes(self._per_lane(value, "a shuffle"), source)

    # ---- asynchronous copies and barriers ----------------------------------------------------------------

    def cp_async(
        self, dst: Ref, src: Ref, bytes: int = 16, *, cache: str = "cg", src_bytes=None, site: str | None = None
    ) -> None:
        """cp.async.ca (4, 8 or 16 bytes) or .cg (16): global to shared, readable after a wait.

        ``src_bytes`` (int per lane) copies only so many and fills the rest with zeros; a lane that copies 0 may
        point anywhere.
        """
        name = f"cp.async.{cache}"
        if name not in INSTRUCTIONS:
            raise SimError(f"cp.async has no cache mode {cache!r} (it has ca, cg)")
        if not _shared(dst) or _shared(src) or dst.tensor.dtype != src.tensor.dtype:
            raise SimError(
                f"cp.async copies global to shared memory of one dtype, not {src.tensor.name!r} "
                f"({src.tensor.dtype}) to {dst.tensor.name!r} ({dst.tensor.dtype})"
            )
        place = self._site(site, "cp", dst.tensor, name, bytes)
        copied = np.full((1, 1, 1), bytes) if src_bytes is None else self._copied(place, src, bytes, src_bytes)
        target = self._offset(place, dst, bytes, self.active)
        source = self._offset(place, src, bytes, self.active & (copied > 0), copied)
        filled = copied < bytes
        # cp.async.cg with a source size costs more even where every lane reads all of it (rules.copy_past_l1), and has
        # no rule here: without a source it is told so.
        sourceless = src_bytes is not None if cache == "cg" else copied == 0
        read = np.where(sourceless, NO_SOURCE, self._absolute(src.tensor, source))
        self._emit(place, self._absolute(dst.tensor, target), read, dst.tensor.name)
        if self._global:
            itemsize = dst.tensor.dtype.itemsize
            values = self._read(place, src.tensor, source, bytes // itemsize, self._mask)
            if filled.any():
                kept = copied[..., None] > itemsize * np.arange(bytes // itemsize)
                values = np.where(kept if values.ndim > 3 else kept[..., 0], values, values.dtype.type(0))
            self._shared.copy(self._at(dst.tensor, target), values, bytes, self._mask)

    def _copied(self, place: Site, src: Ref, bytes: int, src_bytes) -> np.ndarray:
        """``src_bytes`` per lane; refused where it is no number of whole elements up to ``bytes``."""
        copied, itemsize = self._per_lane(src_bytes, "src_bytes"), src.tensor.dtype.itemsize
        if copied.dtype.kind not in "iu":
            raise SimError(f"{describe(place)}: src_bytes is {copied.dtype}, not an integer")
        self._refuse(
            place,
            ((copied < 0) | (copied > bytes) | (copied % itemsize != 0)) & self.active,
            f"src_bytes {{}} is not a multiple of {itemsize} (an element of {src.tensor.name!r}) up to {bytes}",
            copied,
        )
        return copied

    def cp_async_commit(self) -> None:
        """cp.async.commit_group: what each active thread copied since its last commit becomes a group."""
        self._work("cp.async.commit")
        if self._global:
            self._shared.commit(self._mask)

    def cp_async_wait(self, pending: int = 0) -> None:
        """cp.async.wait_group: wait until at most ``pending`` of each active thread's groups are in flight.

        Raises SimError for a negative ``pending``. Copies not committed to a group stay in flight.
        """
        if pending < 0:
            raise SimError(f"cp.async.wait_group {pending}: the number of groups is not negative")
        self._work("cp.async.wait", pending)
        if self._global:
            self._shared.wait(pending, self._mask)

    def sync(self) -> None:
        """__syncthreads(). Raises SimError when only a part of a CTA's threads reach it."""
        if self._mask is not self._tail:
            exist = np.True_ if self._tail is None else self._tail
            reach = np.broadcast_to(self._mask, self.shape)
            self._refuse(
                None,
                reach.any((1, 2), keepdims=True) & exist & ~reach,
                "the barrier is in divergent code: this lane does not reach it",
            )
        self._work("barrier")


def _shared(ref: Ref) -> bool:
    if not isinstance(ref, Ref):
        raise SimError(f"a memory operation takes tensor[coordinates], not {type(ref).__name__}")
    return isinstance(ref.tensor, SharedTensor)
