"""LLM-Pruner: coupled structures removed by Taylor importance, then low-rank repair (Ma et al., NeurIPS 2023).

Every block loses about the same share of heads and of feed-forward channels. The paper spares the first blocks and the
last one, of 32; models of five or six have none to spare. Where the comparison has no labels, the loss is the one that
flexrank's own `fisher` takes.
"""

import copy
from collections.abc import Iterator

from flexrank.nn.blocks import block_stack
from flexrank.profiles.costs import total_dense
from research.baselines.trained.channels import Widths, find_units, importances, ordered
from research.baselines.trained.lora import adapt_
from research.baselines.trained.task import Settings, Size, TrainedMethod, TrainingTask, rates, trained_parameters

#: The least share of channels over that of heads, which come in few steps.
LEAST_CHANNELS = 0.8


def sizes(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Makes each size separately: removes what is least important, then trains adapters on all linear layers."""
    widths = task.prepared(taylor_widths)
    for budget in task.budgets:
        kept = widths.at(unit_budget(task, widths, budget), LEAST_CHANNELS)
        if kept is None:
            yield None
            continue
        model = copy.deepcopy(task.teacher)
        adapt_(model, list(task.layers), seed=task.seed)
        with widths.use(model, kept):
            adapters = trained_parameters(model, [".lora_"])
            objective, steps = task.objective, task.steps_per_size
            task.train_(model, adapters, objective, steps, task.learning_rate(settings))
            yield model, task.parameter_limit(0) + parameters_outside_units(task, widths) + widths.parameters(kept)


def taylor_widths(task: TrainingTask) -> Widths:
    """Returns heads and channels in the order of their importance on the calibration."""
    model = copy.deepcopy(task.teacher)
    units = find_units(model, [name for name, _ in block_stack(model, task.layers)])
    loss = task.label_loss or task.objective.fisher_loss
    return Widths(units, ordered(units, importances(model, units, task.calibration, loss)))


def parameters_outside_units(task: TrainingTask, widths: Widths) -> int:
    """Returns the number of layer parameters that belong to no unit."""
    dense = total_dense(task.layers)
    return dense - sum(one.parameters(one.count) for one in widths.units.values())


def unit_budget(task: TrainingTask, widths: Widths, budget: float) -> float:
    """Returns the parameters that units may have at a budget."""
    return task.parameter_limit(budget) - task.parameter_limit(0) - parameters_outside_units(task, widths)


LLM_PRUNER = TrainedMethod(
    "llm-pruner", "Ma et al., NeurIPS 2023", False, rates("learning_rate", 2e-3, 4e-3, 8e-3, 1.6e-2), sizes
)
