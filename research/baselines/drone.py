"""DRONE: the data-aware optimum by two singular value decompositions (Chen et al., NeurIPS 2021).

Ranks are searched as in algorithm 2: the model may lose so much, of which each layer gets a part that grows with the
time it takes; layer after layer, in the model truncated so far, takes the least rank of a grid with which the loss
stays within its part. Time counts as parameters here, like sizes, and the grid has tenths of a layer's parameters. The
paper starts from an allowed loss and takes the size that it gives; here the allowance is searched for each size. It is
a ratio of losses where the base model has one; a distance from the base model, which is 0 there, may rise by a sum.
A size that the search ends below its budget grows by one factor for all layers. The retraining is left out. There is no
code of the authors to check against.
"""

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.nn.linalg import Factors
from flexrank.nn.switch import layer_shapes, use_profile
from flexrank.profiles import RankProfile
from flexrank.profiles.costs import dense_parameters, full_ranks, profile_parameters, rank_levels
from research.baselines.method import UNSEEN, Measures, RankMethod, grown_ranks, split
from research.baselines.statistics import input_moments

#: Candidate ranks of a layer: at tenths of its parameters, the full one included.
LEVELS = 10
#: Allowances that are tried for each size, each halving the range of its logarithm, and the ends of that range; and how
#: far below its budget a size may be that ends its search, as a share of the dense parameters.
HALVINGS, LEAST, MOST, SPARE = 10, 1e-5, 1e2, 0.0025


def factors(weight: Float[Tensor, "m n"], moment: Float[Tensor, "n n"]) -> Factors:
    """Returns factors whose prefix minimises ‖W X − W_r X‖ for every r (Chen et al., 2021, theorem 1).

    With W = P_W Λ_W Q_W and X = P_X Λ_X Q_X, take Λ_W Q_W P_X Λ_X = P Λ Q; then W_r = P_W P_r Λ_r · Q_r Λ_X⁻¹ P_Xᵀ.
    P_X and Λ_X come from X Xᵀ = P_X Λ_X² P_Xᵀ, because X has a column for each token. Λ_X⁻¹ is zero where Λ_X is, up to
    `UNSEEN`: directions that the data never visited are lost, even at full rank.
    """
    own, values, right = torch.linalg.svd(weight, full_matrices=False)
    squares, directions = torch.linalg.eigh(moment.double())
    seen = squares > UNSEEN * squares[-1]
    root = torch.where(seen, squares, 0.0).sqrt()
    inverse = torch.where(seen, 1 / root, 0.0)
    left, singular, shared = torch.linalg.svd(values[:, None] * right @ directions * root, full_matrices=False)
    return split(own @ left, singular, shared * inverse @ directions.T)


def within(
    candidates: Mapping[str, Sequence[int]], parts: Mapping[str, float], loss: Callable[[RankProfile], float]
) -> RankProfile:
    """Returns ranks that each raise the loss by at most their part, chosen layer after layer.

    A layer's least such candidate is found by bisection, as if losses fell with its rank. The last candidate is the
    full rank, which raises nothing.
    """
    chosen = {name: ranks[-1] for name, ranks in candidates.items()}
    reached = loss(RankProfile(chosen))
    for name, ranks in candidates.items():
        losses = {ranks[-1]: reached}
        allowed = reached + parts[name]

        def fits(rank: int, name: str = name, losses: dict[int, float] = losses, allowed: float = allowed) -> bool:
            if rank not in losses:
                losses[rank] = loss(RankProfile({**chosen, name: rank}))
            return losses[rank] <= allowed

        chosen[name] = ranks[bisect.bisect_left(ranks, True, key=fits)]
        reached = losses[chosen[name]]
    return RankProfile(chosen)


def ranks(
    model: nn.Module, _: Mapping[str, Tensor], budgets: Sequence[float], measures: Measures
) -> list[RankProfile | None]:
    """Returns the searched ranks at each budget, filled up; None if none fit."""
    shapes, found = layer_shapes(model), searched(model, budgets, measures)
    return [one and grown_ranks(shapes, one, budget) for one, budget in zip(found, budgets, strict=True)]


def searched(model: nn.Module, budgets: Sequence[float], measures: Measures) -> list[RankProfile | None]:
    """Returns the ranks of about the least allowance whose parameters are within each budget; None if none are."""
    shapes = layer_shapes(model)
    candidates = {name: rank_levels(shape, LEVELS, "parameters", 0.0, 0.0) for name, shape in shapes.items()}
    dense = sum(map(dense_parameters, shapes.values()))
    shares = {name: dense_parameters(shape) / dense for name, shape in shapes.items()}

    @functools.cache  # close allowances choose the same ranks in the first layers
    def measured(profile: RankProfile) -> float:
        with use_profile(model, profile):
            return measures.loss(model)

    def log_of_measured(profile: RankProfile) -> float:
        return math.log(max(measured(profile), LEAST))

    loss = log_of_measured if measured(RankProfile(full_ranks(shapes))) > LEAST else measured

    @functools.cache
    def at(allowance: float) -> RankProfile:
        return within(candidates, {name: allowance * share for name, share in shares.items()}, loss)

    def share(allowance: float) -> float:
        return profile_parameters(at(allowance), shapes) / dense

    return [None if share(MOST) > budget else at(_least_allowance(share, budget)) for budget in budgets]


def _least_allowance(share: Callable[[float], float], budget: float) -> float:
    """Returns about the least allowance that gives at most the budget's share, as if shares fell with the allowance."""
    low, high = LEAST, MOST
    for _ in range(HALVINGS):
        if share(high) > budget - SPARE:
            break
        middle = math.sqrt(low * high)
        low, high = (low, middle) if share(middle) <= budget else (middle, high)
    return high


DRONE = RankMethod("drone", "Chen et al., NeurIPS 2021", input_moments, factors, ranks)
