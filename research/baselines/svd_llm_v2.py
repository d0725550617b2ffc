"""SVD-LLM V2: whitening by an SVD, and a compression ratio for each layer (Wang et al., NAACL 2025).

The ratio follows from the least loss that a layer can have at the common one, within layers of one type. Losses are
sums over all calibration tokens, in the units of the activations: the logarithm, and with it the ratios, depend on
both. A loss of at most 1 has no positive logarithm, and is refused.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.errors import FlexrankError
from flexrank.nn.linalg import Factors
from flexrank.nn.switch import layer_shapes, uniform_profile
from flexrank.profiles import RankProfile
from flexrank.profiles.costs import dense_parameters, largest_rank
from flexrank.run.tables import split_block
from research.baselines.method import RankMethod, invertible, split
from research.baselines.statistics import input_moments


def factors(weight: Float[Tensor, "m n"], moment: Float[Tensor, "n n"]) -> Factors:
    """With X Xᵀ = P_X Λ_X² P_Xᵀ and W P_X Λ_X = P Λ Q, W_r = P_r Λ_r · Q_r Λ_X⁻¹ P_Xᵀ (Wang et al., 2025, algorithm 2).

    X Xᵀ has the ridge of SVD-LLM's first version here, so that Λ_X can be divided by.
    """
    directions, squares, _ = torch.linalg.svd(invertible(moment))
    root = squares.sqrt()
    left, values, right = torch.linalg.svd(weight @ directions * root, full_matrices=False)
    return split(left, values, right / root @ directions.T)


def removed_shares(losses: Mapping[str, float], removed: float) -> dict[str, float]:
    """The share of parameters to remove from each layer of one type: N · R · (1 / log L) / Σ (1 / log L).

    The mean over the N layers is R, the common ratio (Wang et al., 2025, algorithm 1). A share can be above 1.

    Raises:
        FlexrankError: a loss is not above 1.
    """
    for name, loss in losses.items():
        if not loss > 1:
            raise FlexrankError(f"layer {name!r}: truncation loss {loss:.3g} is not above 1; SVD-LLM V2 takes its log")
    inverses = {name: 1 / math.log(loss) for name, loss in losses.items()}
    total = sum(inverses.values())
    return {name: len(losses) * removed * inverse / total for name, inverse in inverses.items()}


def ranks(model: nn.Module, energies: Mapping[str, Tensor], budget: float) -> RankProfile:
    """Each layer's largest rank whose deployed parameters are within its own share of the dense ones, at least 1."""
    shapes, uniform, kept = layer_shapes(model), uniform_profile(model, budget), dict[str, float]()
    types: dict[str, dict[str, float]] = {}
    for name in shapes:
        loss = float(energies[name][uniform[name] :].sum().sqrt())
        types.setdefault(split_block(name)[1], {})[name] = loss
    for losses in types.values():
        kept |= {name: 1 - share for name, share in removed_shares(losses, 1 - budget).items()}
    chosen = {name: largest_rank(shape, kept[name] * dense_parameters(shape)) for name, shape in shapes.items()}
    return RankProfile({name: max(1, rank) for name, rank in chosen.items()})


SVD_LLM_V2 = RankMethod("svd-llm-v2", "Wang et al., NAACL 2025", input_moments, factors, ranks)
