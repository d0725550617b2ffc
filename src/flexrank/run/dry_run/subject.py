"""What a run would work on: the model and its elastic form on the meta device, and what one sample does in them."""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.data.batches import call_model, output_tensor
from flexrank.distill.objectives import EmbeddingObjective, default_objective
from flexrank.errors import FlexrankError
from flexrank.hf import meta, models
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import conv_geometry, input_rows, is_layer, matrix_shape
from flexrank.nn.select import nest_, select_layers
from flexrank.nn.switch import nested_layers
from flexrank.profiles.costs import Shape
from flexrank.run.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Call:
    """What one call of a layer does for one sample.

    Attributes:
        rows: that its matrix multiplies: tokens, patches, or positions of a convolution.
        is_inner: whether something trained stands before it, so that the loss's gradient goes on to its input.
    """

    rows: int
    is_inner: bool


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model without its weights, and what one sample does in it.

    Attributes:
        teacher: the model, on the meta device; what consolidation would train requires a gradient.
        student: its elastic form at full rank, likewise.
        calls: of each layer with a matrix, factorised or not, in the order in which they run.
        groups: factorised layers that read the same tensors, and so share a moment; in the same order.
        tokens: positions of one sample: tokens, or the most rows that a linear layer sees of an image (patches,
            registers and class token).
        outputs: numbers in the model's output for one sample.
        targets: numbers that the probe keeps of the teacher's output for one sample.
    """

    teacher: Any
    student: Any
    calls: Mapping[str, tuple[Call, ...]]
    groups: tuple[tuple[str, ...], ...]
    tokens: int
    outputs: int
    targets: int

    @functools.cached_property
    def matrices(self) -> dict[str, Shape]:
        """(m, n) of each layer in `calls`."""
        return {name: matrix_shape(self.teacher.get_submodule(name)) for name in self.calls}

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """(m, n) of each factorised layer."""
        return {name: layer.matrix_shape for name, layer in nested_layers(self.student).items()}

    @functools.cached_property
    def attention(self) -> int:
        """Operations of attention's own products for one sample: 4·T²·heads·head size in each layer.

        Scores and mixed values are 2·T²·d each. The whole square is counted, also where a mask hides a part of it.
        """
        return 4 * self.tokens**2 * meta.attention_width(self.teacher)


def make_subject(config: RunConfig) -> Subject:
    """The subject of a run.

    Raises:
        FlexrankError: the architecture cannot be built, or no layer can be factorised.
    """
    dtype = getattr(torch, config.dtype)
    teacher = meta.meta_model(config.model, config.task, dtype=dtype, architecture=config.architecture)
    _require_positions(teacher, config)
    _freeze_embeddings(teacher)
    layers = select_layers(teacher, config.layers.include, config.layers.exclude)
    student = copy.deepcopy(teacher)
    for name in layers:
        nest_(student, name, _empty_factors(matrix_shape(layers[name])))
    watched = {name: module for name, module in teacher.named_modules() if is_layer(module)}
    calls, inputs, output = _watch(teacher, watched, meta.meta_sample(teacher, config.task, config.data.max_tokens))
    objective = EmbeddingObjective() if config.task == "embedding" else default_objective(output)
    linear = [call.rows for name in calls for call in calls[name] if conv_geometry(watched[name]) is None]
    return Subject(
        teacher=teacher,
        student=student,
        calls=calls,
        groups=_groups({name: (*inputs[name], conv_geometry(layers[name])) for name in inputs if name in layers}),
        tokens=max(linear, default=1) if config.task == "classification" else config.data.max_tokens,
        outputs=output_tensor(output).numel(),
        targets=objective.target(output, {}).numel(),
    )


def _require_positions(teacher: Any, config: RunConfig) -> None:
    limit = getattr(teacher.config, "max_position_embeddings", None)
    if config.task != "classification" and limit is not None and config.data.max_tokens > limit:
        raise FlexrankError(f"data.max_tokens is {config.data.max_tokens}; this model reads at most {limit}")


def _freeze_embeddings(model: nn.Module) -> None:
    """Leaves a gradient to what consolidation trains: all but embeddings and what is tied to them."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)


def _empty_factors(shape: Shape) -> Factors:
    m, n = shape
    rank = min(shape)
    u, v, energies = (torch.empty(size, dtype=torch.float64, device="meta") for size in ((rank, m), (rank, n), (rank,)))
    return Factors(u, v, energies)


def _watch(
    model: nn.Module, layers: Mapping[str, nn.Module], sample: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[Call, ...]], dict[str, list[Any]], Any]:
    """Runs one sample on the meta device: each layer's calls, the identities of what they read, and the output.

    Tensors there have no address; their storages tell them apart, and are all held until the end.
    """
    calls: dict[str, list[Call]] = {}
    inputs: dict[str, list[Any]] = {}
    held: list[Tensor] = []

    def see(name: str, tensor: Tensor, _: Tensor) -> None:
        held.append(tensor)
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor._version)
        calls.setdefault(name, []).append(Call(input_rows(layers[name], tensor).shape[0], tensor.requires_grad))
        inputs.setdefault(name, []).append(place)

    with Hooks() as hooks, models.clear_errors(type(model).__name__):
        for name, layer in layers.items():
            hooks.watch(layer, functools.partial(see, name))
        output = call_model(model, sample)
    return {name: tuple(found) for name, found in calls.items()}, inputs, output


def _groups(keys: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    groups: dict[Any, list[str]] = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    return tuple(map(tuple, groups.values()))
