"""Divergence of a student's logits from a teacher's, chunk by chunk: no full float32 copy of the logits exists."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Logits per chunk, on a CPU and elsewhere: a chunk's few float32 copies, 512 KiB each, stay in a CPU's cache.
CPU_CHUNK, LARGE_CHUNK = 2**17, 2**24
Divergence = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]  #: as `_divergence`


def total_divergence(student: Tensor, target: Tensor, temperature: float, chunk: int | None, is_top_k: bool) -> Tensor:
    """T²·KL at temperature T, summed over rows; its gradient, into `student` (rows, classes), can be taken only once.

    The target is the teacher's logits or, if `is_top_k`, its `top_k_with_rest`; `chunk` is a number of rows.
    """
    divergence = _top_k_divergence if is_top_k else _divergence
    return _TotalDivergence.apply(student, target, temperature, _chunk_rows(chunk, student), divergence)


def top_k_with_rest(logits: Tensor, temperature: float, count: int, chunk: int | None) -> Tensor:
    """(rows, 2k+1) in float32: the k largest log-probabilities, that of all other classes, and the k class indices."""
    parts = []
    for part in logits.split(_chunk_rows(chunk, logits)):
        log_probability = _log_probability(part, temperature)
        values, classes = log_probability.topk(min(count, logits.shape[-1]), sorted=False)
        rest = log_probability.scatter_(1, classes, -torch.inf).logsumexp(-1, keepdim=True)
        parts.append(torch.cat([values, rest, classes.float()], -1))  # float32 holds whole numbers up to 2²⁴ exactly
    return torch.cat(parts)


def _chunk_rows(chunk: int | None, logits: Tensor) -> int:
    return chunk or max(1, (CPU_CHUNK if logits.device.type == "cpu" else LARGE_CHUNK) // logits.shape[-1])


def _log_probability(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities in float32; temperature 1 saves the pass for the division."""
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def _divergence(
    student: Tensor, teacher: Tensor, temperature: float, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Σ KL(softmax(t/T) ‖ softmax(s/T)) over rows in float64, and T times its gradient: softmax(s/T) − softmax(t/T)."""
    log_student, log_teacher = _log_probability(student, temperature), _log_probability(teacher, temperature)
    probability = log_teacher.exp()
    # A class that the teacher rules out adds nothing, whatever the student gives it; 0 times -inf would be NaN.
    surprise = probability * (log_teacher - log_student).masked_fill_(probability == 0, 0)
    total = surprise.sum(dtype=torch.float64)
    return total, log_student.exp_().sub_(probability) if wants_gradient else None


def _top_k_divergence(
    student: Tensor, target: Tensor, temperature: float, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """As `_divergence`, over the classes of a `top_k_with_rest` target and one class for all others.

    The gradient at a class of probability q is q − p for the likeliest, and q·(1 − p_rest/q_rest) for the others.
    """
    count = target.shape[-1] // 2
    log_kept, log_rest, classes = target.split([count, 1, count], -1)
    classes = classes.long()
    log_student = _log_probability(student, temperature)
    log_student_kept = log_student.gather(1, classes)
    log_student_rest = log_student.scatter(1, classes, -torch.inf).logsumexp(-1, keepdim=True)
    kept, rest = log_kept.exp(), log_rest.exp()
    # At k = V there are no other classes, and below it the teacher may give them no probability: they then add nothing.
    surplus = (log_rest - log_student_rest).masked_fill(log_rest == -torch.inf, -torch.inf)
    lost = rest * surplus.masked_fill(rest == 0, 0)
    surprise = kept * (log_kept - log_student_kept).masked_fill(kept == 0, 0)
    total = surprise.sum(dtype=torch.float64) + lost.sum(dtype=torch.float64)
    if not wants_gradient:
        return total, None
    # A difference of two exponentials, because the ratio of the rests by itself may overflow.
    gradient = log_student.exp() - (log_student + surplus).exp_()
    return total, gradient.scatter_(1, classes, log_student_kept.exp() - kept)


class _TotalDivergence(torch.autograd.Function):
    """T² times a divergence, summed over rows; the forward also computes the gradient, in the student's dtype."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, temperature: float, chunk: int, divergence: Divergence
    ) -> Tensor:
        total = student.new_zeros((), dtype=torch.float64)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None  # a probe needs none
        for start in range(0, len(student), chunk):
            part = slice(start, start + chunk)
            added, slope = divergence(student[part], teacher[part], temperature, gradient is not None)
            total += added
            if gradient is not None and slope is not None:
                gradient[part] = slope.mul_(temperature)
        ctx.gradient = gradient
        return (total * temperature**2).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Scales the gradient in place, because a copy would be as large as the logits, so it works only once."""
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the gradient of this divergence was already taken; it is not kept for a second time")
        return gradient.mul_(grad_output.to(gradient.dtype)), None, None, None, None
