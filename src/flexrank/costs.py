"""What a layer costs at a rank in parameters, and how two times are compared.

A layer is its matrix, m × n (out × in). Deployed, it takes the cheapest of three forms: dense (m·n parameters),
plain U Vᵀ (r·(m+n)), or gauge-aligned with slack p (r·(m+n−r) + p·r; FlexRank, section 3.5, is p = 0).
"""

import math
import statistics
import time
from collections.abc import Callable

Shape = tuple[int, int]


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
