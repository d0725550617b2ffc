"""Rank methods and size methods, and how they are applied to a model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import is_conv1d, matrix_shape, weight_matrix
from flexrank.nn.select import nest_
from flexrank.nn.switch import layer_shapes
from flexrank.profiles import RankProfile
from flexrank.profiles.costs import Shape, dense_parameters, deployed_parameters, full_ranks, largest_rank

#: Maps (output, batch) to a scalar: the task's loss, summed over the samples of the batch.
Loss = Callable[[Any, Batch], Tensor]
Layers = Mapping[str, nn.Module]
#: What a method collects from the calibration for one layer: a tensor, or a tuple of tensors.
Statistic = Any
Collect = Callable[[nn.Module, Sequence[Batch], Layers, Loss], Mapping[str, Statistic]]
Evaluate = Callable[[nn.Module], float]
#: What a paper leaves free, by the name of the argument that takes it.
Settings = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Measures:
    """How a search for ranks may evaluate a model, on samples of its own; lower is better."""

    loss: Evaluate  #: the task's loss
    distance: Evaluate  #: the distance from the base model


#: Maps (elastic model, each layer's energies, budgets, measures) to the ranks at each budget; None if none fits.
Ranks = Callable[[nn.Module, Mapping[str, Tensor], Sequence[float], Measures], Sequence[RankProfile | None]]
#: The least scale of an input, over the largest: scales are divided by, and an input may always be zero.
FLOOR = 1e-6
#: Halvings by which a factor is searched, to float64's precision.
HALVINGS = 60
#: Directions with less than this share of the largest direction's energy count as unseen.
UNSEEN = 1e-6


def uniform_ranks(
    model: nn.Module, _: Mapping[str, Tensor], budgets: Sequence[float], __: Measures
) -> list[RankProfile]:
    """Returns ranks that give every layer the same share of its parameters, filled up to each budget."""
    shapes = layer_shapes(model)
    return [filled_ranks(shapes, dict.fromkeys(shapes, budget), budget) for budget in budgets]


def filled_ranks(shapes: Mapping[str, Shape], shares: Mapping[str, float], budget: float) -> RankProfile:
    """Returns each layer's largest rank within its share, at least 1, and spends what rounding down left of the budget.

    Where it fits, one more rank goes to each layer, in descending order of the parameters that it lacks of its share.
    """
    targets = {name: shares[name] * dense_parameters(shape) for name, shape in shapes.items()}
    ranks = {name: max(1, largest_rank(shape, targets[name])) for name, shape in shapes.items()}
    costs = {name: deployed_parameters(shape, ranks[name]) for name, shape in shapes.items()}
    left = int(budget * sum(map(dense_parameters, shapes.values()))) - sum(costs.values())
    full = full_ranks(shapes)
    for name in sorted(shapes, key=lambda one: costs[one] - targets[one]):
        step = deployed_parameters(shapes[name], min(ranks[name] + 1, full[name])) - costs[name]
        if 0 < step <= left:
            ranks[name], left = ranks[name] + 1, left - step
    return RankProfile(ranks)


def grown_ranks(shapes: Mapping[str, Shape], ranks: Mapping[str, int], budget: float) -> RankProfile:
    """Returns ranks that take the budget: the share of every layer grows by one factor, up to the whole layer.

    It is for a search among few ranks per layer, which ends below its budget.
    """
    shares = {
        name: deployed_parameters(shapes[name], rank) / dense_parameters(shapes[name]) for name, rank in ranks.items()
    }
    total = sum(map(dense_parameters, shapes.values()))

    def grown(factor: float) -> dict[str, float]:
        return {name: min(1.0, factor * share) for name, share in shares.items()}

    low, high = 1.0, 1 / min(shares.values())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        taken = sum(share * dense_parameters(shapes[name]) for name, share in grown(middle).items())
        low, high = (middle, high) if taken <= budget * total else (low, middle)
    return filled_ranks(shapes, grown(low), budget)


@dataclasses.dataclass(frozen=True)
class RankMethod:
    """A training-free factorisation; see the package's docstring."""

    name: str
    source: str
    collect: Collect
    factors: Callable[[Tensor, Statistic], Factors]
    ranks: Ranks = uniform_ranks
    trials: Sequence[Settings] = ()  #: values of a free constant to try; the first is the default
    tuned: Sequence[str] = ()  #: which of the functions above take it

    def decompose_(
        self, model: nn.Module, batches: Sequence[Batch], layers: Layers, loss: Loss
    ) -> dict[str, Float[Tensor, " k"]]:
        """Replaces the layers in place by elastic layers; returns the energies of each layer's components.

        Statistics and factors are on the CPU, wherever the model is.
        """
        statistics, energies = self.collect(model, batches, layers, loss), {}
        with torch.no_grad():
            for name, layer in layers.items():
                factors = self.factors(weight_matrix(layer).detach().cpu().double(), statistics[name])
                nest_(model, name, factors)
                energies[name] = factors.energies
        return energies


@dataclasses.dataclass(frozen=True)
class CompressedModel:
    """A model of one size, and the parameters that it stores when deployed."""

    model: nn.Module
    parameters: int  #: of the whole model; tied ones count once


#: Maps (base model, calibration, layers to reduce by name, loss, budget) to a new model; the base model is unchanged.
#: None if no size of the method is within the budget.
Make = Callable[[nn.Module, Sequence[Batch], Layers, Loss, float], CompressedModel | None]
#: The same with a rank for each layer instead of one share for all.
MakeAt = Callable[[nn.Module, Sequence[Batch], Layers, Loss, Mapping[str, int]], CompressedModel]


class NotApplicable(FlexrankError):
    """The method does not know the model's architecture, so it has no sizes of it."""


@dataclasses.dataclass(frozen=True)
class SizeMethod:
    """A training-free compression that makes a separate model for each size: no size is a part of another."""

    name: str
    source: str
    make: Make
    #: Maps (base model, layers) to why the method does not apply; None if it does.
    obstacle: Callable[[nn.Module, Layers], str | None]
    make_at: MakeAt | None = None  #: for a method whose sizes are ranks
    start: str = ""  #: the rank method whose factors `make_at` starts from
    trials: Sequence[Settings] = ()  #: as for a rank method
    tuned: Sequence[str] = ()


Method = TypeVar("Method", RankMethod, SizeMethod)


def with_settings(method: Method, settings: Settings) -> Method:
    """Returns the method with these settings in place of its defaults."""
    changed: dict[str, Any] = {name: functools.partial(getattr(method, name), **settings) for name in method.tuned}
    return dataclasses.replace(method, **changed)


def parameter_count(model: nn.Module) -> int:
    """Returns the number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def dense_count(layers: Layers) -> int:
    """Returns the number of parameters of these layers' matrices."""
    return sum(dense_parameters(matrix_shape(layer)) for layer in layers.values())


def parameter_limit(model: nn.Module, layers: Layers, budget: float) -> int:
    """Returns a whole model's limit at a budget: all outside the layers' matrices, and the budget's share of these."""
    dense = dense_count(layers)
    return parameter_count(model) - dense + int(budget * dense)


def replace_matrix_(layer: nn.Module, matrix: Float[Tensor, "m n"]) -> None:
    """Replaces the matrix of a linear layer, or of GPT-2's `Conv1D`, by one of another shape, in the layer's dtype."""
    given: Any = layer
    stored = matrix.to(given.weight.dtype)
    if is_conv1d(layer):
        stored, (given.nf, given.nx) = stored.T.contiguous(), matrix.shape
    else:
        given.out_features, given.in_features = matrix.shape
    given.weight = nn.Parameter(stored, given.weight.requires_grad)


def split(left: Float[Tensor, "m k"], values: Float[Tensor, " k"], right: Float[Tensor, "k n"]) -> Factors:
    """Returns factors of left · diag(values) · right, each with the root of the values, and energies values²."""
    root = values.sqrt()
    return Factors((left * root).T.contiguous(), root[:, None] * right, values**2)


def invertible(moment: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Returns X Xᵀ in float64 with a ridge that makes it positive definite for any data; the identity if it is zero.

    The ridge is `UNSEEN` times the largest eigenvalue: sums of float32 products have errors of about a tenth of that.
    """
    moment = moment.to(torch.float64, copy=True)
    largest = torch.linalg.matrix_norm(moment, 2)
    moment.diagonal().add_(UNSEEN * largest if largest > 0 else 1.0)
    return moment


def scaled_svd(weight: Float[Tensor, "m n"], scale: Float[Tensor, " n"]) -> Factors:
    """Factors W S = P Λ Q for a diagonal S, so W = P Λ · Q S⁻¹: the prefix minimises ‖(W − W_r) S‖ for every r.

    The scale is at least `FLOOR` times its largest value; a scale of zeros is replaced by ones.
    """
    largest = scale.max()
    scale = scale.double().clamp(min=float(FLOOR * largest)) if largest > 0 else torch.ones_like(scale).double()
    left, values, right = torch.linalg.svd(weight * scale, full_matrices=False)
    return split(left, values, right / scale)
