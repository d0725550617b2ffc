"""Second moments of a model's activations: streamed, masked, shared, and only the smaller side of each layer."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from flexrank.batches import Batch, call_model, eval_mode, model_device, to_device, token_mask
from flexrank.errors import FlexrankError
from flexrank.progress import track
from flexrank.storage import write_aside
from flexrank.views import bias_of, conv_geometry, input_rows, masked_rows, matrix_shape, output_rows, weight_matrix

GradientLoss = Callable[[Any, Batch], Tensor]


@dataclasses.dataclass
class LayerMoment:
    """What calibration knows of one layer, summed over tokens.

    Attributes:
        side: "input" for Σ = Σ_t x_t x_tᵀ (n × n), "output" for C = W Σ Wᵀ (m × m).
        moment: float64; the same tensor for all layers that read the same input.
        mean_square: tr(Σ)/n.
        tokens: how many rows were summed.
        gradient_moment: G (m × m) float64, the second moment of the loss's gradient at the output, where asked for.
    """

    side: Literal["input", "output"]
    moment: Tensor
    mean_square: float = 0.0
    tokens: int = 0
    gradient_moment: Tensor | None = None


Moments = dict[str, LayerMoment]


class Hooks:
    """Owns forward hooks for the length of a `with` block, and removes every one of them whatever happens."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Hooks":
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(self, layer: nn.Module, see: Callable[[Tensor, Tensor], None]) -> None:
        """Calls `see(input, output)` after each forward of `layer`."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            see(args[0] if args else next(iter(kwargs.values())), output)

        self._handles.append(layer.register_forward_hook(hook, with_kwargs=True))


def collect_moments(
    model: nn.Module,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module],
    *,
    side: Literal["smaller", "input"] = "smaller",
    gradient_loss: GradientLoss | None = None,
) -> Moments:
    """Streams `batches` through the model and sums each layer's second moment; memory does not grow with tokens.

    Padding is left out by the batch's `attention_mask`. Layers that read the same tensor share one accumulator. For
    m <= n the output's moment is summed in place of the input's where that is less work. Products are taken in float32
    or better, sums in float64.

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
    first = next(stream, None)
    if first is None:
        raise FlexrankError("calibration got no batches; it needs at least one")
    for name, layer in layers.items():
        if not bool(torch.isfinite(weight_matrix(layer)).all()):
            raise FlexrankError(f"layer {name!r}: the weight holds values that are not finite")
    with eval_mode(model), _gradients(model, gradient_loss is not None):
        collector = _Collector(layers, _find_groups(model, first, layers), side, gradient_loss is not None)
        total = len(batches) if isinstance(batches, Sequence) else None
        with Hooks() as hooks:
            for name, layer in layers.items():
                hooks.watch(layer, collector.watcher(name, layer))
            for index, batch in enumerate(track(itertools.chain([first], stream), "calibrating", total)):
                batch = to_device(batch, model_device(model))
                collector.start_batch(index, token_mask(batch))
                output = call_model(model, batch)
                if gradient_loss is not None:
                    with torch.random.fork_rng(enabled=True):
                        torch.manual_seed(index)  # a loss may draw: anew for each batch, alike in every run
                        collector.add_gradients(gradient_loss(output, batch))
    return collector.moments


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


def merge_moments(first: Moments, second: Moments) -> Moments:
    """The moments of two sets of samples together, of the same layers and settings; both are left as they are.

    Raises:
        FlexrankError: they differ in layers, side, or gradients.
    """
    kinds = [
        [(name, layer.side, layer.gradient_moment is None) for name, layer in moments.items()]
        for moments in (first, second)
    ]
    if kinds[0] != kinds[1]:
        raise FlexrankError("moments of other layers, sides or gradients cannot be merged; collect both alike")
    sums: dict[int, Tensor] = {}  # layers that share their input's moment share the sum
    merged: Moments = {}
    for name, layer in first.items():
        other = second[name]
        moment = sums.setdefault(id(layer.moment), layer.moment + other.moment)
        tokens = layer.tokens + other.tokens
        gradient = None
        if layer.gradient_moment is not None and other.gradient_moment is not None:
            gradient = layer.gradient_moment + other.gradient_moment
        merged[name] = LayerMoment(layer.side, moment, layer.mean_square + other.mean_square, tokens, gradient)
    return merged


def save_moments(moments: Moments, path: str | Path) -> None:
    """Writes moments to one safetensors file; shared moments once."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, dict[str, Any]] = {}
    owners: dict[int, str] = {}
    for name, layer in moments.items():
        owner = owners.setdefault(id(layer.moment), name)
        tensors[f"{owner}.moment"] = layer.moment.contiguous()
        if layer.gradient_moment is not None:
            tensors[f"{name}.gradient_moment"] = layer.gradient_moment.contiguous()
        header[name] = {
            "side": layer.side, "tokens": layer.tokens, "mean_square": layer.mean_square, "owner": owner
        }  # fmt: skip
    with write_aside(path) as aside:
        safetensors.torch.save_file(tensors, aside, metadata={"layers": json.dumps(header)})


def load_moments(path: str | Path) -> Moments:
    """Reads `save_moments`' file; layers that shared a moment share it again."""
    moments: Moments = {}
    with safetensors.safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["layers"])
    for name, layer in header.items():
        moments[name] = LayerMoment(
            layer["side"], tensors[f"{layer['owner']}.moment"], layer["mean_square"], layer["tokens"],
            tensors.get(f"{name}.gradient_moment"),
        )  # fmt: skip
    return moments


class _Collector:
    """Sums moments while the model runs; one accumulator a group of layers with the same input."""

    def __init__(
        self, layers: Mapping[str, nn.Module], groups: Sequence[Sequence[str]], side: str, with_gradients: bool
    ):
        self.moments: Moments = {}
        self._leaders: dict[str, str] = {}
        self._groups: dict[str, Sequence[str]] = {}
        self._seen: dict[str, list[_Version]] = {}
        self._outputs: list[tuple[str, nn.Module, GradientEdge]] = []
        self._with_gradients = with_gradients
        self._batch = 0
        self._mask: Tensor | None = None
        for group in groups:
            self._leaders |= dict.fromkeys(group, group[0])
            self._groups[group[0]] = group
            self._allocate(group, layers, side)
        self.moments = {name: self.moments[name] for name in layers}

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
            self.moments[name] = LayerMoment("output" if is_output else "input", moment, gradient_moment=gradient)

    def start_batch(self, index: int, mask: Tensor | None) -> None:
        self._batch, self._mask = index, mask
        self._seen = {name: [] for name in self._leaders}

    def watcher(self, name: str, layer: nn.Module) -> Callable[[Tensor, Tensor], None]:
        def see(inputs: Tensor, outputs: Tensor) -> None:
            if self._with_gradients:
                # The edge, not the tensor: an activation in place would put another value and gradient there.
                self._outputs.append((name, layer, get_gradient_edge(outputs)))
            with torch.no_grad():
                self._add(name, layer, inputs.detach(), outputs.detach())

        return see

    def _add(self, name: str, layer: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
        entry, leader = self.moments[name], self._leaders[name]
        rows = _precise(masked_rows(input_rows(layer, inputs), self._mask))
        entry.tokens += rows.shape[0]
        entry.mean_square += float(rows.square().sum(dtype=torch.float64)) / rows.shape[1]
        if entry.side == "output":
            entry.moment += self._gram(name, self._output_rows(layer, rows, outputs))
            return
        if name == leader:
            entry.moment += self._gram(name, rows)
        self._check_sharing(name, leader, inputs)

    def _check_sharing(self, name: str, leader: str, inputs: Tensor) -> None:
        """Holds on to an input only until every layer of the group has read it, and sees that each reads the same."""
        self._seen[name].append(_version(inputs))
        calls, partner = len(self._seen[name]), self._seen[leader]
        if len(partner) < calls or not _same(partner[calls - 1], self._seen[name][-1]):
            raise FlexrankError(
                f"layers {leader!r} and {name!r} shared their input in the first batch and not in batch {self._batch}"
            )
        if all(len(self._seen[member]) == len(partner) for member in self._groups[leader]):
            for member in self._groups[leader]:
                self._seen[member].clear()

    def _output_rows(self, layer: nn.Module, rows: Tensor, outputs: Tensor) -> Tensor:
        if outputs.dtype.itemsize < 4:  # half precision has rounded the output: take the product again
            return rows @ _precise(weight_matrix(layer)).T
        found = masked_rows(output_rows(layer, outputs), self._mask)
        bias = bias_of(layer)
        return found if bias is None else found - bias

    def add_gradients(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, [edge for _, _, edge in self._outputs], allow_unused=True)
        for (name, layer, _), gradient in zip(self._outputs, gradients, strict=True):
            moment = self.moments[name].gradient_moment
            if gradient is not None and moment is not None:  # a layer the loss does not reach has no gradient
                moment += self._gram(name, _precise(masked_rows(output_rows(layer, gradient), self._mask)))
        self._outputs.clear()

    def _gram(self, name: str, rows: Tensor) -> Tensor:
        gram = rows.T @ rows
        if not bool(torch.isfinite(gram).all()):
            raise FlexrankError(f"layer {name!r} saw a value that is not finite in batch {self._batch}")
        return gram.double()


@torch.no_grad()
def _find_groups(model: nn.Module, batch: Batch, layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """Layers grouped by the very tensors they read in one batch, each group in order of its calls."""
    inputs, calls = _Inputs(), dict[str, list[int]]()

    def note(name: str, tensor: Tensor, _: Tensor) -> None:
        calls.setdefault(name, []).append(inputs.number(tensor))

    with Hooks() as hooks:
        for name, layer in layers.items():
            hooks.watch(layer, functools.partial(note, name))
        call_model(model, to_device(batch, model_device(model)))
    silent = [name for name in layers if name not in calls]
    if silent:
        raise FlexrankError(f"layer {silent[0]!r} did not run on the first batch; exclude it (unused: {len(silent)})")
    groups: dict[Any, list[str]] = {}
    for name, numbers in calls.items():
        groups.setdefault((*numbers, conv_geometry(layers[name])), []).append(name)
    return list(groups.values())


class _Inputs:
    """Numbers the tensors that layers read. Those who share one read it soon after each other (q, k, v; gate, up).

    Only the last few are held, so that no more than these stand in memory at once.
    """

    def __init__(self, held: int = 8):
        self._held: collections.deque[tuple[int, _Version]] = collections.deque(maxlen=held)
        self._count = 0

    def number(self, tensor: Tensor) -> int:
        """The number of this tensor as it stands: an operation in place makes it another."""
        version = _version(tensor)
        for place, (number, other) in enumerate(self._held):
            if _same(version, other):
                del self._held[place]
                self._held.append((number, other))  # read again: the last to be let go
                return number
        self._count += 1
        self._held.append((self._count, version))
        return self._count


#: A tensor as it stood when it was read: an operation in place later gives it another version.
_Version = tuple[Tensor, int]


def _version(tensor: Tensor) -> _Version:
    return tensor, 0 if tensor.is_inference() else tensor._version


def _same(a: _Version, b: _Version) -> bool:
    (x, x_version), (y, y_version) = a, b
    same_memory = x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
    return x_version == y_version and (x is y or same_memory)


def _precise(rows: Tensor) -> Tensor:
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _zeros(layer: nn.Module, size: int) -> Tensor:
    return torch.zeros(size, size, dtype=torch.float64, device=weight_matrix(layer).device)


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
