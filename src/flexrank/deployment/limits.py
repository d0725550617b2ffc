"""The largest size of an elastic model that is within limits when it is deployed."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank.artefacts.elastic import count_bytes_in, load_entries, read_shapes
from flexrank.deployment import deploy
from flexrank.deployment.slack import find_slack
from flexrank.errors import FlexrankError
from flexrank.hf.companions import local_directory
from flexrank.nn.gauge_aligned import Slack
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile, SlackTable
from flexrank.profiles.chain import require_limits
from flexrank.profiles.costs import Shape, profile_parameters


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
        directory: of the artefact, or a repository `owner/name` on the hub that holds it.
        limits: `budget`, `max_params` and `max_bytes`, as `load_elastic` takes them; None is no limit.
        dtype: as for `deploy`, like `device` and `slack`.

    Raises:
        FlexrankError: no size is within the limits; or an error of `load_elastic`.
    """
    require_limits(**limits)
    directory = local_directory(directory)
    shapes, chain = read_shapes(directory)
    budget, slacks = limits.get("budget"), list[SlackTable]()
    chain = count_bytes_in(chain if budget is None else chain.up_to(chain.entry_at(budget)), dtype)
    whole = {name: limit for name, limit in limits.items() if name != "budget" and limit is not None}
    most = _count(chain.entries, lambda entry: is_within(chain, profile_parameters(entry.profile, shapes), whole))
    elastic, _ = load_entries(directory, max(1, most))

    def with_slack(profile: RankProfile) -> int:
        slacks[:] = [find_slack(elastic, [profile], dtype=dtype, slack=slack, known=next(iter(slacks), None))]
        return slacks[0].parameters(profile, shapes)

    entry = entries_within(chain.up_to(chain.entries[max(1, most) - 1]), shapes, whole, with_slack)[-1]
    return deploy(elastic, entry.profile, dtype=dtype, device=device, slack=slacks[0]), entry, elastic


def entries_within(
    chain: ProfileChain,
    shapes: Mapping[str, Shape],
    limits: Mapping[str, float],
    deployed_parameters: Callable[[RankProfile], int],
) -> tuple[ChainEntry, ...]:
    """The chain's entries up to the largest whose deployed model is within `max_params` and `max_bytes`.

    It bisects the entries above the largest requested one that fits: there, a neighbour may have a little more slack
    than a larger one.

    Args:
        chain: with the footprint in the dtype of deployment.
        shapes: (m, n) of each layer.
        limits: of the whole model.
        deployed_parameters: the parameters of the layers' matrices at a profile, with the slack that is chosen for it;
            it is called for few profiles only, because to choose slack takes long.

    Raises:
        FlexrankError: the smallest size is not within the limits.
    """

    def fits(entry: ChainEntry) -> bool:
        if not is_within(chain, profile_parameters(entry.profile, shapes), limits):  # not even without slack
            return False
        return is_within(chain, deployed_parameters(entry.profile), limits)

    numbers = range(len(chain.entries), 0, -1)
    requested = (number for number in numbers if chain.entries[number - 1].requested is not None)
    start = next((number for number in requested if fits(chain.entries[number - 1])), 0)
    if count := start + _count(chain.entries[start:], fits):
        return chain.entries[:count]
    least = _whole_sizes(chain, deployed_parameters(chain.entries[0].profile))
    size = f"{least['max_params']:,} parameters and {least['max_bytes']:,} bytes"
    named = ", ".join(f"{name}={limit}" for name, limit in limits.items())
    raise FlexrankError(f"{named} is too small: the smallest size has {size}, with its slack")


def is_within(chain: ProfileChain, parameters: int, limits: Mapping[str, float]) -> bool:
    """Whether a model with this many parameters in its factorised layers is within `max_params` and `max_bytes`."""
    return all(size <= limits.get(name, math.inf) for name, size in _whole_sizes(chain, parameters).items())


def _whole_sizes(chain: ProfileChain, parameters: int) -> dict[str, int]:
    entry = dataclasses.replace(chain.entries[0], parameters=parameters)
    return {"max_params": chain.model_parameters(entry), "max_bytes": chain.model_bytes(entry)}


def _count(entries: Sequence[ChainEntry], fits: Callable[[ChainEntry], bool]) -> int:
    """How many entries fit, if each that does is smaller than each that does not."""
    return bisect.bisect_left(entries, True, key=lambda entry: not fits(entry))
