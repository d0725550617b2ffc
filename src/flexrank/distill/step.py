"""One optimiser step of a student that follows a teacher; the student may be elastic or any other module."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.data.batches import Batch, batch_rows, call_model, model_device, some_rows, to_device
from flexrank.distill.objectives import (
    Objective,
    compute_loss,
    default_objective,
    has_terms,
    make_target,
    require_objective,
    require_rows,
)
from flexrank.distill.optimizer import update
from flexrank.errors import DivergedError, FlexrankError
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.sharding import is_sharded, sharded_parameters

Item = tuple[int | None, Batch]  #: a batch's index in the sequence that repeats it (None without one), and the batch


class Targets:
    """The teacher's targets; those for a sequence's batches are cached for later passes, up to `limit` bytes."""

    def __init__(self, model: nn.Module, objective: Objective | None, autocast: torch.dtype | None, limit: int):
        require_objective(objective)
        self._model, self._objective, self._autocast, self._remaining_bytes = model, objective, autocast, limit
        self._kept: dict[int, Tensor] = {}

    def autocast(self) -> torch.autocast:
        """The autocast context for the forwards of both models."""
        return torch.autocast(model_device(self._model).type, self._autocast, self._autocast is not None)

    @torch.no_grad()
    def of(self, index: int | None, batch: Batch) -> Tensor:
        """The objective's target for this batch, from the cache or the teacher's output."""
        if index is not None and index in self._kept:
            return self._kept[index]
        output = call_model(self._model, batch)
        if self._objective is None:
            self._objective = default_objective(output)
        target = make_target(self._objective, output, batch)
        size = target.untyped_storage().nbytes()  # a view keeps its full storage alive
        # All processes cache it or none does: a sharded teacher runs in all of them.
        if index is not None and not processes.any_process(size > self._remaining_bytes):
            self._kept[index] = target
            self._remaining_bytes -= size
        return target

    def loss(self, output: Any, target: Tensor, batch: Batch, counts: bool = True) -> tuple[Tensor, float]:
        """The objective's loss of a student's output, against a target from `of`, and the weight of the batch.

        The weight is the denominator of the loss's first term, such as the number of tokens, or 1 for an objective
        without `terms`. With several processes, each gets its part of the loss over all rows: 0 unless it `counts`.
        """
        assert self._objective is not None
        if not has_terms(self._objective):
            if processes.count() == 1:
                return compute_loss(self._objective, output, target, batch), 1.0
            kind = type(self._objective).__name__
            raise FlexrankError(f"objective {kind} has no `terms`, which several processes need; see Objective.loss")
        objective: Any = self._objective
        terms = objective.terms(output, target, batch)
        bottoms = processes.sums(*(float(bottom) * counts for _, bottom in terms))
        require_rows(bottoms[0])
        first, *others = (top * counts / bottom for (top, _), bottom in zip(terms, bottoms, strict=True))
        return sum(others, first), bottoms[0]


@dataclasses.dataclass
class Step:
    """One training step of a student: forward, backward, clipping of gradients to norm `max_norm`, and update."""

    model: nn.Module
    targets: Targets
    trainable: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    max_norm: float

    def __post_init__(self) -> None:
        self._parts = sharded_parameters(self.model)

    def take(self, items: Iterable[Item], number: int, mean_loss: float | None = 1.0) -> float:
        """Takes step `number` on these batches, and returns their mean loss, weighted as `Targets.loss` says.

        The step thus equals that of one batch of all their rows, except for further terms of a loss, which are means
        over the batches. The loss is divided by the square root of `mean_loss`, its running mean, or of its own value
        for None. Raises FlexrankError, with the weights unchanged, if the mean loss or gradient norm is not finite.
        """
        losses, weights = list[float](), list[float]()
        for item in items:
            self._backward(item, mean_loss, losses, weights)
        shares = [weight / sum(weights) for weight in weights]
        loss = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        require_finite(loss, number, "loss")
        if len(shares) > 1:  # gradients are in units of the first batch's weight
            torch._foreach_mul_([one.grad for one in self.trainable.values() if one.grad is not None], shares[0])
        self._sum_gradients()
        length = self._gradient_length()
        require_finite(float(length), number, "gradient's length")
        if float(length) > self.max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.trainable.values(), self.max_norm, length)
        update(self.optimizer, number)
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _backward(self, item: Item, mean_loss: float | None, losses: list[float], weights: list[float]) -> None:
        """Adds this batch's loss and weight to the lists, and its gradient, scaled by its weight over the first's.

        Without a mean loss, that of the step's first batch scales them all.
        """
        rows, counts = _own_rows(item[1])
        index, batch = item[0], to_device(rows, model_device(self.model))
        with self.targets.autocast():
            target = self.targets.of(index, batch)
            loss, weight = self.targets.loss(call_model(self.model, batch), target, batch, counts)
        if not loss.requires_grad:
            raise FlexrankError("the objective's loss has no gradient; compute it from the model's output, undetached")
        del target  # as large as the logits, and not needed in the backward pass
        losses.extend(processes.sums(float(loss.detach())))
        weights.append(weight)
        (loss * (weight / weights[0]) / loss_scale(losses[0], mean_loss)).backward()
        self._require_same_gathers()

    def _require_same_gathers(self) -> None:
        """Raises FlexrankError if processes gathered different layers, which mixes them."""
        gathers = [module.gathers for module in self.model.modules() if isinstance(module, NestedLayer)]
        if self._parts and not processes.same_everywhere(gathers):
            raise FlexrankError("sharded: a batch's rows reach other layers in other processes; train the model whole")

    def _sum_gradients(self) -> None:
        """Sums gradients over processes; for factors only those of the active prefix, because the others are zeros.

        A parameter that only other processes' rows reach gets zeros here. Gradients of sharded parameters are summed
        already.
        """
        layers = [module for module in self.model.modules() if isinstance(module, NestedLayer)]
        active = {factor: layer.rank for layer in layers for factor in (layer.u, layer.v)}
        whole = [one for one in self.trainable.values() if one not in self._parts]
        for one, reached in zip(whole, processes.sums(*(float(one.grad is not None) for one in whole)), strict=True):
            if reached and one.grad is None:
                one.grad = torch.zeros_like(one)
        processes.sum_(one.grad[: active.get(one)] for one in whole if one.grad is not None)

    def _gradient_length(self) -> Tensor:
        """The gradient's norm, with all processes' parts of sharded parameters."""
        gradients = {one: one.grad for one in self.trainable.values() if one.grad is not None}
        length = torch.nn.utils.get_total_norm([grad for one, grad in gradients.items() if one not in self._parts])
        if self._parts:
            own = torch.nn.utils.get_total_norm([grad for one, grad in gradients.items() if one in self._parts])
            squares = length.double().square() + processes.sums(float(own) ** 2)[0]
            length = squares.sqrt().to(length)
        return length


def _own_rows(batch: Batch) -> tuple[Batch, bool]:
    """This process's rows of a batch, and whether they count: if it has none, it gets the first row, uncounted."""
    if processes.count() == 1:
        return batch, True
    if not batch_rows(batch):
        raise FlexrankError("a batch holds no tensor with rows, which several processes could share")
    start, end = (
        batch_rows(batch) * bound // processes.count() for bound in (processes.number(), processes.number() + 1)
    )
    return (some_rows(batch, slice(start, end)), True) if start < end else (some_rows(batch, slice(0, 1)), False)


def loss_scale(value: float, mean_loss: float | None) -> float:
    """The square root of `mean_loss`, a running mean, or of `value` without one; 1 if rounding leaves none above 0."""
    mean_loss = value if mean_loss is None else mean_loss
    return math.sqrt(mean_loss) if mean_loss > 0 else 1.0


def require_other(model: nn.Module, teacher: nn.Module) -> None:
    """Raises FlexrankError if the model is its own teacher, or the teacher has factors that are to be trained."""
    if model is teacher or (not is_sharded(model) and _factor_addresses(model) & _factor_addresses(teacher)):
        raise FlexrankError("model and teacher are one network; the teacher is a copy from before decompose_")


def _factor_addresses(model: nn.Module) -> set[int]:
    return {module.u.data_ptr() for module in model.modules() if isinstance(module, NestedLayer)}


def require_finite(value: float, step: int, what: str) -> None:
    """Raises DivergedError unless the value, named `what` in the message, is finite."""
    if not math.isfinite(value):
        raise DivergedError(f"the {what} is {value} at step {step}; lower the learning rate, or check the batches")
