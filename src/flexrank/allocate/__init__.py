"""Rank allocation (FlexRank, sections 3.2 and appendix C.2): which rank each layer has at each budget.

`paper` is the printed dynamic program; `joint` solves the profiles of all budgets together, nested by constraint.
NumPy and SciPy only.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from flexrank.allocate import joint, paper
from flexrank.allocate.chain import Anchor, fill_chain
from flexrank.allocate.curves import CostTable, LayerCurve, monotone, read_curves, refine, total_dense, undominated
from flexrank.allocate.knapsack import solve_window
from flexrank.errors import FlexrankError
from flexrank.profiles import ChainEntry, ProfileChain, SensitivityTable

__all__ = ["allocate_ranks", "unconstrained_bounds"]

Weights = Mapping[float, float] | Sequence[float]


def allocate_ranks(
    table: SensitivityTable,
    budgets: Sequence[float],
    *,
    method: str = "joint",
    savings: str = "parameters",
    weights: Weights | None = None,
    gap: float = 1e-3,
    time_limit: float = 60.0,
    candidates_per_layer: int | None = None,
    grid: int | None = None,
    monotone_errors: bool | None = None,
) -> ProfileChain:
    """Chooses nested rank profiles from the layers' sensitivities, errors taken to add up over the layers.

    `joint` minimises the weighted sum of the budgets' predicted errors under nesting (module `joint`: each budget's own
    optimum, which is often nested already, else an integer program), and fills the chain between the solved profiles
    by single steps of least error per saving.

    `paper` is the printed algorithm (module `paper`): its chain as it comes, and of it the best profile within each
    budget. The least and the full profile are added where the chain lacks them.

    Budget 1 is always the full model.

    Args:
        table: probe results S (L × K).
        budgets: deployed over dense parameters of the factorised layers, each in (0, 1], none twice.
        method: "joint" or "paper".
        savings: what `paper` counts, "parameters" or "ranks". The budgets count parameters in either case.
        weights: of the budgets' errors in `joint`: a mapping from budget, or a sequence in the order of `budgets`;
            all equal if None. `paper` has none.
        gap: relative gap, proven, at which `joint` may stop, in [0, 1).
        time_limit: seconds for `joint`'s integer program; the chain's `gap` tells what was reached.
        candidates_per_layer: None for the probed ranks alone; else `joint` also chooses among interpolated ranks
            between them, about this many a layer in all, evenly placed in cost (see `curves.refine`).
        grid: None for exact savings in `paper`; else parameters are counted in units of dense / grid, each layer's
            saving rounded down, so that no budget is overrun. With L layers the front found at a saving is then at
            least as good as the exact front at that saving plus L / grid of the dense parameters.
        monotone_errors: whether errors that rise with the rank are taken for noise and fitted (see `curves.monotone`);
            the predicted errors are then the fit's. None: yes for `joint`, no for `paper`, as printed. Where the probed
            errors never rise it makes no difference; elsewhere compare the two methods with the same setting.

    Returns:
        Profiles from the least to the full, nested; one `requested` for each budget, never above it.

    Raises:
        FlexrankError: an argument is out of range, the table is not whole, or a budget is below the least profile.
    """
    _check_options(method, savings, gap, time_limit, candidates_per_layer, grid)
    curves = read_curves(table)
    if method == "joint" if monotone_errors is None else monotone_errors:
        curves = [monotone(curve) for curve in curves]
    budgets, alphas = _check_budgets(budgets, weights)
    caps = _caps(table, curves, budgets)
    solved_gap: float | None = None
    if method == "paper":
        entries, label = _paper_chain(curves, budgets, caps, savings, _grid_unit(table, grid))
    else:
        curves = _joint_curves(table, curves, candidates_per_layer)
        entries, solved_gap = _joint_chain(curves, budgets, caps, alphas, gap, time_limit)
        label = "joint" if candidates_per_layer is None else f"joint, {candidates_per_layer} candidates a layer"
    return ProfileChain(entries, total_dense(table), table.footprint, label, solved_gap)


def unconstrained_bounds(
    table: SensitivityTable,
    budgets: Sequence[float],
    *,
    candidates_per_layer: int | None = None,
    monotone_errors: bool = True,
) -> tuple[float, ...]:
    """A proven lower bound of the error of any profile within each budget, nested or not, in the order of `budgets`.

    It is the unconstrained Pareto front to within `joint.CLOSE`, unless the search outgrows `knapsack.STATES`.

    Raises:
        FlexrankError: as `allocate_ranks`.
    """
    _check_options("joint", "parameters", 0.0, 1.0, candidates_per_layer, None)
    curves = [monotone(curve) if monotone_errors else curve for curve in read_curves(table)]
    rising, _ = _check_budgets(budgets, None)
    caps = _caps(table, curves, rising)
    curves = _joint_curves(table, curves, candidates_per_layer)
    costs = CostTable(curves)
    bounds = {
        budget: solve_window(costs, np.zeros_like(costs.top), costs.top, cap, joint.CLOSE).bound
        for budget, cap in zip(rising, caps, strict=True)
    }
    return tuple(bounds[float(budget)] for budget in budgets)


def _joint_curves(table: SensitivityTable, curves: Sequence[LayerCurve], count: int | None) -> list[LayerCurve]:
    falling = [curve if (np.diff(curve.errors) <= 0).all() else undominated(curve) for curve in curves]
    return falling if count is None else [refine(curve, table.shapes[curve.name], count) for curve in falling]


def _joint_chain(
    curves: Sequence[LayerCurve],
    budgets: Sequence[float],
    caps: Sequence[int],
    weights: Sequence[float],
    gap: float,
    time_limit: float,
) -> tuple[tuple[ChainEntry, ...], float]:
    solved = [index for index, budget in enumerate(budgets) if budget < 1]
    anchors: list[Anchor] = []
    solved_gap = 0.0
    if solved:
        solution = joint.solve_nested(curves, [caps[i] for i in solved], [weights[i] for i in solved], gap, time_limit)
        solved_gap = solution.gap
        anchors = [(levels, budgets[i]) for levels, i in zip(solution.levels, solved, strict=True)]
    if len(solved) < len(budgets):
        anchors.append((CostTable(curves).top, 1.0))
    return fill_chain(curves, anchors), solved_gap


def _paper_chain(
    curves: Sequence[LayerCurve], budgets: Sequence[float], caps: Sequence[int], savings: str, unit: int
) -> tuple[tuple[ChainEntry, ...], str]:
    counted = [curve.ranks if savings == "ranks" else curve.parameters for curve in curves]
    label = f"paper, savings in {savings}"
    if savings == "ranks":
        unit = 1
    elif unit > 1:
        label += f" in units of {unit}"
    selection = paper.select_nested(
        [values[-1] - values[:-1] for values in counted], [curve.errors[:-1] for curve in curves], unit
    )
    label += f", {selection.states} states"
    table = CostTable(curves)
    levels = np.where(selection.choices == paper.NO_SAVING, table.top[:, None], selection.choices).T[::-1]
    least = [np.zeros_like(table.top)] if levels[0].any() else []
    full = [table.top] if (levels[-1] < table.top).any() else []
    return _mark_budgets(table.entries(np.stack([*least, *levels, *full])), budgets, caps), label


def _mark_budgets(
    entries: Sequence[ChainEntry], budgets: Sequence[float], caps: Sequence[int]
) -> tuple[ChainEntry, ...]:
    """SelectProfiles: the largest profile of the chain within each budget, which is its best, marked as requested."""
    costs = [entry.parameters for entry in entries]
    answers: dict[int, list[float]] = {}
    for budget, cap in zip(budgets, caps, strict=True):
        answers.setdefault(int(np.searchsorted(costs, cap, side="right")) - 1, []).append(budget)
    marked: list[ChainEntry] = []
    for index, entry in enumerate(entries):
        if index not in answers:
            marked.append(entry)
        for budget in answers.get(index, ()):
            marked.append(dataclasses.replace(entry, requested=budget))
    return tuple(marked)


def _check_options(
    method: str, savings: str, gap: float, time_limit: float, candidates_per_layer: int | None, grid: int | None
) -> None:
    if method not in ("joint", "paper"):
        raise FlexrankError(f"method {method!r} is unknown; it is 'joint' or 'paper'")
    if savings not in ("parameters", "ranks"):
        raise FlexrankError(f"savings {savings!r} is unknown; it is 'parameters' or 'ranks'")
    if method == "joint" and savings == "ranks":
        raise FlexrankError("savings='ranks' belongs to method='paper'; 'joint' counts parameters")
    if not 0 <= gap < 1:
        raise FlexrankError(f"gap {gap} is out of range; it is a relative gap in [0, 1)")
    if not time_limit > 0:
        raise FlexrankError(f"time_limit {time_limit} is out of range; it is in seconds, above 0")
    for name, count in (("candidates_per_layer", candidates_per_layer), ("grid", grid)):
        if count is not None and count < 2:
            raise FlexrankError(f"{name} {count} is out of range; it is at least 2, or None")
    if candidates_per_layer is not None and method == "paper":
        raise FlexrankError("candidates_per_layer belongs to method='joint'; 'paper' chooses among the probed ranks")
    if grid is not None and (method == "joint" or savings == "ranks"):
        raise FlexrankError("grid belongs to method='paper' with savings='parameters'")


def _check_budgets(budgets: Sequence[float], weights: Weights | None) -> tuple[list[float], list[float]]:
    """Budgets by rising size, and their weights."""
    budgets = list(budgets)
    if not budgets:
        raise FlexrankError("no budget is given; give at least one, in (0, 1]")
    for budget in budgets:
        if not 0 < budget <= 1:
            raise FlexrankError(f"budget {budget} is out of range; it is a fraction of the dense layers, in (0, 1]")
    if len(set(budgets)) < len(budgets):
        twice = next(budget for budget in budgets if list(budgets).count(budget) > 1)
        raise FlexrankError(f"budget {twice} is given twice; each budget once")
    pairs = sorted(zip(map(float, budgets), _weights_of(budgets, weights), strict=True))
    return [budget for budget, _ in pairs], [weight for _, weight in pairs]


def _weights_of(budgets: Sequence[float], weights: Weights | None) -> list[float]:
    if weights is None:
        return [1.0] * len(budgets)
    if isinstance(weights, Mapping):
        odd = sorted(set(weights) ^ set(budgets))
        if odd:
            raise FlexrankError(f"weights and budgets differ at budget {odd[0]}; give one weight for each budget")
        weights = [weights[budget] for budget in budgets]
    if len(weights) != len(budgets):
        raise FlexrankError(f"{len(weights)} weights for {len(budgets)} budgets; give one weight for each budget")
    for budget, weight in zip(budgets, weights, strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise FlexrankError(f"budget {budget} has weight {weight}; weights are positive and finite")
    return [float(weight) for weight in weights]


def _caps(table: SensitivityTable, curves: Sequence[LayerCurve], budgets: Sequence[float]) -> list[int]:
    """Parameters allowed by each rising budget, rounded down."""
    dense = total_dense(table)
    least = sum(int(curve.parameters[0]) for curve in curves)
    caps = [math.floor(budget * dense) for budget in budgets]
    if caps[0] < least:
        offered = math.ceil(least / dense * 1e4) / 1e4
        raise FlexrankError(f"budget {budgets[0]} is too small; the least that the probed ranks allow is {offered}")
    return caps


def _grid_unit(table: SensitivityTable, grid: int | None) -> int:
    return 1 if grid is None else max(1, math.ceil(total_dense(table) / grid))
