"""All requested profiles together, nested by constraint.

Each budget alone (module `knapsack`) where that proves enough, else in one program (module `program`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexrank.allocate.adjustment import repair, spend
from flexrank.allocate.curves import Bools, CostTable, Ints, LayerCurve
from flexrank.allocate.knapsack import Best, solve_window
from flexrank.allocate.program import solve_program

SWEEPS = 4
CLOSE = 1e-5  # relative gap of a budget by itself: finer than is asked, for it costs little


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

    Each budget alone has an exact optimum, and these add up to a bound of the nested program. Then nested profiles:
    each the best between its neighbours. Layers by the dozen are almost nested by themselves, so this often proves the
    gap. Where it does not, one integer program is solved over the candidates that the bounds leave; the better
    profiles and the better bound are kept.

    Args:
        curves: the layers' candidates. Every cap holds the profile of all first candidates.
        caps: parameters allowed, rising.
        weights: of the errors, positive.
        gap: relative gap to solve to.
        time_limit: seconds for the integer program.

    Returns:
        Levels (B, L) that keep every cap and are nested; their weighted error; and the bound.
    """
    table = CostTable(curves)
    own = min(gap, CLOSE)
    alone = [solve_window(table, np.zeros_like(table.top), table.top, cap, own) for cap in caps]
    quick = solve_by_budget(table, alone, caps, weights, gap)
    if quick.gap <= gap:
        return quick
    kept = still_possible(alone, weights, quick)
    least = [best.bound for best in alone]
    levels, bound = solve_program(curves, caps, weights, gap, time_limit, kept, least)
    repair(table, levels, caps)
    polish(table, levels, caps, alone, own)
    objective = _objective(table, levels, weights)
    bound = min(max(bound, quick.bound), quick.objective)
    return Solution(levels, objective, bound) if objective < quick.objective else quick._replace(bound=bound)


def solve_by_budget(
    table: CostTable, alone: Sequence[Best], caps: Sequence[int], weights: Sequence[float], gap: float
) -> Solution:
    """Nested profiles from each budget's own best: the smallest budget first; if that is not enough, the largest."""
    bound = math.fsum(weight * best.bound for weight, best in zip(weights, alone, strict=True))
    found = []
    for order in (range(len(caps)), range(len(caps) - 1, -1, -1)):
        levels = _nest(table, alone, caps, order, min(gap, CLOSE))
        found.append(Solution(levels, _objective(table, levels, weights), bound))
        if found[-1].gap <= gap:
            break
    return min(found, key=lambda solution: solution.objective)


def _nest(table: CostTable, alone: Sequence[Best], caps: Sequence[int], order: range, gap: float) -> Ints:
    low, high = np.zeros_like(table.top), table.top
    levels = np.zeros((len(caps), len(table.top)), np.int64)
    for budget in order:
        row = alone[budget].levels
        if (row < low).any() or (row > high).any():
            row = solve_window(table, low, high, caps[budget], gap).levels
        levels[budget] = row
        low, high = (row, high) if order.step > 0 else (low, row)
    polish(table, levels, caps, alone, gap)
    return levels


def still_possible(alone: Sequence[Best], weights: Sequence[float], known: Solution) -> Bools:
    """The candidates (B, L, K) that a solution no worse than the known one may hold.

    No budget's error can be below its own bound, so none can be above that by more than all bounds together leave.
    """
    left = known.objective - known.bound
    kept = []
    for best, weight in zip(alone, weights, strict=True):
        room = left / weight + best.bound - best.relaxed
        kept.append(best.excess <= room + best.rounding)
    return np.stack(kept)


def _objective(table: CostTable, levels: Ints, weights: Sequence[float]) -> float:
    return math.fsum(weight * table.error(row) for weight, row in zip(weights, levels, strict=True))


def polish(table: CostTable, levels: Ints, caps: Sequence[int], alone: Sequence[Best], gap: float) -> None:
    """Spends what is spare, then solves each budget again between its neighbours, in place, for up to `SWEEPS`.

    A budget whose error is that of its own bound, to the relative `gap`, is left as it is.
    """
    spend(table, levels, caps)
    for _ in range(SWEEPS):
        before = levels.copy()
        for budget, cap in enumerate(caps):
            error = table.error(levels[budget])
            if error - alone[budget].bound <= gap * abs(error):
                continue
            low = levels[budget - 1] if budget else np.zeros_like(table.top)
            high = levels[budget + 1] if budget + 1 < len(caps) else table.top
            row = solve_window(table, low, high, cap, gap).levels
            if table.error(row) < error:
                levels[budget] = row
        if np.array_equal(before, levels):
            return
