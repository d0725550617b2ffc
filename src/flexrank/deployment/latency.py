"""How long models take on this machine: measured in turn, and predicted from their layers' times."""

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, to_device
from flexrank.deployment.planning import form_key, predicted_seconds
from flexrank.deployment.timing import FormKey, Load, TimeTable
from flexrank.errors import FlexrankError
from flexrank.nn.layers import GaugeAlignedLinear
from flexrank.nn.surgery import nested_layers
from flexrank.profiles import ChainEntry, ProfileChain
from flexrank.profiles.costs import measure_ratio

REPEATS, LEAST_SECONDS = 7, 0.5
#: A correction outside this is a mistaken measurement, of a model whose layers are too small a part of its time.
CORRECTIONS = (0.5, 3.0)


def latency_ratio(
    model: nn.Module, base: nn.Module, batch: Batch, repeats: int = 15, least_seconds: float = 0.0
) -> float:
    """Time of the model's forward over the base's on one batch: the median of pairs, as `costs.measure_ratio`'s."""
    if model_device(model) != model_device(base):
        raise FlexrankError(
            f"the model is on {model_device(model)}, the base on {model_device(base)}; latency compares one device"
        )
    with eval_mode(model, base), torch.inference_mode():
        return measure_ratio(_forward(model, batch), _forward(base, batch), repeats, least_seconds=least_seconds)


def seconds_of_forward(model: nn.Module, batch: Batch) -> float:
    """Median seconds of the model's forward on one batch, of `REPEATS` at least and `LEAST_SECONDS` of them."""
    run = _forward(model, batch)
    seconds: list[float] = []
    with eval_mode(model), torch.inference_mode():
        run()
        while len(seconds) < REPEATS or sum(seconds) < LEAST_SECONDS:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _forward(model: nn.Module, batch: Batch) -> Callable[[], None]:
    device = model_device(model)
    batch = to_device(batch, device)

    def run() -> None:
        call_model(model, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def observe_load(base: nn.Module, batch: Batch, layers: Iterable[str]) -> Load:
    """The rows that a forward on this batch sends through each of the layers, by its calls."""
    seen: dict[str, list[int]] = collections.defaultdict(list)

    def note(name: str, inputs: Tensor, _: Tensor) -> None:
        seen[name].append(inputs.shape[:-1].numel())

    with eval_mode(base), torch.inference_mode(), Hooks() as hooks:
        for name in layers:
            hooks.watch(base.get_submodule(name), functools.partial(note, name))
        call_model(base, to_device(batch, model_device(base)))
    return Load(dict(seen))


def correct_load(load: Load, small: nn.Module, ratio: float, seconds: float, times: TimeTable) -> Load:
    """The load with the correction under which the table's times explain how long a deployed model takes.

    With D and S the table's times of the same layers dense and as they are in the small model, and what lies outside
    of them alike, the small model's time over the base's is 1 + (correction·S − D) / T.

    Args:
        load: of `observe_load`.
        small: deployed.
        ratio: `latency_ratio` of the small model under this load.
        seconds: T, the base's.
        times: this machine's.
    """
    dense = inside = 0.0
    for name in load.rows:
        layer = small.get_submodule(name)
        if isinstance(layer, GaugeAlignedLinear):
            key = FormKey(layer.matrix_shape, getattr(layer.expand, "bias", None) is not None)
            dense += load.seconds(times, name, key, min(key.shape), None)
            inside += dataclasses.replace(load, correction=1.0).seconds(times, name, key, layer.rank, layer.slack)
    if not inside:
        return load
    least, most = CORRECTIONS
    return dataclasses.replace(load, correction=min(max((dense + (ratio - 1) * seconds) / inside, least), most))


def time_chain(
    model: nn.Module,
    base: nn.Module,
    batch: Batch,
    chain: ProfileChain,
    times: TimeTable | None = None,
    *,
    is_quickest: bool = False,
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
        is_quickest: of each layer the quickest form; else the one with fewest parameters, as `deploy` takes.

    Returns:
        A chain for `at(max_latency_ms=…)` and `fit_plans`, which plans the forms that the chain was timed for.
    """
    layers = {name: layer for name, layer in nested_layers(model).items() if layer.geometry is None}
    if times is None:
        dtype = next(parameter.dtype for parameter in base.parameters() if parameter.is_floating_point())
        times = TimeTable(dtype, model_device(base))
    times.measure([form_key(layer) for layer in layers.values()])
    load = observe_load(base, batch, layers)

    def inside(profile: dict[str, int]) -> float:
        found = (predicted_seconds(n, layers[n], profile[n], load, times, is_quickest=is_quickest) for n in layers)
        return sum(found)

    dense = inside({name: min(layer.matrix_shape) for name, layer in layers.items()})
    rest = max(0.0, seconds_of_forward(base, batch) - dense)

    def timed(entry: ChainEntry) -> ChainEntry:
        return dataclasses.replace(entry, milliseconds=1e3 * (rest + inside(dict(entry.profile))))

    return dataclasses.replace(chain, entries=tuple(map(timed, chain.entries)), is_quickest=is_quickest)
