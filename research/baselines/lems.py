"""LEMS: ranks by an integer program over a model of layers' errors, on factors of KFAC-SVD (Thoma et al., ICML 2026).

The cost of layer l at rank r is modelled as

    e_l(r) = D_l · ρ_l(r) / ρ_l(r₀) · (1 + γ s_b),    s_b = (h_b − h_B) / (h_1 − h_B),    h_b = Σ_{k=b}^{B} k^{−α}

where ρ_l(r) is the share of its energy beyond rank r, D_l the distance of the model with only this layer at the
reference rank r₀, which has a tenth of its parameters, and s_b a bias for early blocks (block b of B), because their
errors pass through all later blocks. The ranks minimise Σ e_l(r_l) within the budget. (α, γ) are the best of ten trials
on [0, 3] × [0, 7] by the distance of the whole model. The authors draw them with Optuna, whose first ten trials are
random; here they are Halton's, the first of which is no bias. The distance is flexrank's objective; theirs is a
divergence at temperature .6 of the tokens from the 257th on. Parameters are deployed ones, and ranks are multiples of 8
in large layers only.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.allocate.curves import LayerCurve
from flexrank.allocate.joint import solve_nested
from flexrank.nn.switch import full_profile, layer_shapes, use_profile
from flexrank.profiles import RankProfile
from flexrank.profiles.costs import Shape, dense_parameters, deployed_parameters, largest_rank
from flexrank.run.tables import split_block
from research.baselines import kfac_svd
from research.baselines.method import Evaluate, Measures, RankMethod

#: The reference rank's share of a layer's parameters, and the largest share of a layer that is not dense.
REFERENCE, LARGEST = 0.1, 0.95
TRIALS, ALPHAS, GAMMAS = 10, 3.0, 7.0
#: A layer's ranks are multiples of `MULTIPLE`, or of less if that left fewer than `LEAST_CHOICES` of them.
MULTIPLE, LEAST_CHOICES = 8, 48
#: Gurobi's default gap, and the time limit for one program in seconds.
GAP, TIME_LIMIT = 1e-4, 60.0
#: The least ρ(r₀) to divide by.
LEAST = 1e-6


def ranks(
    model: nn.Module, energies: Mapping[str, Tensor], budgets: Sequence[float], measures: Measures
) -> list[RankProfile | None]:
    """Returns the best of the trials' ranks at each budget, by the distance of the model that has them."""
    rests = {name: _rests(one) for name, one in energies.items()}
    references = {
        name: max(1, largest_rank(s, REFERENCE * dense_parameters(s))) for name, s in layer_shapes(model).items()
    }
    distances = _reference_distances(model, references, measures.distance)
    errors = {name: distances[name] * rest / max(float(rest[references[name]]), LEAST) for name, rest in rests.items()}
    return [_best(model, errors, budget, measures.distance) for budget in budgets]


def _rests(energies: Float[Tensor, " k"]) -> np.ndarray:
    """Returns ρ(r) for r = 0 … k: the share of the energies beyond the first r; zeros if there is no energy."""
    falling = np.append(np.cumsum(energies.double().numpy()[::-1])[::-1], 0.0)
    return falling / falling[0] if falling[0] > 0 else falling


def _reference_distances(model: nn.Module, references: Mapping[str, int], distance: Evaluate) -> dict[str, float]:
    """Returns the distance of the model with each layer alone at its reference rank."""
    full, found = full_profile(model), {}
    for name, rank in references.items():
        with use_profile(model, full | {name: rank}):
            found[name] = distance(model)
    return found


def biases(layers: Sequence[str], alpha: float, gamma: float) -> dict[str, float]:
    """Returns 1 + γ s_b for each layer, by its block; 1 for a layer outside blocks or in the last block."""
    blocks = list(dict.fromkeys(block for block, _ in map(split_block, layers) if block))
    ends = np.cumsum((np.arange(len(blocks)) + 1.0)[::-1] ** -alpha)[::-1]  # h_b
    spread = ends[0] - ends[-1] if len(blocks) > 1 else 1.0
    found = {block: 1 + gamma * (end - ends[-1]) / spread for block, end in zip(blocks, ends, strict=True)}
    return {name: float(found.get(split_block(name)[0], 1.0)) for name in layers}


def solved(
    shapes: Mapping[str, Shape], errors: Mapping[str, np.ndarray], budget: float, floor: float
) -> RankProfile | None:
    """Returns the ranks of least Σ errors[layer][rank] whose deployed parameters are within the budget.

    Each layer keeps at least the share `floor` of its parameters. Solves an integer program; None if that does not fit.
    """
    curves = [_curve(name, shape, errors[name], floor) for name, shape in shapes.items()]
    cap = int(budget * sum(map(dense_parameters, shapes.values())))
    if sum(int(curve.parameters[0]) for curve in curves) > cap:
        return None
    levels = solve_nested(curves, [cap], [1.0], GAP, TIME_LIMIT).levels[0]
    return RankProfile({curve.name: int(curve.ranks[level]) for curve, level in zip(curves, levels, strict=True)})


def _curve(name: str, shape: Shape, errors: np.ndarray, floor: float) -> LayerCurve:
    """Returns a layer's choices: multiples of one rank from `floor` to `LARGEST` of its parameters, and dense."""
    step = min(MULTIPLE, max(1, min(shape) // LEAST_CHOICES))
    costs = {rank: deployed_parameters(shape, rank) for rank in (*range(step, min(shape), step), min(shape))}
    dense = dense_parameters(shape)
    kept = [r for r, cost in costs.items() if floor * dense <= cost <= LARGEST * dense and r < min(shape)]
    chosen = [*kept, min(shape)]
    return LayerCurve(name, np.array(chosen), np.array([costs[rank] for rank in chosen]), errors[chosen])


def _best(model: nn.Module, errors: Mapping[str, np.ndarray], budget: float, distance: Evaluate) -> RankProfile | None:
    """Returns the trials' solution with which the model is nearest to the base model; None if nothing fits."""
    from scipy.stats import qmc

    tried, floor = dict[RankProfile, float](), 0.3 if budget >= 0.5 and not kfac_svd.is_vision(model) else 0.1
    for alpha, gamma in qmc.Halton(2, scramble=False).random(TRIALS) * (ALPHAS, GAMMAS):
        bias = biases(list(errors), alpha, gamma)
        profile = solved(layer_shapes(model), {name: bias[name] * one for name, one in errors.items()}, budget, floor)
        if profile is None:
            return None
        if profile not in tried:
            with use_profile(model, profile):
                tried[profile] = distance(model)
    return min(tried, key=lambda profile: tried[profile])


#: The authors' shrinkage for language models and for images, each with the least-error factors and those as coded.
SETTINGS = tuple(
    {"gradient_shrinkage": part, "as_coded": as_coded}
    for part in (kfac_svd.GRADIENT_SHRINKAGE, 0.7)
    for as_coded in (False, True)
)
LEMS = RankMethod(
    "lems", "Thoma et al., ICML 2026", kfac_svd.moments, kfac_svd.factors, ranks, trials=SETTINGS, tuned=("factors",)
)
