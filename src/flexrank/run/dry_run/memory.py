"""What stands in memory at each stage, in bytes.

Counted are weights, gradients, AdamW's two moments, the calibration's second moments, and the outputs of a batch.
Activations, the workspace of a product or factorisation, and what an allocator holds back are not.
"""

from torch import nn

from flexrank.probe import MATRIX_BYTES
from flexrank.run.config import RunConfig
from flexrank.run.dry_run.subject import Subject
from flexrank.run.report import split_block

#: Of a moment, a float64.
MOMENT = 8


def count_memory(subject: Subject, config: RunConfig) -> dict[str, dict[str, int]]:
    """Bytes of each stage by what holds them.

    `teacher`, and `student`: while moments are collected a dense copy, which then turns into factors U, V at full
    rank. `gradients` and `optimizer` (two numbers each) of all that consolidation trains. `matrices`: of full layers,
    while others are probed. `targets`: the teacher's outputs that the probe keeps for all its samples. `outputs`: those
    of one batch, once to calibrate; twice to probe, with the teacher's; three times in training, with the teacher's and
    the loss's gradient. They have the model's dtype, and in training that of `autocast` where it is named.
    """
    teacher, student = tensor_bytes(subject.teacher), tensor_bytes(subject.student)
    moments = sum(moment_bytes(subject, config.decomposition.method).values())
    trained = sum(p.numel() * p.element_size() for p in subject.student.parameters() if p.requires_grad)
    size = subject.teacher.dtype.itemsize
    output = subject.outputs * size
    in_training = subject.outputs * (2 if config.distillation.autocast == "bfloat16" else size)
    batch = config.data.batch_size
    return {
        "calibration": {"teacher": teacher, "student": teacher, "moments": moments, "outputs": batch * output},
        "decomposition": {"teacher": teacher, "student": student, "moments": moments},
        "probe": {
            "teacher": teacher,
            "student": student,
            "matrices": min(MATRIX_BYTES, size * sum(m * n for m, n in subject.shapes.values())),
            "targets": config.data.probe * subject.targets * size,
            "outputs": 2 * batch * output,
        },
        "consolidation": {
            "teacher": teacher,
            "student": student,
            "gradients": trained,
            "optimizer": 2 * trained,
            "outputs": 3 * config.distillation.batch_size * in_training,
        },
    }


def moment_bytes(subject: Subject, method: str) -> dict[str, int]:
    """Bytes of the second moments by block of the model: 8·m² or 8·n², one for layers that share their input.

    `fisher` adds 8·m² for the gradients of each layer's output.
    """
    found: dict[str, int] = {}
    for group in subject.groups:
        is_output = reads_output(subject, group, method)
        for name in group:
            m, n = subject.shapes[name]
            size = m**2 if is_output else n**2 * (name == group[0])
            size += m**2 * (method == "fisher")
            block = split_block(name)[0]
            found[block] = found.get(block, 0) + MOMENT * size
    return found


def reads_output(subject: Subject, group: tuple[str, ...], method: str) -> bool:
    """Whether these layers' moments are those of their outputs, as `collect_moments` chooses: where that is less."""
    shapes = [subject.shapes[name] for name in group]
    is_less = all(m <= n for m, n in shapes) and sum(m * m for m, _ in shapes) < shapes[0][1] ** 2
    return method != "paper" and is_less


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
