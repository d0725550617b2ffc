"""ACIP: one order of all singular values of a model, learned once (Genzel et al., TMLR 2025).

Each layer is P diag(σ ∘ mask) Q + B A, where W = P Λ Q is its plain SVD and B A a low-rank adapter. A mask is 1 where
its score is above 0, with a straight-through gradient; a removed value has no gradient, and stays removed. Scores and
adapters minimise the loss plus λ Σ |score|, while λ grows until the model is as small as the smallest size.
Values removed later come before those removed earlier; any size is a prefix of that order, and all share the adapters.

Where the paper leaves a short training open:

- The share of parameters follows a line to the smallest budget, which begins when a score can have come to 0. λ grows
  while the share is above it; below it there is no penalty, and λ stays. The share is predicted some steps ahead, as if
  each score went on as in the last step: Adam moves most scores alike, and goes on when the penalty is gone.
- λ starts so small that a score's own gradients decide whether it falls. λ's growth in a step, the learning rate of
  scores and the line are scaled so a training of any length takes the same course.
- While the order is learned, learning rates are constant, that of adapters a share of that of scores: faster adapters
  spoil the order and what large sizes need, slower ones learn too little. The setting is the adapters' rate afterwards.
- Among values removed at the same step, the one with the larger last score comes first.
- The last part of the steps trains only the adapters, at sizes drawn at random.
- An adapter has the authors' share of a layer's width, and counts as additional ranks, gauge-aligned like all others.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from flexrank.data.batches import Batch
from flexrank.distill.objectives import Objective
from flexrank.distill.schedule import Schedule
from flexrank.nn.matrix import bias_of, weight_matrix
from flexrank.profiles.costs import deployed_parameters
from research.baselines.method import NotApplicable
from research.baselines.trained.task import Settings, Size, TrainedMethod, TrainingTask, rates, trained_parameters

#: λ at first, its growth if it grows at every step, and how often a score could go from 1 to 0 in these steps.
PENALTY, GROWTH, TRAVEL = 1e-5, 1e8, 5.0
#: The learning rate of adapters over that of scores. The authors' code has .02; of .02, .05 and the setting's rate
#: this was best on the tuning half of stories260k, at 4e-3.
PACE = 0.05
#: Where the line begins and ends, and how far ahead the share is predicted, as shares of these steps: a tenth is about
#: as long as AdamW goes on in a short training, ten steps. Then the share of all steps that learn scores.
LINE, AHEAD, LEARNING = (1 / TRAVEL, 0.9), 0.1, 0.6
#: The rank of an adapter over the layer's narrower side: the authors have 32 for 4096.
ADAPTER = 1 / 128


class ScoredLinear(nn.Module):
    """y = P (σ ∘ mask ∘ (Q x)) + B A x + bias; P is m × k, Q is k × n, A is a × n and B is m × a."""

    values: Tensor

    def __init__(self, layer: nn.Module, adapter: int, generator: torch.Generator):
        super().__init__()
        weight, bias = weight_matrix(layer).detach(), bias_of(layer)
        self.shape = (weight.shape[0], weight.shape[1])
        left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
        self.left, self.right = (nn.Parameter(one.to(weight.dtype), requires_grad=False) for one in (left, right))
        self.register_buffer("values", values.to(weight.dtype))
        self.score = nn.Parameter(torch.ones_like(self.values))
        down = torch.randn(adapter, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
        self.down, self.up = nn.Parameter(down.to(weight)), nn.Parameter(weight.new_zeros(len(weight), adapter))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.mask: Tensor | None = None  #: the mask of a size; None while scores are learned

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:  # noqa: D102
        hard = (self.score > 0).to(self.values) if self.mask is None else self.mask
        soft = functional.relu(self.score)  # a removed value gets no gradient, and stays removed
        mask = hard + soft - soft.detach() if self.mask is None else hard
        kept = functional.linear(functional.linear(x, self.right) * (self.values * mask).to(x.dtype), self.left)
        return kept + functional.linear(functional.linear(x, self.down), self.up, self.bias)

    def parameters_at(self, values: int) -> int:
        """Returns the parameters of the deployed layer that keeps `values` singular values, and the adapter's ranks."""
        return deployed_parameters(self.shape, min(*self.shape, values + len(self.down)))


@dataclasses.dataclass
class Pressure:
    """Learns the order: holds λ, and the last step at which each value was kept, with its score there."""

    layers: Mapping[str, ScoredLinear]
    smallest: float  #: the share of parameters at the end
    steps: int
    weight: float = PENALTY
    is_on: bool = True  #: whether there is a penalty at all

    def __post_init__(self) -> None:
        self.last = {name: torch.zeros_like(layer.score) for name, layer in self.layers.items()}
        self.scores = {name: torch.zeros_like(layer.score) for name, layer in self.layers.items()}
        self.dense = sum(math.prod(layer.shape) for layer in self.layers.values())
        self.growth = GROWTH ** (1 / self.steps)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Records what is kept, and raises λ if the model will soon be larger than it should be then."""
        later, ahead = dict[str, Tensor](), AHEAD * self.steps
        for name, layer in self.layers.items():
            score, before = layer.score.clamp_(min=0), self.scores[name]
            kept = score > 0
            later[name] = score + ahead * (score - before)
            self.last[name][kept], before[kept] = step + 1, score[kept]
        self.is_on = self.share(later) >= self.wanted(step + ahead)
        self.weight *= self.growth if self.is_on else 1.0

    def wanted(self, step: float) -> float:
        """Returns the share of parameters on the line after this step."""
        begin, end = (at * self.steps for at in LINE)
        return 1 - (1 - self.smallest) * min(1.0, max(0.0, (step + 1 - begin) / (end - begin)))

    def share(self, scores: Mapping[str, Tensor]) -> float:
        """Returns the parameters that these scores keep, over the dense ones."""
        counts = ((layer, int((scores[name] > 0).sum())) for name, layer in self.layers.items())
        return sum(layer.parameters_at(count) for layer, count in counts) / self.dense

    def penalty(self) -> Tensor:
        """Returns λ Σ |score|, or zero if the penalty is off."""
        scores = torch.cat([layer.score for layer in self.layers.values()])
        return self.weight * self.is_on * scores.abs().sum()

    @torch.no_grad()
    def order(self) -> dict[str, Tensor]:
        """Returns each value's position among all, 0 first: what was kept longest, then by descending last score."""
        scores = torch.cat(list(self.scores.values()))
        last = torch.cat(list(self.last.values()))
        by_score = scores.argsort(descending=True, stable=True)
        order = by_score[last[by_score].argsort(descending=True, stable=True)]
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return dict(zip(self.layers, places.split([len(one.score) for one in self.layers.values()]), strict=True))


def masks_within(layers: Mapping[str, ScoredLinear], places: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Returns the longest prefix of the order whose deployed parameters are within the limit, as masks by layer."""

    def parameters(length: int) -> int:
        return sum(layer.parameters_at(int((places[name] < length).sum())) for name, layer in layers.items())

    low, high = 0, sum(map(len, places.values()))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if parameters(middle) <= limit else (low, middle - 1)
    return {name: (place < low).to(layers[name].values) for name, place in places.items()}


def sizes(task: TrainingTask, settings: Settings) -> Iterator[Size]:
    """Trains all sizes together: scores and adapters first, then adapters at sizes drawn at random."""
    model, layers = scored(task)
    pressure = Pressure(layers, min(task.budgets), round(LEARNING * task.steps))
    learn_order(task, model, pressure)
    places, dense = pressure.order(), pressure.dense
    all_masks = [masks_within(layers, places, budget * dense) for budget in task.budgets]
    draws = Schedule([1.0] * len(all_masks), task.seed, task.steps, 0.0, 0)
    steps, rate = task.steps - pressure.steps, task.learning_rate(settings)
    adapters = trained_parameters(model, [".down", ".up"])

    def switch(step: int) -> None:
        set_masks(layers, all_masks[draws.draw(step)])

    task.train_(model, adapters, task.objective, steps, rate, switch, first_batch=pressure.steps)
    for budget, masks in zip(task.budgets, all_masks, strict=True):
        set_masks(layers, masks)
        kept = sum(layers[name].parameters_at(int(mask.sum())) for name, mask in masks.items())
        yield (model, task.parameter_limit(0) + kept) if kept <= budget * dense else None


def scored(task: TrainingTask, adapter: int | None = None) -> tuple[nn.Module, dict[str, ScoredLinear]]:
    """Returns the model with `ScoredLinear` layers, all of whose scores are 1, and these layers by name.

    Adapters have rank `adapter`, or by default the authors' share of each layer's narrower side.
    """
    model, layers = copy.deepcopy(task.teacher), dict[str, ScoredLinear]()
    generator = torch.Generator().manual_seed(task.seed)
    for name in task.layers:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Conv2d):
            raise NotApplicable(f"layer {name!r} is a convolution; ACIP is of linear layers")
        rank = adapter or max(1, round(ADAPTER * min(task.layers[name])))
        layers[name] = ScoredLinear(layer, rank, generator)
        model.set_submodule(name, layers[name])
    return model, layers


def learn_order(task: TrainingTask, model: nn.Module, pressure: Pressure) -> None:
    """Trains scores and adapters until the model is as small as the smallest size."""
    learned = trained_parameters(model, [".score", ".down", ".up"])
    scores = [name for name in learned if name.endswith(".score")]
    task.train_(
        model, learned, Penalised(task.objective, pressure), pressure.steps, PACE * TRAVEL / pressure.steps,
        pressure.update, fast_parameters=scores, fast_factor=1 / PACE, decays=False,
    )  # fmt: skip
    pressure.update(pressure.steps)


@dataclasses.dataclass
class Penalised:
    """An objective with λ Σ |score| added to its loss."""

    inner: Objective
    pressure: Pressure

    def target(self, output: Any, batch: Batch) -> Tensor:
        """Returns the inner objective's target."""
        return self.inner.target(output, batch)

    def loss(self, output: Any, target: Tensor, batch: Batch) -> Tensor:
        """Returns the inner objective's loss plus the penalty."""
        return self.inner.loss(output, target, batch) + self.pressure.penalty()


def set_masks(layers: Mapping[str, ScoredLinear], masks: Mapping[str, Tensor]) -> None:
    """Sets the model to the size that these masks keep."""
    for name, mask in masks.items():
        layers[name].mask = mask


ACIP = TrainedMethod("acip", "Genzel et al., TMLR 2025", True, rates("learning_rate", 5e-4, 1e-3, 2e-3, 4e-3), sizes)
