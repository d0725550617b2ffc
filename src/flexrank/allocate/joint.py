"""The profiles of all budgets together, with nesting as a constraint: an integer program, solved by HiGHS.

With y[b, s] = 1 if budget b drops step s (a layer's step from one candidate to the next):

    minimise    Σ_b w_b Σ_s Δe_s y[b, s]
    subject to  Σ_s Δc_s y[b, s] ≥ c_full − cap_b     (each budget is kept)
                y[b, s] ≤ y[b, s']                    (s' the next step of the same layer: a rank is a prefix)
                y[b', s] ≤ y[b, s]                    (b' the next larger budget: profiles are nested)

All constraints except the first kind are differences of two variables, so the program is integral except for one row
per budget, and its relaxation is close. The variables stand for dropped steps, not kept ones, so the objective is
the error itself and the solver's relative gap is that of the error.
"""

import contextlib
import dataclasses
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flexrank.allocate.chain import fill_chain
from flexrank.allocate.curves import Bools, CostTable, Floats, Ints, LayerCurve
from flexrank.errors import FlexrankError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: HiGHS's tolerances are absolute, 1e-6: the largest error is scaled to ERROR_SCALE, so small ones matter, and
#: costs are counted in whole units, at most COST_UNITS a step, rounded up so no cap is exceeded.
ERROR_SCALE, COST_UNITS = 1e4, 2**16
#: Weight of all dropped parameters together, relative to the largest error: of profiles equal in error the larger wins.
TIE = 1e-7
#: The largest error over about the smallest one that the solver still resolves.
MAX_ERROR_RATIO = 1e5
#: A program is solved to the gap divided by this, which leaves room for what nesting adds.
GAP_SHARE = 4
#: SciPy's status of a HiGHS program that ran out of time.
TIME_LIMIT = 1

log = logging.getLogger("flexrank")


class Solution(NamedTuple):
    """Nested profiles as levels (B, L), their weighted error, and a proven lower bound on it."""

    levels: Ints
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """(objective − bound) / max(|objective|, |bound|); 0 if the two agree to 1e-9."""
        difference = self.objective - self.bound
        scale = max(abs(self.objective), abs(self.bound))
        return 0.0 if difference <= 1e-9 * scale else difference / scale


def solve_nested(
    curves: Sequence[LayerCurve], caps: Sequence[int], weights: Sequence[float], gap: float, time_limit: float
) -> Solution:
    """Finds the nested profiles of least weighted error for ascending caps.

    The optima of the separate budgets add up to a bound. Profiles of dozens of layers are almost nested by themselves,
    so solving each budget with the previous profile as its minimum often proves the gap; otherwise one joint program is
    solved. Every cap (parameters) must admit the first candidate of all layers. `time_limit` is in seconds per program.

    Raises:
        FlexrankError: HiGHS finds no solution within `time_limit`.
    """
    program = _Program(_clip_errors(curves, caps[0]), gap / GAP_SHARE, time_limit)
    alone = [program.solve([cap], [1.0]) for cap in caps]
    bound = float(np.dot(weights, [solution.bound for solution in alone]))
    rows: list[Ints] = []
    for cap, solution in zip(caps, alone, strict=True):
        row = solution.levels[0]
        if rows and (row < rows[-1]).any():
            row = program.solve([cap], [1.0], least=rows[-1]).levels[0]
        rows.append(row)
    nested = Solution(np.stack(rows), program.error(rows, weights), bound)
    if nested.gap <= gap:
        return nested
    together = program.solve(caps, weights)
    best = min(nested, together, key=lambda solution: solution.objective)
    return best._replace(bound=min(best.objective, max(bound, together.bound)))


def _clip_errors(curves: Sequence[LayerCurve], cap: int) -> Sequence[LayerCurve]:
    """Clips errors to twice the error of one profile within the cap, if the largest is over MAX_ERROR_RATIO times that.

    No better profile has a larger error, which would hide the others within the solver's tolerance.
    """
    within = [entry for entry in fill_chain(curves, []) if entry.parameters <= cap]
    lowest = sum(min(0.0, float(curve.errors.min())) for curve in curves)
    limit = 2 * (within[-1].error - lowest)
    largest = max(float(curve.errors.max()) for curve in curves)
    if not 0 < limit < largest / MAX_ERROR_RATIO:
        return curves
    return [dataclasses.replace(curve, errors=np.minimum(curve.errors, limit)) for curve in curves]


class _Program:
    """The integer program of these layers, for any caps."""

    def __init__(self, curves: Sequence[LayerCurve], gap: float, time_limit: float):
        self._curves, self._gap, self._time_limit = curves, gap, time_limit
        self._table = CostTable(curves)
        errors = np.concatenate([-np.diff(curve.errors) for curve in curves])
        costs = np.concatenate([np.diff(curve.parameters) for curve in curves])
        self._scale = (float(np.abs(errors).max(initial=0)) or 1.0) / ERROR_SCALE
        self._step_errors = errors / self._scale + TIE * ERROR_SCALE * costs / max(1, costs.sum())

    def error(self, rows: Iterable[Ints], weights: Sequence[float]) -> float:
        """Weighted error of profiles (B, L)."""
        return math.fsum(weight * self._table.error(row) for weight, row in zip(weights, rows, strict=True))

    def solve(self, caps: Sequence[int], weights: Sequence[float], least: Ints | None = None) -> Solution:
        """Solves for nested profiles within these caps alone, each at least `least` (L,)."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        if not len(self._step_errors):
            return Solution(np.zeros((len(caps), len(self._curves)), np.int64), 0.0, 0.0)
        objective = np.outer(weights, self._step_errors).ravel()
        with _quiet_output():
            result = milp(
                objective,
                integrality=np.ones(len(objective), np.int64),
                bounds=Bounds(0, 1 if least is None else np.tile(self._drop_bounds(least), len(caps))),
                constraints=[
                    LinearConstraint(*_budget_rows(self._curves, caps), np.inf),
                    LinearConstraint(_order_rows(self._curves, len(caps)), -np.inf, 0),
                ],
                options={"mip_rel_gap": self._gap, "time_limit": self._time_limit},
            )
        if result.status == TIME_LIMIT and result.x is not None:
            log.warning("allocation: no proof of the gap within %g s; give a larger time_limit", self._time_limit)
        if result.x is None:
            raise FlexrankError(
                f"no allocation within {self._time_limit:g} s: {result.message}; give a larger time_limit"
            )
        levels = _levels(self._curves, (result.x > 0.5).reshape(len(caps), -1))
        error = self.error(levels, weights)
        return Solution(levels, error, min(error, float(result.mip_dual_bound) * self._scale))

    def _drop_bounds(self, least: Ints) -> Floats:
        """1 for the steps above the least levels, 0 for the steps up to them."""
        steps = [np.arange(1, len(curve.ranks)) > level for curve, level in zip(self._curves, least, strict=True)]
        return np.concatenate(steps).astype(float)


@contextlib.contextmanager
def _quiet_output() -> Iterator[None]:
    """Discards standard output inside the block, because HiGHS 1.12 prints a line to it (its issue 2783)."""
    if sys.stdout is not None:  # as it is without a console
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # it is closed, as in some daemons: there is nothing to discard
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _budget_rows(curves: Sequence[LayerCurve], caps: Sequence[int]) -> tuple["csr_array", Floats]:
    """For each budget, the units that its dropped steps save, and the units that they must save, less half a unit.

    A cap less than a unit above the smallest profile is below it in whole units: then all steps must be dropped.
    """
    from scipy.sparse import block_diag, csr_array

    largest = max(int(np.diff(curve.parameters).max(initial=0)) for curve in curves)
    unit = max(1, -(-largest // COST_UNITS))
    units = [-(-curve.parameters // unit) for curve in curves]
    saved = np.concatenate([np.diff(one) for one in units])
    needs = np.array([sum(int(one[-1]) for one in units) - cap // unit for cap in caps])
    is_least = needs > saved.sum()
    rows = [np.ones((1, len(saved))) if least else saved[None, :] for least in is_least]
    return csr_array(block_diag(rows)), np.where(is_least, len(saved), needs) - 0.5


def _order_rows(curves: Sequence[LayerCurve], budgets: int) -> "csr_array":
    """Rows y_a − y_b ≤ 0, so kept steps are a prefix in every layer, and nested over the budgets."""
    from scipy.sparse import csr_array

    layer = np.repeat(np.arange(len(curves)), [len(curve.ranks) - 1 for curve in curves])
    steps = len(layer)
    inner = np.flatnonzero(layer[1:] == layer[:-1])
    prefix = (inner + steps * np.arange(budgets)[:, None]).ravel()
    larger_budget = np.arange(steps, budgets * steps)
    low = np.concatenate((prefix, larger_budget))
    high = np.concatenate((prefix + 1, larger_budget - steps))
    rows = np.arange(len(low))
    values = np.repeat([1.0, -1.0], len(low))
    indices = (np.concatenate((rows, rows)), np.concatenate((low, high)))
    return csr_array((values, indices), shape=(len(low), budgets * steps))


def _levels(curves: Sequence[LayerCurve], drops: Bools) -> Ints:
    """Levels (B, L): the number of steps kept in each layer, exactly nested; dropped steps are the layer's last."""
    layer = np.repeat(np.arange(len(curves)), [len(curve.ranks) - 1 for curve in curves])
    kept = np.stack([np.bincount(layer, weights=~row, minlength=len(curves)) for row in drops]).astype(np.int64)
    return np.minimum.accumulate(kept[::-1])[::-1].copy()
