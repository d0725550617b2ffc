"""Sums second moments while a model runs: products of a bounded number of rows in float32, sums of them in float64."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flexrank import processes
from flexrank.calibrate.moments import LayerMoment, Moments
from flexrank.calibrate.structure import Version, version_of
from flexrank.data.batches import Batch, eval_mode
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import ROWS, STRIP, add_gram, full_precision, mirror
from flexrank.nn.matrix import (
    bias_of,
    conv_geometry,
    input_rows,
    masked_rows,
    match_mask_layout,
    matrix_shape,
    output_rows,
    weight_matrix,
)
from flexrank.nn.select import require_differentiable

GradientLoss = Callable[[Any, Batch], Tensor]
Side = Literal["smaller", "input"]
#: Where a bias is so many times as long as the products, float32 leaves these three digits; they are computed again.
LONG_BIAS = 1e4


class Collector:
    """Sums moments while the model runs; a group's layers share one input moment, to which only the first adds."""

    def __init__(
        self, layers: Mapping[str, nn.Module], groups: Sequence[Sequence[str]], side: str, with_gradients: bool
    ):
        if side not in ("smaller", "input"):
            raise FlexrankError(f"side {side!r} is unknown; it is smaller or input")
        for name, layer in layers.items():
            if not bool(torch.isfinite(weight_matrix(layer)).all()):
                raise FlexrankError(f"layer {name!r}: the weight holds values that are not finite; exclude it")
        if not processes.same_everywhere(groups):
            raise FlexrankError("layers share their inputs in some batches and not in others; exclude those that do")
        self._layers, self._with_gradients = layers, with_gradients
        self._groups = {name: group for group in groups for name in group}
        self._read: dict[str, list[Version]] = {}
        self._outputs: list[tuple[str, GradientEdge, torch.Size]] = []
        self._is_backward = False
        self._batch = 0
        self._masks: Sequence[Tensor] = ()
        allocated = {name: moment for group in groups for name, moment in self._allocate(group, side).items()}
        self._moments = {name: allocated[name] for name in layers}

    def _allocate(self, group: Sequence[str], side: str) -> Moments:
        outputs, n = [matrix_shape(self._layers[name])[0] for name in group], matrix_shape(self._layers[group[0]])[1]
        moments: Moments = {}
        if side == "smaller" and max(outputs) <= n and sum(m * m for m in outputs) < n * n:
            for name, m in zip(group, outputs, strict=True):
                moments[name] = LayerMoment("output", self._zeros(name, m))
        else:
            shared = self._zeros(group[0], n)
            moments = {name: LayerMoment("input", shared) for name in group}
        for name, m in zip(group, outputs, strict=True):
            moments[name].gradient_moment = self._zeros(name, m) if self._with_gradients else None
        return moments

    def _zeros(self, name: str, size: int) -> Tensor:
        return torch.zeros(size, size, dtype=torch.float64, device=weight_matrix(self._layers[name]).device)

    @torch.no_grad()
    def add_call(self, name: str, inputs: Tensor, outputs: Tensor) -> None:
        """Adds one call of a layer to its moment; the callback for `Hooks.on_forward`."""
        if self._is_backward:  # a checkpointed part runs again
            return
        if self._with_gradients:
            if not outputs.requires_grad:
                raise FlexrankError(f"layer {name!r} runs without gradients; exclude it, or leave gradient_loss out")
            # The edge, not the tensor: an in-place activation would change the tensor's value and gradient.
            self._outputs.append((name, get_gradient_edge(_computed(outputs)), outputs.shape))
        if self._moments[name].side == "output" or name == self._groups[name][0]:
            for part in call_parts(self._layers[name], inputs, outputs, match_mask_layout(self._masks, inputs)):
                self._add(name, *part)
        self._read[name].append(version_of(inputs))

    def _add(self, name: str, inputs: Tensor, outputs: Tensor, masks: Sequence[Tensor]) -> None:
        entry, rows = self._moments[name], masked_rows(input_rows(self._layers[name], inputs), masks)
        entry.tokens += rows.shape[0]
        if entry.side == "output":
            lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
            entry.mean_square += float(lengths.double().square().sum()) / rows.shape[1]
            rows = self._output_rows(name, rows, outputs, masks)
        self._sum(name, entry.moment, rows)

    @contextlib.contextmanager
    def batch(self, index: int, masks: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block, batch number `index` runs, whose `row_masks` are `masks`."""
        if masks and not any(bool(mask.any()) for mask in masks):
            raise FlexrankError(f"batch {index} has no real token, as its attention_mask is 0 everywhere; leave it out")
        self._batch, self._masks = index, masks
        self._read = {name: [] for name in self._layers}
        yield
        for name, group in self._groups.items():
            if self._moments[name].side == "input" and self._read[name] != self._read[group[0]]:
                pair, right = f"layers {group[0]!r} and {name!r}", "exclude one of them"
                raise FlexrankError(f"{pair} shared their input in the first batch and not in batch {index}; {right}")

    def add_gradients(self, result: Tensor, gradient: Tensor | None = None, *inputs: Tensor) -> Sequence[Tensor]:
        """Adds the moments of the gradients at all outputs since the last call; returns the gradients at `inputs`.

        Gradients propagate from `result`: a loss, or a tensor at which the loss's gradient is `gradient`.
        """
        ends: list[Any] = [*(edge for _, edge, _ in self._outputs), *inputs]
        self._is_backward = True
        gradients = torch.autograd.grad(result, ends, gradient, allow_unused=True)
        self._is_backward = False
        for (name, _, shape), gradient in zip(self._outputs, gradients, strict=False):
            moment = self._moments[name].gradient_moment
            if gradient is not None and moment is not None:  # a layer the loss does not reach has no gradient
                gradient = gradient.reshape(shape)
                masks = match_mask_layout(self._masks, gradient)
                self._sum(name, moment, masked_rows(output_rows(self._layers[name], gradient), masks))
        self._outputs.clear()
        return gradients[len(gradients) - len(inputs) :]

    def finish(self, counts: bool = True) -> Moments:
        """Returns the moments over all processes, made symmetric: until this call each holds only its upper triangle.

        If `counts` is false, this process has no batches of its own: it ran another's, which is not added.
        """
        if processes.count() > 1:
            self._sum_over_processes(counts)
        if self._moments and not any(entry.tokens for entry in self._moments.values()):  # a dense block has none
            raise FlexrankError("calibration saw no rows: the batches are empty")
        for name, entry in self._moments.items():
            mirror(entry.moment)  # a shared moment is mirrored again, which changes nothing
            if entry.gradient_moment is not None:
                mirror(entry.gradient_moment)
            if entry.side == "input":
                entry.tokens = self._moments[self._groups[name][0]].tokens
                entry.mean_square = float(entry.moment.trace()) / entry.moment.shape[0]
        return self._moments

    def _sum_over_processes(self, counts: bool) -> None:
        entries = list(self._moments.values())
        parts = (part for entry in entries for part in (entry.moment, entry.gradient_moment) if part is not None)
        moments = list({id(part): part for part in parts}.values())
        for moment in moments if not counts else ():
            moment.zero_()
        processes.sum_(moments)
        totals = processes.sums(*(value * counts for entry in entries for value in (entry.tokens, entry.mean_square)))
        for entry, tokens, square in zip(entries, totals[::2], totals[1::2], strict=True):
            entry.tokens, entry.mean_square = int(tokens), square

    def _output_rows(self, name: str, rows: Tensor, outputs: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """W x for each row, without the bias, in float32 or better."""
        layer = self._layers[name]
        if outputs.dtype.itemsize < 4:  # half precision rounded the output: compute the product again
            return _product(rows, weight_matrix(layer))
        products, bias = masked_rows(output_rows(layer, outputs), masks), bias_of(layer)
        if bias is None:
            return products
        centred = products - bias
        is_long = bias.norm() * len(centred) ** 0.5 > LONG_BIAS * centred.norm()
        is_lost = outputs.dtype == torch.float32 and bool(is_long)
        return _product(rows, weight_matrix(layer)) if is_lost else centred

    def _sum(self, name: str, moment: Tensor, rows: Tensor) -> None:
        add_gram(moment, rows)
        # A value that is not finite in a row, or overflows in a product, shows on the diagonal: |Σ_ij|² <= Σ_ii Σ_jj.
        if not bool(torch.isfinite(moment.diagonal()).all()):
            right = "check it, or load the model in float32"
            raise FlexrankError(f"layer {name!r} saw a value that is not finite in batch {self._batch}; {right}")


def call_parts(
    layer: nn.Module, inputs: Tensor, outputs: Tensor, masks: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Sequence[Tensor]]]:
    """Yields a layer's call in parts: a convolution's by images, about `ROWS` rows each, as patches repeat inputs.

    Each part comes with the masks of its rows.
    """
    geometry = conv_geometry(layer)
    if geometry is None or inputs.ndim < 4 or not len(inputs):
        yield inputs, outputs, masks
        return
    count = geometry.positions(inputs)
    size = max(1, ROWS * len(inputs) // max(1, count))
    own = [mask.reshape(len(inputs), -1).split(size) for mask in masks if mask.numel() == count]
    for part, products, *some in zip(inputs.split(size), outputs.split(size), *own, strict=True):
        yield part, products, some


def _computed(outputs: Tensor) -> Tensor:
    """What a layer has computed, if its outputs are a view of that in another shape: those of a linear layer often are.

    An operation that changes a view in place takes the view's own place in the graph, and no gradient reaches that.
    """
    base = outputs._base
    if base is None or base.numel() != outputs.numel() or base.storage_offset() != outputs.storage_offset():
        return outputs
    return base if base.reshape(outputs.shape).stride() == outputs.stride() else outputs


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows (t, n) times the transposed weight (m, n) in float32, strip by strip, so neither is copied in full."""
    product = torch.empty(len(rows), len(weight), dtype=torch.float32, device=rows.device)
    for top in range(0, len(rows), STRIP):
        part = rows[top : top + STRIP].float()
        for left in range(0, len(weight), STRIP):
            product[top : top + STRIP, left : left + STRIP] = part @ weight[left : left + STRIP].float().T
    return product


@contextlib.contextmanager
def calibration_mode(model: nn.Module, device: torch.device, with_gradients: bool) -> Iterator[None]:
    """Inside the block, the model is in eval mode and full precision; with gradients, no parameter is frozen.

    Tensors of `inference_mode` are not made: they do not count the changes that are made to them in place.
    """
    if with_gradients:
        require_differentiable(model)
    frozen = [p for p in model.parameters() if with_gradients and p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.inference_mode(False), eval_mode(model), full_precision(device):
            with torch.set_grad_enabled(with_gradients):
                yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def seeded_loss(loss: GradientLoss, output: Any, batch: Batch, number: int) -> Tensor:
    """The loss of batch `number`; its random draws differ between batches and are the same in every run."""
    if not callable(loss) or isinstance(loss, type):
        raise FlexrankError(f"gradient_loss is {loss!r}; it is a function, such as an objective's fisher_loss")
    with torch.random.fork_rng(range(torch.accelerator.device_count())):  # `manual_seed` seeds all of them
        torch.manual_seed(number)
        value = loss(output, batch)
    if torch.is_grad_enabled() and not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
        raise FlexrankError(
            "gradient_loss must return a scalar tensor with a gradient; sum the losses, and detach nothing"
        )
    return value


def first_of(batches: Iterator[Batch]) -> Batch:
    """Returns the first of the batches; raises FlexrankError if there are none."""
    for first in batches:
        return first
    raise FlexrankError("calibration got no batches; it needs at least one")
