"""Bytes that each stage holds in memory, without the libraries and their workspaces."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flexrank.artefacts.elastic import SHARD_BYTES
from flexrank.data.batches import call_model
from flexrank.distill import TEACHER_CACHE
from flexrank.distill.trained import layers_with_matrix
from flexrank.nn.blocks import block_stack
from flexrank.nn.switch import footprint, nested_layers
from flexrank.probe import MATRIX_BYTES
from flexrank.probe.replay import make_plan
from flexrank.profiles.costs import Shape, full_ranks
from flexrank.run.candidates import candidate_ranks, rank_constraints
from flexrank.run.config import RunConfig
from flexrank.run.dry_run.activations import kept_bytes
from flexrank.run.dry_run.architecture import Architecture, trains_only_factors
from flexrank.run.dry_run.moments import factor_bytes, moment_bytes
from flexrank.run.tables import split_block
from flexrank.run.targets import probe_top_k, top_k_bytes

#: Bytes of a number in torchao's 8-bit state, which has one float32 for each block of 256.
STATE_8BIT = 1 + 4 / 256

#: How many times outputs are in memory when a model is judged: as they come, what is read of them, and its loss; or, to
#: see whether they are finite, as they come, their absolute values, and three masks of a byte each.
CHECKED = 3


def count_memory(architecture: Architecture, config: RunConfig, count: int = 1) -> dict[str, dict[str, int]]:
    """Bytes of each stage by what holds them, and of all together, in each of `count` processes.

    A model is decomposed block by block: there `student` is the largest block and everything outside the blocks, and
    `moments` are the largest block's. `factors` is what the largest layer takes in float64, to be decomposed or, in
    deployment, aligned. In later stages `student` is the factors U and V: at full rank for the probe, and as
    `trained_part` says from consolidation on. `matrices` are those of full layers while others are probed, and
    `replayed` are the student's outputs that the probe keeps. `targets` are the teacher's outputs that are kept by the
    probe, and by the loss checks before and after consolidation. `outputs` are those of one batch, of both models where
    both run; they count three times in training, with the loss's gradient, and `CHECKED` times where a model is judged.
    `deployed` is the largest size. For `gathered` see `sharded_bytes`, and for `buffers` see `buffer_bytes`.
    """
    teacher = tensor_bytes(architecture.teacher, architecture.file_dtype)
    moments = max(moment_bytes(architecture, config).values())
    weights, method = peak_weight_bytes(architecture), config.decomposition.method
    factors = max(factor_bytes(shape, method, config.keeps_input_moments) for shape in architecture.shapes.values())
    size, file_size = architecture.teacher.dtype.itemsize, architecture.file_dtype.itemsize
    output, compared = config.data.batch_size * architecture.outputs, 2 * architecture.outputs * size
    buffers = buffer_bytes(architecture, config)
    probe = {
        "teacher": teacher,
        "student": tensor_bytes(architecture.student),
        "matrices": min(MATRIX_BYTES, size * architecture.dense_parameters),
        "targets": target_bytes(architecture, config),
        "replayed": replayed_bytes(architecture, config),
        "outputs": output * (size + file_size),
    }
    trained = trained_part(architecture, config)
    training = step_bytes(architecture, trained, config, count)
    both = {"teacher": teacher, "outputs": output * (size + file_size)}
    judged = {"teacher": teacher, "outputs": CHECKED * output * size}
    held = {part: training[part] for part in ("teacher", "student", "gathered") if part in training}
    checked = both | held | {"targets": probe["targets"]}
    stages = {
        "calibration": peak({"student": weights, "moments": moments}, {"student": weights, "outputs": compared})
        | buffers,
        "decomposition": {"student": weights, "moments": moments, "factors": factors} | buffers,
        "probe": {} if config.probe.method == "curvature" else probe,
        "consolidation": peak(training, checked) if config.distillation.steps else {},
        "evaluation": peak(*(judged | one for one in evaluated_bytes(architecture, trained, config))),
        "deployment": peak(judged, *deployment_bytes(architecture, config)),
    }
    return {stage: parts | {"all": sum(parts.values())} for stage, parts in stages.items()}


def step_bytes(architecture: Architecture, trained: Any, config: RunConfig, count: int) -> dict[str, int]:
    """What a step of consolidation holds, in each of `count` processes; `trained` is the `trained_part`."""
    teacher = tensor_bytes(architecture.teacher, architecture.file_dtype)
    training = {"teacher": teacher, **training_bytes(architecture, trained, config, count)}
    if config.distillation.sharded and count > 1:
        training |= sharded_bytes(architecture, trained, training, config, count)
    return training


def buffer_bytes(architecture: Architecture, config: RunConfig) -> dict[str, int]:
    """Hidden states between blocks, and factors that wait to be written: on the host, so counted only for a CPU.

    If there is a backward pass, each block's input, the last one's output, and the gradient there are kept.
    """
    if config.device != "cpu":
        return {}
    room, stack = config.decomposition.buffer_bytes, block_stack(architecture.teacher, architecture.shapes)
    read = [name for name in architecture.calls if stack and name.startswith(f"{stack[0][0]}.")]
    numbers = architecture.calls[read[0]][0].rows * architecture.matrices[read[0]][1] if read else 0
    kept = len(stack) + 2 if config.keeps_gradient_moments else 1
    states = kept * config.data.calibration * numbers * architecture.teacher.dtype.itemsize
    return {"buffers": min(room, states) + min(room // 4, SHARD_BYTES, tensor_bytes(architecture.student))}


def target_bytes(architecture: Architecture, config: RunConfig) -> int:
    """Bytes of the teacher's outputs that the probe keeps, if texts have no padding."""
    rows, numbers = config.data.probe * architecture.target[0], architecture.target[1]
    row_bytes = numbers * architecture.file_dtype.itemsize
    top_k = probe_top_k(config, rows, row_bytes)
    return rows * row_bytes if top_k is None else top_k_bytes(rows, top_k)


def replayed_bytes(architecture: Architecture, config: RunConfig) -> int:
    """The most bytes of the student's outputs that the probe keeps, if texts have no padding."""
    samples = config.data.probe
    with torch.no_grad():
        plan = make_plan(
            architecture.student,
            lambda student: call_model(student, architecture.sample),
            config.probe.replay_bytes // samples,
        )
    return samples * plan.most_bytes()


def peak(*moments: dict[str, int]) -> dict[str, int]:
    """What is in memory at the moment when a stage takes most."""
    return max(moments, key=lambda parts: sum(parts.values()))


def evaluated_bytes(architecture: Architecture, trained: Any, config: RunConfig) -> list[dict[str, int]]:
    """What is held beside the teacher: the model before consolidation or, for slack, the elastic one; or a size."""
    before = decomposed_bytes(architecture, config) if config.distillation.steps else 0
    written = elastic_bytes(architecture, trained, config) + matrix_bytes(architecture, config)
    size = deployed_bytes(architecture, config, max(config.allocation.budgets))
    return [{"student": max(before, written)}, {"deployed": size}]


def decomposed_bytes(architecture: Architecture, config: RunConfig) -> int:
    """Bytes of the decomposed model with only the components of its largest size."""
    ranks = architecture.profile(max(config.allocation.budgets), rank_constraints(config)["slack_share"])
    left = sum((min(shape) - ranks[name]) * sum(shape) for name, shape in architecture.shapes.items())
    return tensor_bytes(architecture.student) - left * architecture.teacher.dtype.itemsize


def deployment_bytes(architecture: Architecture, config: RunConfig) -> list[dict[str, int]]:
    """A size while its last layer is aligned, and while it runs: in a fresh process, after this one has freed it."""
    if not config.deployed_budgets:
        return []
    budget, dtype = max(config.deployed_budgets), config.deployed_dtype(architecture.file_dtype)
    deployed = {"deployed": deployed_bytes(architecture, config, budget)}
    ranks, shapes = largest_ranks(architecture, config, [budget]), architecture.shapes
    aligned = [aligned_bytes(shapes[name], rank) for name, rank in ranks.items() if rank < min(shapes[name])]
    samples = max(config.data.batch_size, min(config.evaluation.latency_batch_size, config.data.evaluation))
    outputs = CHECKED * samples * architecture.outputs * dtype.itemsize
    return [deployed | {"factors": max(aligned, default=0)}, deployed | {"outputs": outputs}]


def aligned_bytes(shape: Shape, rank: int) -> int:
    """The most bytes that aligning a layer takes, all in float64.

    U and V are (m + n)·r numbers, U Q is m·r, V Q, V U₁ᵀ and Ṽ are 3·n·r, and Û and its aligned part (m − r)·r each.
    """
    m, n = shape
    return 8 * rank * (4 * (m + n) - 2 * rank)


def largest_ranks(architecture: Architecture, config: RunConfig, budgets: Iterable[float]) -> dict[str, int]:
    """The largest rank of each layer at these budgets; if sizes share only factors, the largest below full rank."""
    share, candidates = rank_constraints(config)["slack_share"], candidate_ranks(config, architecture.shapes)
    profiles = [architecture.profile(budget, share) for budget in budgets]
    ranks = {name: {profile[name] for profile in profiles} for name in candidates}
    if not trains_only_factors(config):
        return {name: max(some) for name, some in ranks.items()}
    if architecture.chain is None:
        return {name: min(max(some), candidates[name][-2]) for name, some in ranks.items()}
    full = full_ranks(architecture.shapes)
    return {name: max(some - {full[name]}, default=full[name]) for name, some in ranks.items()}


def target_bytes_per_sample(architecture: Architecture, config: RunConfig) -> int:
    """Bytes of one sample's targets in consolidation: outputs, or the likeliest classes, and hidden states."""
    settings, (rows, numbers) = config.distillation, architecture.target
    size = 2 if settings.autocast == "bfloat16" else architecture.file_dtype.itemsize
    follows = bool(settings.weight_of_hidden_states)
    if config.task == "embedding":
        return (architecture.outputs if follows else rows * numbers) * size
    if settings.top_k is not None:
        numbers, size = 2 * settings.top_k + 1, 4
    hidden = architecture.teacher.config.get_text_config().hidden_size if follows and config.task == "language" else 0
    return rows * (numbers + hidden) * size


def training_bytes(architecture: Architecture, student: Any, config: RunConfig, count: int = 1) -> dict[str, int]:
    """Bytes of a step of consolidation in each of `count` processes, without the teacher's weights.

    If sizes share only factors, tensors that equal the teacher's are shared with it; matrices of full layers always
    are. `activations` are those beyond the gradients, which replace them in the backward pass of a step of one batch.
    `targets` are the teacher's outputs that are kept from one pass to the next.
    """
    settings, trained = config.distillation, [p for p in student.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    in_8_bits = round(2 * STATE_8BIT * sum(p.numel() for p in trained))
    size = elastic_bytes(architecture, student, config)
    if trains_only_factors(config) and architecture.file_dtype == architecture.teacher.dtype:
        size -= sum(p.numel() * p.element_size() for p in student.parameters() if not p.requires_grad)
    in_training = architecture.outputs * (2 if settings.autocast == "bfloat16" else architecture.teacher.dtype.itemsize)
    activations = kept_bytes(student, architecture.sample, config)
    if settings.accumulation == 1 and not settings.gradient_checkpointing:
        activations = max(0, activations - gradients)
    taken = settings.steps * settings.batch_size * settings.accumulation
    own = 0 if config.data.is_stream else math.ceil((config.data.training or taken * count) / count)
    return {
        "student": size,
        "gradients": gradients,
        "optimizer": in_8_bits if settings.optimizer == "adamw_8bit" else 2 * gradients,
        "activations": activations,
        "targets": min(TEACHER_CACHE, min(own, taken) * target_bytes_per_sample(architecture, config)),
        "outputs": 3 * settings.batch_size * in_training,
    }


def sharded_bytes(
    architecture: Architecture, student: Any, unsharded: dict[str, int], config: RunConfig, count: int
) -> dict[str, int]:
    """The bytes of consolidation that change if each of `count` processes holds its part, from the `unsharded` ones.

    The layers' factors, their gradients and optimiser states, matrices of full layers, and the teacher's blocks are
    divided. `gathered` is the most that is whole at one moment: a block's factors in its backward pass, beside one
    layer's gradients, in their dtype and twice in float32 to be put in order and summed; or a block of the teacher, as
    it is received and as it is used.
    """
    layers = nested_layers(student)
    numbers = {name: len(layer.u) * sum(layer.matrix_shape) for name, layer in layers.items()}
    size, factors = next(iter(layers.values())).u.element_size(), sum(numbers.values())
    of_blocks = dict.fromkeys((split_block(name)[0] for name in numbers), 0)
    for name, own in numbers.items():
        of_blocks[split_block(name)[0]] += size * own
    teacher = [tensor_bytes(one, architecture.file_dtype) for _, one in block_stack(architecture.teacher, numbers)]
    untrained = elastic_bytes(architecture, student, config) - tensor_bytes(student)
    divided = {
        "teacher": sum(teacher),
        "student": size * factors + untrained,
        "gradients": size * factors,
        "optimizer": 2 * size * factors,
    }
    going_back = max(of_blocks.values()) + (size + 8) * max(numbers.values())
    parts = {part: unsharded[part] - own + own // count for part, own in divided.items()}
    parts["student"] += matrix_bytes(architecture, config) // count
    return parts | {"gathered": max(going_back, 2 * max(teacher, default=0))}


def elastic_bytes(architecture: Architecture, trained: Any, config: RunConfig) -> int:
    """Bytes of a consolidated model: its trained part and, unless sizes share only factors, all other components."""
    if trains_only_factors(config):
        return tensor_bytes(trained)
    layers = nested_layers(trained).values()
    untrained = sum((min(one.matrix_shape) - len(one.u)) * sum(one.matrix_shape) for one in layers)
    return tensor_bytes(trained) + untrained * architecture.teacher.dtype.itemsize


def matrix_bytes(architecture: Architecture, config: RunConfig) -> int:
    """Bytes of the matrices of full layers in the artefact, in the dtype of the model's files.

    At the largest budget a layer saves at least `allocation.min_saving`, or is full: the estimate takes all others to
    save no more than that. If the run has allocated ranks, the full layers are known.
    """
    if not trains_only_factors(config):
        return 0
    if architecture.chain is not None:
        profiles = [entry.profile for entry in architecture.chain.requested]
        names = layers_with_matrix(profiles, full_ranks(architecture.shapes))
        return sum(math.prod(architecture.shapes[name]) for name in names) * architecture.file_dtype.itemsize
    spared, least = 1 - max(config.allocation.budgets), rank_constraints(config)["min_saving"]
    full = max(0.0, 1 - spared / least) if least else float(not spared)
    return round(full * architecture.dense_parameters) * architecture.file_dtype.itemsize


def peak_weight_bytes(architecture: Architecture) -> int:
    """Bytes of the largest block of the model's stack and of all outside the blocks; of all, if there is no stack."""
    blocks = [tensor_bytes(block) for _, block in block_stack(architecture.teacher, architecture.shapes)]
    return tensor_bytes(architecture.teacher) - sum(blocks) + max(blocks, default=0)


def trained_part(architecture: Architecture, config: RunConfig) -> Any:
    """The part of the elastic model that is trained: factors up to the largest rank, and vectors of sizes.

    If sizes share only factors, that is the largest rank below full of those that may be allocated. Until the run has
    allocated ranks, they are those of uniform sizes.
    """
    model, share = copy.deepcopy(architecture.student), rank_constraints(config)["slack_share"]
    budgets = config.allocation.budgets
    profiles = [architecture.profile(budget, share) for budget in budgets]
    largest = largest_ranks(architecture, config, budgets)
    for name, layer in nested_layers(model).items():
        layer.rank = largest[name]
        layer.u, layer.v = (nn.Parameter(f.detach()[: layer.rank], f.requires_grad) for f in (layer.u, layer.v))
        if config.distillation.method == "balanced":
            layer.set_sizes_([profile[name] for profile in profiles])
    return model


def deployed_bytes(architecture: Architecture, config: RunConfig, budget: float) -> int:
    """Bytes of the weights of a size, in the dtype of deployment."""
    dtype = config.deployed_dtype(architecture.file_dtype)
    others = footprint(architecture.student, dtype).other_bytes
    return others + round(budget * architecture.dense_parameters) * dtype.itemsize


def tensor_bytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes of parameters and buffers, counting tied ones once; with `dtype`, as if parameters had it."""
    parameters = sum(p.numel() * (dtype or p.dtype).itemsize for p in model.parameters())
    return parameters + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
