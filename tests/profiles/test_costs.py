import itertools
import math

import pytest

from flexrank.errors import FlexrankError
from flexrank.profiles.costs import (
    aligned_parameters,
    dense_parameters,
    deployed_parameters,
    is_dense,
    largest_rank,
    rank_block,
    rank_levels,
    whole_slack,
)

SHAPES = [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1), (48, 12)]


def count_aligned(shape: tuple[int, int], rank: int, slack: int) -> int:
    """Counts the numbers that the gauge-aligned form stores, one by one: the identity rows of Û are not stored."""
    m, n = shape
    latents = rank - slack
    stored_u = sum(1 for row in range(m) for _ in range(rank) if row >= latents)
    stored_v = sum(1 for _ in range(n) for _ in range(rank))
    return stored_u + stored_v


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_equal_a_count_of_what_is_stored(shape):
    for rank in range(1, min(shape) + 1):
        for slack in range(rank + 3):
            stored = count_aligned(shape, rank, min(slack, rank))
            assert aligned_parameters(shape, rank, slack) == stored
            least = min(math.prod(shape), count_aligned(shape, rank, rank), stored)
            assert deployed_parameters(shape, rank, slack) == least


@pytest.mark.parametrize("shape", SHAPES)
def test_deployed_parameters_rise_with_the_rank_to_the_dense_matrix(shape):
    costs = [deployed_parameters(shape, rank) for rank in range(1, min(shape) + 1)]
    assert all(small < large for small, large in itertools.pairwise(costs))
    assert costs[-1] == dense_parameters(shape) == shape[0] * shape[1]


@pytest.mark.parametrize("shape", [*SHAPES, (31, 8), (8, 31), (40, 40)])
def test_largest_rank_equals_a_search_over_all_ranks(shape):
    costs = [deployed_parameters(shape, rank) for rank in range(1, min(shape) + 1)]
    whole = range(-2, dense_parameters(shape) + 3)
    for limit in [*whole, *(cost + step for cost in costs for step in (-1e-6, 1e-6)), 0.3 * dense_parameters(shape)]:
        assert largest_rank(shape, limit) == sum(cost <= limit for cost in costs)


@pytest.mark.parametrize("shape", [(40, 40), (64, 128)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_largest_rank_counts_slack_and_whole_blocks(shape, share):
    m, n = shape
    cost = {r: min(m * n, r * (m + n - r + min(r, math.ceil(share * r)))) for r in range(1, min(shape) + 1)}
    for limit in range(0, m * n + 1, 37):
        for block in (1, 4):
            expected = max((r for r in cost if cost[r] <= limit and r % block == 0), default=0)
            assert largest_rank(shape, limit, share, block) == expected


@pytest.mark.parametrize(
    ("rank", "slack", "expected"),
    [(10, 0, False), (10, 10, False), (10, 12, False), (20, 19, False), (20, 20, True), (40, 0, True), (39, 1, True),
     (39, 0, False)],
)  # fmt: skip
def test_a_layer_is_dense_unless_factors_have_fewer_parameters(rank, slack, expected):
    """40 × 40: 1600 numbers dense, 80·r low-rank, r·(80 − r + p) gauge-aligned."""
    assert is_dense((40, 40), rank, slack) is expected


def test_levels_are_even_in_parameters_up_to_the_least_saving():
    levels = rank_levels((384, 384), 10)
    assert levels[-1] == 384 and len(levels) == 10
    dense = 384 * 384
    for level, rank in enumerate(levels[:-1], 1):
        limit = 0.75 * dense * level / 9
        cost, larger = (r * (768 - r + math.ceil(0.1 * r)) for r in (rank, rank + 16))
        assert rank % 16 == 0 and cost <= limit < larger
    assert rank_levels((384, 384), 10, "parameters", 0.0, 0.0) == tuple(
        [max(r for r in range(1, 384) if r * (768 - r) <= dense * level / 10) for level in range(1, 10)] + [384]
    )
    assert rank_levels((40, 60), 10, "ranks") == (4, 8, 12, 16, 20, 24, 28, 32, 36, 40)


@pytest.mark.parametrize("shape", [(384, 384), (1003, 512), (64, 256), (7, 7)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_slack_of_whole_blocks_is_the_least_of_them(shape, dtype):
    block = rank_block(shape)
    for rank in range(1, min(shape) + 1, 7):
        for slack in range(0, rank + 1, 3):
            fitting = [one for one in range(slack, rank) if (shape[0] - rank + one) % block == 0]
            expected = slack if dtype == "float32" else min([*fitting, rank])
            assert whole_slack(shape, rank, slack, dtype) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_levels": 1}, "num_levels is 1; probing needs a whole number, at least 2"),
        ({"num_levels": 2.5}, "num_levels is 2.5; probing needs a whole number, at least 2"),
        ({"spacing": "rank"}, "spacing 'rank' is unknown; it is parameters, blocks or ranks"),
        ({"min_saving": 1.5}, r"min_saving 1.5 is out of range; it is in \[0, 1\)"),
        ({"min_saving": -1}, "min_saving -1 is out of range"),
        ({"slack_share": 3.0}, "slack_share 3.0 is out of range"),
    ],
)
def test_wrong_settings_of_levels_are_named(wrong, message):
    with pytest.raises(FlexrankError, match=message):
        rank_levels((8, 12), **({"num_levels": 4} | wrong))
