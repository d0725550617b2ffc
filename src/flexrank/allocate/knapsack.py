"""One budget alone: the multiple-choice knapsack of FlexRank, appendix C.2, exactly.

    L(λ) = Σ_l min_j (e_lj + λ c_lj) − λ cap   ≤   min error within cap

The Lagrangian's best λ leaves few candidates in doubt. Call a candidate's excess how far its e + λ c lies above its
layer's minimum; then a profile within the cap has

    error = L(λ) + Σ_l excess_l + λ (cap − cost),

so that neither its excess nor what it leaves unspent at price λ may be above the distance from L(λ) to a known
profile. A dynamic program over what is left, pruned by that bound and by dominance, finds the optimum.
"""

import math
from typing import NamedTuple

import numpy as np

from flexrank.allocate.adjustment import spend
from flexrank.allocate.curves import Bools, CostTable, Floats, Ints

BISECTIONS = 80
STATES = 5_000  # of the dynamic program at once; what is dropped beyond them lowers the proven bound


class Dual(NamedTuple):
    """The best bound, its λ, each candidate's excess (L, K; infinite where padded), and levels (L,) within the cap."""

    bound: float
    price: float
    excess: Floats
    levels: Ints


class Best(NamedTuple):
    """Levels (L,) of least error, a proven lower bound of it; the Lagrangian's bound, excess (L, K) and rounding."""

    levels: Ints
    bound: float
    relaxed: float
    excess: Floats
    rounding: float


class States(NamedTuple):
    """Partial profiles: what they cost above every layer's least, their excess, and where they came from."""

    spent: Ints
    excess: Floats
    parents: Ints
    choices: Ints

    def take(self, index: Ints) -> "States":
        """The states at `index`."""
        return States(self.spent[index], self.excess[index], self.parents[index], self.choices[index])


def solve_window(table: CostTable, low: Ints, high: Ints, cap: int, gap: float = 0.0) -> Best:
    """The levels of least error between `low`, which keeps the cap, and `high`.

    Args:
        table: the layers' candidates.
        low: the least level of each layer.
        high: the largest level of each layer.
        cap: parameters allowed.
        gap: relative gap to stop at.

    Returns:
        The optimum to within `gap`; its bound is further off only where the dynamic program outgrew `STATES`. The
        excess is that of the window's candidates, from `low` on.
    """
    window = CostTable([curve.take(slice(a, b + 1)) for curve, a, b in zip(table.curves, low, high, strict=True)])
    dual = solve_dual(window, cap)
    best = dual.levels
    spend(window, best[None], [cap])
    error = window.error(best)
    rounding = 1e-12 * (abs(error) + dual.price * cap)  # what sums of e + λ c may be off by
    least = dual.bound
    if error - dual.bound > gap * abs(error):
        found, dropped = _search(window, dual, cap, error - dual.bound + rounding)
        if found is not None:
            spend(window, found[None], [cap])
            if window.error(found) < error:
                best, error = found, window.error(found)
        least = max(least, dropped)
    return Best(best + low, min(least, error), min(dual.bound, error), dual.excess, rounding)


def solve_dual(window: CostTable, cap: int) -> Dual:
    """Bisects λ ≥ 0 (error a parameter) for the largest L(λ); its cheaper side keeps the cap."""
    layers = np.arange(len(window.top))
    low, high = 0.0, float(np.ptp(window.errors)) + 1e-300
    bound, best_price = -math.inf, 0.0
    feasible = np.zeros_like(window.top)
    for step in range(BISECTIONS):
        price = (low + high) / 2 if step else 0.0
        priced = window.errors + price * window.parameters
        levels = np.argmin(priced, axis=1)
        value = math.fsum(priced[layers, levels]) - price * cap
        fits = window.cost(levels) <= cap
        if fits:
            feasible = levels
        if value > bound:
            bound, best_price = value, price
        if fits and step == 0:
            break  # no price is needed
        low, high = (low, price) if fits else (price, high)
    priced = window.errors + best_price * window.parameters
    excess = np.where(window.real, priced - priced.min(axis=1, keepdims=True), np.inf)
    return Dual(bound, best_price, excess, feasible)


def _search(window: CostTable, dual: Dual, cap: int, room: float) -> tuple[Ints | None, float]:
    """The best levels (L,) whose error is at most `room` above the dual's bound, and the least bound of any dropped."""
    doubt = dual.excess <= room
    costs = np.ma.masked_array(window.parameters, ~doubt)
    least, span = costs.min(axis=1).filled(0), np.ma.getdata(np.ma.ptp(costs, axis=1))
    spare = cap - int(least.sum())
    order = np.argsort(-span, kind="stable")  # what may still be spent falls fast, and with it what is left open
    later = span.sum() - np.cumsum(span[order])
    states = States(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))
    trail, dropped = [], math.inf
    for layer, rest in zip(order, later, strict=True):
        choices = np.flatnonzero(doubt[layer])
        grown = _grow(states, choices, window.parameters[layer] - least[layer], dual.excess[layer])
        bounds = grown.excess + dual.price * np.maximum(spare - grown.spent - rest, 0)
        kept = _undominated(grown, dual.price, (grown.spent <= spare) & (bounds <= room))
        if len(kept) > STATES:
            by_bound = np.argpartition(bounds[kept], STATES)
            dropped = min(dropped, dual.bound + float(bounds[kept[by_bound[STATES:]]].min()))
            kept = np.sort(kept[by_bound[:STATES]])
        if not len(kept):
            return None, dropped
        states = grown.take(kept)
        trail.append(states)
    state = int(np.argmin(states.excess + dual.price * (spare - states.spent)))
    levels = np.empty_like(window.top)
    for layer, states in zip(order[::-1], trail[::-1], strict=True):
        levels[layer], state = states.choices[state], states.parents[state]
    return levels, dropped


def _grow(states: States, choices: Ints, costs: Ints, excess: Floats) -> States:
    """Every state with every choice of a layer."""
    return States(
        np.add.outer(states.spent, costs[choices]).ravel(),
        np.add.outer(states.excess, excess[choices]).ravel(),
        np.repeat(np.arange(len(states.spent)), len(choices)),
        np.tile(choices, len(states.spent)),
    )


def _undominated(states: States, price: float, allowed: Bools) -> Ints:
    """Which of the allowed states have an error below that of all that spend as much or less, by rising cost."""
    index = np.flatnonzero(allowed)
    spent = states.spent[index]
    errors = states.excess[index] - price * spent  # but for a constant
    order = np.lexsort((errors, spent))
    before = np.append(np.inf, np.minimum.accumulate(errors[order])[:-1])
    return index[order[errors[order] < before]]
