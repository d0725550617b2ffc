"""What every trained rival is given, and the loop that trains it."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from flexrank.data.batches import Batch
from flexrank.decompose import Method
from flexrank.distill.objectives import FisherObjective, Objective
from flexrank.distill.optimizer import set_rate
from flexrank.distill.schedule import Feed, scheduled_rate
from flexrank.distill.step import Step, Targets
from flexrank.distill.trained import training
from flexrank.errors import DivergedError
from flexrank.profiles import ProfileChain
from flexrank.profiles.costs import total_dense
from flexrank.progress import track
from research.baselines.method import Loss, parameter_count

log = logging.getLogger("flexrank")

#: The warm-up's share of the steps, and the bytes of the teacher's outputs that are cached.
WARMUP, CACHE = 0.025, 256 * 2**20
Settings = Mapping[str, Any]
T = TypeVar("T")
#: A model and its deployed parameters, with embeddings and norms; None if there is no size that small.
Size = tuple[nn.Module, int] | None


@dataclasses.dataclass(frozen=True)
class TrainingTask:
    """A base model, and all that a method may learn from; methods change nothing in it."""

    teacher: nn.Module
    calibration: Sequence[Batch]
    batches: Iterable[Batch]  #: for training; a stream keeps its own order
    budgets: Sequence[float]  #: shares of the factorised layers' parameters, largest first
    steps: int  #: of all sizes together
    steps_per_size: int  #: for a method that trains each size separately
    objective: FisherObjective  #: the objective of distillation
    output_objective: Objective  #: the same without hidden states, as the paper prints it
    label_loss: Loss | None  #: the loss on labels, by which units are ranked; None without labels
    decompose: Callable[[Method], nn.Module]  #: returns the model decomposed by `datasvd` or `fisher`
    chain: Callable[[Method, str], ProfileChain]  #: returns the chain of its allocation by `paper` or `joint`
    forward_context: Callable[[nn.Module], AbstractContextManager[None]]  #: in which models are trained
    layers: Mapping[str, tuple[int, int]]  #: the shapes of the layers whose parameters the budgets are shares of
    default_rate: float  #: the learning rate of flexrank's own consolidation of the model
    autocast: torch.dtype | None
    seed: int
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict)  #: what `prepared` has made

    def prepared(self, make: Callable[["TrainingTask"], T]) -> T:
        """Returns what `make` returns for this task, which it does once for all learning rates and budgets."""
        if make not in self.kept:
            self.kept[make] = make(self)
        made: T = self.kept[make]
        return made

    def parameter_limit(self, budget: float) -> int:
        """Returns the parameters that a deployed model may have at a budget, including those outside the layers."""
        dense = total_dense(self.layers)
        return parameter_count(self.teacher) - dense + int(budget * dense)

    def weights(self, model: Any) -> dict[str, nn.Parameter]:
        """Returns all parameters of a form of the base model except its embeddings, which ours leaves unchanged too."""
        embeddings = set(model.get_input_embeddings().parameters())
        return {name: one for name, one in model.named_parameters() if one not in embeddings}

    def learning_rate(self, settings: Settings) -> float:
        """Returns the settings' learning rate: `learning_rate`, or `times_usual` times the model's default rate."""
        return settings.get("learning_rate") or settings["times_usual"] * self.default_rate

    def train_(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        objective: Objective,
        steps: int,
        learning_rate: float,
        before_step: Callable[[int], None] = lambda step: None,
        fast_parameters: Sequence[str] = (),
        fast_factor: float = 1.0,
        decays: bool = True,
        first_batch: int = 0,
    ) -> None:
        """Trains these parameters in place with AdamW, `fast_parameters` at `fast_factor` times the learning rate.

        After its warm-up the learning rate decays to 0 if `decays`, otherwise it stays. `before_step` is called before
        each step, with the step's number. Training goes on from batch `first_batch`, as in a method of two phases.
        """
        optimizer = torch.optim.AdamW(
            [
                {"params": [one for name, one in parameters.items() if name not in fast_parameters], "scale": 1.0},
                {"params": [one for name, one in parameters.items() if name in fast_parameters], "scale": fast_factor},
            ],
            lr=learning_rate, weight_decay=0.0, fused=True,
        )  # fmt: skip
        targets = Targets(self.teacher, objective, self.autocast, CACHE)
        warmup = round(WARMUP * steps)
        step, feed = Step(model, targets, parameters, optimizer, 1.0), Feed(self.batches, self.seed)
        for _ in range(first_batch):
            feed.next()
        with self.forward_context(model), training(model, self.teacher, parameters):
            for number in track(range(steps), "training", steps, 0):
                before_step(number)
                along = number if decays else min(number, warmup)  # the end of the warm-up is the peak
                set_rate(optimizer, scheduled_rate(along, steps, learning_rate, warmup))
                step.take([feed.next()], number)


@dataclasses.dataclass(frozen=True)
class TrainedMethod:
    """A method that trains; see the package's docstring."""

    name: str
    source: str
    is_one_artefact: bool
    trials: Sequence[Settings]  #: four learning rates to try, each twice the one before
    sizes: Callable[[TrainingTask, Settings], Iterator[Size]]
    table: Method | None = None  #: the decomposition from whose sensitivity table it chooses ranks

    def sizes_at(self, task: TrainingTask, rates: Mapping[float, float]) -> Iterator[Size]:
        """Yields sizes at the learning rates of their budgets; those at one rate, and of one artefact, by one call.

        If training diverges, the sizes at that rate that are not made yet are None.
        """
        (setting,) = self.trials[0]
        for rate, group in itertools.groupby(task.budgets, rates.__getitem__):
            budgets, made = list(group), 0
            try:
                for size in self.sizes(dataclasses.replace(task, budgets=budgets), {setting: rate}):
                    made += 1
                    yield size
            except DivergedError as error:
                log.warning("%s at %g: %s", self.name, rate, error)
                yield from [None] * (len(budgets) - made)


def rates(name: str, *values: float) -> tuple[Settings, ...]:
    """Returns settings with these rates, which ascend."""
    return tuple({name: value} for value in values)


def trained_parameters(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Returns the parameters whose names contain one of `names`."""
    parts = tuple(names)
    return {name: one for name, one in model.named_parameters() if any(part in name for part in parts)}
