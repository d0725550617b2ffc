"""Stage three: one set of weights learns to serve every profile (FlexRank, section 3.3, eq. 5 and 6)."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, require_several, to_device
from flexrank.distill.interrupts import deferred, shielded
from flexrank.distill.mixing import mix_after_steps_
from flexrank.distill.objectives import (
    Objective,
    compute_loss,
    default_objective,
    describe,
    make_target,
    require_objective,
    require_rows,
)
from flexrank.distill.optimizer import OptimizerName, make_optimizer, require_known, scale_vectors_, set_rate
from flexrank.distill.schedule import Feed, RunningLosses, Schedule, drawn_weights
from flexrank.distill.state import State
from flexrank.distill.step import Step, Targets, require_other
from flexrank.distill.trained import sized, trainable_parameters, training, undone_if_untrained
from flexrank.errors import FlexrankError
from flexrank.files import digest_json, digest_tensor
from flexrank.nn.quantised import is_quantised
from flexrank.nn.select import require_differentiable, require_unwrapped
from flexrank.nn.sharding import is_sharded, sharded_parameters
from flexrank.nn.switch import layer_shapes, nested_layers, require_fitting, use_profile
from flexrank.profiles import ProfileChain
from flexrank.profiles.costs import full_ranks, profile_parameters
from flexrank.progress import track

Profiles = ProfileChain | Sequence[Mapping[str, int]]
Method = Literal["balanced", "paper"]
#: Bytes of the teacher's outputs that are cached between passes over a sequence.
TEACHER_CACHE = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class TrainingHistory:
    """Each step's loss and profile index (cheapest first), and the number of steps, including interrupted calls."""

    losses: tuple[float, ...]
    profiles: tuple[int, ...]
    steps: int


class TrainingStep(NamedTuple):
    """A completed optimiser step: its number from 0, profile index (cheapest first), loss and learning rate."""

    number: int
    profile: int
    loss: float
    learning_rate: float


def distillation_evaluator(
    teacher: nn.Module, batches: Iterable[Batch], objective: Objective | None = None
) -> Callable[[nn.Module], float]:
    """Returns evaluate(model) -> mean objective over `batches` (weighted by target rows), both models in eval mode.

    The teacher runs once; its targets and the batches stay on its device. The objective defaults to the
    `default_objective` of the teacher's output. Raises FlexrankError if there are no batches, or one has no real token.
    """
    require_several(batches)
    require_objective(objective)
    kept = [to_device(batch, model_device(teacher)) for batch in batches]
    if not kept:
        raise FlexrankError("the evaluator got no batches; it needs at least one")
    # Not inference_mode: a sharded teacher keeps its gather buffers, and reuses them in training.
    with eval_mode(teacher), torch.no_grad():
        if objective is None:
            objective = default_objective(call_model(teacher, kept[0]))
        targets = [make_target(objective, call_model(teacher, batch), batch) for batch in kept]
    for target in targets:
        require_rows(len(target))

    @torch.no_grad()  # nor here: what a model caches in its first forward is used in training
    def evaluate(model: nn.Module) -> float:
        total = 0.0
        with eval_mode(model):
            for batch, target in zip(kept, targets, strict=True):
                total += float(compute_loss(objective, call_model(model, batch), target, batch)) * len(target)
        return total / sum(map(len, targets))

    return evaluate


def distill_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Batch] | Iterable[Batch],
    chain: Profiles,
    *,
    method: Method = "balanced",
    objective: Objective | None = None,
    steps: int = 1000,
    learning_rate: float = 1e-4,
    warmup_steps: int = 0,
    weights: Sequence[float] | None = None,
    weight_decay: float = 0.0,
    accumulation: int = 1,
    max_norm: float = 1.0,
    autocast: torch.dtype | None = None,
    optimizer: OptimizerName = "adamw",
    gradient_checkpointing: bool = False,
    train_embeddings: bool = False,
    teacher_cache: int = TEACHER_CACHE,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 200,
    on_step: Callable[[TrainingStep], None] | None = None,
) -> TrainingHistory:
    """Trains the elastic model in place: each step draws one profile and follows the frozen teacher.

    With plain averaging (`paper`, eq. 6) the small sizes, whose losses and gradients are far larger, degrade the large
    ones. So by default (`balanced`) several profiles train only the factors in common: a layer that only larger
    profiles leave full has a separate matrix for them, norms and biases are fixed, and each profile has its own gains
    of inputs and outputs and additions to biases, which merge into it, and learn at a rate proportional to the square
    root of the profile's mean loss. After each step of AdamW, components that the drawn profile lacks are mixed into it
    such that the largest stays as it is but for rounding (`distill.mixing`). Each loss is divided by the square root of
    its profile's running mean. The largest profile below the full model is drawn twice as often as any other; the full
    model, if it is among them, is never drawn, so it stays as is. The optimiser is AdamW (weight decay on matrices
    only), with linear warm-up, cosine decay, no dropout and fixed batch norms. Components above a layer's largest
    trained rank do not change. The objective defaults to `default_objective`. With several processes, each takes its
    share of the rows of every batch; losses and weights are those of one process. A sharded model (`sharding.shard_`)
    stays sharded.

    Args:
        batches: a sequence, reshuffled on every pass, whose items never change (otherwise set `teacher_cache=0`); or an
            iterable, repeated as needed. One with `state_dict` and `load_state_dict` resumes by them, others skip.
        chain: its requested profiles are trained; or the profiles themselves, cheapest first.
        method: see above.
        weights: α, how often each profile is drawn relative to the others, cheapest first; by default as `method`
            says. With several profiles `balanced` sets that of the full model to 0, because it never draws it.
        accumulation: batches per step, weighted by their numbers of tokens or rows (`Objective.loss`).
        autocast: torch.bfloat16 to run both models under autocast; parameters and optimiser keep their dtypes.
        optimizer: `adamw_8bit` has 8-bit states; it, and weights in bfloat16, need torchao.
        gradient_checkpointing: store only the inputs of each block of the stack, and run it again in the backward pass:
            a third more time for a small part of the memory of activations.
        train_embeddings: by default embeddings, and heads tied to them, are frozen, as is what does not require grad.
            All sizes share them: training them also moves the full model away from the base model.
        teacher_cache: bytes of the teacher's outputs cached between passes over a sequence.
        checkpoint: a directory of this training alone, from which a call resumes bit for bit, with the weights that
            are there, whatever those of `model`; written every `checkpoint_every` steps, at the
            end, and after the current step on Ctrl-C or SIGTERM, which then ends the call with a KeyboardInterrupt.
        on_step: called after each step, to log it; a resumed call starts from the checkpoint's step.

    Raises:
        FlexrankError: wrong settings, no batches, a batch without a real token, float16, profiles of another model or
            not cheapest first, a loss that is not finite, or another run's checkpoint.
    """
    _check(model, teacher, optimizer, autocast, checkpoint)
    _check_counts(steps=steps, accumulation=accumulation, checkpoint_every=checkpoint_every)
    _check_counts(least=0, warmup_steps=warmup_steps, seed=seed)
    profiles = profiles_of(chain, model)
    steps, accumulation, seed = int(steps), int(accumulation), int(seed)  # numpy integers are not JSON
    _check_numbers(learning_rate=learning_rate, max_norm=max_norm)
    _check_numbers(allow_zero=True, weight_decay=weight_decay)
    is_balanced = _is_balanced(method)
    drawn = _weights(weights, method, model, profiles)
    schedule = Schedule(drawn, seed, steps, float(learning_rate), int(warmup_steps))
    settings = {
        **dataclasses.asdict(schedule), **_identities(objective, profiles, batches, teacher if checkpoint else None),
        "method": method, "weight_decay": float(weight_decay), "accumulation": accumulation, "optimizer": optimizer,
        "max_norm": str(max_norm), "autocast": str(autocast), "train_embeddings": train_embeddings,
    }  # fmt: skip
    losses: list[float] = []
    with undone_if_untrained(model, losses), shielded(batches), sized(model, profiles, is_balanced) as size_indices:
        trainable = trainable_parameters(model, train_embeddings, is_balanced and len(profiles) > 1)
        adam = make_optimizer(model, trainable, learning_rate, weight_decay, optimizer)
        running = RunningLosses() if is_balanced else None
        if running:
            scales = functools.partial(running.vector_scales, size_indices)
            scale_vectors_(adam, model, scales)
            mix_after_steps_(adam, model, scales)
        state = State(checkpoint, settings, trainable, adam, Feed(batches, seed), sharded_parameters(model), losses)
        step = Step(model, Targets(teacher, objective, autocast, teacher_cache), trainable, adam, max_norm)
        with training(model, teacher, trainable, gradient_checkpointing):
            if running:
                running.extend(state.losses, state.choices)
            _train(step, state, schedule, profiles, accumulation, checkpoint_every, running, on_step)
    return TrainingHistory(tuple(state.losses), tuple(state.choices), state.step)


def _train(
    step: Step,
    state: State,
    schedule: Schedule,
    profiles: list[dict[str, int]],
    accumulation: int,
    every: int,
    running: RunningLosses | None,
    on_step: Callable[[TrainingStep], None] | None,
) -> None:
    with deferred(state.path is not None) as is_asked:
        for number in track(range(state.step, schedule.steps), "distilling", schedule.steps, state.step):
            choice = schedule.draw(number)
            set_rate(step.optimizer, schedule.rate(number))
            with use_profile(step.model, profiles[choice]):
                items = (state.feed.next() for _ in range(accumulation))
                loss = step.take(items, number, running.mean(choice) if running else 1.0)
            state.advance(loss, choice)
            if on_step:
                on_step(TrainingStep(number, choice, loss, schedule.rate(number)))
            if running:
                running.add(loss, choice)
            ends = processes.any_process(is_asked())
            if ends or state.step % every == 0 or state.step == schedule.steps:
                state.save()
            if ends:
                raise KeyboardInterrupt
        if processes.any_process(is_asked()):  # while the last step was saved
            raise KeyboardInterrupt


def profiles_of(chain: Profiles, model: nn.Module) -> list[dict[str, int]]:
    """The requested profiles of a chain, or the given profiles, cheapest first.

    Raises FlexrankError if there are none, if one does not fit the elastic model, or if they are in another order.
    """
    profiles = [entry.profile for entry in chain.requested] if isinstance(chain, ProfileChain) else chain
    if not isinstance(profiles, Sequence) or not all(isinstance(profile, Mapping) for profile in profiles):
        raise FlexrankError("chain is neither a ProfileChain nor a list of profiles, such as [chain.at(0.5)]")
    if not profiles:
        raise FlexrankError("distillation got no profiles; the chain has no requested budgets")
    layers, shapes = nested_layers(model), layer_shapes(model)
    for profile in profiles:
        require_fitting(layers, profile)
    sizes = [profile_parameters(profile, shapes) for profile in profiles]
    if sizes != sorted(sizes) and not isinstance(chain, ProfileChain):
        raise FlexrankError(f"chain has profiles of {sizes} parameters; give them cheapest first")
    return [{name: int(rank) for name, rank in profile.items()} for profile in profiles]


def _check(model: nn.Module, teacher: nn.Module, optimizer: str, autocast: object, checkpoint: object) -> None:
    require_unwrapped(model)
    require_differentiable(model)
    require_other(model, teacher)
    require_known(optimizer)
    if is_sharded(model) and optimizer == "adamw_8bit":
        raise FlexrankError("optimizer is adamw_8bit; of a sharded model it is adamw, whose states are divided too")
    if autocast not in (None, torch.bfloat16):
        raise FlexrankError(f"autocast is {autocast!r}; it is None or torch.bfloat16, as float16 loses small gradients")
    if not isinstance(checkpoint, str | Path | None):
        raise FlexrankError(f"checkpoint is {checkpoint!r}; it is None or the path of a directory")


def _check_counts(least: int = 1, **counts: object) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < least:
            raise FlexrankError(f"{name} is {count!r}; it must be a whole number from {least} up")


def _check_numbers(allow_zero: bool = False, **values: object) -> None:
    for name, value in values.items():
        is_refused = isinstance(value, bool) or (value == 0 and not allow_zero)
        if is_refused or not isinstance(value, numbers.Real) or math.isnan(value) or value < 0:
            raise FlexrankError(f"{name} is {value!r}; it must be a number {'from 0 up' if allow_zero else 'above 0'}")


def _is_balanced(method: str) -> bool:
    if method not in ("balanced", "paper"):
        raise FlexrankError(f"method {method!r} is unknown; it is balanced or paper")
    return method == "balanced"


def _weights(
    weights: Sequence[float] | None, method: Method, model: nn.Module, profiles: Sequence[Mapping[str, int]]
) -> list[float]:
    """The `drawn_weights` of the given weights or the method. Raises FlexrankError if the given ones do not fit."""
    if isinstance(weights, Mapping):
        raise FlexrankError("weights is a mapping; give a list with a number for each profile, cheapest first")
    if weights is not None and (len(weights) != len(profiles) or not all(0 < weight < math.inf for weight in weights)):
        wanted = f"give {len(profiles)} positive numbers, one for each profile, cheapest first"
        raise FlexrankError(f"weights {list(weights)} do not fit; {wanted}")
    full = full_ranks(layer_shapes(model))
    return drawn_weights(weights, method, [profile == full for profile in profiles])


def _identities(
    objective: Objective | None, profiles: object, batches: Iterable[Batch], teacher: nn.Module | None
) -> dict[str, object]:
    """What a checkpoint must have in common with the call that resumes it, besides its settings."""
    return {
        "objective": describe(objective),
        "profiles": digest_json(profiles),
        "batches": len(batches) if isinstance(batches, Sequence) else None,
        "teacher": _identity(teacher) if teacher is not None else None,
    }


def _identity(model: nn.Module) -> str:
    """A digest of the names, shapes and first values of the model's tensors."""
    tensors = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    return digest_json([(name, list(value.shape), digest_tensor(_first_values(value))) for name, value in tensors])


def _first_values(tensor: Tensor) -> Tensor:
    """The first values, also of a sharded or quantised tensor; none of one that is not in memory."""
    if tensor.is_meta:
        return torch.empty(0)
    if is_quantised({"": tensor}):
        tensor = cast(Any, tensor).dequantize()
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.flatten()[:16]
