"""All requested profiles together, nested by constraint: an integer program, solved by HiGHS.

With y[b, s] = 1 if budget b drops step s (a layer's step from one candidate to the next):

    minimise  Σ_b w_b Σ_s Δe_s y[b, s]
    subject to  Σ_s Δc_s y[b, s] ≥ c_full − cap_b     (each budget holds)
                y[b, s] ≤ y[b, s']                    (s' the next step of the same layer: a rank is a prefix)
                y[b', s] ≤ y[b, s]                    (b' the next larger budget: profiles are nested)

All but the first kind of constraint are differences of two variables, so that the program is integral but for one row
a budget, and its relaxation is close. Dropped steps are counted, not kept ones, so that the objective is the error
itself and the solver's relative gap is one of the error.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flexrank.allocation.curves import Bools, CostTable, Floats, Ints, LayerCurve

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# HiGHS's tolerances are absolute, 1e-6. A knapsack row is scaled to a largest step of 1 (below a million parameters a
# step the row is then exact, and a larger one is repaired), the objective to this, so that small errors count too.
OBJECTIVE_SCALE = 1e4
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
    levels, bound = _solve_program(curves, caps, weights, gap, time_limit)
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


def solve_window(
    table: CostTable, low: Ints, high: Ints, cap: int, gap: float, time_limit: float
) -> tuple[Ints, float]:
    """One budget's levels (L,) between `low`, which keeps the cap, and `high`; and the bound of its error."""
    window = [curve.take(slice(a, b + 1)) for curve, a, b in zip(table.curves, low, high, strict=True)]
    levels, bound = _solve_program(window, [cap], [1.0], gap, time_limit)
    inside = CostTable(window)
    repair(inside, levels, [cap])
    spend(inside, levels, [cap])
    base = math.fsum(float(curve.errors[-1]) for curve in window)  # the program counts errors from `high`
    return levels[0] + low, bound + base


def _objective(table: CostTable, levels: Ints, weights: Sequence[float]) -> float:
    return math.fsum(weight * table.error(row) for weight, row in zip(weights, levels, strict=True))


def _solve_program(
    curves: Sequence[LayerCurve], caps: Sequence[int], weights: Sequence[float], gap: float, time_limit: float
) -> tuple[Ints, float]:
    """Levels (B, L) to the solver's tolerance, and the proven lower bound of the weighted error from the last level."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    errors = np.concatenate([-np.diff(curve.errors) for curve in curves])
    scale = (float(np.abs(errors).max(initial=0)) or 1.0) / OBJECTIVE_SCALE
    objective = np.outer(weights, errors / scale).ravel()
    if not len(objective):
        return np.zeros((len(caps), len(curves)), np.int64), 0.0
    knapsack, needs = _knapsack_rows(curves, caps)
    constraints = [LinearConstraint(knapsack, needs, np.inf), LinearConstraint(_order_rows(curves, len(caps)), -1, 0)]
    result = milp(
        objective,
        integrality=np.ones(len(objective), np.int64),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": gap, "time_limit": time_limit},
    )
    if result.x is not None:
        return _levels(curves, (result.x > 0.5).reshape(len(caps), -1)), result.mip_dual_bound * scale
    relaxed = milp(objective, bounds=Bounds(0, 1), constraints=constraints)
    # Dropping every step keeps every cap, so the relaxation has a solution; what it drops in part is dropped whole.
    part = np.asarray(relaxed.x)
    return _levels(curves, (part > 1e-6).reshape(len(caps), -1)), float(objective @ part) * scale


def _knapsack_rows(curves: Sequence[LayerCurve], caps: Sequence[int]) -> tuple["csr_array", Floats]:
    from scipy.sparse import csr_array, kron

    full = sum(int(curve.parameters[-1]) for curve in curves)
    row = np.concatenate([np.diff(curve.parameters) for curve in curves])
    needs = np.array([full - cap for cap in caps])
    return csr_array(kron(np.eye(len(caps)), row[None, :] / row.max())), needs / row.max()


def _order_rows(curves: Sequence[LayerCurve], budgets: int) -> "csr_array":
    """Rows y_a − y_b ≤ 0: a prefix in every layer, and nested over the budgets."""
    from scipy.sparse import csr_array

    layer = np.repeat(np.arange(len(curves)), [len(curve.ranks) - 1 for curve in curves])
    steps = len(layer)
    inner = np.flatnonzero(layer[1:] == layer[:-1])
    smaller = [inner + budget * steps for budget in range(budgets)]
    larger = [index + 1 for index in smaller]
    if budgets > 1:
        smaller.append(np.arange(steps, budgets * steps))
        larger.append(np.arange((budgets - 1) * steps))
    left, right = np.concatenate(smaller), np.concatenate(larger)
    rows = np.arange(len(left))
    values = np.repeat([1.0, -1.0], len(left))
    indices = (np.concatenate((rows, rows)), np.concatenate((left, right)))
    return csr_array((values, indices), shape=(len(left), budgets * steps))


def _levels(curves: Sequence[LayerCurve], drops: Bools) -> Ints:
    """Levels (B, L): the steps kept in each layer. Dropped steps are each layer's last ones."""
    layer = np.repeat(np.arange(len(curves)), [len(curve.ranks) - 1 for curve in curves])
    kept = np.stack([np.bincount(layer, weights=~row, minlength=len(curves)) for row in drops]).astype(np.int64)
    return np.minimum.accumulate(kept[::-1])[::-1].copy()  # nested to the bit, not to the solver's tolerance


def repair(table: CostTable, levels: Ints, caps: Sequence[int]) -> None:
    """Lowers profiles that overrun their cap by the solver's tolerance, in place, by steps of least error a saving."""
    layers = np.arange(levels.shape[1])
    for budget in range(len(caps) - 1, -1, -1):
        row = levels[budget]
        while table.cost(row) > caps[budget]:
            below = np.maximum(row - 1, 0)
            saved = table.parameters[layers, row] - table.parameters[layers, below]
            lost = table.errors[layers, below] - table.errors[layers, row]
            layer = int(np.argmin(np.where(saved > 0, lost / np.maximum(saved, 1), np.inf)))
            row[layer] -= 1
        levels[:budget] = np.minimum(levels[:budget], row)


def spend(table: CostTable, levels: Ints, caps: Sequence[int]) -> None:
    """Spends spare parameters, in place, by raises of most error saved a parameter; the profiles stay nested."""
    layers = np.arange(levels.shape[1])[:, None]
    candidates = np.arange(table.parameters.shape[1])[None, :]
    for budget in range(len(caps) - 1, -1, -1):
        row = levels[budget]
        limit = levels[budget + 1] if budget + 1 < len(caps) else table.top
        spare = caps[budget] - table.cost(row)
        while True:
            spent = table.parameters - table.parameters[layers, row[:, None]]
            saved = table.errors[layers, row[:, None]] - table.errors
            allowed = (candidates > row[:, None]) & (candidates <= limit[:, None]) & (spent <= spare) & (saved >= 0)
            if not allowed.any():
                break
            best = np.argmax(np.where(allowed, saved / np.maximum(spent, 1), -np.inf))
            layer, level = divmod(int(best), table.parameters.shape[1])
            spare -= int(spent[layer, level])
            row[layer] = level


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
