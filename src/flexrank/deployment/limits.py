"""Deploys the largest size of an elastic artefact that is within limits when it is deployed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank.artefacts.elastic import load_elastic
from flexrank.deployment import deploy
from flexrank.errors import FlexrankError
from flexrank.nn.gauge_aligned import Slack
from flexrank.nn.switch import stored_sizes
from flexrank.profiles import ChainEntry


def deploy_within_limits(
    directory: str | Path,
    limits: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    slack: Slack = "auto",
) -> tuple[nn.Module, ChainEntry, nn.Module]:
    """The largest size within the limits, as `deploy` returns it, its entry, and the elastic model that it is cut from.

    `max_params` and `max_bytes` apply to the returned model, in its dtype and with its actual slack, which the
    artefact's own count of a size does not know.

    Args:
        directory: of the artefact.
        limits: `budget`, `max_params` and `max_bytes`, as `load_elastic` takes them.
        dtype: as for `deploy`, like `device` and `slack`.

    Raises:
        FlexrankError: no size is within the limits; or an error of `load_elastic`.
    """
    elastic, chain = load_elastic(directory, **limits, dtype=dtype)
    for entry in reversed(chain.entries):
        small = deploy(elastic, entry.profile, dtype=dtype, device=device, slack=slack)
        parameters, size = stored_sizes(small)
        if parameters <= _limit(limits, "max_params") and size <= _limit(limits, "max_bytes"):
            return small, entry, elastic
        del small  # before the next one is made
    raise FlexrankError(f"{directory}: with its slack the smallest size has {parameters} parameters in {size} bytes")


def _limit(limits: Mapping[str, Any], name: str) -> float:
    limit = limits.get(name)
    return float("inf") if limit is None else limit
