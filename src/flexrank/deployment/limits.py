"""The largest size of an elastic model that is within limits when it is deployed."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from flexrank.artefacts.elastic import load_entries, read_shapes
from flexrank.deployment import deploy
from flexrank.errors import FlexrankError
from flexrank.hf.companions import local_directory
from flexrank.nn.gauge_aligned import Slack
from flexrank.nn.switch import footprint, nested_layers, stored_sizes
from flexrank.profiles import ChainEntry, ProfileChain
from flexrank.profiles.chain import require_limits
from flexrank.profiles.costs import profile_parameters


def deploy_within_limits(
    directory: str | Path,
    limits: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    slack: Slack = "auto",
) -> tuple[nn.Module, ChainEntry]:
    """The largest size within the limits, as `deploy` returns it, and its entry.

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
    if (budget := limits.get("budget")) is not None:
        chain = chain.up_to(chain.entry_at(budget))
    whole = {name: limit for name, limit in limits.items() if name != "budget" and limit is not None}
    entries, fitting = chain.entries, list[nn.Module]()
    if whole:  # sizes that exceed them even without slack are not read
        counted = _counted(chain, load_entries(directory, 1)[0], dtype)
        most = _count(entries, lambda entry: is_within(counted, profile_parameters(entry.profile, shapes), whole))
        entries = entries[: max(1, most)]
    elastic, _ = load_entries(directory, len(entries))

    def deployed(entry: ChainEntry) -> nn.Module:
        return deploy(elastic, entry.profile, dtype=dtype, device=device, slack=slack)

    def fits(entry: ChainEntry) -> bool:
        small = deployed(entry)
        sizes = zip(("max_params", "max_bytes"), stored_sizes(small), strict=True)
        if is_small := all(size <= whole.get(name, math.inf) for name, size in sizes):
            fitting[:] = [small]  # the last one that fits is the largest
        return is_small

    if not whole:
        return deployed(entries[-1]), entries[-1]
    if not (count := count_fitting(entries, fits)):
        refuse(whole, *stored_sizes(deployed(entries[0])))
    return fitting[0], entries[count - 1]


def count_fitting(entries: Sequence[ChainEntry], fits: Callable[[ChainEntry], bool]) -> int:
    """How many entries of a chain there are up to the largest that fits; 0 if none does.

    It bisects the entries above the largest requested one that fits, because to try one takes long, and a neighbour may
    have a little more slack than a larger size.
    """
    numbers = range(len(entries), 0, -1)
    requested = (number for number in numbers if entries[number - 1].requested is not None)
    start = next((number for number in requested if fits(entries[number - 1])), 0)
    return start + _count(entries[start:], fits)


def is_within(chain: ProfileChain, parameters: int, limits: Mapping[str, float]) -> bool:
    """Whether a model with this many parameters in its factorised layers is within `max_params` and `max_bytes`."""
    entry = dataclasses.replace(chain.entries[0], parameters=parameters)
    sizes = {"max_params": chain.model_parameters(entry), "max_bytes": chain.model_bytes(entry)}
    return all(size <= limits.get(name, math.inf) for name, size in sizes.items())


def refuse(limits: Mapping[str, float], parameters: int, size: int) -> NoReturn:
    """Raises FlexrankError, which says how many parameters and bytes the smallest size has."""
    named = ", ".join(f"{name}={limit}" for name, limit in limits.items())
    sizes = f"{parameters:,} parameters and {size:,} bytes"
    raise FlexrankError(f"{named} is too small: the smallest size has {sizes}, with its slack")


def _counted(chain: ProfileChain, least: nn.Module, dtype: torch.dtype | None) -> ProfileChain:
    """The chain with the footprint of an elastic model in this dtype; without one, by its layers' smallest dtype."""
    width = min(layer.u.element_size() for layer in nested_layers(least).values()) if dtype is None else dtype.itemsize
    return dataclasses.replace(chain, footprint=dataclasses.replace(footprint(least, dtype), bytes_per_parameter=width))


def _count(entries: Sequence[ChainEntry], fits: Callable[[ChainEntry], bool]) -> int:
    """How many entries fit, if each that does is smaller than each that does not."""
    return bisect.bisect_left(entries, True, key=lambda entry: not fits(entry))
