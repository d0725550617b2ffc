"""Stage three: one set of weights learns to serve every profile (FlexRank, section 3.3, eq. 5 and 6)."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from flexrank.data.batches import Batch, call_model, eval_mode, model_device, to_device
from flexrank.distill.feed import Feed
from flexrank.distill.objectives import Objective, default_objective
from flexrank.distill.prefixes import used_components
from flexrank.distill.schedule import Schedule, scheduled_rate
from flexrank.distill.state import State
from flexrank.distill.step import Step, Targets, make_optimizer, trainable_parameters, training
from flexrank.errors import FlexrankError
from flexrank.nn.switch import use_profile
from flexrank.profiles import ProfileChain
from flexrank.progress import track

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
    teacher: nn.Module, batches: Iterable[Batch], objective: Objective | None = None
) -> Callable[[nn.Module], float]:
    """evaluate(model) -> mean objective over `batches` (weighted by their rows), both models in eval mode.

    What the objective needs of the teacher's outputs is kept, so that it need not run again.

    Args:
        teacher: the original.
        batches: in a fixed order; kept, on the teacher's device.
        objective: the loss; by default the one that `default_objective` finds for the teacher's output.

    Raises:
        FlexrankError: there are no batches.
    """
    kept = [to_device(batch, model_device(teacher)) for batch in batches]
    if not kept:
        raise FlexrankError("the evaluator got no batches; it needs at least one")
    with eval_mode(teacher), torch.inference_mode():
        if objective is None:
            objective = default_objective(call_model(teacher, kept[0]))
        targets = [objective.target(call_model(teacher, batch), batch) for batch in kept]

    @torch.inference_mode()
    def evaluate(model: nn.Module) -> float:
        total = 0.0
        with eval_mode(model):
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
    objective: Objective | None = None,
    steps: int = 1000,
    learning_rate: float = 1e-4,
    warmup_steps: int = 0,
    final_learning_rate: float = 0.0,
    weights: Sequence[float] | None = None,
    weight_decay: float = 0.0,
    accumulation: int = 1,
    max_norm: float = 1.0,
    autocast: torch.dtype | None = None,
    train_embeddings: bool = False,
    teacher_cache: int = 256 * 2**20,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 200,
) -> TrainingHistory:
    """Trains the elastic model in place: each step draws one profile and follows the frozen teacher on one batch.

    AdamW, linear warm-up, cosine decay. Dropout stays off and batch norms keep their statistics, which all profiles
    share. Profiles and batches are drawn from (seed, step) alone, so an interrupted run resumes to the same bits.

    Components above a layer's largest trained rank stay as they were: no gradient, no decay, no state of the optimiser.
    So train budget 1 only where the base's own weights will not be kept: `deploy(base=)` gives the base itself there.
    Without it, a model trained below full rank is at full rank its trained components and these old ones.

    Args:
        model: elastic.
        teacher: the original; frozen, in eval mode.
        batches: a sequence, shuffled anew each pass, whose items never change (else `teacher_cache=0`); or an iterable,
            taken in its order, again and again. One with `state_dict` and `load_state_dict` (torchdata's
            StatefulDataLoader) resumes by them, others by skipping.
        chain: its requested profiles are trained; or the profiles themselves, cheapest first.
        objective: the loss; by default the one that `default_objective` finds for the teacher's output.
        steps: optimiser steps.
        learning_rate: peak.
        warmup_steps: of linear rise.
        final_learning_rate: what the cosine falls to.
        weights: α, one for each profile, cheapest first; equal by default.
        weight_decay: of matrices.
        accumulation: batches a step.
        max_norm: gradients are clipped to this length.
        autocast: run both models under this dtype; parameters and optimiser keep theirs.
        train_embeddings: embeddings (and heads tied to them) are frozen unless set; so is what does not require grad.
        teacher_cache: bytes of the teacher's outputs kept from one pass over a sequence to the next.
        seed: of profiles and batch order.
        checkpoint: a directory, written every `checkpoint_every` steps and at the end; found there, it is resumed.
        checkpoint_every: steps.

    Raises:
        FlexrankError: wrong settings, no batches, weights of half precision, which AdamW's small steps would not
            move, a loss or gradient that is not finite, or a checkpoint of another run.
    """
    profiles = _profiles(chain)
    settings = {
        "steps": steps, "learning_rate": learning_rate, "warmup_steps": warmup_steps, "weight_decay": weight_decay,
        "final_learning_rate": final_learning_rate, "accumulation": accumulation, "max_norm": max_norm, "seed": seed,
        "autocast": str(autocast), "train_embeddings": train_embeddings, "objective": repr(objective),
        "teacher": None if checkpoint is None else _identity(teacher),
        "profiles": _digest([sorted(profile.items()) for profile in profiles]),
        "weights": None if weights is None else list(weights),
    }  # fmt: skip
    schedule = Schedule(_positive(weights, len(profiles)), seed)
    _check_counts(steps=steps, accumulation=accumulation, checkpoint_every=checkpoint_every)
    with used_components(model, profiles):
        trainable = trainable_parameters(model, train_embeddings)
        optimizer = make_optimizer(trainable, learning_rate, weight_decay)
        feed = Feed(batches, seed)
        state = State(checkpoint, settings, trainable, optimizer, feed)
        taking = Step(model, Targets(teacher, objective, autocast, teacher_cache), trainable, optimizer, max_norm)
        with training(model, teacher, trainable):
            for step in track(range(state.step, steps), "distilling", steps, state.step):
                for group in optimizer.param_groups:
                    group["lr"] = scheduled_rate(step, steps, learning_rate, warmup_steps, final_learning_rate)
                choice = schedule.draw(step)
                with use_profile(model, profiles[choice]):
                    loss = taking.take((feed.next() for _ in range(accumulation)), accumulation, step)
                state.advance(loss, choice)
                if state.step % checkpoint_every == 0 or state.step == steps:
                    state.save()
    return TrainingHistory(tuple(state.losses), tuple(state.choices), state.step)


def _profiles(chain: Profiles) -> list[dict[str, int]]:
    if isinstance(chain, ProfileChain):
        chain = [entry.profile for entry in chain.requested]
    if not chain:
        raise FlexrankError("distillation got no profiles; the chain has no requested budgets")
    return [dict(profile) for profile in chain]


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


def _identity(model: nn.Module) -> str:
    """Tells a model from others of its kind: a digest of its tensors' names, shapes and first values."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    firsts = [[name, list(value.shape), value.flatten()[:16].double().tolist()] for name, value in state.items()]
    return _digest(firsts)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
