"""FWSVD: singular value decomposition weighted by Fisher information (Hsu et al., ICLR 2022).

The paper writes Z = X W, where the rows of W are inputs, and weights each row by the root of its summed Fisher
information. Here y = W x, so inputs are columns. The Fisher information is the empirical one of the task's loss.
Comparisons on sentences and images have no labels: there it is of the loss that flexrank's own `fisher` takes. The
paper fine-tunes afterwards, which is left out. Not checked against the authors' code.
"""

from jaxtyping import Float
from torch import Tensor

from flexrank.nn.linalg import Factors
from research.baselines.method import RankMethod, scaled_svd
from research.baselines.statistics import input_importance


def factors(weight: Float[Tensor, "m n"], importance: Float[Tensor, " n"]) -> Factors:
    """Returns factors whose prefix minimises ‖(W − W_r) diag(I)^{1/2}‖, I the inputs' Fisher information."""
    return scaled_svd(weight, importance.double().sqrt())


FWSVD = RankMethod("fwsvd", "Hsu et al., ICLR 2022", input_importance, factors)
