"""The largest size within limits, on a chain whose deployed sizes are stated here."""

from collections.abc import Mapping

import pytest

from flexrank.deployment.limits import count_fitting, is_within
from flexrank.profiles import ChainEntry, Footprint, ProfileChain, RankProfile


def chain_of(*requested: int) -> ProfileChain:
    entries = [
        ChainEntry(RankProfile({"a": rank}), 20 * rank, 0.0, rank / 10 if rank in requested else None)
        for rank in range(1, 6)
    ]
    return ProfileChain(tuple(entries), 100, Footprint(7, 30, 4), "joint")


def found(chain: ProfileChain, limit: int, deployed: Mapping[int, int]) -> tuple[int, list[int]]:
    """The rank of the largest size of at most so many parameters, and the ranks that were tried."""
    tried: list[int] = []

    def fits(entry: ChainEntry) -> bool:
        tried.append(entry.profile["a"])
        return deployed[entry.profile["a"]] <= limit

    return count_fitting(chain.entries, fits), tried


def test_a_requested_size_counts_though_a_smaller_one_has_more_slack() -> None:
    deployed = {1: 19, 2: 40, 3: 67, 4: 66, 5: 80}
    assert found(chain_of(4), 66, deployed) == (4, [4, 5])
    assert found(chain_of(2), 66, deployed)[0] in (2, 4)


@pytest.mark.parametrize("limit", range(10, 100))
def test_sizes_that_rise_are_found_as_by_brute_force(limit: int) -> None:
    deployed = {1: 19, 2: 40, 3: 55, 4: 70, 5: 90}
    wanted = max((rank for rank, size in deployed.items() if size <= limit), default=0)
    for requested in ((), (1,), (2, 4), (5,)):
        assert found(chain_of(*requested), limit, deployed)[0] == wanted


def test_both_limits_count_all_that_the_model_holds() -> None:
    """66 parameters in the layers, 7 others, in 30 bytes and 4 each."""
    chain = chain_of(2)
    assert is_within(chain, 66, {"max_params": 73, "max_bytes": 294}) and is_within(chain, 66, {})
    assert not is_within(chain, 66, {"max_params": 72}) and not is_within(chain, 66, {"max_bytes": 293})
