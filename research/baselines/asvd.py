"""ASVD: singular value decomposition scaled by activations (Yuan et al., 2023).

The paper then searches ranks by the perplexity of one truncated layer at a time, as flexrank's probe does; its uniform
ranks here are without that search.
"""

from jaxtyping import Float
from torch import Tensor

from flexrank.nn.linalg import Factors
from research.baselines.method import RankMethod, scaled_svd
from research.baselines.statistics import mean_magnitudes

#: The paper's choice for language models.
ALPHA = 0.5


def factors(weight: Float[Tensor, "m n"], magnitudes: Float[Tensor, " n"], alpha: float = ALPHA) -> Factors:
    """W S = P Λ Q with S = diag(mean |x|)^α, and W = P Λ · Q S⁻¹; α = 0 is plain SVD."""
    return scaled_svd(weight, magnitudes.double() ** alpha)


ASVD = RankMethod("asvd", "Yuan et al., 2023", mean_magnitudes, factors)
