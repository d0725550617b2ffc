"""The integer program of nested profiles, in HiGHS's terms.

With y[b, s] = 1 if budget b drops step s (a layer's step from one candidate to the next):

    minimise  Σ_b w_b Σ_s Δe_s y[b, s]
    subject to  Σ_s Δc_s y[b, s] ≥ c_full − cap_b     (each budget holds)
                y[b, s] ≤ y[b, s']                    (s' the next step of the same layer: a rank is a prefix)
                y[b', s] ≤ y[b, s]                    (b' the next larger budget: profiles are nested)

All but the first kind of constraint are differences of two variables, so that the program is integral but for one row
a budget, and its relaxation is close. Dropped steps are counted, not kept ones, so that the objective is the error
itself and the solver's relative gap is one of the error. What is known of each budget alone goes in too: which
candidates can be in no better solution (y is fixed there, or equal on both sides of one), and the least error.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flexrank.allocate.curves import Bools, Floats, Ints, LayerCurve

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# HiGHS's tolerances are absolute, 1e-6. A knapsack row is scaled to a largest step of 1 (below a million parameters a
# step the row is then exact, and a larger one is repaired), the objective to this, so that small errors count too.
OBJECTIVE_SCALE = 1e4


def solve_program(
    curves: Sequence[LayerCurve],
    caps: Sequence[int],
    weights: Sequence[float],
    gap: float,
    time_limit: float,
    kept: Bools,
    least: Sequence[float],
) -> tuple[Ints, float]:
    """Solves for `time_limit` seconds, else rounds the relaxation to smaller profiles.

    Args:
        curves: the layers' candidates.
        caps: parameters allowed, rising.
        weights: of the errors.
        gap: relative gap to stop at.
        time_limit: seconds.
        kept: the candidates (B, L, K) to choose among; some nested profiles of them keep the caps.
        least: for each budget a lower bound of its error.

    Returns:
        Levels (B, L) that keep the caps to the solver's tolerance, and the proven lower bound of the weighted error.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    errors = np.concatenate([-np.diff(curve.errors) for curve in curves])
    scale = (float(np.abs(errors).max(initial=0)) or 1.0) / OBJECTIVE_SCALE
    objective = np.outer(weights, errors / scale).ravel()
    if not len(objective):
        return np.zeros((len(caps), len(curves)), np.int64), 0.0
    order, slack = _order_rows(curves, kept)
    constraints = [
        LinearConstraint(*_knapsack_rows(curves, caps), np.inf),
        LinearConstraint(_budget_rows(errors / scale, len(caps)), np.array(least) / scale, np.inf),
        LinearConstraint(order, -slack, 0),
    ]
    bounds = Bounds(*_fixed(curves, kept))
    # HiGHS 1.12 (SciPy 1.17) may print a line of its own, "…transformNewIntegerFeasibleSolution…": its issue 2783.
    result = milp(
        objective,
        integrality=np.ones(len(objective), np.int64),
        bounds=bounds,
        constraints=constraints,
        options={"mip_rel_gap": gap, "time_limit": time_limit},
    )
    if result.x is not None:
        return _levels(curves, (result.x > 0.5).reshape(len(caps), -1)), result.mip_dual_bound * scale
    relaxed = milp(objective, bounds=bounds, constraints=constraints)
    part = np.asarray(relaxed.x)  # it has a solution, for the program has one; what it drops in part is dropped whole
    return _levels(curves, (part > 1e-6).reshape(len(caps), -1)), float(objective @ part) * scale


def _budget_rows(row: Floats, budgets: int) -> "csr_array":
    """One row a budget, over its own steps."""
    from scipy.sparse import csr_array, kron

    return csr_array(kron(np.eye(budgets), row[None, :]))


def _knapsack_rows(curves: Sequence[LayerCurve], caps: Sequence[int]) -> tuple["csr_array", Floats]:
    full = sum(int(curve.parameters[-1]) for curve in curves)
    row = np.concatenate([np.diff(curve.parameters) for curve in curves])
    needs = np.array([full - cap for cap in caps])
    return _budget_rows(row / row.max(), len(caps)), needs / row.max()


def _fixed(curves: Sequence[LayerCurve], kept: Bools) -> tuple[Floats, Floats]:
    """Bounds of y: 1 where no larger candidate than before the step is kept, 0 where no candidate before it is."""
    steps = np.arange(kept.shape[2]) < np.array([len(curve.ranks) - 1 for curve in curves])[:, None]
    smaller = np.logical_or.accumulate(kept, axis=2)
    larger = np.logical_or.accumulate(kept[:, :, ::-1], axis=2)[:, :, ::-1]
    larger = np.concatenate((larger[:, :, 1:], np.zeros_like(larger[:, :, :1])), axis=2)
    return np.where(larger, 0.0, 1.0)[:, steps].ravel(), np.where(smaller, 1.0, 0.0)[:, steps].ravel()


def _order_rows(curves: Sequence[LayerCurve], kept: Bools) -> tuple["csr_array", Floats]:
    """Rows −slack ≤ y_a − y_b ≤ 0: a prefix in every layer, and nested over the budgets.

    The slack is 0 between the two steps beside a candidate that is not kept, else 1.
    """
    from scipy.sparse import csr_array

    budgets = len(kept)
    layer = np.repeat(np.arange(len(curves)), [len(curve.ranks) - 1 for curve in curves])
    level = np.concatenate([np.arange(1, len(curve.ranks)) for curve in curves])
    steps = len(layer)
    inner = np.flatnonzero(layer[1:] == layer[:-1])
    smaller = [inner + budget * steps for budget in range(budgets)]
    larger = [index + 1 for index in smaller]
    slack = kept[:, layer[inner], level[inner]].astype(float).ravel()
    if budgets > 1:
        smaller.append(np.arange(steps, budgets * steps))
        larger.append(np.arange((budgets - 1) * steps))
        slack = np.append(slack, np.ones((budgets - 1) * steps))
    left, right = np.concatenate(smaller), np.concatenate(larger)
    rows = np.arange(len(left))
    values = np.repeat([1.0, -1.0], len(left))
    indices = (np.concatenate((rows, rows)), np.concatenate((left, right)))
    return csr_array((values, indices), shape=(len(left), budgets * steps)), slack


def _levels(curves: Sequence[LayerCurve], drops: Bools) -> Ints:
    """Levels (B, L): the steps kept in each layer. Dropped steps are each layer's last ones."""
    layer = np.repeat(np.arange(len(curves)), [len(curve.ranks) - 1 for curve in curves])
    kept = np.stack([np.bincount(layer, weights=~row, minlength=len(curves)) for row in drops]).astype(np.int64)
    return np.minimum.accumulate(kept[::-1])[::-1].copy()  # nested to the bit, not to the solver's tolerance
