"""Nested widths, as in MatFormer (Devvrit et al., NeurIPS 2024), of a pretrained model.

MatFormer trains the first m_1 < m_2 < … channels of each feed-forward part together, from scratch, one size per step.
Here channels are first put in the order of their importance, as in Flextron and Minitron. Heads are nested too, because
otherwise a model of half the size would have no feed-forward part left.
"""

import contextlib
import copy
from collections.abc import Iterator

from flexrank.distill.schedule import Schedule
from research.baselines.trained.lesson import Lesson, Settings, Size, TrainedMethod, rates
from research.baselines.trained.llm_pruner import room, taylor_widths, unheld


def sizes(lesson: Lesson, settings: Settings) -> Iterator[Size]:
    """Trains all sizes together, one per step, and all weights."""
    widths, model = taylor_widths(lesson), copy.deepcopy(lesson.teacher)
    all_kept = [widths.at(room(lesson, widths, budget)) for budget in lesson.budgets]
    possible = [kept for kept in all_kept if kept is not None]
    if not possible:
        yield from (None for _ in all_kept)
        return
    draws = Schedule([1.0] * len(possible), lesson.seed, lesson.steps, 0.0, 0)
    weights = lesson.weights(model)
    with contextlib.ExitStack() as stack:

        def switch(step: int) -> None:
            stack.close()
            stack.enter_context(widths.use(model, possible[draws.draw(step)]))

        lesson.train_(model, weights, lesson.followed, lesson.steps, lesson.rate(settings), switch)
    for kept in all_kept:
        if kept is None:
            yield None
            continue
        with widths.use(model, kept):
            yield model, lesson.limit(0) + unheld(lesson, widths) + widths.parameters(kept)


RATES = rates("times_usual", 0.5, 1.0, 2.0, 4.0)
MATFORMER = TrainedMethod(
    "matformer", "Devvrit et al., NeurIPS 2024", True, rates("times_usual", 0.5, 1.0, 2.0, 4.0), sizes
)
