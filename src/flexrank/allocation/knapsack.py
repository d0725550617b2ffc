"""One budget alone: the multiple-choice knapsack of FlexRank, appendix C.2, by its Lagrangian and a small program.

    L(λ) = Σ_l min_j (e_lj + λ c_lj) − λ cap   ≤   min error within cap

The best λ leaves a few layers in doubt. A candidate whose e + λ c lies above its layer's minimum by more than the
distance from the bound to a known profile is in no better profile; the program is solved over the rest.
"""

import math
from typing import NamedTuple

import numpy as np

from flexrank.allocation.adjustment import repair, spend
from flexrank.allocation.curves import CostTable, Floats, Ints
from flexrank.allocation.program import solve_program

BISECTIONS = 80


class Dual(NamedTuple):
    """The Lagrangian's best bound, each candidate's excess over its layer's minimum (L, K), and levels within cap."""

    bound: float
    excess: Floats
    levels: Ints


def solve_window(
    table: CostTable, low: Ints, high: Ints, cap: int, gap: float, time_limit: float
) -> tuple[Ints, float]:
    """The levels (L,) of least error between `low`, which keeps the cap, and `high`; and the proven bound.

    Args:
        table: the layers' candidates.
        low: the least level of each layer.
        high: the largest level of each layer.
        cap: parameters allowed.
        gap: relative gap to stop at.
        time_limit: seconds for the program.
    """
    curves = [curve.take(slice(a, b + 1)) for curve, a, b in zip(table.curves, low, high, strict=True)]
    window = CostTable(curves)
    dual = solve_dual(window, cap)
    spend(window, dual.levels[None], [cap])
    error = window.error(dual.levels)
    distance = error - dual.bound
    if distance <= gap * abs(error):
        return dual.levels + low, min(dual.bound, error)
    doubt = dual.excess <= distance + 1e-12 * float(np.abs(window.errors).max())
    doubt[np.arange(len(low)), dual.levels] = True
    kept = [np.flatnonzero(row[: top + 1]) for row, top in zip(doubt, window.top, strict=True)]
    core = [curve.take(index) for curve, index in zip(curves, kept, strict=True)]
    solved, bound = solve_program(core, [cap], [1.0], gap, time_limit)
    levels = np.array([index[level] for index, level in zip(kept, solved[0], strict=True)])
    repair(window, levels[None], [cap])
    spend(window, levels[None], [cap])
    bound += math.fsum(float(curve.errors[-1]) for curve in core)  # the program counts from the last candidates
    best = levels if window.error(levels) < error else dual.levels
    return best + low, min(max(bound, dual.bound), window.error(best))


def solve_dual(window: CostTable, cap: int) -> Dual:
    """Bisects λ ≥ 0 (error a parameter) for the largest L(λ); its cheaper side keeps the cap."""
    layers = np.arange(len(window.top))
    low, high = 0.0, float(np.ptp(window.errors)) + 1e-300
    best = Dual(-math.inf, window.errors, np.zeros_like(window.top))
    feasible = best.levels
    for step in range(BISECTIONS):
        price = (low + high) / 2 if step else 0.0
        priced = window.errors + price * window.parameters
        levels = np.argmin(priced, axis=1)
        least = priced[layers, levels]
        bound = math.fsum(least) - price * cap
        fits = window.cost(levels) <= cap
        if fits:
            feasible = levels
        if bound > best.bound:
            best = Dual(bound, priced - least[:, None], levels)
        if fits and step == 0:
            break  # no price is needed
        low, high = (low, price) if fits else (price, high)
    return best._replace(levels=feasible)
