"""The largest size within limits, on a chain whose deployed sizes are stated here."""

from collections.abc import Mapping

import pytest

from flexrank.deployment.limits import entries_within
from flexrank.errors import FlexrankError
from flexrank.profiles import ChainEntry, Footprint, ProfileChain, RankProfile

#: Without slack, ranks 1 to 5 of a layer of 10 × 10 have 19, 36, 51, 64 and 75 parameters.
SHAPES = {"a": (10, 10)}


def chain_of(*requested: int) -> ProfileChain:
    entries = [
        ChainEntry(RankProfile({"a": rank}), 20 * rank, 0.0, rank / 10 if rank in requested else None)
        for rank in range(1, 6)
    ]
    return ProfileChain(tuple(entries), 100, Footprint(7, 30, 4), "joint")


def found(chain: ProfileChain, limits: Mapping[str, int], deployed: Mapping[int, int]) -> tuple[int, list[int]]:
    """The rank of the largest size within the limits, and the ranks for which slack was chosen."""
    asked: list[int] = []

    def parameters(profile: RankProfile) -> int:
        asked.append(profile["a"])
        return deployed[profile["a"]]

    return entries_within(chain, SHAPES, limits, parameters)[-1].profile["a"], asked


@pytest.mark.parametrize(
    "limits", [{"max_params": 73}, {"max_bytes": 66 * 4 + 30}, {"max_params": 90, "max_bytes": 294}]
)
def test_a_requested_size_counts_though_a_smaller_one_has_more_slack(limits: dict[str, int]) -> None:
    """7 other parameters, in 30 bytes: 66 are left. Rank 3 would take 67 with its slack."""
    deployed = {1: 19, 2: 40, 3: 67, 4: 66, 5: 80}
    assert found(chain_of(4), limits, deployed) == (4, [4])
    assert found(chain_of(2), limits, deployed)[0] in (2, 4)


@pytest.mark.parametrize("limit", range(19, 100))
def test_sizes_that_rise_are_found_as_by_brute_force(limit: int) -> None:
    deployed = {1: 19, 2: 40, 3: 55, 4: 70, 5: 90}
    wanted = max(rank for rank, size in deployed.items() if size <= limit)
    for requested in ((), (1,), (2, 4), (5,)):
        rank, asked = found(chain_of(*requested), {"max_params": limit + 7}, deployed)
        assert rank == wanted and all(rank * (20 - rank) <= limit for rank in asked)


def test_the_smallest_size_is_named_with_its_slack() -> None:
    with pytest.raises(
        FlexrankError, match="^max_params=27 is too small: the smallest size has 28 param.* and 114 bytes"
    ):
        found(chain_of(2), {"max_params": 27}, dict.fromkeys(range(1, 6), 21))
