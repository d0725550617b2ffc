"""DRONE: the data-aware optimum by two singular value decompositions (Chen et al., NeurIPS 2021).

Ranks are uniform here. The paper's own search starts from an allowed loss, not from a size: it gives each module a part
of that loss, and takes the least rank of a grid that stays within it. How the parts are set, and in which order modules
are truncated, is not known here with certainty, so its search is left out, and so is the retraining. Not checked
against the authors' code.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flexrank.nn.linalg import Factors
from research.baselines.method import UNSEEN, RankMethod, split
from research.baselines.statistics import input_moments


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


DRONE = RankMethod("drone", "Chen et al., NeurIPS 2021", input_moments, factors)
