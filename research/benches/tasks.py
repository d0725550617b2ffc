"""Tasks of lm-eval, by which a comparison scores language models besides their nats."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flexrank.errors import FlexrankError
from flexrank.run.harness import load_tasks, score, settings_of
from flexrank.run.workspace import Workspace
from research.experiment import Request

#: A task's metric is the first of these that it has, otherwise its own first metric.
METRICS = ("acc_norm", "acc")
#: Scores of sentences that have their own table, besides the cosine to the base model's.
OTHERS = ("spearman", "docstring mrr", "mrr")
#: Suffixes of a task's key in the scores: for its standard error, and for the score of chance.
ERROR, CHANCE = ", error", ", chance"


def task_measure(space: Workspace, request: Request) -> tuple[Callable[[nn.Module], dict[str, float]], dict[str, Any]]:
    """Returns a run's measures with the scores of the request's tasks, as "TASK, METRIC", and what those depend on."""
    measure = space.measure_quality
    if not request.tasks:
        return measure, {}
    if space.config.task != "language":
        name, task = space.config.name, space.config.task
        raise FlexrankError(f"--tasks needs a configuration of task language; {name} is of {task}")
    loaded, size = _loaded(request.tasks, request.include_path), space.config.data.batch_size

    def measured(model: nn.Module) -> dict[str, float]:
        found, chance = score(model, space.tokenizer, loaded, size)
        return {**measure(model), **_flat(found, chance)}

    return measured, {"tasks": settings_of(loaded)}


@functools.cache  # a comparison asks for them again for each seed and half
def _loaded(names: tuple[str, ...], include_path: Path | None) -> dict[str, Any]:
    return load_tasks(names, include_path)


def _flat(found: Mapping[str, Any], chance: Mapping[str, float]) -> dict[str, float]:
    scores = {}
    for task, metrics in found.items():
        metric = next((name for name in METRICS if name in metrics), next(iter(metrics)))
        key = f"{task}, {metric}"
        scores[key] = metrics[metric]["value"]
        if metrics[metric]["stderr"] is not None:
            scores[key + ERROR] = metrics[metric]["stderr"]
        if task in chance:
            scores[key + CHANCE] = chance[task]
    return scores


def shown_measures(base: Mapping[str, float], measure: str, digits: int) -> dict[str, int]:
    """Returns the base model's scores that have a table, with their digits: `measure` first, then those of tasks."""
    tasks = [key for key in base if ", " in key and not key.endswith((ERROR, CHANCE))]
    return {measure: digits} | dict.fromkeys([key for key in OTHERS if key in base] + tasks, 3)


def format_base_score(base: Mapping[str, float], measure: str, digits: int) -> str:
    """Formats the base model's score.

    For a task it also says whether the score is two standard errors above chance, and so means anything.
    """
    text = f"base {base[measure]:.{digits}f}"
    if (chance := base.get(measure + CHANCE)) is None:
        return text
    error = base.get(measure + ERROR, 0.0)
    is_above = base[measure] - chance > 2 * error
    return f"{text} ± {error:.{digits}f}, chance {chance:.{digits}f}: {'' if is_above else 'not '}above it"
