"""Singular value decomposition of the weights alone."""

from jaxtyping import Float
from torch import Tensor, linalg

from flexrank.nn.linalg import Factors
from research.baselines.method import RankMethod, split
from research.baselines.statistics import nothing


def factors(weight: Float[Tensor, "m n"], _: Tensor) -> Factors:
    """Factors W = P Λ Q: the prefix minimises ‖W − W_r‖ for every r (Eckart and Young, 1936)."""
    return split(*linalg.svd(weight, full_matrices=False))


SVD = RankMethod("svd", "Eckart and Young, 1936", nothing, factors)
