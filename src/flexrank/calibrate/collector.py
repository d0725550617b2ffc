"""Sums second moments while a model runs: float32 products of a bounded number of rows, float64 sums of those."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flexrank.calibrate.groups import Version, version_of
from flexrank.calibrate.hooks import Hooks
from flexrank.calibrate.moments import LayerMoment, Moments
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import STRIP, add_gram, mirror
from flexrank.nn.matrix import bias_of, input_rows, masked_rows, matrix_shape, output_rows, weight_matrix


class Collector:
    """Sums moments while the model runs. Layers that share their input share one sum, which the first of them adds to.

    `groups` are from `find_groups`; side "smaller" sums the output's moment where that is less work.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], groups: Sequence[Sequence[str]], side: str, with_gradients: bool
    ):
        self._layers, self._with_gradients = layers, with_gradients
        self._groups = {name: group for group in groups for name in group}
        self._read: dict[str, list[Version]] = {}
        self._outputs: list[tuple[str, GradientEdge]] = []
        self._batch = 0
        self._mask: Tensor | None = None
        allocated: Moments = {}
        for group in groups:
            allocated |= self._allocate(group, side)
        self._moments = {name: allocated[name] for name in layers}

    def _allocate(self, group: Sequence[str], side: str) -> Moments:
        shapes = {name: matrix_shape(self._layers[name]) for name in group}
        n = shapes[group[0]][1]
        outputs_cost = sum(m * m for m, _ in shapes.values())
        is_output = side == "smaller" and all(m <= n for m, _ in shapes.values()) and outputs_cost < n**2
        shared = None if is_output else self._zeros(group[0], n)
        moments = {}
        for name, (m, _) in shapes.items():
            moment = self._zeros(name, m) if shared is None else shared
            gradient = self._zeros(name, m) if self._with_gradients else None
            moments[name] = LayerMoment("output" if is_output else "input", moment, gradient_moment=gradient)
        return moments

    def _zeros(self, name: str, size: int) -> Tensor:
        return torch.zeros(size, size, dtype=torch.float64, device=weight_matrix(self._layers[name]).device)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Hooks]:
        """Inside the block each call of a layer adds to its moment; the hooks may own others too."""
        with Hooks() as hooks:
            for name, layer in self._layers.items():
                hooks.watch(layer, self.watcher(name))
            yield hooks

    def watcher(self, name: str) -> Callable[[Tensor, Tensor], None]:
        """The function that takes the layer's input and output of each call."""

        def see(inputs: Tensor, outputs: Tensor) -> None:
            if self._with_gradients:
                # The edge, not the tensor: an activation in place would put another value and gradient there.
                self._outputs.append((name, get_gradient_edge(outputs)))
            with torch.no_grad():
                self._add(name, inputs.detach(), outputs.detach())

        return see

    @contextlib.contextmanager
    def batch(self, index: int, mask: Tensor | None) -> Iterator[None]:
        """Inside the block one batch runs, of this number and these real tokens (B, T); None where all are real."""
        self._batch = index
        self._mask = None if mask is None or bool(mask.all()) else mask  # rows need no copy where none is left out
        self._read = {name: [] for name in self._layers}
        yield
        for name, group in self._groups.items():
            if self._moments[name].side == "input" and self._read[name] != self._read[group[0]]:
                pair = f"layers {group[0]!r} and {name!r}"
                raise FlexrankError(f"{pair} shared their input in the first batch and not in batch {index}")

    def add_gradients(self, loss: Tensor) -> None:
        """Adds the second moments of the loss's gradients at the outputs since the last call."""
        gradients = torch.autograd.grad(loss, [edge for _, edge in self._outputs], allow_unused=True)
        for (name, _), gradient in zip(self._outputs, gradients, strict=True):
            moment = self._moments[name].gradient_moment
            if gradient is not None and moment is not None:  # a layer the loss does not reach has no gradient
                self._sum(name, moment, masked_rows(output_rows(self._layers[name], gradient), self._mask))
        self._outputs.clear()

    def finish(self) -> Moments:
        """The moments, made symmetric: until now each holds only its upper triangle."""
        finished: set[int] = set()
        for name, entry in self._moments.items():
            for moment in (entry.moment, entry.gradient_moment):
                if moment is not None and id(moment) not in finished:
                    mirror(moment)
                    finished.add(id(moment))
            if entry.side == "input":
                entry.tokens = self._moments[self._groups[name][0]].tokens
                entry.mean_square = float(entry.moment.trace()) / entry.moment.shape[0]
        return self._moments

    def _add(self, name: str, inputs: Tensor, outputs: Tensor) -> None:
        entry = self._moments[name]
        if entry.side == "output" or name == self._groups[name][0]:
            rows = masked_rows(input_rows(self._layers[name], inputs), self._mask)
            entry.tokens += rows.shape[0]
            if entry.side == "output":
                entry.mean_square += _energy(rows) / rows.shape[1]
                rows = self._output_rows(name, rows, outputs)
            self._sum(name, entry.moment, rows)
        self._read[name].append(version_of(inputs))

    def _output_rows(self, name: str, rows: Tensor, outputs: Tensor) -> Tensor:
        """W x of each row, without the bias, in float32 or better."""
        layer = self._layers[name]
        if outputs.dtype.itemsize < 4:  # half precision has rounded the output: take the product again
            return _product(rows, weight_matrix(layer))
        products, bias = masked_rows(output_rows(layer, outputs), self._mask), bias_of(layer)
        return products if bias is None else products - bias

    def _sum(self, name: str, moment: Tensor, rows: Tensor) -> None:
        add_gram(moment, rows)
        # What is not finite in a row, or overflows in a product, is so on the diagonal: |Σ_ij|² <= Σ_ii Σ_jj.
        if not bool(torch.isfinite(moment.diagonal()).all()):
            raise FlexrankError(f"layer {name!r} saw a value that is not finite in batch {self._batch}")


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows (t, n) times weightᵀ (m, n) in float32, strip by strip: neither is copied whole."""
    product = torch.empty(len(rows), len(weight), dtype=torch.float32, device=rows.device)
    for top in range(0, len(rows), STRIP):
        part = rows[top : top + STRIP].float()
        for left in range(0, len(weight), STRIP):
            product[top : top + STRIP, left : left + STRIP] = part @ weight[left : left + STRIP].float().T
    return product


def _energy(rows: Tensor) -> float:
    """The sum of squares: each row's in float32 or better, their sum in float64."""
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return float(lengths.double().square().sum())
