"""What a layer costs at a rank, which format it is deployed in, and which of its ranks are worth having.

A layer is its matrix, m × n (out × in). When deployed, it is dense (m·n parameters), low-rank U Vᵀ (r·(m+n)), or
gauge-aligned with slack p (r·(m+n−r+p); p = 0 in FlexRank, section 3.5). Each parameter is one multiply-add per token.
"""

import bisect
import math
import numbers
from collections.abc import Mapping
from typing import Literal

from flexrank.errors import FlexrankError

Shape = tuple[int, int]
Spacing = Literal["blocks", "parameters", "ranks"]
#: Ranks per block, which fill vector registers and matrix tiles in float32 and in bfloat16, and the least number of
#: blocks per layer, so the ranks of small layers stay fine enough to choose among.
BLOCK, LEAST_BLOCKS = 32, 16
#: Least share of the dense operations that a factorised layer saves: a smaller saving is lost to the second product.
MIN_SAVING = 0.25
#: Slack counted in allocation, as a share of the rank, so deployed sizes stay within budget (docs/log.md).
SLACK_SHARE = 0.1


def is_dense(shape: Shape, rank: int, slack: int = 0) -> bool:
    """Whether a layer is deployed as one matrix, because factors of this rank have no fewer parameters."""
    return aligned_parameters(shape, rank, slack) >= dense_parameters(shape)


def dense_parameters(shape: Shape) -> int:
    """Parameters m·n of the dense matrix."""
    return shape[0] * shape[1]


def total_dense(shapes: Mapping[str, Shape]) -> int:
    """Parameters of all layers' dense matrices."""
    return sum(map(dense_parameters, shapes.values()))


def full_ranks(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The full rank of each layer."""
    return {name: min(shape) for name, shape in shapes.items()}


def aligned_parameters(shape: Shape, rank: int, slack: int = 0) -> int:
    """Parameters r·(m+n−r+p) of the gauge-aligned format; the slack p is at most r, where the format is U Vᵀ."""
    return rank * (shape[0] + shape[1] - rank + min(slack, rank))


def deployed_parameters(shape: Shape, rank: int, slack: int = 0) -> int:
    """Parameters of the smallest format; they rise with `rank`, up to m·n at full rank."""
    return min(dense_parameters(shape), aligned_parameters(shape, rank, slack))


def profile_parameters(profile: Mapping[str, int], shapes: Mapping[str, Shape]) -> int:
    """The sum of `deployed_parameters` over the layers."""
    return sum(deployed_parameters(shapes[name], rank) for name, rank in profile.items())


def expected_parameters(shape: Shape, rank: int, slack_share: float = SLACK_SHARE) -> int:
    """`deployed_parameters` with a slack of `slack_share` times the rank, rounded up."""
    return deployed_parameters(shape, rank, math.ceil(slack_share * rank))


def largest_rank(shape: Shape, limit: float, slack_share: float = 0.0, block: int = 1) -> int:
    """The largest multiple of `block` whose `expected_parameters` are within `limit`; 0 if there is none."""
    ranks = range(block, min(shape) + 1, block)
    return block * bisect.bisect_right(ranks, limit, key=lambda rank: expected_parameters(shape, rank, slack_share))


def rank_block(shape: Shape) -> int:
    """The number of which fast ranks of this layer are multiples: a power of two up to `BLOCK`.

    A 2048 × 2048 layer in bfloat16 took 1.15 of its dense time at rank 1020 and .80 at 1024, on two cores with bfloat16
    tiles (docs/log.md); the matrix units of GPUs need multiples of at least 8.
    """
    return 2 ** int(math.log2(min(BLOCK, max(1, min(shape) // LEAST_BLOCKS))))


def whole_slack(shape: Shape, rank: int, slack: int, dtype: str) -> int:
    """Rounds the slack up, in half precision, so the outputs left to multiply form whole blocks.

    The result is at most r, where the format is U Vᵀ. A 2048 × 2048 layer in bfloat16 with 2048 tokens at rank 512 took
    .52 of its dense time with slack 102, and .44 with 128. In float32 both take as long, and the slack stays as it is.
    """
    if dtype not in ("bfloat16", "float16"):
        return min(rank, slack)
    computed = shape[0] - rank + slack
    return min(rank, slack + -computed % rank_block(shape))


def is_worth_it(shape: Shape, rank: int, min_saving: float, slack_share: float) -> bool:
    """Whether the rank is full, or costs less than the dense layer and saves `min_saving` of its operations."""
    dense, cost = dense_parameters(shape), expected_parameters(shape, rank, slack_share)
    return rank == min(shape) or (cost < dense and cost <= (1 - min_saving) * dense)


def rank_levels(
    shape: Shape,
    num_levels: int,
    spacing: Spacing = "blocks",
    min_saving: float = MIN_SAVING,
    slack_share: float = SLACK_SHARE,
) -> tuple[int, ...]:
    """The ranks to probe, ascending: in even steps of parameters up to the largest that `is_worth_it`, then full rank.

    Steps are even in parameters because budgets count them: of 10 even ranks of a square layer, 9 cost over .19.

    Args:
        num_levels: K, at most; small layers have fewer.
        spacing: "parameters" as above; "blocks" also rounds down to multiples of `rank_block`; "ranks" is the paper's
            spacing, in even steps of rank up to full rank.

    Raises:
        FlexrankError: there are fewer than two levels, or a setting is out of range.
    """
    if not isinstance(num_levels, numbers.Integral) or num_levels < 2:
        raise FlexrankError(f"num_levels is {num_levels!r}; probing needs a whole number, at least 2")
    if spacing not in ("parameters", "blocks", "ranks"):
        raise FlexrankError(f"spacing {spacing!r} is unknown; it is parameters, blocks or ranks")
    for name, share in {"min_saving": min_saving, "slack_share": slack_share}.items():
        if not 0 <= share < 1:
            raise FlexrankError(f"{name} {share} is out of range; it is in [0, 1)")
    full = min(shape)
    if spacing == "ranks":
        return tuple(sorted({max(1, round(full * level / num_levels)) for level in range(1, num_levels + 1)}))
    block = rank_block(shape) if spacing == "blocks" else 1
    limits = [share * dense_parameters(shape) for share in _level_shares(num_levels, min_saving)]
    ranks = (
        largest_rank(shape, limit, slack_share, block) or largest_rank(shape, limit, slack_share) for limit in limits
    )
    return tuple(sorted({full, *(max(1, rank) for rank in ranks)}))


def _level_shares(num_levels: int, min_saving: float) -> list[float]:
    """Shares of the dense parameters below 1: j/K if `min_saving` is 0, otherwise even steps up to 1 − min_saving."""
    if min_saving == 0:
        return [level / num_levels for level in range(1, num_levels)]
    return [(1 - min_saving) * level / (num_levels - 1) for level in range(1, num_levels)]
