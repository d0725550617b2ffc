"""ASVD: singular value decomposition scaled by activations (Yuan et al., 2023).

Ranks are searched as in the paper: the model's loss with one layer truncated is measured at each ratio of the layer's
parameters, .1 to .9; each layer then gets the least ratio whose loss is within a threshold shared by all layers, and
the threshold is the least with which the parameters fit. A ratio counts deployed parameters here. Mean losses give the
same order as perplexities. The authors' code has ratios from .4 only, with which small sizes do not exist.
"""

import bisect
from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor, nn

from flexrank import probe_sensitivity
from flexrank.nn.linalg import Factors
from flexrank.profiles import RankProfile, SensitivityTable
from flexrank.profiles.costs import dense_parameters, profile_parameters
from research.baselines.method import Measures, RankMethod, scaled_svd
from research.baselines.statistics import mean_magnitudes

#: The paper's choice for language models.
ALPHA = 0.5
#: Ratios of the search: tenths, the full layer included.
LEVELS = 10


def factors(weight: Float[Tensor, "m n"], magnitudes: Float[Tensor, " n"], alpha: float = ALPHA) -> Factors:
    """Factors W S = P Λ Q with S = diag(mean |x|)^α, so W = P Λ · Q S⁻¹; α = 0 is plain SVD."""
    return scaled_svd(weight, magnitudes.double() ** alpha)


def within(table: SensitivityTable, threshold: float) -> RankProfile:
    """Returns each layer's least rank whose error is at most the threshold; the largest rank if there is none."""
    chosen = {}
    for name, ranks in table.ranks.items():
        fitting = [rank for rank, error in zip(ranks, table.errors[name], strict=True) if error <= threshold]
        chosen[name] = min(fitting, default=ranks[-1])
    return RankProfile(chosen)


def searched(table: SensitivityTable, budget: float) -> RankProfile | None:
    """Returns the ranks of the least threshold with which deployed parameters are within the budget, by bisection.

    None if the least ratios do not fit.
    """
    cap = budget * sum(map(dense_parameters, table.shapes.values()))

    def fits(threshold: float) -> bool:
        return profile_parameters(within(table, threshold), table.shapes) <= cap

    thresholds = sorted(error for errors in table.errors.values() for error in errors[:-1])
    place = bisect.bisect_left(thresholds, True, key=fits)  # a higher threshold means fewer parameters
    if place == len(thresholds):
        return None
    return within(table, thresholds[place])


def ranks(
    model: nn.Module, _: Mapping[str, Tensor], budgets: Sequence[float], measures: Measures
) -> list[RankProfile | None]:
    """Returns the searched ranks at each budget, from one table of losses."""
    table = probe_sensitivity(model, measures.loss, LEVELS, spacing="parameters", min_saving=0.0, slack_share=0.0)
    return [searched(table, budget) for budget in budgets]


ASVD = RankMethod(
    "asvd", "Yuan et al., 2023", mean_magnitudes, factors, ranks,
    trials=tuple({"alpha": alpha} for alpha in (ALPHA, 0.25, 0.75, 1.0)), tuned=("factors",),
)  # fmt: skip
