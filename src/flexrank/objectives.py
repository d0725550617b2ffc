"""What a student is held to: the losses of the distillation family, one class for each kind of output.

An objective tells what to keep of the teacher's output (`target`), how far a student's output is from it (`loss`, a
mean over what is compared, lower is better), and whose gradient weighs the outputs for `fisher` (`fisher_loss`).
"""

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from flexrank.batches import Batch, mean_pool, output_tensor, token_mask
from flexrank.errors import FlexrankError


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
    `chunk` rows at a time, so no full float32 copy of the logits stands, forward or backward.
    """

    temperature: float = 1.0
    chunk: int = 1024

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The teacher's logits of real tokens, (rows, classes)."""
        return _real_rows(output_tensor(output), batch).detach()

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        logits = _real_rows(output_tensor(output), batch)
        loss = _ChunkedDivergence.apply(logits, target, self.temperature, self.chunk)
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


def objective_for(task: str, *, temperature: float = 1.0, hidden_weight: float = 0.0) -> Objective:
    """The objective of a task: language, classification, embedding or features.

    Raises:
        FlexrankError: another task.
    """
    if task in ("language", "classification"):
        return LogitObjective(temperature)
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


def _relative_error(hidden: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        hidden, target = hidden[mask], target[mask]
    target = target.float()
    return (hidden.float() - target).square().sum() / target.square().sum().clamp(min=1e-12)


class _ChunkedDivergence(torch.autograd.Function):
    """Mean over rows of T²·KL(softmax(t/T) ‖ softmax(s/T)).

    The gradient, T·(softmax(s/T) − softmax(t/T)), is taken at once, in the student's dtype.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, student: Tensor, teacher: Tensor, temperature: float, chunk: int) -> Tensor:
        rows = student.shape[0]
        total = student.new_zeros((), dtype=torch.float64)
        gradient = torch.empty_like(student)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            log_student = (student[part].float() / temperature).log_softmax(-1)
            log_teacher = (teacher[part].float() / temperature).log_softmax(-1)
            teacher_probability = log_teacher.exp()
            total += (teacher_probability * (log_teacher - log_student)).sum(dtype=torch.float64)
            gradient[part] = (log_student.exp() - teacher_probability) * (temperature / rows)
        ctx.save_for_backward(gradient)
        return (total * temperature**2 / rows).float()

    @staticmethod
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * grad_output.to(gradient.dtype), None, None, None
