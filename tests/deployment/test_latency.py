"""The largest size within a latency, with times set by hand."""

import pytest
import torch
from torch import nn

from flexrank.deployment import entry_within_latency, latency
from flexrank.errors import FlexrankError
from flexrank.profiles import ChainEntry, RankProfile

ENTRIES = [ChainEntry(RankProfile({"a": rank}), 10 * rank, 1.0 / rank) for rank in range(1, 101)]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A base model of 50 ms; a size of rank r takes r % of it. Returns the ranks that were built."""
    ranks: list[int] = []

    def build_ratio(model: nn.Linear, *_: object, least_seconds: float) -> float:
        assert least_seconds == latency.LEAST_SECONDS
        ranks.append(model.in_features)
        return model.in_features / 100

    def interleave(_: object, least_seconds: float) -> list[list[float]]:
        assert least_seconds == latency.LEAST_SECONDS
        return [[0.04, 0.05, 0.06]]

    monkeypatch.setattr(latency, "interleave", interleave)
    monkeypatch.setattr(latency, "latency_ratio", build_ratio)
    return ranks


def within(milliseconds: float) -> ChainEntry:
    return entry_within_latency(
        ENTRIES, lambda entry: nn.Linear(entry.profile["a"], 1), nn.Linear(1, 1), torch.zeros(1, 1), milliseconds
    )


@pytest.mark.parametrize(("milliseconds", "rank"), [(0.5, 1), (0.99, 1), (25.0, 50), (25.2, 50), (49.9, 99), (99, 100)])
def test_the_largest_size_within_a_latency(milliseconds: float, rank: int, built: list[int]) -> None:
    assert within(milliseconds).profile == {"a": rank}
    assert len(built) <= 8  # bisected


def test_a_latency_that_no_size_reaches_is_refused(built: list[int]) -> None:
    with pytest.raises(FlexrankError, match="max_latency_ms=0.4 is too small; the smallest size takes 0.5 ms"):
        within(0.4)
    assert built == [1]
