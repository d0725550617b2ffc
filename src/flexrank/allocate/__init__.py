"""Rank allocation (FlexRank, section 3.2 and appendix C.2): which rank each layer has at each budget.

`paper` is the printed dynamic program; `joint` solves for the profiles of all budgets together, with nesting as a
constraint. Both need NumPy and SciPy only.
"""

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flexrank.allocate import joint, paper
from flexrank.allocate.chain import Anchor, fill_chain, mark_budgets
from flexrank.allocate.curves import CostTable, LayerCurve, monotone, read_curves
from flexrank.errors import FlexrankError
from flexrank.profiles import ChainEntry, ProfileChain, SensitivityTable
from flexrank.profiles.costs import MIN_SAVING, SLACK_SHARE, total_dense

__all__ = ["allocate_ranks"]

Weights = Mapping[float, float] | Sequence[float]


def allocate_ranks(
    table: SensitivityTable,
    budgets: Sequence[float],
    *,
    method: str = "joint",
    min_saving: float = MIN_SAVING,
    slack_share: float = SLACK_SHARE,
    savings: str = "parameters",
    weights: Weights | None = None,
    gap: float = 1e-3,
    time_limit: float = 60.0,
    grid: int | None = None,
    monotone_errors: bool | None = None,
) -> ProfileChain:
    """Chooses nested rank profiles from the layers' sensitivities, assuming that the layers' errors add up.

    `joint` minimises the weighted sum of the budgets' predicted errors under nesting, over the probed ranks that save
    enough. It fills the chain between the solved profiles with single steps, those that save most error per parameter
    first; a layer that is full in the next profile becomes full in one step. `paper` is the printed algorithm: the
    chain as it comes, and from it the best profile within each budget. It counts no slack and allows every probed rank
    (probe with `min_saving=0` and `slack_share=0` for it). Budget 1 is always the full model.

    Args:
        table: probe results S (L × K).
        budgets: distinct shares in (0, 1]: deployed over dense parameters of the factorised layers.
        method: "joint" or "paper".
        min_saving: for `joint`: the least share of the dense operations that a factorised layer saves.
        slack_share: for `joint`: the slack counted in every cost, as a share of the rank.
        savings: for `paper`: what savings count, "parameters" or "ranks". Budgets count parameters in either case.
        weights: for `joint`: weights of the budgets' errors, by budget or in the order of `budgets`; None for equal.
        gap: for `joint`: the proven relative gap at which the solver may stop, in [0, 1).
        time_limit: for `joint`: seconds for each integer program.
        grid: for `paper`: savings are counted in units of dense / grid parameters, rounded down; None counts exactly.
            With L layers, the front at a saving is as good as the exact front at L / grid of the dense parameters more.
        monotone_errors: whether errors that rise with the rank count as noise, and a monotone fit replaces the
            predicted errors (see `curves.monotone`). None means yes for `joint`, and no for `paper`, as printed.

    Returns:
        Nested profiles from the smallest to the full one; one is `requested` for each budget, never above it.

    Raises:
        FlexrankError: an argument is out of range, the table is incomplete, or a budget is below the smallest profile.
    """
    _check_options(method, savings, min_saving, slack_share, gap, time_limit, grid)
    is_joint = method == "joint"
    curves = read_curves(table, min_saving, slack_share) if is_joint else read_curves(table)
    if is_joint if monotone_errors is None else monotone_errors:
        curves = [monotone(curve) for curve in curves]
    budgets, alphas = _check_budgets(budgets, weights)
    caps, dense = _caps(table, curves, budgets), total_dense(table.shapes)
    if not is_joint:
        entries, label = _paper_chain(curves, budgets, caps, savings, grid and math.ceil(dense / grid))
        return ProfileChain(entries, dense, table.footprint, label)
    entries, solved_gap = _joint_chain(curves, budgets, caps, alphas, gap, time_limit)
    return ProfileChain(entries, dense, table.footprint, "joint", solved_gap)


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
    curves: Sequence[LayerCurve], budgets: Sequence[float], caps: Sequence[int], savings: str, unit: int | None
) -> tuple[tuple[ChainEntry, ...], str]:
    counted = [curve.ranks if savings == "ranks" else curve.parameters for curve in curves]
    saved = [values[-1] - values[:-1] for values in counted]
    selection = paper.select_nested(saved, [curve.errors[:-1] for curve in curves], unit or 1)
    units = f" in units of {unit}" if unit else ""
    label = f"paper, savings in {savings}{units}, {selection.states} states"
    table = CostTable(curves)
    levels = np.where(selection.choices == paper.NO_SAVING, table.top[:, None], selection.choices).T[::-1]
    least = [np.zeros_like(table.top)] if levels[0].any() else []
    full = [table.top] if (levels[-1] < table.top).any() else []
    return mark_budgets(table.entries(np.stack([*least, *levels, *full])), budgets, caps), label


def _check_options(
    method: str, savings: str, min_saving: float, slack_share: float, gap: float, time_limit: float, grid: int | None
) -> None:
    is_joint = method == "joint"
    wrong = {
        f"method {method!r} is unknown; it is 'joint' or 'paper'": method not in ("joint", "paper"),
        f"savings {savings!r} is unknown; it is 'parameters' or 'ranks'": savings not in ("parameters", "ranks"),
        "savings='ranks' belongs to method='paper'; 'joint' counts parameters": is_joint and savings == "ranks",
        f"min_saving {min_saving} is out of range; it is in [0, 1)": not 0 <= min_saving < 1,
        f"slack_share {slack_share} is out of range; it is in [0, 1)": not 0 <= slack_share < 1,
        f"gap {gap} is out of range; it is in [0, 1)": not 0 <= gap < 1,
        f"time_limit {time_limit} is out of range; it is in seconds, above 0": not time_limit > 0,
        f"grid {grid} is out of range; it is at least 2, or None": grid is not None and grid < 2,
        "grid belongs to method='paper' with savings='parameters'": bool(grid) and (is_joint or savings == "ranks"),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise FlexrankError(message)


def _check_budgets(budgets: Sequence[float], weights: Weights | None) -> tuple[list[float], list[float]]:
    """The budgets in ascending order, and their weights."""
    if not isinstance(budgets, Iterable) or not all(isinstance(budget, numbers.Real) for budget in budgets):
        raise FlexrankError(f"budgets is {budgets!r}; it is a list of numbers, such as [0.5]")
    budgets = list(budgets)
    if not budgets:
        raise FlexrankError("no budget is given; give at least one, in (0, 1]")
    for budget in budgets:
        if not 0 < budget <= 1:
            raise FlexrankError(f"budget {budget} is out of range; it is a share of dense parameters, in (0, 1]")
        if budgets.count(budget) > 1:
            raise FlexrankError(f"budget {budget} is given twice; each budget once")
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
    if not isinstance(weights, Sequence) or not all(isinstance(weight, numbers.Real) for weight in weights):
        raise FlexrankError(f"weights is {weights!r}; it is a list of numbers, one for each budget")
    if len(weights) != len(budgets):
        raise FlexrankError(f"{len(weights)} weights for {len(budgets)} budgets; give one weight for each budget")
    for budget, weight in zip(budgets, weights, strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise FlexrankError(f"budget {budget} has weight {weight}; weights are positive and finite")
    return [float(weight) for weight in weights]


def _caps(table: SensitivityTable, curves: Sequence[LayerCurve], budgets: Sequence[float]) -> list[int]:
    """The parameters that each budget allows, rounded down; budgets are ascending."""
    dense = total_dense(table.shapes)
    least = sum(int(curve.parameters[0]) for curve in curves)
    caps = [math.floor(budget * dense * (1 + 1e-12)) for budget in budgets]  # as `ProfileChain.entry_at` rounds
    if caps[0] < least:
        offered = math.ceil(least / dense * 1e4) / 1e4
        raise FlexrankError(f"budget {budgets[0]} is too small; the least that the probed ranks allow is {offered}")
    return caps
