import itertools

import pytest
import torch

from flexrank.profiles.costs import (
    aligned_parameters,
    dense_parameters,
    deployed_parameters,
    largest_rank,
    measure_ratio,
    rank_block,
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
        for slack in range(rank + 1):
            assert aligned_parameters(shape, rank, slack) == count_aligned(shape, rank, slack)
            forms = (shape[0] * shape[1], count_aligned(shape, rank, rank), count_aligned(shape, rank, slack))
            assert deployed_parameters(shape, rank, slack) == min(forms)


@pytest.mark.parametrize("shape", SHAPES)
def test_deployed_parameters_rise_with_the_rank_to_the_dense_matrix(shape):
    costs = [deployed_parameters(shape, rank) for rank in range(1, min(shape) + 1)]
    assert all(small < large for small, large in itertools.pairwise(costs))
    assert costs[-1] == dense_parameters(shape) == shape[0] * shape[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_slack_never_passes_the_dense_matrix(shape):
    for rank, slack in itertools.product(range(1, min(shape) + 1), range(20)):
        assert deployed_parameters(shape, rank) <= deployed_parameters(shape, rank, slack) <= dense_parameters(shape)


@pytest.mark.parametrize("shape", [*SHAPES, (31, 8), (8, 31), (40, 40)])
def test_largest_rank_equals_a_search_over_all_ranks(shape):
    costs = [deployed_parameters(shape, rank) for rank in range(1, min(shape) + 1)]
    whole = range(-2, dense_parameters(shape) + 3)
    for limit in [*whole, *(cost + step for cost in costs for step in (-1e-6, 1e-6)), 0.3 * dense_parameters(shape)]:
        assert largest_rank(shape, limit) == sum(cost <= limit for cost in costs)


def test_largest_rank_is_exact_where_floats_are_not():
    shape = (3 * 2**30 + 1, 2**31 + 7)
    for rank in (2**29 + 3, min(shape) - 1):
        cost = deployed_parameters(shape, rank)
        assert [largest_rank(shape, limit) for limit in (cost - 1, cost, cost + 1)] == [rank - 1, rank, rank]


@pytest.mark.parametrize("shape", [(384, 384), (1003, 512), (64, 256), (7, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_slack_of_whole_blocks_is_the_least_of_them(shape, dtype):
    block = rank_block(shape)
    for rank in range(1, min(shape) + 1, 7):
        for slack in range(0, rank + 1, 3):
            fitting = [one for one in range(slack, rank) if (shape[0] - rank + one) % block == 0]
            expected = slack if dtype is torch.float32 else min([*fitting, rank])
            assert whole_slack(shape, rank, slack, dtype) == expected


def test_measure_ratio_is_the_median_of_paired_ratios(monkeypatch):
    clock = [0.0]
    spent = iter([9.0, 9.0, 2.0, 1.0, 30.0, 1.0, 6.0, 2.0])  # a warm-up, then three pairs: 2, 30 and 3

    def work() -> None:
        clock[0] += next(spent)

    monkeypatch.setattr("flexrank.profiles.costs.time.perf_counter", lambda: clock[0])
    assert measure_ratio(work, work, repeats=3, warmup=1) == 3.0


@pytest.mark.parametrize(("least", "ratio"), [(0.0, 2.0), (2.9, 2.0), (3.1, 16.0), (34.0, 16.0), (35.0, 4.0)])
def test_measure_ratio_goes_on_for_as_long_as_asked(monkeypatch, least: float, ratio: float):
    clock = [0.0]
    spent = iter([2.0, 1.0, 30.0, 1.0, 8.0, 2.0])  # 3, 31 and 10 seconds

    def work() -> None:
        clock[0] += next(spent)

    monkeypatch.setattr("flexrank.profiles.costs.time.perf_counter", lambda: clock[0])
    assert measure_ratio(work, work, repeats=1, warmup=0, least_seconds=least) == ratio
