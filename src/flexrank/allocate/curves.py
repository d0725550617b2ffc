"""What each layer may be cut to: candidate ranks with their cost and their predicted error."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexrank.errors import FlexrankError
from flexrank.profiles import ChainEntry, RankProfile, SensitivityTable
from flexrank.profiles.costs import dense_parameters, deployed_parameters, rank_block

Ints = NDArray[np.signedinteger]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class LayerCurve:
    """The candidates of one layer by rising rank; the last is full rank.

    Attributes:
        name: the layer.
        ranks: (K,), strictly rising.
        parameters: (K,), deployed parameters at those ranks (gauge-aligned, slack 0), strictly rising.
        errors: (K,), predicted rise of the probe loss; 0 at full rank.
    """

    name: str
    ranks: Ints
    parameters: Ints
    errors: Floats

    def take(self, kept: slice | Bools | Ints) -> "LayerCurve":
        """The curve of some of its candidates."""
        return LayerCurve(self.name, self.ranks[kept], self.parameters[kept], self.errors[kept])


def read_curves(table: SensitivityTable) -> list[LayerCurve]:
    """The probed points as they are, checked.

    Raises:
        FlexrankError: the table is empty or names different layers, or a layer's ranks do not rise to full rank,
            or an error is not finite, or the error at full rank is not 0.
    """
    if not table.shapes:
        raise FlexrankError("the sensitivity table holds no layer; probe a model with factorised layers")
    for part, names in (("ranks", table.ranks), ("errors", table.errors)):
        if names.keys() != table.shapes.keys():
            odd = sorted(names.keys() ^ table.shapes.keys())[0]
            raise FlexrankError(f"sensitivity table: layer {odd!r} is in only one of shapes and {part}")
    return [_read_curve(table, name) for name in table.shapes]


def _read_curve(table: SensitivityTable, name: str) -> LayerCurve:
    shape, ranks, errors = table.shapes[name], table.ranks[name], table.errors[name]
    full = min(shape)
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
    parameters = [deployed_parameters(shape, rank) for rank in ranks]
    return LayerCurve(name, np.array(ranks, np.int64), np.array(parameters, np.int64), np.array(errors, np.float64))


def total_dense(table: SensitivityTable) -> int:
    """Dense parameters of all the table's layers."""
    return sum(map(dense_parameters, table.shapes.values()))


def undominated(curve: LayerCurve) -> LayerCurve:
    """Drops each candidate that a smaller rank equals or betters; full rank always stays.

    Probes are noisy, so an error may rise with the rank. The optimum loses nothing by the drop, nested or not: let
    f map each rank to the smallest rank whose error is the running minimum there. f never raises cost or error, and
    as it is monotone it keeps nested profiles nested. Nothing is smoothed: every figure left is one that was measured.
    """
    best_before = np.concatenate(([np.inf], np.minimum.accumulate(curve.errors)[:-1]))
    kept = curve.errors < best_before
    kept[-1] = True
    return curve.take(kept)


def monotone(curve: LayerCurve) -> LayerCurve:
    """The least-squares fit whose errors never rise with the rank nor fall below full rank's 0.

    A larger rank is a longer prefix of the same factors, so a rise, or an error below 0, is taken for noise of the
    probe. A curve that is monotone already keeps every bit. Without the fit one lucky probe lets a layer be cut to
    nothing and leaves a large budget unspent: on simulated tables with noise added to the errors, the profiles chosen
    from the errors as measured had a true error 1.03 to 4 times as large (36 layers, budgets .2 to .9).
    """
    from scipy.optimize import isotonic_regression

    if len(curve.errors) == 1:
        return curve
    fit = np.maximum(isotonic_regression(curve.errors[:-1], increasing=False).x, 0.0)
    return dataclasses.replace(curve, errors=np.append(fit, 0.0))


def refine(curve: LayerCurve, shape: tuple[int, int], count: int) -> LayerCurve:
    """Adds interpolated candidates, about `count` in all, evenly placed in cost between the probed ranks.

    `curve` is `monotone` or `undominated`. Its points stay exact, and nothing is extrapolated below its first rank.
    Where the probed ranks are whole blocks, what is added is too.
    The error is interpolated in its logarithm (monotone cubic in the rank), for errors fall by orders of magnitude. In
    the last stretch, where it falls to 0 or below, it is a straight line: too high for a convex curve, on purpose,
    for the optimum seeks out whatever is predicted too low (a cubic tail did 17 % worse there in truth). In the same
    simulations 32 candidates lowered the true error by 1 to 5 % where the probes were exact or little noisy, and raised
    it by up to 32 % (36 layers) where they were very noisy: what is chosen more finely follows the noise more closely.
    """
    wanted = np.linspace(curve.parameters[0], curve.parameters[-1], count)
    block = rank_block(shape)
    if any(rank % block for rank in curve.ranks[:-1] if rank > block):
        block = 1
    between = np.arange(block, curve.ranks[-1], block)
    every_rank = np.union1d(curve.ranks, between[between > curve.ranks[0]])
    costs = np.array([deployed_parameters(shape, int(rank)) for rank in every_rank], np.int64)
    near = every_rank[np.minimum(np.searchsorted(costs, wanted), len(costs) - 1)]
    ranks = np.union1d(curve.ranks, near)
    errors = _interpolate(curve, ranks)
    errors[np.searchsorted(ranks, curve.ranks)] = curve.errors
    return LayerCurve(curve.name, ranks, costs[np.searchsorted(every_rank, ranks)], errors)


def _interpolate(curve: LayerCurve, ranks: Ints) -> Floats:
    from scipy.interpolate import PchipInterpolator

    errors = np.interp(ranks, curve.ranks, curve.errors)
    positive = int(np.count_nonzero(curve.errors > 0))  # they come first, for the errors fall
    if positive > 1:
        inside = ranks <= curve.ranks[positive - 1]
        logarithm = PchipInterpolator(curve.ranks[:positive], np.log(curve.errors[:positive]))
        errors[inside] = np.exp(logarithm(ranks[inside]))
    return errors


def step_slopes(parameters: Ints, errors: Floats) -> Floats:
    """For each step between neighbours (K-1,), the slope of the lower convex hull over it: error saved a parameter.

    The slopes fall with the rank, so steps sorted by slope over all layers keep every layer's own order.
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
    """Candidates of all layers as two padded arrays (L, K), for totals over many profiles at once.

    A profile here is a row of levels (L,): the index of each layer's candidate. Padding repeats the last candidate.
    """

    def __init__(self, curves: Sequence[LayerCurve]) -> None:
        self.curves = curves
        width = max(len(curve.ranks) for curve in curves)
        self.top = np.array([len(curve.ranks) - 1 for curve in curves], np.int64)
        self.real = np.arange(width) <= self.top[:, None]  # False where padded
        pad = np.minimum(np.arange(width), self.top[:, None])
        self.ranks = np.stack([curve.ranks[index] for curve, index in zip(curves, pad, strict=True)])
        self.parameters = np.stack([curve.parameters[index] for curve, index in zip(curves, pad, strict=True)])
        self.errors = np.stack([curve.errors[index] for curve, index in zip(curves, pad, strict=True)])

    def cost(self, levels: Ints) -> int:
        """Deployed parameters of one profile."""
        return int(self.parameters[np.arange(len(levels)), levels].sum())

    def error(self, levels: Ints) -> float:
        """Predicted error of one profile: the sum of its layers' errors, rounded once."""
        return math.fsum(self.errors[np.arange(len(levels)), levels])

    def entries(self, rows: Ints, requested: float | None = None) -> list[ChainEntry]:
        """Profiles (P, L) as a chain's entries; `requested` is the budget of the last."""
        layers = np.arange(len(self.top))
        names = [curve.name for curve in self.curves]
        ranks, errors = self.ranks[layers, rows].tolist(), self.errors[layers, rows].tolist()
        costs = self.parameters[layers, rows].sum(axis=1).tolist()
        budgets = [None] * (len(rows) - 1) + [requested]
        return [
            ChainEntry(RankProfile(dict(zip(names, row, strict=True))), cost, math.fsum(lost), budget)
            for row, cost, lost, budget in zip(ranks, costs, errors, budgets, strict=True)
        ]
