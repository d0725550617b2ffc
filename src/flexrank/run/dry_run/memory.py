"""Bytes that each stage holds in memory, without activations and workspaces."""

import torch
from torch import nn

from flexrank.calibrate import block_stack
from flexrank.nn.switch import nested_layers
from flexrank.probe import MATRIX_BYTES
from flexrank.profiles.costs import Shape
from flexrank.run.config import RunConfig
from flexrank.run.dry_run.architecture import Architecture
from flexrank.run.tables import split_block

#: Bytes of a number in a second moment, which is summed in float64.
MOMENT_BYTES = 8


def count_memory(architecture: Architecture, config: RunConfig) -> dict[str, dict[str, int]]:
    """Bytes of each stage by what holds them, and of all together.

    A model is decomposed block by block: `student` is then the largest block and all that is in no block, `moments` are
    the largest block's, and `factors` what the largest layer takes in float64. Later it is factors U, V at full rank;
    in training, the vectors of every budget too (all factors count as trained: more than their trained part and the
    matrices of full layers).
    `matrices` are those of full layers while others are probed. `targets` are the teacher's outputs that the probe
    keeps. `outputs` are those of one batch: twice to probe, with the teacher's; three times in training, with the
    loss's gradient too.
    """
    teacher = tensor_bytes(architecture.teacher, architecture.file_dtype)
    student = tensor_bytes(architecture.student)
    moments = max(moment_bytes(architecture, config).values())
    at_once, method = weights_at_once(architecture), config.decomposition.method
    factors = max(factor_bytes(shape, method, config.keeps_input_moments) for shape in architecture.shapes.values())
    size, own = architecture.teacher.dtype.itemsize, vector_bytes(architecture, config)
    trained = sum(p.numel() * p.element_size() for p in architecture.student.parameters() if p.requires_grad) + own
    of_teacher, output = architecture.file_dtype.itemsize, config.data.batch_size * architecture.outputs
    in_training = architecture.outputs * (2 if config.distillation.autocast == "bfloat16" else size)
    both, whole = {"teacher": teacher, "student": student}, {"teacher": teacher, "student": student + own}
    matrices = min(MATRIX_BYTES, size * architecture.dense_parameters)
    targets = config.data.probe * architecture.targets * of_teacher
    probe = {**both, "matrices": matrices, "targets": targets, "outputs": output * (size + of_teacher)}
    training = {"gradients": trained, "optimizer": 2 * trained}
    stages = {
        "calibration": {"student": at_once, "moments": moments},
        "decomposition": {"student": at_once, "moments": moments, "factors": factors},
        "probe": {} if config.probe.method == "curvature" else probe,
        "consolidation": {**whole, **training, "outputs": 3 * config.distillation.batch_size * in_training},
    }
    return {stage: parts | {"all": sum(parts.values())} for stage, parts in stages.items()}


def weights_at_once(architecture: Architecture) -> int:
    """Bytes of the largest block of the model's stack and of all that is in no block; of a model without one, all."""
    blocks = [tensor_bytes(block) for _, block in block_stack(architecture.teacher, architecture.shapes)]
    return tensor_bytes(architecture.teacher) - sum(blocks) + max(blocks, default=0)


def factor_bytes(shape: Shape, method: str, from_inputs: bool) -> int:
    """Bytes that decomposing a layer takes at most, all in float64.

    DataSVD holds W, its vectors, and U twice, of m·n each, and seven matrices of k²; a ridged copy of Σ too where an
    input's moment is kept. Roots of Σ (`paper`) or of the gradients' moment (`fisher`) take four matrices of their
    width, eigenvectors and LAPACK's workspace among them.
    """
    (m, n), k = shape, min(shape)
    roots = {"paper": 4 * n * n + m * n, "fisher": 4 * m * m + 3 * m * n}.get(method, 0)
    ridged = 3 * m * n + n * n + 5 * k * k if from_inputs else 0
    return 8 * max(4 * m * n + 7 * k * k, ridged, roots)


def vector_bytes(architecture: Architecture, config: RunConfig) -> int:
    """Bytes of the vectors that `balanced` gives each budget: of m and n, and m more where a layer has a bias."""
    if config.distillation.method != "balanced":
        return 0
    layers = nested_layers(architecture.student).values()
    numbers = sum(sum(layer.matrix_shape) + (0 if layer.bias is None else layer.bias.numel()) for layer in layers)
    return len(config.allocation.budgets) * numbers * architecture.teacher.dtype.itemsize


def moment_bytes(architecture: Architecture, config: RunConfig) -> dict[str, int]:
    """Bytes of the second moments in each block of the model: 8·d² each, and 8·m² more per layer for gradients."""
    widths, sizes = moment_widths(architecture, config), {split_block(name)[0]: 0 for name in architecture.shapes}
    for name, (m, _) in architecture.shapes.items():
        numbers = widths.get(name, 0) ** 2 + (m**2 if config.keeps_gradient_moments else 0)
        sizes[split_block(name)[0]] += MOMENT_BYTES * numbers
    return sizes


def moment_widths(architecture: Architecture, config: RunConfig) -> dict[str, int]:
    """The width d of each moment (d x d) by layer; layers that share their input have one, under the first's name."""
    outputs = layers_by_output(architecture, config)
    owners = [name for group in architecture.groups for name in group if name in outputs or name == group[0]]
    return {name: architecture.shapes[name][0 if name in outputs else 1] for name in owners}


def layers_by_output(architecture: Architecture, config: RunConfig) -> set[str]:
    """Layers whose moment is that of the output: where that is less work, as `collect_moments` chooses."""
    names: set[str] = set()
    for group in () if config.keeps_input_moments else architecture.groups:
        shapes = [architecture.shapes[name] for name in group]
        if all(m <= n for m, n in shapes) and sum(m * m for m, _ in shapes) < shapes[0][1] ** 2:
            names.update(group)
    return names


def tensor_bytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes of parameters and buffers, tied ones once; with `dtype` as if parameters had it."""
    parameters = sum(p.numel() * (dtype or p.dtype).itemsize for p in model.parameters())
    return parameters + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
