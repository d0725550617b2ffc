"""All requested profiles together, nested by constraint.

Budget by budget (module `knapsack`) where that proves enough, else in one program (module `program`).
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexrank.allocation.adjustment import repair, spend
from flexrank.allocation.curves import CostTable, Ints, LayerCurve
from flexrank.allocation.knapsack import solve_window
from flexrank.allocation.program import solve_program

SWEEPS = 4


class Solution(NamedTuple):
    """Nested profiles as levels (B, L), their weighted error, and a proven lower bound of it."""

    levels: Ints
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """(objective − bound) / |objective|; 0 where the two agree to rounding."""
        difference = self.objective - self.bound
        scale = max(abs(self.objective), abs(self.bound))
        return 0.0 if difference <= 1e-12 * scale else difference / scale


def solve_nested(
    curves: Sequence[LayerCurve], caps: Sequence[int], weights: Sequence[float], gap: float, time_limit: float
) -> Solution:
    """Profiles for rising `caps` (parameters), nested, of least weighted error.

    First budget by budget: each alone, whose bounds add up to one of the nested program; then each with the last one's
    profile as its floor. Layers by the dozen are almost nested by themselves, so this often proves the gap. Where it
    does not, the whole program is solved; the better profiles and the better bound are kept.

    Args:
        curves: the layers' candidates. Every cap holds the profile of all first candidates.
        caps: parameters allowed, rising.
        weights: of the errors, positive.
        gap: relative gap to solve to.
        time_limit: seconds for each of the two ways.

    Returns:
        Levels (B, L) that keep every cap and are nested; their weighted error; and the bound.
    """
    table = CostTable(curves)
    quick = _solve_by_budget(table, caps, weights, gap, time_limit)
    if quick.gap <= gap:
        return quick
    levels, bound = solve_program(curves, caps, weights, gap, time_limit)
    repair(table, levels, caps)
    polish(table, levels, caps, gap, time_limit)
    objective = _objective(table, levels, weights)
    bound = max(bound, quick.bound)
    return Solution(levels, objective, bound) if objective < quick.objective else quick._replace(bound=bound)


def _solve_by_budget(
    table: CostTable, caps: Sequence[int], weights: Sequence[float], gap: float, time_limit: float
) -> Solution:
    end = time.monotonic() + time_limit
    levels = np.zeros((len(caps), len(table.top)), np.int64)
    floor = levels[0]
    bound = 0.0
    for budget, (cap, weight) in enumerate(zip(caps, weights, strict=True)):
        share = max(end - time.monotonic(), 1e-3) / (len(caps) - budget)
        alone, least = solve_window(table, floor * 0, table.top, cap, gap / 2, share)
        bound += weight * least
        if (alone < floor).any():
            alone, _ = solve_window(table, floor, table.top, cap, gap / 2, share)
        levels[budget] = floor = alone
    if len(caps) > 1:
        polish(table, levels, caps, gap / 2, max(end - time.monotonic(), 1e-3))
    return Solution(levels, _objective(table, levels, weights), bound)


def _objective(table: CostTable, levels: Ints, weights: Sequence[float]) -> float:
    return math.fsum(weight * table.error(row) for weight, row in zip(weights, levels, strict=True))


def polish(table: CostTable, levels: Ints, caps: Sequence[int], gap: float, time_limit: float) -> None:
    """Spends what is spare, then solves each budget again between its neighbours, in place, for up to `SWEEPS`.

    A gap of the weighted sum says little of the small errors of large budgets; each is solved to the gap of its own.
    """
    end = time.monotonic() + time_limit
    spend(table, levels, caps)
    for _ in range(SWEEPS):
        before = levels.copy()
        for budget, cap in enumerate(caps):
            low = levels[budget - 1] if budget else np.zeros_like(table.top)
            high = levels[budget + 1] if budget + 1 < len(caps) else table.top
            left = end - time.monotonic()
            if left <= 0:
                return
            row, _ = solve_window(table, low, high, cap, gap, left)
            if table.error(row) < table.error(levels[budget]):
                levels[budget] = row
        if np.array_equal(before, levels):
            return
