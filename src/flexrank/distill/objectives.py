"""What a student is held to: the losses of the distillation family, one class for each kind of output.

An objective tells what to keep of the teacher's output (`target`), how far a student's output is from it (`loss`, a
mean over what is compared, lower is better), and whose gradient weighs the outputs for `fisher` (`fisher_loss`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from flexrank.data.batches import Batch, mean_pool, output_tensor, token_mask
from flexrank.errors import FlexrankError

#: Logits that a divergence takes at a time, by device: a CPU keeps its few float32 copies, 512 KiB each, in its cache.
CHUNK = {"cpu": 2**17}
_LARGE_CHUNK = 2**24

#: Of student's rows, what was kept of the teacher's, a temperature, and whether the gradient is wanted.
Divergence = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]


class Objective(Protocol):
    """A loss of the distillation family."""

    def target(self, output: Any, batch: Batch) -> Tensor:
        """What of the teacher's output the loss needs; detached."""

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """Scalar loss of a student's output; its gradient flows into the output."""

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """Scalar whose gradients at a layer's output have the Fisher information as second moment, in expectation."""


@dataclasses.dataclass(frozen=True)
class LogitObjective:
    """T²·KL(teacher ‖ student) at temperature T, a mean over real tokens (language) or over rows (classification).

    Logits are (B, T, V) with the batch's attention mask obeyed, or (B, classes). Log-softmaxes are taken in float32 by
    `chunk` rows at a time (by default as many as `CHUNK` says), so no full float32 copy of the logits stands,
    forward or backward.

    With `top_k` the divergence is between distributions over the teacher's k likeliest classes and one class that
    holds all others. It is never above the full one, and equal to it at k = V. A target takes 4·(2k+1) bytes a row in
    place of V logits, so that far more of them can be kept.
    """

    temperature: float = 1.0
    chunk: int | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise FlexrankError(f"top_k is {self.top_k}; it must be at least 1, or None for all classes")

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The teacher's logits of real tokens, (rows, classes); with `top_k` what `_likeliest` keeps of them."""
        logits = _real_rows(output_tensor(output), batch).detach()
        if self.top_k is None:
            return logits
        parts = [_likeliest(part, self.temperature, self.top_k) for part in logits.split(_rows(self.chunk, logits))]
        return torch.cat(parts)

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        logits = _real_rows(output_tensor(output), batch)
        divergence = _divergence if self.top_k is None else _lumped_divergence
        loss = _ChunkedDivergence.apply(logits, target, self.temperature, _rows(self.chunk, logits), divergence)
        assert isinstance(loss, Tensor)
        return loss

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """Summed cross entropy to labels drawn from the model's own distribution (the true Fisher, one sample)."""
        logits = _real_rows(output_tensor(output), batch).float()
        labels = torch.multinomial(logits.detach().softmax(-1), 1).squeeze(-1)
        return functional.cross_entropy(logits, labels, reduction="sum")


@dataclasses.dataclass(frozen=True)
class EmbeddingObjective:
    """1 − cosine between mean-pooled, length-one embeddings, plus `hidden_weight` times the tokens' relative error.

    The token term, ‖h − h*‖² / ‖h*‖² over real tokens, is richer supervision for training; probe with weight 0.
    """

    hidden_weight: float = 0.0

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The teacher's embeddings (B, d), or its token states (B, T, d) where the token term needs them."""
        hidden = output_tensor(output).detach()
        return hidden if self.hidden_weight else mean_pool(hidden, token_mask(batch))

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        mask = token_mask(batch)
        hidden = output_tensor(output)
        pooled = mean_pool(target, mask) if self.hidden_weight else target
        loss = (1 - (mean_pool(hidden, mask) * pooled).sum(-1)).mean()
        if not self.hidden_weight:
            return loss
        return loss + self.hidden_weight * _relative_error(hidden, target, mask)

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """Random normal projection of the embeddings: its gradient's second moment is that of their Jacobian."""
        pooled = mean_pool(output_tensor(output), token_mask(batch))
        return (pooled * torch.randn_like(pooled)).sum()


@dataclasses.dataclass(frozen=True)
class FeatureObjective:
    """Relative squared error ‖h − h*‖² / ‖h*‖² of features of any shape (encoders of images, plain modules)."""

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The teacher's features."""
        del batch
        return output_tensor(output).detach()

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        hidden = output_tensor(output)
        return _relative_error(hidden, target, token_mask(batch) if hidden.ndim == 3 else None)

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """Random normal projection of the features."""
        del batch
        hidden = output_tensor(output).float()
        return (hidden * torch.randn_like(hidden)).sum()


def objective_for(
    task: str, *, temperature: float = 1.0, hidden_weight: float = 0.0, top_k: int | None = None
) -> Objective:
    """The objective of a task: language, classification, embedding or features; each takes what it knows.

    Raises:
        FlexrankError: another task.
    """
    if task in ("language", "classification"):
        return LogitObjective(temperature, top_k=top_k)
    if task == "embedding":
        return EmbeddingObjective(hidden_weight)
    if task == "features":
        return FeatureObjective()
    raise FlexrankError(f"task {task!r} is unknown; it is language, classification, embedding or features")


def default_objective(output: Any) -> Objective:
    """The objective that fits a model's output: divergence where it has logits, relative error of features else."""
    return FeatureObjective() if getattr(output, "logits", None) is None else LogitObjective()


def _real_rows(values: Tensor, batch: Batch) -> Tensor:
    mask = token_mask(batch)
    if values.ndim == 3 and mask is not None and values.shape[:2] == mask.shape and not bool(mask.all()):
        return values[mask.to(values.device)]
    return values.flatten(0, -2)


def _rows(chunk: int | None, logits: Tensor) -> int:
    if chunk is not None:
        return chunk
    return max(1, CHUNK.get(logits.device.type, _LARGE_CHUNK) // logits.shape[-1])


def _relative_error(hidden: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        hidden, target = hidden[mask], target[mask]
    target = target.float()
    return (hidden.float() - target).square().sum() / target.square().sum().clamp(min=1e-12)


def _likeliest(logits: Tensor, temperature: float, count: int) -> Tensor:
    """(rows, 2k+1) float32: the k largest log-probabilities, all others' together, and the numbers of the k classes.

    A float32 holds whole numbers up to 2²⁴ exactly.
    """
    log_probability = _log_probability(logits, temperature)
    values, classes = log_probability.topk(min(count, logits.shape[-1]), sorted=False)
    rest = log_probability.scatter_(1, classes, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([values, rest, classes.float()], -1)


def _log_probability(logits: Tensor, temperature: float) -> Tensor:
    """float32; at temperature 1 without a pass for the division."""
    logits = logits.float()
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def _divergence(
    student: Tensor, teacher: Tensor, temperature: float, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Σ KL(softmax(t/T) ‖ softmax(s/T)) over rows, float64, and T times its gradient, softmax(s/T) − softmax(t/T)."""
    log_student, log_teacher = _log_probability(student, temperature), _log_probability(teacher, temperature)
    if not wants_gradient:  # one pass in place of five
        return functional.kl_div(log_student, log_teacher, reduction="sum", log_target=True).double(), None
    probability = log_teacher.exp()
    total = (probability * (log_teacher - log_student)).sum(dtype=torch.float64)
    return total, log_student.exp_().sub_(probability)


def _lumped_divergence(
    student: Tensor, target: Tensor, temperature: float, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """As `_divergence`, over the classes of a `_likeliest` target and one of all others.

    The gradient at class j of probability q is q − p where j was kept, q·(1 − p_rest/q_rest) where not.
    """
    count = target.shape[-1] // 2
    log_kept, log_rest, classes = target.split([count, 1, count], -1)
    classes = classes.long()
    log_student = _log_probability(student, temperature)
    log_student_kept = log_student.gather(1, classes)
    log_student_rest = log_student.scatter(1, classes, -torch.inf).logsumexp(-1, keepdim=True)
    kept, rest = log_kept.exp(), log_rest.exp()
    # No class is left over at k = V, and a teacher may give those that are no probability: nothing is lost there.
    surplus = (log_rest - log_student_rest).masked_fill(log_rest == -torch.inf, -torch.inf)
    lost = rest * surplus.masked_fill(rest == 0, 0)
    surprise = kept * (log_kept - log_student_kept).masked_fill(kept == 0, 0)
    total = surprise.sum(dtype=torch.float64) + lost.sum(dtype=torch.float64)
    if not wants_gradient:
        return total, None
    # The difference of two exponentials, for the ratio of the rests alone may overflow.
    gradient = log_student.exp() - (log_student + surplus).exp_()
    return total, gradient.scatter_(1, classes, log_student_kept.exp() - kept)


class _ChunkedDivergence(torch.autograd.Function):
    """Mean over rows of T² times a divergence, whose gradient is taken at once, in the student's dtype."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, temperature: float, chunk: int, divergence: Divergence
    ) -> Tensor:
        rows = student.shape[0]
        total = student.new_zeros((), dtype=torch.float64)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None  # a probe takes none
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            added, slope = divergence(student[part], teacher[part], temperature, gradient is not None)
            total += added
            if gradient is not None and slope is not None:
                gradient[part] = slope.mul_(temperature / rows)
        ctx.gradient = gradient
        return (total * temperature**2 / rows).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Scales the gradient where it stands, for a copy would be as large as the logits: this works once."""
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("this divergence has been gone back through; its gradient is no longer there")
        return gradient.mul_(grad_output.to(gradient.dtype)), None, None, None, None
