"""Statistics that rank methods collect from the calibration: one tensor for each layer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from flexrank.calibrate import Hooks, collect_moments
from flexrank.calibrate.collector import calibration_mode, seeded_loss
from flexrank.data.batches import (
    Batch,
    batch_rows,
    call_model,
    eval_mode,
    model_device,
    row_masks,
    to_device,
)
from flexrank.data.metrics import next_tokens
from flexrank.nn.matrix import input_rows, masked_rows, match_mask_layout, matrix_shape, output_rows
from research.baselines.method import Layers, Loss


def nothing(_: nn.Module, batches: Sequence[Batch], layers: Layers, loss: Loss) -> dict[str, Tensor]:
    """Returns an empty tensor for each layer."""
    return {name: torch.empty(0) for name in layers}


def input_moments(
    model: nn.Module, batches: Sequence[Batch], layers: Layers, _: Loss
) -> dict[str, Float[Tensor, "n n"]]:
    """Returns X Xᵀ of each layer, summed over real tokens, in float64."""
    return {name: one.moment.cpu() for name, one in collect_moments(model, batches, layers, side="input").items()}


def mean_magnitudes(
    model: nn.Module, batches: Sequence[Batch], layers: Layers, _: Loss
) -> dict[str, Float[Tensor, " n"]]:
    """Returns each input's mean absolute value over real tokens, in float64."""
    sums, counts = _zeros(layers), dict.fromkeys(layers, 0)

    def add(name: str, inputs: Tensor, _: Tensor) -> None:
        sums[name] += inputs.abs().sum(0, dtype=torch.float64).cpu()
        counts[name] += len(inputs)

    _watch(model, batches, layers, add)
    return {name: sums[name] / counts[name] for name in layers}


def output_moments(model: nn.Module, batches: Sequence[Batch], layers: Layers) -> dict[str, Float[Tensor, "m m"]]:
    """Returns Y Yᵀ of each layer, bias included, summed over real tokens, in float64."""
    sizes = {name: matrix_shape(layer)[0] for name, layer in layers.items()}
    sums = {name: torch.zeros(size, size, dtype=torch.float64) for name, size in sizes.items()}

    def add(name: str, _: Tensor, outputs: Tensor) -> None:
        sums[name] += (outputs.double().T @ outputs.double()).cpu()

    _watch(model, batches, layers, add)
    return sums


@torch.no_grad()
def _watch(
    model: nn.Module, batches: Sequence[Batch], layers: Layers, callback: Callable[[str, Tensor, Tensor], None]
) -> None:
    """Runs the model; calls `callback(name, inputs, outputs)` with the rows of real tokens of each layer's calls."""
    masks = list[Tensor]()

    def watched(name: str, inputs: Tensor, outputs: Tensor) -> None:
        layer = layers[name]
        own = match_mask_layout(masks, inputs)
        callback(name, masked_rows(input_rows(layer, inputs), own), masked_rows(output_rows(layer, outputs), own))

    device = model_device(model)
    with calibration_mode(model, device, with_gradients=False), Hooks() as hooks:
        hooks.on_forward(layers, watched)
        for batch in batches:
            batch = to_device(batch, device)
            masks[:] = row_masks(batch)
            call_model(model, batch)


def input_importance(
    model: nn.Module, batches: Sequence[Batch], layers: Layers, loss: Loss
) -> dict[str, Float[Tensor, " n"]]:
    """Returns each input's Fisher information in float64: the mean over samples of Σ_i (∂L/∂W_ij)², L a sample's loss.

    The gradient of one sample is Σ_t g_t x_tᵀ over its tokens, with g at the layer's output and x at its input.
    """
    sums, samples, device = _zeros(layers), 0, model_device(model)
    seen: list[tuple[str, Tensor, GradientEdge]] = []

    def record(name: str, inputs: Tensor, outputs: Tensor) -> None:
        seen.append((name, input_rows(layers[name], inputs).detach(), get_gradient_edge(outputs)))

    with calibration_mode(model, device, with_gradients=True), Hooks() as hooks:
        hooks.on_forward(layers, record)
        for number, batch in enumerate(batches):
            batch, count = to_device(batch, device), batch_rows(batch)
            total, samples = seeded_loss(loss, call_model(model, batch), batch, number), samples + count
            gradients = torch.autograd.grad(total, [edge for *_, edge in seen], allow_unused=True)
            for (name, rows, _), gradient in zip(seen, gradients, strict=True):
                if gradient is not None:  # the loss reaches the layer
                    sums[name] += _squares(rows, output_rows(layers[name], gradient), count)
            seen.clear()
    return {name: sums[name] / samples for name in layers}


def _squares(rows: Float[Tensor, "t n"], gradients: Float[Tensor, "t m"], samples: int) -> Float[Tensor, " n"]:
    """Returns the squared gradients of W of each sample, summed over outputs and samples of equally many rows."""
    pairs = zip(rows.unflatten(0, (samples, -1)), gradients.unflatten(0, (samples, -1)), strict=True)
    return torch.stack([(g.T @ x).square().sum(0, dtype=torch.float64) for x, g in pairs]).sum(0).cpu()


def _zeros(layers: Layers) -> dict[str, Tensor]:
    return {name: torch.zeros(matrix_shape(layer)[1], dtype=torch.float64) for name, layer in layers.items()}


def mean_loss(loss: Loss, batches: Sequence[Batch]) -> Callable[[nn.Module], float]:
    """Returns evaluate(model) -> the loss per sample, averaged over all batches."""

    @torch.inference_mode()
    def evaluate(model: nn.Module) -> float:
        total, device = 0.0, model_device(model)
        with eval_mode(model):
            for number, batch in enumerate(batches):
                batch = to_device(batch, device)
                total += float(seeded_loss(loss, call_model(model, batch), batch, number))
        return total / sum(map(batch_rows, batches))

    return evaluate


def next_token_loss(output: Any, batch: Batch) -> Tensor:
    """Returns the summed cross entropy of each real token given those before it: a causal language model's loss."""
    logits, targets = next_tokens(output, batch)
    return functional.cross_entropy(logits.float(), targets, reduction="sum")
