"""What each layer may be cut to: candidate ranks with their costs and predicted errors."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexrank.errors import FlexrankError
from flexrank.profiles import ChainEntry, RankProfile, SensitivityTable
from flexrank.profiles.costs import expected_parameters, is_worth_it

Ints = NDArray[np.signedinteger]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class LayerCurve:
    """The K candidates of one layer by ascending rank; the last is full rank."""

    name: str
    ranks: Ints
    parameters: Ints  # expected when deployed
    errors: Floats  # predicted rise of the probe loss, 0 at full rank

    def take(self, kept: slice | Bools | Ints) -> "LayerCurve":
        """The curve with only these candidates."""
        return LayerCurve(self.name, self.ranks[kept], self.parameters[kept], self.errors[kept])


def read_curves(table: SensitivityTable, min_saving: float = 0.0, slack_share: float = 0.0) -> list[LayerCurve]:
    """Checks the table, and reads each layer's probed points that save enough to be worth it, and full rank.

    Raises:
        FlexrankError: it is no table, is empty or names different layers, or a layer's ranks do not rise to full rank,
            or an error is not finite, or the error at full rank is not 0.
    """
    if not isinstance(table, SensitivityTable):
        wanted = "it is what probe_sensitivity or SensitivityTable.from_json returns"
        raise FlexrankError(f"the sensitivity table is a {type(table).__name__}; {wanted}")
    if not table.shapes:
        raise FlexrankError("the sensitivity table holds no layer; probe a model with factorised layers")
    for part, names in (("ranks", table.ranks), ("errors", table.errors)):
        if names.keys() != table.shapes.keys():
            odd = sorted(names.keys() ^ table.shapes.keys())[0]
            raise FlexrankError(f"sensitivity table: layer {odd!r} is in only one of shapes and {part}")
    return [_read_curve(table, name, min_saving, slack_share) for name in table.shapes]


def _read_curve(table: SensitivityTable, name: str, min_saving: float, slack_share: float) -> LayerCurve:
    shape, ranks, errors = table.shapes[name], table.ranks[name], table.errors[name]
    _check_curve(name, min(shape), ranks, errors)
    kept = np.array([is_worth_it(shape, rank, min_saving, slack_share) for rank in ranks])
    parameters = [expected_parameters(shape, rank, slack_share) for rank in ranks]
    curve = LayerCurve(name, np.array(ranks, np.int64), np.array(parameters, np.int64), np.array(errors, np.float64))
    return curve.take(kept)


def _check_curve(name: str, full: int, ranks: Sequence[int], errors: Sequence[float]) -> None:
    rising = all(small < large for small, large in zip(ranks, ranks[1:], strict=False))
    if not ranks or ranks[0] < 1 or not rising or ranks[-1] != full:
        raise FlexrankError(f"layer {name!r} is probed at ranks {list(ranks)}; they must rise from 1 or more to {full}")
    if len(errors) != len(ranks):
        raise FlexrankError(f"layer {name!r} has {len(errors)} errors for {len(ranks)} probed ranks; give one each")
    for rank, error in zip(ranks, errors, strict=True):
        if not math.isfinite(error):
            raise FlexrankError(f"layer {name!r} has error {error} at rank {rank}; probe errors must be finite")
    if errors[-1] != 0:
        raise FlexrankError(f"layer {name!r} has error {errors[-1]} at full rank; errors are rises over it, so 0 there")


def monotone(curve: LayerCurve) -> LayerCurve:
    """The least-squares fit whose errors neither rise with the rank nor fall below 0, the error at full rank.

    A larger rank is a longer prefix of the same factors, so a rise, or an error below 0, is noise of the probe. A
    curve that needs no fit keeps every bit. Without the fit, one lucky probe lets a layer be cut to nothing: on
    simulated noisy tables the profiles had 1.03 to 4 times the true error (36 layers, budgets .2 to .9).
    """
    from scipy.optimize import isotonic_regression

    if len(curve.errors) == 1:
        return curve
    fit = np.maximum(isotonic_regression(curve.errors[:-1], increasing=False).x, 0.0)
    return dataclasses.replace(curve, errors=np.append(fit, 0.0))


def step_slopes(parameters: Ints, errors: Floats) -> Floats:
    """The slope of the lower convex hull at each step between neighbours (K-1,): error saved per parameter.

    The slopes fall with the rank, so sorting the steps of all layers by slope keeps the order within each layer.
    """
    blocks: list[tuple[float, int, int]] = []  # error saved, parameters spent, steps
    for saved, spent in zip(-np.diff(errors), np.diff(parameters), strict=True):
        block = (float(saved), int(spent), 1)
        while blocks and blocks[-1][0] * block[1] < block[0] * blocks[-1][1]:
            last = blocks.pop()
            block = (last[0] + block[0], last[1] + block[1], last[2] + block[2])
        blocks.append(block)
    slopes = [np.full(steps, saved / spent) for saved, spent, steps in blocks]
    return np.concatenate(slopes) if slopes else np.zeros(0)


class CostTable:
    """The candidates of all layers as three padded arrays (L, K), for totals over many profiles at once.

    A profile here is a row of levels (L,): the index of each layer's candidate. Padding repeats the last candidate.
    """

    def __init__(self, curves: Sequence[LayerCurve]) -> None:
        self.curves = curves
        width = max(len(curve.ranks) for curve in curves)
        self.top = np.array([len(curve.ranks) - 1 for curve in curves], np.int64)
        pad = np.minimum(np.arange(width), self.top[:, None])
        self.ranks = np.stack([curve.ranks[index] for curve, index in zip(curves, pad, strict=True)])
        self.parameters = np.stack([curve.parameters[index] for curve, index in zip(curves, pad, strict=True)])
        self.errors = np.stack([curve.errors[index] for curve, index in zip(curves, pad, strict=True)])

    def error(self, levels: Ints) -> float:
        """Predicted error of one profile: the sum of its layers' errors, rounded once."""
        return math.fsum(self.errors[np.arange(len(levels)), levels])

    def entries(self, rows: Ints, requested: float | None = None) -> list[ChainEntry]:
        """Profiles (P, L) as a chain's entries; `requested` is the budget of the last one."""
        layers = np.arange(len(self.top))
        names = [curve.name for curve in self.curves]
        ranks, errors = self.ranks[layers, rows].tolist(), self.errors[layers, rows].tolist()
        costs = self.parameters[layers, rows].sum(axis=1).tolist()
        budgets = [None] * (len(rows) - 1) + [requested]
        return [
            ChainEntry(RankProfile(dict(zip(names, row, strict=True))), cost, math.fsum(lost), budget)
            for row, cost, lost, budget in zip(ranks, costs, errors, budgets, strict=True)
        ]
