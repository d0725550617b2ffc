"""Finds the largest size of a chain within a latency: sizes are built, and timed alternately with the base model."""

import logging
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

from flexrank.data.batches import Batch, eval_mode
from flexrank.deployment.machine import forward_of, interleave, latency_ratio
from flexrank.errors import FlexrankError
from flexrank.profiles import ChainEntry

log = logging.getLogger("flexrank")

#: The minimum number of seconds for which a model and its base model are timed.
LEAST_SECONDS = 1.0


def entry_within_latency(
    entries: Sequence[ChainEntry],
    build: Callable[[ChainEntry], nn.Module],
    base: nn.Module,
    batch: Batch,
    max_latency_ms: float,
) -> ChainEntry:
    """Finds by bisection the largest of a chain's entries whose deployed model takes at most `max_latency_ms` here.

    `entries` rise in cost, and times are assumed to rise with it; `build` deploys an entry; `base` is the base model,
    on the device and in the dtype of the deployed models. A size's time is measured relative to the base model's, and
    converted to milliseconds by the base model's time at the beginning.

    Raises:
        FlexrankError: even the smallest takes longer.
    """
    with eval_mode(base), torch.inference_mode():
        (seconds,) = interleave([forward_of(base, batch)], least_seconds=LEAST_SECONDS)
    base_ms = 1e3 * statistics.median(seconds)

    def milliseconds(entry: ChainEntry) -> float:
        ratio = latency_ratio(build(entry), base, batch, least_seconds=LEAST_SECONDS)
        log.info("latency: %d parameters in the layers take %.2f ms", entry.parameters, ratio * base_ms)
        return ratio * base_ms

    least = milliseconds(entries[0])
    if least > max_latency_ms:
        raise FlexrankError(f"max_latency_ms={max_latency_ms:g} is too small; the smallest size takes {least:.3g} ms")
    low, high = 0, len(entries)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if milliseconds(entries[middle]) <= max_latency_ms else (low, middle)
    return entries[low]
