"""Sums second moments while a model runs: float32 products of a bounded number of rows, float64 sums of those."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flexrank.calibrate.groups import Version, version_of
from flexrank.calibrate.moments import LayerMoment, Moments
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import STRIP, add_gram, mirror
from flexrank.nn.matrix import bias_of, input_rows, masked_rows, matrix_shape, output_rows, weight_matrix


class Collector:
    """Sums moments while the model runs; one accumulator a group of layers with the same input."""

    def __init__(
        self, layers: Mapping[str, nn.Module], groups: Sequence[Sequence[str]], side: str, with_gradients: bool
    ):
        self._moments: Moments = {}
        self._leaders: dict[str, str] = {}
        self._groups: dict[str, Sequence[str]] = {}
        self._seen: dict[str, list[Version]] = {}
        self._outputs: list[tuple[str, nn.Module, GradientEdge]] = []
        self._with_gradients = with_gradients
        self._batch = 0
        self._mask: Tensor | None = None
        for group in groups:
            self._leaders |= dict.fromkeys(group, group[0])
            self._groups[group[0]] = group
            self._allocate(group, layers, side)
        self._moments = {name: self._moments[name] for name in layers}

    def _allocate(self, group: Sequence[str], layers: Mapping[str, nn.Module], side: str) -> None:
        shapes = {name: matrix_shape(layers[name]) for name in group}
        inputs = shapes[group[0]][1]
        outputs_cost = sum(m * m for m, _ in shapes.values())
        is_output = side == "smaller" and all(m <= n for m, n in shapes.values()) and outputs_cost < inputs**2
        shared = None if is_output else _zeros(layers[group[0]], inputs)
        for name, (m, _) in shapes.items():
            layer = layers[name]
            moment = _zeros(layer, m) if shared is None else shared
            gradient = _zeros(layer, m) if self._with_gradients else None
            self._moments[name] = LayerMoment("output" if is_output else "input", moment, gradient_moment=gradient)

    def start_batch(self, index: int, mask: Tensor | None) -> None:
        """Tells which batch comes, and its real tokens (B, T); None where all are."""
        self._batch = index
        self._mask = None if mask is None or bool(mask.all()) else mask  # rows need no copy where none is left out
        self._seen = {name: [] for name in self._leaders}

    def watcher(self, name: str, layer: nn.Module) -> Callable[[Tensor, Tensor], None]:
        """What is to see the layer's input and output at each of its calls."""

        def see(inputs: Tensor, outputs: Tensor) -> None:
            if self._with_gradients:
                # The edge, not the tensor: an activation in place would put another value and gradient there.
                self._outputs.append((name, layer, get_gradient_edge(outputs)))
            with torch.no_grad():
                self._add(name, layer, inputs.detach(), outputs.detach())

        return see

    def add_gradients(self, loss: Tensor) -> None:
        """Adds the second moments of the loss's gradients at the outputs seen since the last call."""
        gradients = torch.autograd.grad(loss, [edge for _, _, edge in self._outputs], allow_unused=True)
        for (name, layer, _), gradient in zip(self._outputs, gradients, strict=True):
            moment = self._moments[name].gradient_moment
            if gradient is not None and moment is not None:  # a layer the loss does not reach has no gradient
                self._sum(name, moment, masked_rows(output_rows(layer, gradient), self._mask))
        self._outputs.clear()

    def finish(self) -> Moments:
        """The moments, whole: until now each held what is right of its diagonal."""
        whole: set[int] = set()
        for name, entry in self._moments.items():
            for moment in (entry.moment, entry.gradient_moment):
                if moment is not None and id(moment) not in whole:
                    mirror(moment)
                    whole.add(id(moment))
            if entry.side == "input":
                entry.tokens = self._moments[self._leaders[name]].tokens
                entry.mean_square = float(entry.moment.trace()) / entry.moment.shape[0]
        return self._moments

    def _add(self, name: str, layer: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
        entry, leader = self._moments[name], self._leaders[name]
        if entry.side == "output" or name == leader:
            rows = masked_rows(input_rows(layer, inputs), self._mask)
            entry.tokens += rows.shape[0]
            if entry.side == "output":
                entry.mean_square += _energy(rows) / rows.shape[1]
                rows = self._output_rows(layer, rows, outputs)
            self._sum(name, entry.moment, rows)
        if entry.side == "input":
            self._check_sharing(name, leader, inputs)

    def _check_sharing(self, name: str, leader: str, inputs: Tensor) -> None:
        """Remembers an input until every layer of the group has read it, and sees that each reads the same."""
        self._seen[name].append(version_of(inputs))
        calls, partner = len(self._seen[name]), self._seen[leader]
        if len(partner) < calls or partner[calls - 1] != self._seen[name][-1]:
            raise FlexrankError(
                f"layers {leader!r} and {name!r} shared their input in the first batch and not in batch {self._batch}"
            )
        if all(len(self._seen[member]) == len(partner) for member in self._groups[leader]):
            for member in self._groups[leader]:
                self._seen[member].clear()

    def _output_rows(self, layer: nn.Module, rows: Tensor, outputs: Tensor) -> Tensor:
        """W x of each row, without the bias, in float32 or better."""
        if outputs.dtype.itemsize < 4:  # half precision has rounded the output: take the product again
            return _product(rows, weight_matrix(layer))
        found = masked_rows(output_rows(layer, outputs), self._mask)
        bias = bias_of(layer)
        return found if bias is None else found - bias

    def _sum(self, name: str, moment: Tensor, rows: Tensor) -> None:
        add_gram(moment, rows)
        # What is not finite in a row, or overflows in a product, is so on the diagonal: |Σ_ij|² <= Σ_ii Σ_jj.
        if not bool(torch.isfinite(moment.diagonal()).all()):
            raise FlexrankError(f"layer {name!r} saw a value that is not finite in batch {self._batch}")


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows (t, n) times weightᵀ (m, n) in float32, block by block: neither is copied whole."""
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


def _zeros(layer: nn.Module, size: int) -> Tensor:
    return torch.zeros(size, size, dtype=torch.float64, device=weight_matrix(layer).device)
