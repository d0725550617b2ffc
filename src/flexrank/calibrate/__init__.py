"""Second moments of a model's activations: streamed, masked, shared, and only the smaller side of each layer."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flexrank.calibrate.collector import Collector
from flexrank.calibrate.hooks import Hooks, traced
from flexrank.calibrate.moments import LayerMoment, Moments, load_moments, save_moments
from flexrank.calibrate.structure import Section, block_stack, find_groups, find_sections, runs_in_order
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, row_masks, to_device
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import full_precision
from flexrank.nn.matrix import input_rows, masked_rows
from flexrank.progress import track

__all__ = [
    "GradientLoss", "Hooks", "LayerMoment", "Moments", "Side", "block_stack", "collect_moments", "collect_rows",
    "find_groups", "load_moments", "moments_by_block", "save_moments",
]  # fmt: skip

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
    """The second moment of each layer, summed over the real tokens of all batches; memory does not grow with tokens.

    Layers that read the same tensor share one sum. For m <= n the output's moment is summed in place of the input's
    where that is less work. Products are taken in float32 or better, of at most 4096 rows each, and summed in float64.

    Args:
        layers: name to layer, from `select_layers`.
        side: "input" keeps Σ for every layer, which whitening (`method="paper"`) needs.
        gradient_loss: (output, batch) to a scalar; with it the outputs' gradient moments are summed too (`fisher`).

    Raises:
        FlexrankError: no batches, a non-finite activation (naming layer and batch), a layer that does not run, or
            layers that share their input in the first batch and not later.
    """
    stream = iter(batches)
    first = _first(stream)
    with eval_mode(model):
        groups = find_groups(model, first, layers)
    total = len(batches) if isinstance(batches, Sequence) else None
    collector = Collector(layers, groups, side, gradient_loss is not None)
    return _run(model, track(itertools.chain([first], stream), "calibrating", total), collector, gradient_loss, None)


def moments_by_block(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Iterable[str],
    *,
    side: Side = "smaller",
    gradient_loss: GradientLoss | None = None,
) -> Iterator[Moments]:
    """`collect_moments` for one block of the model's stack at a time, so that memory holds one block's moments.

    Yields the moments of one block's layers, to the bit those of `collect_moments` (layers of two blocks that share an
    input have a moment each); release them before the next. The last block comes first, and a pass over the batches
    ends where its block returns: what the caller puts in place of the block's layers does not run. L blocks take
    (L + 1)/2 forwards of the stack, and one batch before; with `gradient_loss` L, each with its backward. Layers
    outside the stack have passes of their own. A model without a stack whose blocks run once, in order, has one pass.
    """
    names = list(layers)
    sections, groups = _sections_and_groups(model, _first(iter(batches)), names)
    for number, section in enumerate(sections, 1):
        chosen = {name: model.get_submodule(name) for name in names if name in section.names}
        within = [[name for name in group if name in chosen] for group in groups]
        collector = Collector(chosen, [group for group in within if group], side, gradient_loss is not None)
        stream = track(batches, f"calibrating section {number} of {len(sections)}", len(batches))
        moments = _run(model, stream, collector, gradient_loss, None if gradient_loss else section.until)
        del collector, chosen  # so that only the caller holds the moments, and nobody the layers
        yield moments
        del moments


def _sections_and_groups(model: nn.Module, first: Batch, names: Sequence[str]) -> tuple[list[Section], list[list[str]]]:
    """Sections of the model, the last to run first, and the groups of layers that share an input; by one forward."""
    layers = {name: model.get_submodule(name) for name in names}
    blocks = [block for _, block in block_stack(model, names)]
    with eval_mode(model), traced(model) as forwards:
        groups = find_groups(model, first, layers)
    if blocks and runs_in_order(forwards, blocks):
        return find_sections(forwards[0], blocks, layers), groups
    log.info("calibrate: %s has no stack of blocks that run once and in order; one pass for all", type(model).__name__)
    return [Section(tuple(names), None)], groups


class _Returned(Exception):
    """Ends a forward whose rest is not needed."""


def _stop(*_: object) -> None:
    raise _Returned


def _run(
    model: nn.Module, batches: Iterable[Batch], collector: Collector, loss: GradientLoss | None, until: nn.Module | None
) -> Moments:
    """The collector's moments of all batches, each run up to the return of `until`."""
    device = model_device(model)
    with eval_mode(model), _gradients(model, loss is not None), full_precision(device), Hooks() as hooks:
        collector.watch(hooks)
        if until is not None:
            hooks.add(until.register_forward_hook(_stop))
        for index, batch in enumerate(batches):
            batch = to_device(batch, device)
            with collector.batch(index, row_masks(batch)), contextlib.suppress(_Returned):
                output = call_model(model, batch)
            if loss is not None:
                with torch.random.fork_rng(enabled=True):
                    torch.manual_seed(index)  # a loss may draw: anew for each batch, alike in every run
                    collector.add_gradients(loss(output, batch))
    return collector.finish()


@torch.no_grad()
def collect_rows(
    model: nn.Module, batches: Sequence[Batch], layers: Mapping[str, nn.Module], count: int = 256
) -> dict[str, Tensor]:
    """About `count` rows (t, n), at most, that each layer's matrix multiplies; float32 on the CPU.

    They are evenly spread over at most 16 of the batches, since batches are often sorted by length, and over the
    unmasked tokens of each. It is a FlexrankError if there are no batches.
    """
    if not batches:
        raise FlexrankError("collecting rows needs at least one batch")
    chosen = [batches[index] for index in sorted({round(i * (len(batches) - 1) / 15) for i in range(16)})]
    quota = -(-count // len(chosen))
    samples: dict[str, list[Tensor]] = {name: [] for name in layers}
    masks: list[Tensor] = []

    def keep(name: str, layer: nn.Module, inputs: Tensor, _: Tensor) -> None:
        rows = masked_rows(input_rows(layer, inputs), masks)
        places = torch.linspace(0, len(rows) - 1, min(quota, len(rows))).long()
        samples[name].append(rows[places.to(rows.device)].detach().float().cpu())

    with eval_mode(model), Hooks() as hooks:
        for name, layer in layers.items():
            hooks.watch(layer, functools.partial(keep, name, layer))
        for batch in chosen:
            batch = to_device(batch, model_device(model))
            masks = row_masks(batch)
            call_model(model, batch)
    return {name: torch.cat(rows) for name, rows in samples.items()}


def _first(stream: Iterator[Batch]) -> Batch:
    for first in stream:
        return first
    raise FlexrankError("calibration got no batches; it needs at least one")


@contextlib.contextmanager
def _gradients(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Gradient mode on or off; where it is on, gradients also pass frozen parameters inside the block."""
    frozen = [p for p in model.parameters() if wanted and p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.set_grad_enabled(wanted):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
