"""Nested widths, as in MatFormer (Devvrit et al., NeurIPS 2024), of a pretrained model.

MatFormer trains the first m_1 < m_2 < … channels of each feed-forward part together, from scratch, one size per step.
Here channels are first put in the order of their importance, as in Flextron and Minitron. Small sizes have fewer heads
too, because few channels would be left otherwise; the ratio was chosen on tuning halves (docs/log.md).
"""

import contextlib
import copy
from collections.abc import Iterator

from flexrank.distill.schedule import Schedule
from research.baselines.trained.llm_pruner import parameters_outside_units, taylor_widths, unit_budget
from research.baselines.trained.task import Settings, Size, TrainedMethod, TrainingTask, rates

#: The least share of channels over that of heads.
LEAST_CHANNELS = 0.5


def sizes(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Trains all sizes together, one per step, and all weights."""
    widths, model = taylor_widths(task), copy.deepcopy(task.teacher)
    all_kept = [widths.at(unit_budget(task, widths, budget), LEAST_CHANNELS) for budget in task.budgets]
    possible = [kept for kept in all_kept if kept is not None]
    if not possible:
        yield from (None for _ in all_kept)
        return
    draws = Schedule([1.0] * len(possible), task.seed, task.steps, 0.0, 0)
    weights = task.weights(model)
    with contextlib.ExitStack() as stack:

        def switch(step: int) -> None:
            stack.close()
            stack.enter_context(widths.use(model, possible[draws.draw(step)]))

        task.train_(model, weights, task.objective, task.steps, task.learning_rate(settings), switch)
    for kept in all_kept:
        if kept is None:
            yield None
            continue
        with widths.use(model, kept):
            yield model, task.parameter_limit(0) + parameters_outside_units(task, widths) + widths.parameters(kept)


MATFORMER = TrainedMethod(
    "matformer", "Devvrit et al., NeurIPS 2024", True, rates("times_usual", 0.5, 1.0, 2.0, 4.0), sizes
)
