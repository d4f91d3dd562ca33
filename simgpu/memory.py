"""The bytes behind a run with values, and the bookkeeping that refuses reads of what nobody wrote.

Every address array here is broadcastable to [ctas, warps, 32] and in range; the ``cta`` object has checked it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from simgpu.errors import SimError
from simgpu.tensor import GlobalTensor

MAX_GLOBAL_BYTES = 2**32  # of a run with values: beyond, the machine that emulates runs out first
UNWRITTEN, WRITTEN, IN_FLIGHT = 0, 1, 2  # state of a shared byte; IN_FLIGHT: a cp.async nobody waited for


class Bytes:
    """Rows of bytes (one row per CTA for shared memory, one for a global tensor) read and written by lane."""

    def __init__(self, data: np.ndarray):
        self.data = data  # uint8[rows, bytes]

    def _row(self, dims: int) -> np.ndarray:
        rows = np.arange(len(self.data)) if len(self.data) > 1 else np.zeros(1, int)
        return rows.reshape(-1, *[1] * (dims - 1))

    def read(self, address: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        """``count`` consecutive elements at each byte address: [c, w, 32] for 1, else [c, w, 32, count]."""
        index = address // dtype.itemsize
        if count > 1:
            index = index[..., None] + np.arange(count)
        return self.data.view(dtype)[self._row(index.ndim), index]

    def write(self, address: np.ndarray, values: np.ndarray, mask: np.ndarray | None, shape: tuple[int, ...]) -> None:
        """Store ``values`` ([c, w, 32] or [c, w, 32, count]) where ``mask``; of lanes on one address one wins."""
        view = self.data.view(values.dtype)
        index = np.broadcast_to(address // values.dtype.itemsize, shape)
        row = np.broadcast_to(self._row(3), shape)
        vector = values.ndim > len(shape)
        values = np.broadcast_to(values, (*shape, values.shape[-1]) if vector else shape)
        if mask is not None:
            on = np.broadcast_to(mask, shape)
            index, row, values = index[on], row[on], values[on]
        if vector:
            index, row = index[..., None] + np.arange(values.shape[-1]), row[..., None]
        view[row, index] = values

    def atomic(
        self,
        address: np.ndarray,
        operation: str,
        values: np.ndarray,
        compare: np.ndarray | None,
        mask: np.ndarray | None,
        shape: tuple[int, ...],
    ) -> np.ndarray:
        """Apply ``operation`` (add, exch, cas) lane after lane; the value each active lane found, 0 elsewhere."""
        dtype = values.dtype
        index, row, values, compare = (
            np.broadcast_to(x, shape).reshape(-1)
            for x in (address // dtype.itemsize, self._row(3), values, values if compare is None else compare)
        )
        on = np.ones(shape, bool).reshape(-1) if mask is None else np.broadcast_to(mask, shape).reshape(-1)
        found = _atomics(
            self.data.view(dtype), row, index, ("add", "exch", "cas").index(operation), values, compare, on
        )
        return found.reshape(shape)


@njit(cache=True, nogil=True)
def _atomics(memory, row, index, operation, values, compare, on):
    found = np.zeros(len(index), memory.dtype)
    for i in range(len(index)):
        if on[i]:
            old = memory[row[i], index[i]]
            found[i] = old
            if operation == 0:
                memory[row[i], index[i]] = old + values[i]
            elif operation == 1 or old == compare[i]:
                memory[row[i], index[i]] = values[i]
    return found


def _repeat(state: int, word: np.dtype) -> int:
    """``state`` in every byte of an unsigned ``word``."""
    return int.from_bytes(bytes([state]) * word.itemsize, "little")


@dataclass
class _Copy:
    """A cp.async in flight: which group of its thread it belongs to, and where it lands."""

    group: np.ndarray  # int64[c, w, 32]
    waiting: np.ndarray  # bool[c, w, 32]: lanes whose copy nobody waited for yet
    address: np.ndarray  # int[c, w, 32]
    width: int


class SharedMemory(Bytes):
    """One CTA batch's shared memory: bytes, the state of each byte, and the cp.async groups of each thread."""

    def __init__(self, shape: tuple[int, int, int]):
        super().__init__(np.zeros((shape[0], 0), np.uint8))
        self.shape = shape
        self.state = Bytes(np.zeros((shape[0], 0), np.uint8))
        self.committed = np.zeros(shape, np.int64)
        self.copies: list[_Copy] = []

    def reserve(self, nbytes: int) -> None:
        """Make room for ``nbytes``: what a kernel allocates, because clearing all that it might is slow."""
        more = -(-nbytes // 16) * 16 - self.data.shape[1]
        if more > 0:
            self.data, self.state.data = (np.pad(part, ((0, 0), (0, more))) for part in (self.data, self.state.data))

    def mark(self, address: np.ndarray, width: int, mask: np.ndarray | None, state: int = WRITTEN) -> None:
        """Set the state of ``width`` bytes at each active lane's address."""
        word = np.dtype(f"u{min(width, 8)}")
        pattern = np.full((1, 1, 1, width // 8) if width > 8 else (1, 1, 1), _repeat(state, word), word)
        self.state.write(address, pattern, mask, self.shape)

    def unreadable(self, address: np.ndarray, width: int, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Lanes (bool[c, w, 32]) about to read bytes nobody wrote, and those about to read bytes in flight."""
        word = np.dtype(f"u{min(width, 8)}")
        bad = self.state.read(address, word, max(1, width // 8)) != _repeat(WRITTEN, word)
        if width > 8:
            bad = bad.any(-1)
        if mask is not None:
            bad = bad & mask
        if not bad.any():
            return bad, bad
        flying = self.state.read(address, np.dtype(np.uint8), width) == IN_FLIGHT
        if width > 1:
            flying = flying.any(-1)
        return bad & ~flying, bad & flying

    def copy(self, address: np.ndarray, values: np.ndarray, width: int, mask: np.ndarray | None) -> None:
        """cp.async: the bytes land now, but nobody may read them before the wait."""
        self.write(address, values, mask, self.shape)
        self.mark(address, width, mask, IN_FLIGHT)
        waiting = np.broadcast_to(True if mask is None else mask, self.shape).copy()
        self.copies.append(_Copy(self.committed.copy(), waiting, np.broadcast_to(address, self.shape), width))

    def commit(self, mask: np.ndarray | None) -> None:
        """cp.async.commit_group of every active thread."""
        self.committed += 1 if mask is None else mask

    def wait(self, pending: int, mask: np.ndarray | None) -> None:
        """cp.async.wait_group: all but each active thread's latest ``pending`` groups have landed."""
        done, any_landed = self.committed - pending, False
        for copy in self.copies:
            landed = copy.waiting & (copy.group < done)
            if mask is not None:
                landed &= mask
            if landed.any():
                self.mark(copy.address, copy.width, landed)
                copy.waiting &= ~landed
                any_landed = True
        self.copies = [copy for copy in self.copies if copy.waiting.any()]
        if any_landed:  # what landed may lie under a later copy that has not
            for copy in self.copies:
                self.mark(copy.address, copy.width, copy.waiting, IN_FLIGHT)


class GlobalMemory:
    """The bytes of every global tensor of a launch.

    Raises SimError when they exceed :data:`MAX_GLOBAL_BYTES`.
    """

    def __init__(self, tensors: tuple[GlobalTensor, ...]):
        wanted = sum(tensor.nbytes for tensor in tensors)
        if wanted > MAX_GLOBAL_BYTES:
            raise SimError(
                f"a run with values needs {wanted:,} bytes of global memory; the limit is {MAX_GLOBAL_BYTES:,} "
                f"(a smaller problem, or addresses only)"
            )
        self.tensors = {tensor: Bytes(tensor.initial_bytes()[None]) for tensor in tensors}

    def __getitem__(self, tensor: GlobalTensor) -> Bytes:
        return self.tensors[tensor]

    def arrays(self, tensors: tuple[GlobalTensor, ...]) -> dict[str, np.ndarray]:
        """The contents of each tensor, as an array of its shape."""
        return {tensor.name: tensor.array(self[tensor].data[0]) for tensor in tensors}
