"""The architecture of a run's models on the meta device, where tensors have shapes and take no memory."""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.calibrate.structure import find_groups
from flexrank.data.batches import call_model, output_tensor
from flexrank.distill.objectives import EmbeddingObjective, default_objective
from flexrank.files import read_json
from flexrank.hf import meta, models
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.experts import separate_experts_
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import conv_geometry, input_rows, is_layer, matrix_shape
from flexrank.nn.select import elastic_form, replace_layers, select_layers
from flexrank.nn.switch import layer_shapes, uniform_profile
from flexrank.profiles import ProfileChain, RankProfile
from flexrank.profiles.costs import Shape, full_ranks, total_dense
from flexrank.run.config import RunConfig
from flexrank.run.fitting import require_fitting


class Call(NamedTuple):
    """One call of a layer for one sample: its input's rows, and whether anything before it is trained."""

    rows: int
    needs_gradient: bool


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The base model and its elastic form without weights, and what one sample's forward pass shows of them."""

    teacher: Any  # the base model; what consolidation trains has requires_grad, here and in the student
    student: Any  # its elastic form at full rank
    calls: Mapping[str, tuple[Call, ...]]  # of each layer with a matrix, factorised or not, in order of execution
    groups: tuple[tuple[str, ...], ...]  # factorised layers that read the same tensors, and so share a moment
    sample: Mapping[str, Tensor]  # one sample
    tokens: int  # of one sample; for an image, the most rows that a linear layer reads
    outputs: int  # numbers in the model's output for one sample
    target: Shape  # rows, and numbers per row, that the loss needs of the teacher's output for one sample
    file_dtype: torch.dtype  # of the base model's files, which it keeps as a teacher
    chain: ProfileChain | None = None  # the run's own, if its ranks are allocated already

    @functools.cached_property
    def matrices(self) -> dict[str, Shape]:
        """(m, n) of each layer in `calls`."""
        return {name: matrix_shape(self.teacher.get_submodule(name)) for name in self.calls}

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """(m, n) of each factorised layer."""
        return layer_shapes(self.student)

    def profile(self, budget: float, slack_share: float) -> RankProfile:
        """The run's own ranks at this budget or, until they are allocated, the largest uniform ones within it."""
        if self.chain is not None:
            return self.chain.at(budget)
        return uniform_profile(self.student, budget, slack_share)

    @property
    def dense_parameters(self) -> int:
        """Parameters of the factorised layers in the base model."""
        return total_dense(self.shapes)

    @property
    def attention(self) -> int:
        """Attention's operations for one sample, scores and weighted values: 4·T²·heads·head size a layer, no masks."""
        return 4 * self.tokens**2 * meta.attention_width(self.teacher)


def build_architecture(config: RunConfig) -> Architecture:
    """Builds both models, and runs one sample through the base model.

    Raises:
        FlexrankError: the architecture cannot be built, or no layer can be factorised.
    """
    dtype = getattr(torch, config.dtype)
    teacher = meta.meta_model(config.model, config.task, dtype=dtype, architecture=config.architecture)
    require_fitting(config, teacher)
    separate_experts_(teacher)
    for module in teacher.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)  # consolidation trains neither embeddings nor what is tied to them
    layers = select_layers(teacher, config.layers.include, config.layers.exclude)
    if trains_only_factors(config):
        weights = {layer.get_parameter("weight") for layer in layers.values()}
        for parameter in teacher.parameters():
            parameter.requires_grad_(parameter in weights)
    student = copy.deepcopy(teacher)
    replace_layers(student, {name: _empty_form(layer) for name, layer in layers.items()})
    watched = {name: module for name, module in teacher.named_modules() if is_layer(module)}
    sample = meta.meta_sample(teacher, config.task, config.data.max_tokens)
    calls, output = _watch(teacher, watched, sample)
    objective = EmbeddingObjective() if config.task == "embedding" else default_objective(output)
    target = objective.target(output, {})
    linear = [call.rows for name in calls for call in calls[name] if conv_geometry(watched[name]) is None]
    return Architecture(
        teacher=teacher,
        student=student,
        calls=calls,
        groups=tuple(map(tuple, find_groups(lambda: call_model(teacher, sample), layers))),
        sample=sample,
        tokens=max(linear, default=1) if config.task == "classification" else config.data.max_tokens,
        outputs=output_tensor(output).numel(),
        target=(target.shape[:-1].numel(), target.shape[-1]),
        file_dtype=meta.file_dtype(config.model, config.architecture),
        chain=_own_chain(config, student),
    )


def _own_chain(config: RunConfig, student: nn.Module) -> ProfileChain | None:
    """The chain in RUN/chain.json, if it is of these budgets and layers; else it is from an earlier configuration."""
    path = config.directory / "chain.json"
    if not path.is_file():
        return None
    chain = ProfileChain.from_json(read_json(path))
    shapes = layer_shapes(student)
    found = chain.entries[-1].profile, chain.dense_parameters, {*chain.budgets}
    wanted = full_ranks(shapes), total_dense(shapes), {*config.allocation.budgets}
    return chain if found == wanted else None


def _empty_form(layer: nn.Module) -> NestedLayer:
    """The layer's elastic form at full rank, without values."""
    (m, n), rank = matrix_shape(layer), min(matrix_shape(layer))
    sizes = (rank, m), (rank, n), (rank,)
    return elastic_form(layer, Factors(*(torch.empty(size, device="meta") for size in sizes)))


def trains_only_factors(config: RunConfig) -> bool:
    """Whether consolidation trains only factors and the vectors of sizes."""
    return config.distillation.method == "balanced" and len(config.allocation.budgets) > 1


def _watch(model: nn.Module, layers: Mapping[str, nn.Module], sample: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Runs one sample; returns each layer's calls, and the model's output."""
    calls: dict[str, tuple[Call, ...]] = {}

    def record(name: str, tensor: Tensor, _: Tensor) -> None:
        call = Call(input_rows(layers[name], tensor).shape[0], tensor.requires_grad)
        calls[name] = (*calls.get(name, ()), call)

    with Hooks() as hooks, models.clear_errors(type(model).__name__):
        hooks.on_forward(layers, record)
        output = call_model(model, sample)
    return calls, output
