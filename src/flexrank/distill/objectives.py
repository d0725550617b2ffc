"""The distillation losses, one class for each kind of output."""

import dataclasses
import enum
import re
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flexrank.data.batches import Batch, mean_pool, output_mask, output_tensor
from flexrank.distill.divergence import top_k_with_rest, total_divergence
from flexrank.errors import FlexrankError
from flexrank.files import digest_tensor


class Objective(Protocol):
    """A loss between a student's output and a target made from the teacher's output."""

    def target(self, output: Any, batch: Batch) -> Tensor:
        """What the loss needs from the teacher's output, detached."""

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """Scalar loss of a student's output, lower is better; its gradient flows into the output.

        If several processes share a batch, the objective also needs `terms(output, target, batch)`: the `Quotient`s
        that sum to the loss, so each process has the numerators and denominators of its rows. If a step takes
        several batches, each is weighted by its first denominator; without `terms` all have the same weight.
        """


class FisherObjective(Objective, Protocol):
    """An objective with gradients by which calibration can weight outputs."""

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """A scalar whose gradient at a layer's output has the Fisher information as its expected second moment."""


class Quotient(NamedTuple):
    """A term of a loss: numerator over denominator, both of which are sums over a batch's rows."""

    numerator: Tensor
    denominator: Tensor | int


class _Quotients:
    """A loss that is a sum of quotients."""

    def terms(self, output: Any, target: Tensor, batch: Batch) -> list[Quotient]:
        """The terms of the loss."""
        raise NotImplementedError

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """See the class; raises FlexrankError if the batch has no row that counts."""
        terms = self.terms(output, target, batch)
        if not isinstance(terms[0].denominator, Tensor):  # which is never 0, and may be on a GPU
            require_rows(terms[0].denominator)
        first, *others = (top / bottom for top, bottom in terms)
        return sum(others, first)


@dataclasses.dataclass(frozen=True)
class LogitObjective(_Quotients):
    """T²·KL(teacher ‖ student) at temperature T, averaged over real tokens (language) or over rows (classification).

    Logits are (B, T, V), masked by the batch's attention mask, or (B, classes). They are compared in float32, `chunk`
    rows at a time, so that no full float32 copy of them exists. With `top_k` the divergence is between distributions
    over the teacher's k likeliest classes and one class for all others: never above the full divergence, and equal to
    it at k = V. A target then takes 4·(2k+1) bytes per row in place of V logits, so far more targets can be
    cached; hidden states add as many numbers as they are wide, in the target's dtype.
    `hidden_weight` times ‖h − h*‖² / ‖h*‖² of the last hidden states, from which the logits are computed, is richer
    supervision for training a language model, which must then return `hidden_states`; probe with weight 0.
    """

    temperature: float = 1.0
    chunk: int | None = None
    top_k: int | None = None
    hidden_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise FlexrankError(f"top_k is {self.top_k}; it must be at least 1, or None for all classes")
        if self.chunk is not None and self.chunk < 1:
            raise FlexrankError(f"chunk is {self.chunk}; it must be at least 1, or None for as many rows as are fast")
        if not self.temperature > 0:
            raise FlexrankError(f"temperature is {self.temperature}; it must be above 0")

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The teacher's logits of real tokens (rows, classes), or with `top_k` their `top_k_with_rest`; then states."""
        logits = _real_rows(output_tensor(output), batch).detach()
        target = logits if self.top_k is None else top_k_with_rest(logits, self.temperature, self.top_k, self.chunk)
        if not self.hidden_weight:
            return target
        return torch.cat([target, _real_rows(_last_hidden(output), batch).detach().to(target.dtype)], -1)

    def terms(self, output: Any, target: Tensor, batch: Batch) -> list[Quotient]:
        """The divergence over the number of rows, and the squared error of hidden states over the target's squares."""
        logits, errors = _real_rows(output_tensor(output), batch), list[Quotient]()
        if self.hidden_weight:
            hidden = _real_rows(_last_hidden(output), batch)
            target, wanted = target[:, : -hidden.shape[-1]], target[:, -hidden.shape[-1] :]
            errors.append(_relative_error(hidden, wanted, None, self.hidden_weight))
        if self.top_k is None:
            _require_same_shape(logits, target)
        total = total_divergence(logits, target, self.temperature, self.chunk, self.top_k is not None)
        return [Quotient(total, len(logits)), *errors]

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """Summed cross entropy to labels drawn from the model's own distribution (the true Fisher, one sample)."""
        logits = _real_rows(output_tensor(output), batch).float()
        labels = torch.multinomial(logits.detach().softmax(-1), 1).squeeze(-1)
        return functional.cross_entropy(logits, labels, reduction="sum")


@dataclasses.dataclass(frozen=True)
class EmbeddingObjective(_Quotients):
    """1 − cosine between mean-pooled embeddings, plus `hidden_weight` times ‖h − h*‖² / ‖h*‖² over real tokens.

    A row without real tokens does not count. The token term is richer supervision for training; probe with weight 0.
    """

    hidden_weight: float = 0.0

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The teacher's embeddings (rows, d), or its token states (B, T, d) if the token term needs them."""
        hidden = output_tensor(output).detach()
        return hidden if self.hidden_weight else _embeddings(hidden, output_mask(batch))

    def terms(self, output: Any, target: Tensor, batch: Batch) -> list[Quotient]:
        """One minus the cosine, over the number of rows, and the squared error of token states over the target's."""
        hidden, mask = output_tensor(output), output_mask(batch)
        wanted = _embeddings(target, mask) if self.hidden_weight else target
        distances = 1 - (_embeddings(hidden, mask) * wanted).sum(-1)
        errors = [_relative_error(hidden, target, mask, self.hidden_weight)] if self.hidden_weight else []
        return [Quotient(distances.sum(), len(distances)), *errors]

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """A random normal projection of the embeddings: its gradient's second moment is that of their Jacobian."""
        pooled = mean_pool(output_tensor(output), output_mask(batch))
        return (pooled * torch.randn_like(pooled)).sum()


@dataclasses.dataclass(frozen=True)
class FeatureObjective(_Quotients):
    """Relative squared error ‖h − h*‖² / ‖h*‖² of features of any shape (encoders of images, plain modules)."""

    def target(self, output: Any, batch: Batch) -> Tensor:
        """The teacher's features."""
        return output_tensor(output).detach()

    def terms(self, output: Any, target: Tensor, batch: Batch) -> list[Quotient]:
        """The squared error over the target's squares."""
        hidden = output_tensor(output)
        return [_relative_error(hidden, target, _mask_of(hidden, batch))]

    def fisher_loss(self, output: Any, batch: Batch) -> Tensor:
        """A random normal projection of the features, without padding."""
        hidden = output_tensor(output)
        mask = _mask_of(hidden, batch)
        real = (hidden if mask is None else hidden[mask]).float()
        return (real * torch.randn_like(real)).sum()


def objective_for(
    task: str, *, temperature: float = 1.0, hidden_weight: float = 0.0, top_k: int | None = None
) -> FisherObjective:
    """The objective of a task: language, classification, embedding or features; each uses the settings that it has."""
    if task in ("language", "classification"):
        return LogitObjective(temperature, top_k=top_k, hidden_weight=hidden_weight if task == "language" else 0.0)
    if task == "embedding":
        return EmbeddingObjective(hidden_weight)
    if task == "features":
        return FeatureObjective()
    raise FlexrankError(f"task {task!r} is unknown; it is language, classification, embedding or features")


def has_terms(objective: Objective) -> bool:
    """Whether the objective's loss is the sum of its `terms`: not so if a class overrides only `loss`."""
    kinds = [kind for kind in type(objective).__mro__ if {"terms", "loss"} & vars(kind).keys()]
    return bool(kinds) and "terms" in vars(kinds[0])


def require_rows(count: float) -> None:
    """Raises FlexrankError if no row or token of a batch counts in a loss."""
    if not count:
        raise FlexrankError("a batch has no real token, as its attention_mask is 0 everywhere, or no row; leave it out")


def require_objective(objective: object) -> None:
    """Raises FlexrankError if the object, unless it is None, lacks the methods of an `Objective`, or is a class."""
    methods = (getattr(objective, name, None) for name in ("target", "loss"))
    if objective is not None and (isinstance(objective, type) or not all(map(callable, methods))):
        raise FlexrankError(
            f"objective is {objective!r}; it is an object with the methods target and loss, such as LogitObjective()"
        )


def make_target(objective: Objective, output: Any, batch: Batch) -> Tensor:
    """The objective's target of the teacher's output; raises FlexrankError if it is no tensor."""
    target = objective.target(output, batch)
    if not isinstance(target, Tensor):
        kind = type(target).__name__
        raise FlexrankError(f"target of {type(objective).__name__} returned a {kind}; it must be a tensor")
    return target


def compute_loss(objective: Objective, output: Any, target: Tensor, batch: Batch) -> Tensor:
    """The objective's loss; raises FlexrankError if it is not one number."""
    loss = objective.loss(output, target, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise FlexrankError(f"loss of {type(objective).__name__} returned {shape}; it must be a scalar tensor")
    return loss


def describe(objective: Objective | None) -> str:
    """The text by which a checkpoint identifies an objective, the same in every process: its class and settings."""
    if objective is None or dataclasses.is_dataclass(objective):
        return _text(objective)
    kind = type(objective)
    settings = {name: value for name, value in getattr(objective, "__dict__", {}).items() if _is_setting(value)}
    return f"{kind.__module__}.{kind.__qualname__}{settings}"


def _text(value: Any) -> str:
    """The value's repr, but for what a repr omits or changes between processes: numbers of tensors, sets, addresses.

    Of a module only its structure counts: it may be large, or the model that is trained.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {digest_tensor(value)}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(one)}' for key, one in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f"{one.name}={_text(getattr(value, one.name))}" for one in dataclasses.fields(value) if one.repr]
        return f"{type(value).__qualname__}({', '.join(fields)})"
    return re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))  # an object's address in this process


def _is_setting(value: Any) -> bool:
    """Whether the value is a simple one, or holds only such: tensors and empty containers may be left by a forward."""
    if isinstance(value, list | tuple | dict):
        return bool(value) and all(map(_is_setting, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float | torch.dtype | enum.Enum)


def default_objective(output: Any) -> Objective:
    """The objective that fits a model's output: divergence of several logits, otherwise relative error of features."""
    logits = getattr(output, "logits", None)
    return FeatureObjective() if logits is None or logits.shape[-1] == 1 else LogitObjective()


def _embeddings(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The embeddings of the rows that have a real token."""
    pooled = mean_pool(hidden, mask)
    return pooled if mask is None else pooled[mask.any(1)]


def _mask_of(hidden: Tensor, batch: Batch) -> Tensor | None:
    """The batch's mask, if it is of these features; that of sounds has other lengths."""
    mask = output_mask(batch) if hidden.ndim == 3 else None
    return mask if mask is not None and mask.shape == hidden.shape[:2] else None


def _real_rows(values: Tensor, batch: Batch) -> Tensor:
    mask = output_mask(batch)
    if values.ndim not in (2, 3):
        problem = f"logits have shape {tuple(values.shape)}; they are (B, T, V) or (B, classes)"
        raise FlexrankError(f"{problem}, so give maps an objective of your own")
    if values.shape[-1] == 1:
        raise FlexrankError("the model has a single logit, which is no distribution; give objective=FeatureObjective()")
    if values.ndim < 3 or mask is None or bool(mask.all()):
        return values.flatten(0, -2)
    if values.shape[:2] != mask.shape:
        problem = f"logits have shape {tuple(values.shape)} and the mask of real tokens {tuple(mask.shape)}"
        raise FlexrankError(f"{problem}: give batches without padding, or an objective of your own")
    return values[mask.to(values.device)]


def _require_same_shape(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        shapes = f"{tuple(student.shape)} for the teacher's {tuple(teacher.shape)}"
        raise FlexrankError(f"the model's output has shape {shapes}; it must be of the same architecture")


def _last_hidden(output: Any) -> Tensor:
    """A language model's last hidden states (B, T, d), which are the decoder's in an encoder-decoder."""
    for field in ("hidden_states", "decoder_hidden_states"):
        states = getattr(output, field, None)
        if states is not None:
            return states[-1]
    raise FlexrankError("hidden_weight needs hidden states: set config.output_hidden_states on both models, or it to 0")


def _relative_error(hidden: Tensor, target: Tensor, mask: Tensor | None, weight: float = 1.0) -> Quotient:
    _require_same_shape(hidden, target)
    if mask is not None:
        hidden, target = hidden[mask], target[mask]
    target = target.float()
    length = target.square().sum().clamp(min=1e-12) if target.numel() else 0
    return Quotient(weight * (hidden.float() - target).square().sum(), length)
