"""How long each size of a chain takes on this machine, predicted from its layers' measured times."""

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flexrank.batches import Batch, call_model, eval_mode, model_device, to_device
from flexrank.calibration import Hooks
from flexrank.costs import aligned_parameters, dense_parameters
from flexrank.layers import NestedLayer
from flexrank.planning import form_key
from flexrank.profiles import ChainEntry, ProfileChain
from flexrank.surgery import nested_layers
from flexrank.timing import TimeTable, timed_slack

REPEATS = 7


def time_chain(
    model: nn.Module, base: nn.Module, batch: Batch, chain: ProfileChain, times: TimeTable | None = None
) -> ProfileChain:
    """The chain with every entry's predicted milliseconds for a forward of its deployed model on `batch`.

    The base's time, measured here, with its linear layers' times taken from the table and those of the entry's forms
    put in their place. What lies outside the layers, and convolutions, count as in the base.

    Args:
        model: the elastic model of the chain.
        base: the model before decomposition, on the device to time.
        batch: inputs of the size that matters, as `batches.call_model` takes them.
        chain: its profiles.
        times: this machine's; by default those of the base's dtype and the user's cache.

    Returns:
        A chain for `at(max_latency_ms=…)` and `fit_plans`.
    """
    layers = {name: layer for name, layer in nested_layers(model).items() if layer.geometry is None}
    if times is None:
        dtype = next(parameter.dtype for parameter in base.parameters() if parameter.is_floating_point())
        times = TimeTable(dtype, model_device(base))
    times.measure([form_key(layer) for layer in layers.values()])
    whole, tokens = _base_seconds(base, batch), _tokens_seen(base, batch, layers)
    dense = sum(_layer_seconds(layers[name], min(layers[name].matrix_shape), tokens[name], times) for name in layers)
    rest = max(0.0, whole - dense)

    def timed(entry: ChainEntry) -> ChainEntry:
        inside = sum(_layer_seconds(layer, entry.profile[name], tokens[name], times) for name, layer in layers.items())
        return dataclasses.replace(entry, milliseconds=1e3 * (rest + inside))

    return dataclasses.replace(chain, entries=tuple(map(timed, chain.entries)))


def _layer_seconds(layer: NestedLayer, rank: int, calls: list[int], times: TimeTable) -> float:
    """Of the form with fewest parameters, at the slack that the table was timed with."""
    shape = layer.matrix_shape
    slack = timed_slack(rank)
    is_dense = aligned_parameters(shape, rank, slack) >= dense_parameters(shape)
    return sum(times.seconds_at(form_key(layer), rank, None if is_dense else slack, tokens) for tokens in calls)


def _base_seconds(base: nn.Module, batch: Batch) -> float:
    batch, seconds = to_device(batch, model_device(base)), []
    with eval_mode(base), torch.inference_mode():
        call_model(base, batch)
        for _ in range(REPEATS):
            start = time.perf_counter()
            call_model(base, batch)
            if model_device(base).type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _tokens_seen(base: nn.Module, batch: Batch, layers: Mapping[str, NestedLayer]) -> dict[str, list[int]]:
    """The rows of each call of each layer."""
    seen: dict[str, list[int]] = collections.defaultdict(list)

    def note(name: str, inputs: Tensor, _: Tensor) -> None:
        seen[name].append(inputs.shape[:-1].numel())

    with eval_mode(base), torch.inference_mode(), Hooks() as hooks:
        for name in layers:
            hooks.watch(base.get_submodule(name), functools.partial(note, name))
        call_model(base, to_device(batch, model_device(base)))
    return seen
