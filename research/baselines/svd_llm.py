"""SVD-LLM: truncation-aware whitening by the Cholesky decomposition (Wang et al., ICLR 2025).

The paper's LoRA, and its update of weights layer by layer, are left out. It does not say what to do with a singular
X Xᵀ, which has no Cholesky factor: here it gets a ridge.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flexrank.nn.linalg import Factors
from research.baselines.method import RankMethod, invertible, split
from research.baselines.statistics import input_moments


def factors(weight: Float[Tensor, "m n"], moment: Float[Tensor, "n n"]) -> Factors:
    """Factors W_r = P_r Λ_r · Q_r S⁻¹ with S Sᵀ = X Xᵀ and W S = P Λ Q; its loss ‖W X − W_r X‖² is Σ_{i > r} λ_i²."""
    root = torch.linalg.cholesky(invertible(moment))
    left, values, right = torch.linalg.svd(weight @ root, full_matrices=False)
    return split(left, values, torch.linalg.solve_triangular(root, right, upper=False, left=False))


SVD_LLM = RankMethod("svd-llm", "Wang et al., ICLR 2025", input_moments, factors)
