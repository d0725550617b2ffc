"""LLM-Pruner: coupled structures removed by Taylor importance, then low-rank repair (Ma et al., NeurIPS 2023).

Every block loses the same share of heads and of feed-forward channels. The paper spares the first blocks and the last
one, of 32; models of five or six have none to spare. A model without labels uses the loss that flexrank's own `fisher`
uses.
"""

import copy
from collections.abc import Iterator

from flexrank.nn.blocks import block_stack
from research.baselines.trained.channels import Widths, find_units, importances, ordered
from research.baselines.trained.lesson import Lesson, Settings, Size, TrainedMethod, rates, trained_parameters
from research.baselines.trained.lora import adapt_


def sizes(lesson: Lesson, settings: Settings) -> Iterator[Size]:
    """Makes each size separately: removes what is least important, then trains adapters on all linear layers."""
    widths = taylor_widths(lesson)
    for budget in lesson.budgets:
        kept = widths.at(room(lesson, widths, budget))
        if kept is None:
            yield None
            continue
        model = copy.deepcopy(lesson.teacher)
        adapt_(model, list(lesson.layers), seed=lesson.seed)
        with widths.use(model, kept):
            adapters = trained_parameters(model, [".lora_"])
            objective, steps = lesson.followed, lesson.steps_of_a_size
            lesson.train_(model, adapters, objective, steps, lesson.rate(settings))
            yield model, lesson.limit(0) + unheld(lesson, widths) + widths.parameters(kept)


def taylor_widths(lesson: Lesson) -> Widths:
    """Returns heads and channels in the order of their importance on the calibration."""
    model = copy.deepcopy(lesson.teacher)
    units = find_units(model, [name for name, _ in block_stack(model, lesson.layers)])
    loss = lesson.task or lesson.followed.fisher_loss
    return Widths(units, ordered(units, importances(model, units, lesson.calibration, loss)))


def unheld(lesson: Lesson, widths: Widths) -> int:
    """Returns the number of layer parameters that belong to no unit."""
    dense = sum(m * n for m, n in lesson.layers.values())
    return dense - sum(one.parameters(one.count) for one in widths.units.values())


def room(lesson: Lesson, widths: Widths, budget: float) -> float:
    """Returns the parameters that units may have at a budget."""
    return lesson.limit(budget) - lesson.limit(0) - unheld(lesson, widths)


RATES = rates("learning_rate", 2e-3, 4e-3, 8e-3, 1.6e-2)
LLM_PRUNER = TrainedMethod(
    "llm-pruner", "Ma et al., NeurIPS 2023", False, rates("learning_rate", 2e-3, 4e-3, 8e-3, 1.6e-2), sizes
)
