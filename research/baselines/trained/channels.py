"""Heads and feed-forward channels of transformers as units that can be removed.

A unit is read by some columns of one layer (`o_proj`, `down_proj`) and written by some rows of others. If these columns
read zeros, the model computes what it would without the unit, whose parameters a deployed model does not have. With
grouped queries a unit is a query head; keys and values are removed with the last query head that reads them, and heads
of a group are adjacent in the order. Biases, which are few, are counted in full.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.calibrate.collector import calibration_mode, seeded_loss
from flexrank.data.batches import Batch, call_model, model_device, to_device
from flexrank.nn.matrix import is_conv1d, matrix_shape, weight_matrix
from research.baselines.architectures import Names, find_names
from research.baselines.method import Loss, NotApplicable


@dataclasses.dataclass(frozen=True)
class Units:
    """The units of one reader; `writers` are the names of the layers that write them."""

    writers: tuple[str, ...]
    count: int
    cost: int  #: parameters of one unit, except those it shares
    shared_writers: tuple[str, ...] = ()  #: writers of keys and values, of which `group` units share a head
    group: int = 1
    shared: int = 0  #: parameters that a group shares
    fused: int = 1  #: number of matrices stacked in each writer

    def parameters(self, kept: int) -> int:
        """Returns the parameters of the first `kept` units in the order."""
        return kept * self.cost + -(-kept // self.group) * self.shared

    def rows(self, values: Tensor, fused: int = 1) -> Tensor:
        """Reshapes (fused · count · width, …) to (count, fused, width, …)."""
        return values.unflatten(0, (fused, self.count, -1)).movedim(1, 0)

    def shared_rows(self, values: Tensor) -> Tensor:
        """Expands (count / group · width, …) to (count, width, …), each an equal part of what its group shares."""
        return values.unflatten(0, (self.count // self.group, -1)).repeat_interleave(self.group, 0) / self.group


def find_units(model: nn.Module, blocks: Sequence[str]) -> dict[str, Units]:
    """Returns the units of every block by the name of their reader, in the model's order.

    Raises:
            NotApplicable: the blocks' architecture is unknown, or there are no blocks.
    """
    if not blocks:
        raise NotApplicable(f"{type(model).__name__}: no stack of blocks is found in it")
    units = dict[str, Units]()
    for block in blocks:
        if (names := find_names(model.get_submodule(block))) is None:
            raise NotApplicable(f"block {block!r} of {type(model).__name__}: its heads and channels are not known here")
        units[f"{block}.{names.output}"] = _heads(model, block, names)
        units[f"{block}.{names.down}"] = _channels(model, block, names)
    return units


def _heads(model: Any, block: str, names: Names) -> Units:
    """Returns the query heads of a block's attention."""
    heads, (m, n) = model.config.num_attention_heads, matrix_shape(model.get_submodule(f"{block}.{names.output}"))
    group = heads // (getattr(model.config, "num_key_value_heads", None) or heads)
    writers = tuple(f"{block}.{one}" for one in names.projections)
    own, shared = (writers, ()) if group == 1 else (writers[:1], writers[1:])
    cost, together = m * n + _parameters(model, own), _parameters(model, shared)
    return Units(own, heads, cost // heads, shared, group, together * group // heads, 3 if names.is_fused else 1)


def _channels(model: nn.Module, block: str, names: Names) -> Units:
    """Returns the channels of a block's feed-forward."""
    m, n = matrix_shape(model.get_submodule(f"{block}.{names.down}"))
    writers = tuple(f"{block}.{one}" for one in names.ups)
    return Units(writers, n, (m * n + _parameters(model, writers)) // n)


def _parameters(model: nn.Module, layers: Sequence[str]) -> int:
    return sum(weight_matrix(model.get_submodule(one)).numel() for one in layers)


def importances(
    model: nn.Module, units: Mapping[str, Units], batches: Sequence[Batch], loss: Loss
) -> dict[str, Float[Tensor, " count"]]:
    """Returns Σ |w · ∂L/∂w| over each unit's weights, summed over batches (LLM-Pruner, eq. 5, element by element)."""
    device, totals = model_device(model), {name: torch.zeros(one.count) for name, one in units.items()}
    layers = {
        name: model.get_submodule(name)
        for reader, one in units.items()
        for name in (reader, *one.writers, *one.shared_writers)
    }
    weights: Any = [layer.weight for layer in layers.values()]
    with calibration_mode(model, device, with_gradients=True):
        for weight in weights:
            weight.requires_grad_(True)
        for number, batch in enumerate(batches):
            batch = to_device(batch, device)
            value = seeded_loss(loss, call_model(model, batch), batch, number)
            gradients = torch.autograd.grad(value, weights)
            salience = dict(zip(layers, map(_salience, layers.values(), gradients), strict=True))
            for name, one in units.items():
                parts = [one.rows(salience[part], one.fused) for part in one.writers]
                parts += [one.shared_rows(salience[part]) for part in one.shared_writers]
                totals[name] += sum(part.flatten(1).sum(1).cpu() for part in (one.rows(salience[name].T), *parts))
    return totals


def _salience(layer: Any, gradient: Tensor) -> Float[Tensor, "m n"]:
    """Returns |w · ∂L/∂w| of the layer's matrix."""
    values = (layer.weight * gradient).detach().abs()
    return values.T if is_conv1d(layer) else values


@dataclasses.dataclass(frozen=True)
class Widths:
    """Decides how many units each reader has at a budget, and which: the most important, so sizes are nested."""

    units: Mapping[str, Units]
    orders: Mapping[str, Tensor]  #: the indices of units, most important first

    def at(self, limit: float, least: float) -> dict[str, int] | None:
        """Returns how many units each reader keeps within the limit, as many in every block; None if one has none.

        It removes no more heads than it has to for the share of channels to be `least` of the share of heads.
        """
        most = max(one.count for one in self.units.values())
        channels = {name: one for name, one in self.units.items() if one.count == most}
        heads = {name: one for name, one in self.units.items() if name not in channels}
        total = sum(one.parameters(most) for one in channels.values())
        count = max((one.count for one in heads.values()), default=1)

        def share(count: int) -> float:
            return (limit - sum(one.parameters(count) for one in heads.values())) / total

        part = least / count
        while count > 1 and share(count) < part * count:
            count -= 1
        kept = {name: min(most, int(share(count) * most)) for name in channels}
        return {**dict.fromkeys(heads, count), **kept} if min(kept.values()) >= 1 else None

    def parameters(self, kept: Mapping[str, int]) -> int:
        """Returns the parameters of the kept units."""
        return sum(one.parameters(kept[name]) for name, one in self.units.items())

    def mask(self, name: str, kept: int) -> Float[Tensor, " n"]:
        """Returns one for each kept unit of `name`, and zero for the others."""
        one = self.units[name]
        chosen = torch.zeros(one.count)
        chosen[self.orders[name][:kept]] = 1
        return chosen

    @contextlib.contextmanager
    def use(self, model: nn.Module, kept: Mapping[str, int]) -> Iterator[nn.Module]:
        """Inside the `with` block, the model has only these units."""
        with Hooks() as hooks:
            for name, count in kept.items():
                masked = functools.partial(_masked, self.mask(name, count))
                hooks.remove_on_exit(model.get_submodule(name).register_forward_pre_hook(masked))
            yield model


def _masked(mask: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    values = inputs[0]
    return (values * mask.to(values).repeat_interleave(values.shape[-1] // len(mask)), *inputs[1:])


def ordered(units: Mapping[str, Units], importance: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the indices of units by descending importance: groups first, then the units inside each."""
    return {name: _ordered(importance[name], one.group) for name, one in units.items()}


def _ordered(values: Float[Tensor, " count"], group: int) -> Tensor:
    groups = values.unflatten(0, (-1, group))
    inside = groups.argsort(dim=1, descending=True, stable=True) + group * torch.arange(len(groups)).unsqueeze(1)
    return inside[groups.sum(1).argsort(descending=True, stable=True)].flatten()
