"""Second moments of a model's activations: streamed, masked, shared, and only the smaller side of each layer."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flexrank.calibrate.blocks import BlockOrder, Part, block_stack
from flexrank.calibrate.collector import Collector
from flexrank.calibrate.groups import Hooks
from flexrank.calibrate.groups import find_groups as _find_groups
from flexrank.calibrate.moments import LayerMoment, Moments, load_moments, merge_moments, save_moments
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, to_device, token_mask
from flexrank.errors import FlexrankError
from flexrank.nn.matrix import input_rows, masked_rows, weight_matrix
from flexrank.progress import track

__all__ = [
    "GradientLoss",
    "Hooks",
    "LayerMoment",
    "Moments",
    "Side",
    "block_stack",
    "collect_moments",
    "collect_rows",
    "load_moments",
    "merge_moments",
    "moments_by_block",
    "save_moments",
]

GradientLoss = Callable[[Any, Batch], Tensor]
Side = Literal["smaller", "input"]
log = logging.getLogger("flexrank")


def collect_moments(
    model: nn.Module,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module],
    *,
    side: Side = "smaller",
    gradient_loss: GradientLoss | None = None,
) -> Moments:
    """Streams `batches` through the model and sums each layer's second moment; memory does not grow with tokens.

    Padding is left out by the batch's `attention_mask`. Layers that read the same tensor share one accumulator. For
    m <= n the output's moment is summed in place of the input's where that is less work. Products are taken in float32
    or better, of at most 4096 rows each, and summed in float64.

    Args:
        model: run in eval mode; its mode is restored.
        batches: mappings, tensors or tuples (see `batches.call_model`).
        layers: name to layer, from `select_layers`.
        side: "input" keeps Σ for every layer, which whitening (`method="paper"`) needs.
        gradient_loss: (output, batch) to a scalar; given, the outputs' gradient moments are summed too (`fisher`).

    Raises:
        FlexrankError: no batches, a non-finite activation (naming layer and batch), a layer that never ran, or layers
            that shared their input in the first batch and not later.
    """
    stream = iter(batches)
    first = _first(stream)
    _require_finite_weights(layers)
    with eval_mode(model):
        groups = _find_groups(model, first, layers)
    total = len(batches) if isinstance(batches, Sequence) else None
    collector = Collector(layers, groups, side, gradient_loss is not None)
    again = track(itertools.chain([first], stream), "calibrating", total)
    return _run(model, again, layers, collector, gradient_loss, None)


def moments_by_block(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Iterable[str],
    *,
    side: Side = "smaller",
    gradient_loss: GradientLoss | None = None,
) -> Iterator[Moments]:
    """`collect_moments` for one block of the model's stack at a time, so that one block's moments stand in memory.

    The last block comes first. Its pass over the batches ends where the block returns, and what the caller then puts
    in place of its layers is run by no later pass: every moment is that of the model as it was given, to the bit of
    `collect_moments`. L blocks take (L + 1)/2 forwards of the stack in place of one, and one batch whole before. With
    `gradient_loss` each of the passes is whole, forward and backward. Layers outside the stack have passes of their
    own, at their place in the order. A model that is no stack of blocks, each run once and in order, is one part.

    Args:
        model: as `collect_moments`.
        batches: run over once for each part, the same each time.
        layers: names, from `select_layers`; layers are looked up when their part comes, none is held on to.
        side: as `collect_moments`; layers of two parts that share an input have a moment each.
        gradient_loss: as `collect_moments`.

    Yields:
        The moments of one part's layers, which the caller lets go of before it asks for the next.

    Raises:
        FlexrankError: as `collect_moments`.
    """
    names = list(layers)
    parts, groups = _find_parts(model, _first(iter(batches)), names)
    for place, part in enumerate(parts, 1):
        chosen = {name: model.get_submodule(name) for name in names if name in part.names}
        _require_finite_weights(chosen)
        within = [[name for name in group if name in chosen] for group in groups]
        collector = Collector(chosen, [group for group in within if group], side, gradient_loss is not None)
        stream = track(batches, f"calibrating part {place} of {len(parts)}", len(batches))
        found = _run(model, stream, chosen, collector, gradient_loss, None if gradient_loss else part.until)
        del collector, chosen  # so that only the caller holds the moments, and nobody the layers
        yield found
        del found


def _find_parts(model: nn.Module, first: Batch, names: Sequence[str]) -> tuple[list[Part], list[list[str]]]:
    """Parts, the last to run first, and the groups of layers that share an input; of one forward."""
    layers = {name: model.get_submodule(name) for name in names}
    stack = block_stack(model, names)
    order = BlockOrder([block for _, block in stack])
    with eval_mode(model), Hooks() as hooks:
        order.watch(hooks, layers)
        groups = _find_groups(model, first, layers)
    if stack and order.in_order:
        return order.parts(), groups
    log.info(
        "calibrating: %s is no stack of blocks run once and in order; its layers are one part", type(model).__name__
    )
    return [Part(tuple(names), None)], groups


class _Returned(Exception):
    """Ends a forward whose rest nobody looks at."""


def _stop(*_: object) -> None:
    raise _Returned


def _run(
    model: nn.Module,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module],
    collector: Collector,
    gradient_loss: GradientLoss | None,
    until: nn.Module | None,
) -> Moments:
    """Runs all batches, each up to the return of `until`, past the collector; returns its moments."""
    with eval_mode(model), _gradients(model, gradient_loss is not None), Hooks() as hooks:
        for name, layer in layers.items():
            hooks.watch(layer, collector.watcher(name, layer))
        if until is not None:
            hooks.add(until.register_forward_hook(_stop))
        for index, batch in enumerate(batches):
            batch = to_device(batch, model_device(model))
            collector.start_batch(index, token_mask(batch))
            if until is not None:
                with contextlib.suppress(_Returned):
                    call_model(model, batch)
                continue
            output = call_model(model, batch)
            if gradient_loss is not None:
                with torch.random.fork_rng(enabled=True):
                    torch.manual_seed(index)  # a loss may draw: anew for each batch, alike in every run
                    collector.add_gradients(gradient_loss(output, batch))
    return collector.finish()


@torch.no_grad()
def collect_rows(
    model: nn.Module, batches: Sequence[Batch], layers: Mapping[str, nn.Module], count: int = 256
) -> dict[str, Tensor]:
    """At most about `count` input rows (t, n) of each layer: real activations to measure errors on.

    Evenly spread over at most 16 of the batches, and over the unmasked tokens of each, since batches are often sorted
    by length. `layers` may be elastic ones: rows are what the layer's matrix multiplies.

    Raises:
        FlexrankError: there are no batches.
    """
    if not batches:
        raise FlexrankError("collecting rows needs at least one batch")
    chosen = [batches[index] for index in sorted({round(i * (len(batches) - 1) / 15) for i in range(16)})]
    quota = -(-count // len(chosen))
    rows: dict[str, list[Tensor]] = {name: [] for name in layers}
    mask: list[Tensor | None] = [None]

    def keep(name: str, layer: nn.Module, inputs: Tensor, _: Tensor) -> None:
        found = masked_rows(input_rows(layer, inputs), mask[0])
        places = torch.linspace(0, len(found) - 1, min(quota, len(found))).long()
        rows[name].append(found[places.to(found.device)].detach().float().cpu())

    with eval_mode(model), Hooks() as hooks:
        for name, layer in layers.items():
            hooks.watch(layer, functools.partial(keep, name, layer))
        for batch in chosen:
            batch = to_device(batch, model_device(model))
            mask[0] = token_mask(batch)
            call_model(model, batch)
    return {name: torch.cat(found) for name, found in rows.items()}


def _first(stream: Iterator[Batch]) -> Batch:
    first = next(stream, None)
    if first is None:
        raise FlexrankError("calibration got no batches; it needs at least one")
    return first


def _require_finite_weights(layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        if not bool(torch.isfinite(weight_matrix(layer)).all()):
            raise FlexrankError(f"layer {name!r}: the weight holds values that are not finite")


@contextlib.contextmanager
def _gradients(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Gradient mode on or off; where it is on, frozen parameters let gradients through for the length of the block."""
    frozen = [p for p in model.parameters() if wanted and p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.set_grad_enabled(wanted):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
