"""What a layer costs at a rank in parameters, and how two times are compared.

A layer is its matrix, m × n (out × in). Deployed, it takes the cheapest of three forms: dense (m·n parameters),
plain U Vᵀ (r·(m+n)), or gauge-aligned with slack p (r·(m+n−r) + p·r; FlexRank, section 3.5, is p = 0).
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from flexrank.errors import FlexrankError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]
Spacing = Literal["blocks", "parameters", "ranks"]
#: Ranks of a block: a whole number of vector registers and matrix tiles, in float32 and in bfloat16. At least so many
#: blocks make up a layer, so that the ranks of small ones stay fine enough to choose among.
BLOCK, LEAST_BLOCKS = 32, 16


def dense_parameters(shape: Shape) -> int:
    """Parameters m·n of the dense matrix."""
    return shape[0] * shape[1]


def aligned_parameters(shape: Shape, rank: int, slack: int = 0) -> int:
    """Parameters of the gauge-aligned form: n·r for Ṽ and (m−g)·r for Û, where g = r−p outputs are latents."""
    return rank * (shape[0] + shape[1] - rank + slack)


def deployed_parameters(shape: Shape, rank: int, slack: int = 0) -> int:
    """Parameters of the cheapest form. Rising in `rank`, and m·n at full rank."""
    return min(dense_parameters(shape), aligned_parameters(shape, rank, min(slack, rank)))


def largest_rank(shape: Shape, limit: float) -> int:
    """The largest rank whose `deployed_parameters` are within `limit`; 0 where not even rank one is.

    Below full rank that is the smaller root of r(m+n−r) = limit rounded down, taken in whole numbers.
    """
    if limit >= dense_parameters(shape):
        return min(shape)
    total = sum(shape)
    return max(0, (total - 1 - math.isqrt(total**2 - 4 * math.floor(limit) - 1)) // 2)


def rank_block(shape: Shape) -> int:
    """The number that a fast rank of this layer is a multiple of: a power of two up to `BLOCK`.

    A 2048 × 2048 layer in bfloat16 took 1.15 of its dense time at rank 1020 and .80 at 1024, two cores with bfloat16
    tiles (docs/log.md); GPUs' matrix units ask for multiples of 8 at least.
    """
    return 2 ** int(math.log2(min(BLOCK, max(1, min(shape) // LEAST_BLOCKS))))


def whole_slack(shape: Shape, rank: int, slack: int, dtype: "torch.dtype") -> int:
    """In half precision the least slack from this one on that leaves whole blocks of outputs to multiply.

    That is plain U Vᵀ's r at most. 2048 × 2048, bfloat16, 2048 tokens, rank 512: with 102 columns .52 of the dense
    layer's time, with 128 .44. In float32 both take as long (docs/log.md), and the slack stays as it is.
    """
    if dtype.itemsize != 2:
        return slack
    computed = shape[0] - rank + slack
    return min(rank, slack + -computed % rank_block(shape))


def nearest_rank(shape: Shape, share: float) -> int:
    """The rank of whole blocks nearest to this share of the full rank; the full one at most, never rounded to none."""
    full, block = min(shape), rank_block(shape)
    return min(full, round(share * full / block) * block or max(1, round(share * full)))


def rank_levels(shape: Shape, num_levels: int, spacing: Spacing = "blocks") -> tuple[int, ...]:
    """Rising ranks, the last one full: level j of K has j/K of the dense parameters, or of the full rank.

    Even steps in parameters put the levels where budgets are: for a square layer, 9 of 10 even ranks cost over .19.

    Args:
        shape: of the layer's matrix.
        num_levels: K; there are fewer where so small a layer has no more.
        spacing: "parameters" takes the largest rank within each share of the parameters, "blocks" that rounded down to
            whole blocks of `rank_block`, "ranks" (the paper's) even steps in rank.

    Raises:
        FlexrankError: fewer than two levels.
    """
    if num_levels < 2:
        raise FlexrankError(f"num_levels is {num_levels}; probing needs at least 2")
    full = min(shape)
    if spacing == "ranks":
        return tuple(sorted({max(1, round(full * level / num_levels)) for level in range(1, num_levels + 1)}))
    block = rank_block(shape) if spacing == "blocks" else 1
    levels = {full}
    for level in range(1, num_levels):
        rank = largest_rank(shape, dense_parameters(shape) * level / num_levels)
        levels.add(max(1, rank // block * block if rank > block else rank))
    return tuple(sorted(levels))


def measure_ratio(
    candidate: Callable[[], object],
    reference: Callable[[], object],
    repeats: int = 15,
    warmup: int = 3,
    least_seconds: float = 0.0,
) -> float:
    """Median of candidate time / reference time, the two timed in turn so that drift cancels.

    Over `repeats` pairs, and as many more as it takes to have timed for `least_seconds`: what else a machine does comes
    in bursts, that may be longer than a few pairs of short runs.
    """
    for _ in range(warmup):
        candidate()
        reference()
    ratios: list[float] = []
    total = 0.0
    while len(ratios) < repeats or total < least_seconds:
        own, others = _seconds(candidate), _seconds(reference)
        ratios.append(own / others)
        total += own + others
    return statistics.median(ratios)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
