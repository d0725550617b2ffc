"""flexrank's own methods: all sizes together, as the paper prints it, and each size separately."""

from collections.abc import Iterator

from torch import nn

from flexrank.distill import Method, Profiles, distill_
from flexrank.distill.objectives import Objective
from flexrank.nn.switch import footprint, layer_shapes, use_profile
from flexrank.profiles import RankProfile
from flexrank.profiles.costs import profile_parameters
from research.baselines.trained.task import WARMUP, Settings, Size, TrainedMethod, TrainingTask, rates


def ours(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Trains by the defaults of `flexrank run`: factors weighted by gradients too, joint ranks, balanced consolidation.

    The objective includes hidden states.
    """
    model, chain = task.decompose("fisher"), task.chain("fisher", "joint")
    consolidate_(task, settings, model, chain, task.objective, task.steps)
    yield from (size for budget in task.budgets for size in at(model, chain.at(budget)))


def printed(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Trains FlexRank as the paper prints it: DataSVD, its rank search, eq. 6, and the divergence of outputs alone."""
    model, chain = task.decompose("datasvd"), task.chain("datasvd", "paper")
    consolidate_(task, settings, model, chain, task.output_objective, task.steps, "paper")
    yield from (size for budget in task.budgets for size in at(model, chain.at(budget)))


def independent(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Trains each size separately, from the same factors and ranks as `ours`."""
    chain = task.chain("fisher", "joint")
    for budget in task.budgets:
        model, profile = task.decompose("fisher"), chain.at(budget)
        consolidate_(task, settings, model, [profile], task.objective, task.steps_per_size)
        yield from at(model, profile)


def consolidate_(
    task: TrainingTask,
    settings: Settings,
    model: nn.Module,
    profiles: Profiles,
    objective: Objective,
    steps: int,
    method: Method = "balanced",
) -> None:
    """Runs the library's consolidation in place, on the task's batches."""
    with task.forward_context(model):
        distill_(
            model, task.teacher, task.batches, profiles, method=method, objective=objective, steps=steps,
            learning_rate=task.learning_rate(settings), warmup_steps=round(WARMUP * steps), autocast=task.autocast,
            seed=task.seed,
        )  # fmt: skip


def at(model: nn.Module, profile: RankProfile) -> Iterator[tuple[nn.Module, int]]:
    """Yields the elastic model at a profile, and its parameters when deployed, gauge-aligned without slack."""
    layers = profile_parameters(profile, layer_shapes(model))
    with use_profile(model, profile):
        yield model, layers + footprint(model).other_parameters


_RATES = rates("times_usual", 0.25, 0.5, 1.0, 2.0)
OURS = TrainedMethod("flexrank", "this project", True, _RATES, ours, "fisher")
PRINTED = TrainedMethod("flexrank, printed", "FlexRank, ICML 2026", True, _RATES, printed, "datasvd")
INDEPENDENT = TrainedMethod("independent", "FlexRank, ICML 2026, section 5", False, _RATES, independent, "fisher")
