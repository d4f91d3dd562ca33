"""The two implementations of the rules, behind one signature: tests of one run on both."""

from __future__ import annotations

import numpy as np
import pytest

from simgpu.replay import Columns, replay
from simgpu.rules import Cost, cost

NUMBERS = ("wavefronts", "ideal", "sectors", "ideal_sectors", "lines")


def cost_of_row(columns: Columns, row: int) -> Cost:
    """One access of a replay as the reference would answer: -1 is None."""
    numbers = [None if column is None or column[row] < 0 else int(column[row])
               for column in (getattr(columns, name) for name in NUMBERS)]
    return Cost(*numbers, unmodelled=bool(columns.unmodelled[row]))


def compiled_cost(instruction, width, mask, shared=None, global_=None) -> Cost:
    def one_row(addresses, dtype):
        return None if addresses is None else np.array([addresses], dtype)

    return cost_of_row(replay(instruction, width, [mask], one_row(shared, np.int32), one_row(global_, np.int64)), 0)


both = pytest.mark.parametrize("cost", [cost, compiled_cost], ids=["reference", "compiled"])
