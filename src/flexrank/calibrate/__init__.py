"""Second moments of a model's activations: streamed, masked, shared, and by default of each layer's smaller side."""

import itertools
import logging
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.calibrate.block_stream import STATE_BYTES, Placement, States
from flexrank.calibrate.by_block import ByBlock
from flexrank.calibrate.collector import (
    Collector,
    GradientLoss,
    Side,
    calibration_mode,
    call_parts,
    first_of,
    seeded_loss,
)
from flexrank.calibrate.hooks import Hooks
from flexrank.calibrate.moments import LayerMoment, Moments, load_moments, save_moments
from flexrank.calibrate.structure import find_groups
from flexrank.data.batches import (
    Batch,
    call_model,
    eval_mode,
    model_device,
    require_alike,
    require_same_number,
    require_several,
    row_masks,
    to_device,
)
from flexrank.errors import FlexrankError
from flexrank.nn.blocks import block_stack
from flexrank.nn.matrix import input_rows, masked_rows, match_mask_layout, output_rows
from flexrank.nn.select import require_layers, require_own, require_unwrapped
from flexrank.progress import track

__all__ = [
    "STATE_BYTES", "GradientLoss", "Hooks", "LayerMoment", "Moments", "Placement", "Side",
    "collect_moments", "collect_rows", "find_groups", "load_moments", "moments_by_block", "save_moments",
]  # fmt: skip

log = logging.getLogger("flexrank")


def collect_moments(
    model: nn.Module,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module],
    *,
    side: Side = "smaller",
    gradient_loss: GradientLoss | None = None,
) -> Moments:
    """Sums the second moment of each layer over the real tokens of all batches; memory does not grow with tokens.

    With several processes, each takes its share of the batches, and all get the total sums.
    Layers that read the same tensor share one sum. For m <= n the output's moment is summed instead of the input's if
    that is less work. Products are computed in float32 or better, over at most 4096 rows each, and summed in float64.

    Args:
        layers: mapping from name to layer, from `select_layers`.
        side: "input" sums Σ for every layer, which whitening (`method="paper"`) needs.
        gradient_loss: (output, batch) to a scalar; with it, the outputs' gradient moments are summed too (`fisher`).

    Raises:
        FlexrankError: there are no batches, an activation is not finite (the message names layer and batch), a layer
            does not run, layers share their input in the first batch but not in a later one, or processes got other
            batches.
    """
    require_unwrapped(model)
    require_several(batches)
    if not isinstance(layers, Mapping):
        raise FlexrankError(
            f"layers is a {type(layers).__name__}; it is a mapping of names to layers, as select_layers has"
        )
    require_layers(layers)
    require_own(model, layers)
    stream, device = iter(batches), model_device(model)
    first = first_of(stream)
    total = len(batches) if isinstance(batches, Sequence) else None
    with calibration_mode(model, device, gradient_loss is not None), Hooks() as hooks:
        groups = find_groups(lambda: call_model(model, to_device(first, device)), layers)
        collector = Collector(layers, groups, side, gradient_loss is not None)
        hooks.on_forward(layers, collector.add_call)
        for number, batch in enumerate(track(itertools.chain([first], stream), "calibrating", total)):
            require_alike(number, batch)
            if number % processes.count() != processes.number():
                continue
            batch = to_device(batch, device)
            with collector.batch(number, row_masks(batch)):
                output = call_model(model, batch)
            if gradient_loss is not None:
                collector.add_gradients(seeded_loss(gradient_loss, output, batch, number))
        require_same_number(number + 1)
    return collector.finish()


def moments_by_block(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Iterable[str],
    *,
    side: Side = "smaller",
    gradient_loss: GradientLoss | None = None,
    placement: Placement | None = None,
    state_bytes: int = STATE_BYTES,
) -> Iterator[Moments]:
    """`collect_moments` for one block of the model's stack at a time, so that memory holds one block's moments.

    Yields the moments of one block's layers, equal to those of `collect_moments` (layers in two blocks that share an
    input have a moment each); release them before asking for the next. Modules that the caller puts in place of the
    block's layers do not run. Each block runs once, and once more on the first batch; with `gradient_loss` it runs a
    second time, followed by its backward pass, from the last block to the first. Layers outside the stack come last;
    what runs before the stack, such as an encoder before a decoder's stack, runs again for each block. Between blocks
    the hidden states of all batches are kept, up to `state_bytes` in memory and the rest in a temporary file. A model
    whose blocks cannot run alone is calibrated in one pass, and the log says why.

    Args:
        layers: names, from `select_layers`.
        side: this and `gradient_loss` as for `collect_moments`.
        placement: where blocks compute, and in which dtype; by default the model's device, and the dtypes as they are.
    """
    require_several(batches)
    names, batches, placement = list(layers), list(batches), placement or Placement(model)
    require_layers({name: model.get_submodule(name) for name in names})
    first_of(iter(batches))
    require_same_number(len(batches))
    for number, batch in enumerate(batches):
        require_alike(number, batch)
    stack = block_stack(model, names)
    with States(state_bytes) as states:
        parts = ByBlock(model, stack, batches, names, placement, states, side, gradient_loss)
        obstacle = parts.obstacle()
        if not processes.any_process(obstacle is not None):
            yield from parts.moments()
            return
    log.info("calibrate: %s is calibrated in one pass: %s", type(model).__name__, obstacle or "another process says so")
    with placement.placed(model):
        chosen = {name: model.get_submodule(name) for name in names}
        moments = collect_moments(model, batches, chosen, side=side, gradient_loss=gradient_loss)
        del chosen
        yield moments


@torch.no_grad()
def collect_rows(
    model: nn.Module, batches: Iterable[Batch], layers: Mapping[str, nn.Module], count: int = 256
) -> dict[str, Tensor]:
    """Samples up to about `count` of the rows (t, n) that each layer's matrix multiplies, in float32 on the CPU.

    The rows are spread evenly over at most 16 of the batches, because batches are often sorted by length, and over the
    unmasked tokens of each. Raises FlexrankError if there are no batches, or a layer does not run on them.
    """
    require_unwrapped(model)
    require_several(batches)
    batches = list(batches)
    if not batches:
        raise FlexrankError("collecting rows needs at least one batch")
    if not isinstance(layers, Mapping):
        raise FlexrankError(f"layers is a {type(layers).__name__}; it is what select_layers or nested_layers returns")
    require_own(model, layers)
    if not isinstance(count, numbers.Integral) or count < 1:
        raise FlexrankError(f"count is {count!r}; it is a whole number of rows from 1 up")
    chosen = [batches[index] for index in sorted({round(i * (len(batches) - 1) / 15) for i in range(16)})]
    quota = -(-count // len(chosen))
    samples: dict[str, list[Tensor]] = {name: [] for name in layers}
    masks: list[Tensor] = []

    def keep(name: str, inputs: Tensor, outputs: Tensor) -> None:
        layer = layers[name]
        index = torch.arange(len(output_rows(layer, outputs)))
        real, is_kept = masked_rows(index, match_mask_layout(masks, inputs)), torch.zeros(len(index), dtype=torch.bool)
        kept = min(quota, len(real))  # places in whole numbers: float32 has not all of them
        is_kept[real[torch.arange(kept) * (len(real) - 1) // max(kept - 1, 1)]] = True
        parts = call_parts(layer, inputs, outputs, [is_kept])
        rows = torch.cat([masked_rows(input_rows(layer, part), some) for part, _, some in parts])
        samples[name].append(rows.detach().float().cpu())

    with eval_mode(model), Hooks() as hooks:
        hooks.on_forward(layers, keep)
        for batch in chosen:
            batch = to_device(batch, model_device(model))
            masks = row_masks(batch)
            call_model(model, batch)
    for name, rows in samples.items():
        if not rows:
            raise FlexrankError(f"layer {name!r} did not run on any batch; exclude it")
    return {name: torch.cat(rows) for name, rows in samples.items()}
