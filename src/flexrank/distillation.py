"""Stage three: one set of weights learns to serve every profile (FlexRank, section 3.3, eq. 5 and 6)."""

import contextlib
import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from flexrank.batches import Batch, call_model, eval_mode, model_device, to_device
from flexrank.errors import FlexrankError
from flexrank.objectives import Objective
from flexrank.profiles import ProfileChain
from flexrank.progress import track
from flexrank.storage import directory_aside, read_json, write_json
from flexrank.surgery import nested_layers, use_profile

Profiles = ProfileChain | Sequence[Mapping[str, int]]


@dataclasses.dataclass(frozen=True)
class TrainingHistory:
    """What a consolidation did.

    Attributes:
        losses: the loss of each step.
        profiles: the index of each step's profile, cheapest first.
        steps: how many steps were taken in all, those of earlier, interrupted calls included.
    """

    losses: tuple[float, ...]
    profiles: tuple[int, ...]
    steps: int


def distillation_evaluator(
    teacher: nn.Module, batches: Iterable[Batch], objective: Objective
) -> Callable[[nn.Module], float]:
    """evaluate(model) -> mean objective over `batches` (weighted by their rows), the teacher's outputs kept.

    Raises:
        FlexrankError: there are no batches.
    """
    kept = [to_device(batch, model_device(teacher)) for batch in batches]
    if not kept:
        raise FlexrankError("the evaluator got no batches; it needs at least one")
    with torch.inference_mode():
        targets = [objective.target(call_model(teacher, batch), batch) for batch in kept]

    @torch.inference_mode()
    def evaluate(model: nn.Module) -> float:
        total = 0.0
        for batch, target in zip(kept, targets, strict=True):
            total += float(objective.loss(call_model(model, batch), target, batch)) * target.shape[0]
        return total / sum(target.shape[0] for target in targets)

    return evaluate


def distill_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Batch] | Iterable[Batch],
    chain: Profiles,
    *,
    objective: Objective,
    steps: int,
    learning_rate: float = 1e-4,
    warmup_steps: int = 0,
    final_learning_rate: float = 0.0,
    weights: Sequence[float] | None = None,
    weight_decay: float = 0.0,
    accumulation: int = 1,
    max_norm: float = 1.0,
    autocast: torch.dtype | None = None,
    train_embeddings: bool = False,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 200,
) -> TrainingHistory:
    """Trains the elastic model in place: each step draws one profile and follows the frozen teacher on one batch.

    AdamW, linear warm-up, cosine decay. Dropout stays off and batch norms keep their statistics, which all profiles
    share. Profiles and batches are drawn from (seed, step) alone, so an interrupted run resumes to the same bits.

    Args:
        model: elastic.
        teacher: the original; frozen, in eval mode.
        batches: a sequence, shuffled anew each pass; or an iterable, taken in its order, again and again. One with
            `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) resumes by them, others by skipping.
        chain: its requested profiles are trained; or the profiles themselves, cheapest first.
        objective: the loss, see `objectives`.
        steps: optimiser steps.
        learning_rate: peak.
        warmup_steps: of linear rise.
        final_learning_rate: what the cosine falls to.
        weights: α, one for each profile, cheapest first; equal by default.
        weight_decay: of matrices.
        accumulation: batches a step.
        max_norm: gradients are clipped to this length.
        autocast: run both models under this dtype; parameters and optimiser keep theirs.
        train_embeddings: embeddings (and heads tied to them) are frozen unless set.
        seed: of profiles and batch order.
        checkpoint: a directory, written every `checkpoint_every` steps and at the end; found there, it is resumed.
        checkpoint_every: steps.

    Raises:
        FlexrankError: wrong settings, no batches, a loss that is not finite, or a checkpoint of another run.
    """
    profiles = _profiles(chain)
    settings = {
        "steps": steps, "learning_rate": learning_rate, "warmup_steps": warmup_steps, "weight_decay": weight_decay,
        "final_learning_rate": final_learning_rate, "accumulation": accumulation, "max_norm": max_norm, "seed": seed,
        "autocast": str(autocast), "train_embeddings": train_embeddings, "objective": repr(objective),
        "profiles": _digest([sorted(profile.items()) for profile in profiles]),
        "weights": None if weights is None else list(weights),
    }  # fmt: skip
    schedule = _Schedule(_positive(weights, len(profiles)), seed)
    _check_counts(steps=steps, accumulation=accumulation, checkpoint_every=checkpoint_every)
    trainable = _trainable(model, train_embeddings)
    optimizer = _optimizer(trainable, learning_rate, weight_decay)
    feed = _Feed(batches, seed)
    state = _State(checkpoint, settings, trainable, optimizer, feed)
    device = model_device(model)
    with _training(model, teacher, trainable):
        for step in track(range(state.step, steps), "distilling", steps, state.step):
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step, steps, learning_rate, warmup_steps, final_learning_rate)
            choice = schedule.draw(step)
            with use_profile(model, profiles[choice]):
                loss = 0.0
                for _ in range(accumulation):
                    batch = to_device(feed.next(), device)
                    loss += _backward(model, teacher, batch, objective, autocast, accumulation)
            _finite(loss, step)
            torch.nn.utils.clip_grad_norm_(trainable.values(), max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            state.advance(loss, choice)
            if state.step % checkpoint_every == 0 or state.step == steps:
                state.save()
    return TrainingHistory(tuple(state.losses), tuple(state.choices), state.step)


def _backward(
    model: nn.Module, teacher: nn.Module, batch: Batch, objective: Objective, autocast: torch.dtype | None, parts: int
) -> float:
    device = model_device(model).type
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        with torch.no_grad():
            target = objective.target(call_model(teacher, batch), batch)
        loss = objective.loss(call_model(model, batch), target, batch) / parts
    loss.backward()
    return float(loss.detach())


@dataclasses.dataclass
class _Schedule:
    """Draws profiles in proportion to their weights, evenly spread: each round of n draws is stratified."""

    weights: Sequence[float]
    seed: int

    def draw(self, step: int) -> int:
        count = len(self.weights)
        generator = random.Random(f"{self.seed} profiles {step // count}")
        strata = list(range(count))
        generator.shuffle(strata)
        point = (strata[step % count] + generator.random()) / count * sum(self.weights)
        for index, weight in enumerate(self.weights):
            point -= weight
            if point < 0:
                return index
        return count - 1


class _Feed:
    """Batches without end. A sequence is shuffled by (seed, pass); an iterable is taken in its own order."""

    def __init__(self, batches: Sequence[Batch] | Iterable[Batch], seed: int):
        self._batches, self._seed = batches, seed
        self._indexed = isinstance(batches, Sequence)
        self._count = 0
        self._iterator: Iterator[Batch] | None = None

    def next(self) -> Batch:
        """The next batch.

        Raises:
            FlexrankError: there are none.
        """
        if self._indexed:
            assert isinstance(self._batches, Sequence)
            if not self._batches:
                raise FlexrankError("distillation got no batches; it needs at least one")
            epoch, position = divmod(self._count, len(self._batches))
            self._count += 1
            return self._batches[self._order(epoch)[position]]
        self._count += 1
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._batches)
            for batch in self._iterator:
                return batch
            self._iterator = None
        raise FlexrankError("distillation got no batches; an iterable must give them again on each pass")

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._batches)))  # type: ignore[arg-type]
        random.Random(f"{self._seed} batches {epoch}").shuffle(order)
        return order

    def state(self) -> dict[str, Any]:
        own = getattr(self._batches, "state_dict", None)
        return {"count": self._count, "loader": own() if callable(own) else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        load = getattr(self._batches, "load_state_dict", None)
        if self._indexed or state["count"] == 0:
            self._count = state["count"]
        elif callable(load) and state["loader"] is not None:
            load(state["loader"])
            self._count = state["count"]
        else:
            while self._count < state["count"]:
                self.next()


class _State:
    """Everything a resumed run needs: trainable tensors, the optimiser's, the feed's place, and the losses so far."""

    def __init__(
        self,
        path: str | Path | None,
        settings: dict[str, Any],
        trainable: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        feed: _Feed,
    ):
        self.path = None if path is None else Path(path)
        self.settings, self.trainable, self.optimizer, self.feed = settings, trainable, optimizer, feed
        self.losses: list[float] = []
        self.choices: list[int] = []
        if self.path is not None and self.path.exists():
            self._load(self.path)

    @property
    def step(self) -> int:
        return len(self.losses)

    def advance(self, loss: float, choice: int) -> None:
        self.losses.append(loss)
        self.choices.append(choice)

    def save(self) -> None:
        if self.path is None:
            return
        tensors = {}
        for name, parameter in self.trainable.items():
            tensors[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}//{key}"] = value
        with directory_aside(self.path) as aside:
            safetensors.torch.save_file(tensors, aside / "state.safetensors")
            write_json(
                aside / "state.json",
                {"settings": self.settings, "losses": self.losses, "choices": self.choices, "feed": self.feed.state()},
            )

    @torch.no_grad()
    def _load(self, path: Path) -> None:
        state = read_json(path / "state.json")
        for key, value in self.settings.items():
            if state["settings"].get(key) != value:
                found = state["settings"].get(key)
                raise FlexrankError(f"{path}: was written with {key}={found}, not {value}; remove it or change back")
        with safetensors.safe_open(path / "state.safetensors", framework="pt") as file:
            keys = set(file.keys())
            for name, parameter in self.trainable.items():
                if name not in keys:
                    raise FlexrankError(f"{path}: holds no parameter {name!r}; it belongs to another model")
                parameter.copy_(file.get_tensor(name))
            for key in keys:
                name, separator, slot = key.partition("//")
                if separator:
                    self.optimizer.state[self.trainable[name]][slot] = file.get_tensor(key).to(
                        self.trainable[name].device
                    )
        self.losses, self.choices = state["losses"], state["choices"]
        self.feed.restore(state["feed"])


@contextlib.contextmanager
def _training(model: nn.Module, teacher: nn.Module, trainable: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Only `trainable` gets gradients, both models are in eval mode; all is put back after the block."""
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    chosen = set(map(id, trainable.values()))
    for parameter in required:
        parameter.requires_grad_(id(parameter) in chosen)
    try:
        with eval_mode(model, teacher):
            yield
    finally:
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)
            parameter.grad = None


def _profiles(chain: Profiles) -> list[dict[str, int]]:
    if isinstance(chain, ProfileChain):
        chain = [entry.profile for entry in chain.requested]
    if not chain:
        raise FlexrankError("distillation got no profiles; the chain has no requested budgets")
    return [dict(profile) for profile in chain]


def _trainable(model: nn.Module, train_embeddings: bool) -> dict[str, nn.Parameter]:
    nested_layers(model)
    frozen = set()
    if not train_embeddings:
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        frozen = {id(parameter) for module in embeddings for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in frozen and parameter.is_floating_point()
    }


def _optimizer(trainable: Mapping[str, nn.Parameter], learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in trainable.values() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, fused=True)


def _learning_rate(step: int, steps: int, peak: float, warmup: int, final: float) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def _positive(weights: Sequence[float] | None, count: int) -> Sequence[float]:
    if weights is None:
        return [1.0] * count
    if len(weights) != count or not all(math.isfinite(w) and w > 0 for w in weights):
        raise FlexrankError(f"weights {list(weights)} do not fit; give {count} positive numbers, one for each profile")
    return weights


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise FlexrankError(f"{name} is {value}; it must be at least 1")


def _finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise FlexrankError(f"the loss is {loss} at step {step}; lower the learning rate, or check the batches")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
