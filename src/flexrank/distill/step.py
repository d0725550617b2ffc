"""One optimiser step of a student that follows a teacher; the student may be elastic or any other module."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from flexrank import processes
from flexrank.data.batches import Batch, batch_rows, call_model, eval_mode, model_device, some_rows, to_device
from flexrank.distill.objectives import (
    Objective,
    compute_loss,
    default_objective,
    has_terms,
    make_target,
    require_objective,
)
from flexrank.distill.optimizer import update
from flexrank.errors import DivergedError, FlexrankError
from flexrank.nn.blocks import block_stack, replaced_forwards
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.sharding import sharded_parameters
from flexrank.nn.switch import layer_shapes, nested_layers, require_fitting, restored_sizes, set_profile, use_profile
from flexrank.profiles.costs import full_ranks, profile_parameters

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
        """Adds this batch's loss and weight to the lists, and its gradient, scaled by its weight over the first's."""
        rows, counts = _own_rows(item[1])
        index, batch = item[0], to_device(rows, model_device(self.model))
        with self.targets.autocast():
            target = self.targets.of(index, batch)
            loss, weight = self.targets.loss(call_model(self.model, batch), target, batch, counts)
        del target  # as large as the logits, and not needed in the backward pass
        losses.extend(processes.sums(float(loss.detach())))
        weights.append(weight)
        (loss * (weight / weights[0]) / loss_scale(losses[-1], mean_loss)).backward()

    def _sum_gradients(self) -> None:
        """Sums gradients over processes; for factors only those of the active prefix, because the others are zeros.

        A parameter that only other processes' rows reach gets zeros here. Gradients of sharded parameters are summed
        already; if processes gathered different layers, those sums mix them, which raises FlexrankError.
        """
        layers = [module for module in self.model.modules() if isinstance(module, NestedLayer)]
        if self._parts and not processes.same_everywhere([layer.gathers for layer in layers]):
            raise FlexrankError("sharded: a batch's rows reach other layers in other processes; train the model whole")
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


def set_sizes_(model: nn.Module, profiles: Sequence[Mapping[str, int]]) -> list[int]:
    """Gives each elastic layer the parameters that these sizes do not share; the outputs of all sizes stay the same.

    These are vectors for each size and, in a layer that some size leaves full, a full-rank matrix, if another size has
    a lower rank there or one of several is the full model. Returns each profile's index among sizes, smallest first.
    """
    layers, shapes, given = nested_layers(model), layer_shapes(model), profiles
    profiles = sorted(profiles, key=lambda profile: profile_parameters(profile, shapes))
    keeps_base = len(profiles) > 1 and full_ranks(shapes) in profiles
    rows: dict[str, list[Any]] = {name: [] for name in layers}
    for profile in profiles:
        with use_profile(model, profile):
            for name, layer in layers.items():
                rows[name].append(layer.active_vectors)
    for name, layer in layers.items():
        ranks = [profile[name] for profile in profiles]
        full = min(layer.matrix_shape)
        if layer.dense is None and full in ranks and (keeps_base or min(ranks) < full):
            layer.set_dense_()
        layer.set_sizes_(ranks, rows[name])
    set_profile(model, {name: layer.rank for name, layer in layers.items()})
    return [profiles.index(profile) for profile in given]


@contextlib.contextmanager
def sized(model: nn.Module, profiles: Sequence[Mapping[str, int]], is_balanced: bool) -> Iterator[list[int]]:
    """`trimmed_factors` for the block; yields the indices of `set_sizes_`, or none unless training is `balanced`."""
    size_indices = set_sizes_(model, profiles) if is_balanced else []
    with trimmed_factors(model, profiles):
        yield size_indices


@contextlib.contextmanager
def undone_if_untrained(model: nn.Module, losses: Sequence[float]) -> Iterator[None]:
    """If the block fails while there are no losses, each elastic layer gets back what `set_sizes_` has replaced."""
    before = [(layer, layer.dense, layer.sizes, layer.card_sizes) for layer in nested_layers(model).values()]
    try:
        yield
    except BaseException:
        for layer, dense, sizes, card_sizes in before if not losses else ():
            layer.dense, layer.sizes, layer.card_sizes = dense, sizes, card_sizes
        raise


@contextlib.contextmanager
def trimmed_factors(model: nn.Module, profiles: Sequence[Mapping[str, int]]) -> Iterator[None]:
    """Inside the block each elastic layer holds only its first components, up to the last that `profiles` need.

    They are separate parameters in the memory of the full ones: training them changes the first components of `u` and
    `v`, and the components above need no gradient or optimiser state. Raises FlexrankError as `set_profile` does.
    """
    layers = nested_layers(model)
    for profile in profiles:
        require_fitting(layers, profile)
    whole = [(layer, layer.u, layer.v) for layer in layers.values()]
    with restored_sizes(layers.values()):
        for name, layer in layers.items():
            ranks = {profile[name] for profile in profiles}
            used = max((rank for rank in ranks if not layer.is_dense_at(rank)), default=len(layer.u))
            if used < len(layer.u):
                if layer.rank > used and not layer.is_dense_at(layer.rank):  # otherwise its size stays, to be measured
                    layer.rank = used
                layer.u, layer.v = (nn.Parameter(f.detach()[:used], f.requires_grad) for f in (layer.u, layer.v))
        try:
            yield
        finally:
            for layer, u, v in whole:
                _copy_back_(u, layer.u)
                _copy_back_(v, layer.v)
                layer.u, layer.v = u, v


def _copy_back_(whole: nn.Parameter, own: nn.Parameter) -> None:
    """Copies the first components back into a factor, moved to their device, if `Module.to` gave them other memory.

    accelerate moves a model of several processes on CPUs from `cpu` to `cpu:0`.
    """
    if own.data_ptr() != whole.data_ptr():
        whole.data = whole.data.to(own.device)
        whole.data[: len(own)].copy_(own.data)


def trainable_parameters(
    model: nn.Module, train_embeddings: bool = False, factors_only: bool = False
) -> dict[str, nn.Parameter]:
    """The parameters that consolidation trains, by name; `train_embeddings` as in `distill_`.

    With `factors_only`, only factors, size vectors and, if they are trained, embeddings. Raises FlexrankError if there
    are none, or if any is float16, which AdamW's small steps would not change.
    """
    kept = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    layers = [module for module in model.modules() if isinstance(module, NestedLayer)]
    chosen = {p for layer in layers for p in (layer.u, layer.v, *(layer.sizes.parameters() if layer.sizes else ()))}
    trainable = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.requires_grad
        and (train_embeddings if parameter in kept else not factors_only or parameter in chosen)
    }  # fmt: skip
    if not trainable:
        raise FlexrankError("every parameter has requires_grad=False; consolidation has nothing to train")
    for name, parameter in trainable.items():
        if parameter.dtype is torch.float16:
            raise FlexrankError(f"parameter {name!r} is float16; consolidate weights in float32 or bfloat16")
    return trainable


@contextlib.contextmanager
def training(
    model: nn.Module, teacher: nn.Module, trainable: Mapping[str, nn.Parameter], gradient_checkpointing: bool = False
) -> Iterator[None]:
    """Inside the block only `trainable` gets gradients, and both models are in eval mode.

    With `gradient_checkpointing` each block of the model's stack stores its inputs, and reruns in the backward pass.
    """
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    chosen = set(trainable.values())
    for parameter in required:
        parameter.requires_grad_(parameter in chosen)
    repeating = _repeating_blocks(model) if gradient_checkpointing else contextlib.nullcontext()
    try:
        with eval_mode(model, teacher), repeating, torch.enable_grad():
            yield
    finally:
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)
            parameter.grad = None


@contextlib.contextmanager
def _repeating_blocks(model: nn.Module) -> Iterator[None]:
    """Inside the context the stack's blocks store only their inputs for the backward pass."""
    stack = block_stack(model, nested_layers(model))
    if not stack:
        what = f"{type(model).__name__} has no stack of them, so leave it out"
        raise FlexrankError(f"gradient checkpointing goes block by block; {what}")
    config: Any = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    if cached is not None:  # a block that runs again would append its keys and values twice
        config.use_cache = False
    try:
        with replaced_forwards({block: functools.partial(_checkpointed, block.forward) for _, block in stack}):
            yield
    finally:
        if cached is not None:
            config.use_cache = cached


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:  # on copies: a block that changes its input in place would do so twice
        return forward(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})

    # A forward draws no random numbers: there is no dropout.
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_floating_point() else value


def loss_scale(value: float, mean_loss: float | None) -> float:
    """The square root of `mean_loss`, a running mean, or of `value` without one; 1 if rounding leaves none above 0."""
    mean_loss = value if mean_loss is None else mean_loss
    return math.sqrt(mean_loss) if mean_loss > 0 else 1.0


def require_rows(count: float) -> None:
    """Raises FlexrankError if no row or token of a batch counts in a loss."""
    if not count:
        raise FlexrankError("a batch has no real token, as its attention_mask is 0 everywhere, or no row; leave it out")


def require_other(model: nn.Module, teacher: nn.Module) -> None:
    """Raises FlexrankError if the model is its own teacher."""
    if model is teacher:
        raise FlexrankError("model and teacher are one network; the teacher is a copy from before decompose_")


def require_finite(value: float, step: int, what: str) -> None:
    """Raises DivergedError unless the value, named `what` in the message, is finite."""
    if not math.isfinite(value):
        raise DivergedError(f"the {what} is {value} at step {step}; lower the learning rate, or check the batches")
