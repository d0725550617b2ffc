"""Steps that mix a layer's components: they change its small sizes, and no size that has them all.

Let U₁ and V₁ be the first r components, which are a size, and U₂ and V₂ all others. For any matrix X, the components
U₁ + U₂ X and V₂ - V₁ Xᵀ have the same product U Vᵀ together, and for any Y so have U₂ + U₁ Y and V₁ - V₂ Yᵀ. But the
size itself becomes U₁ V₁ᵀ + U₂ X V₁ᵀ - U₁ Y V₂ᵀ, to first order. So it learns without taking anything from the
largest, up to rounding.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flexrank import processes
from flexrank.distill.optimizer import stochastically_rounded
from flexrank.nn.elastic import NestedLayer

#: How far such a step moves components on average, over how far AdamW does; and at most, as a share of their length.
MIXING_RATE, LONGEST = 16.0, 0.15
#: The old mean's weight in an update of the mean squares of gradients, as AdamW's β₂, and the least mean square.
MEMORY, LEAST = 0.999, 1e-30
ROWS, COLUMNS = "mixing_rows", "mixing_columns"


def mix_after_steps_(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    scales: Callable[[], list[float]],
    at_size: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """After each of the optimiser's steps, mixes the components of each layer by the same gradients.

    Components that a size lacks are mixed into it at its entry of `scales()`; of several such sizes the largest counts.
    Inside `at_size()` the model is at the size that the gradients are of.
    """
    layers = [module for module in model.modules() if isinstance(module, NestedLayer)]

    def mix(*_: Any) -> None:
        group, sizes = optimizer.param_groups[0], torch.tensor(scales())
        rate = MIXING_RATE * float(group["lr"]) / group["scale"]
        with at_size(), torch.no_grad():
            for layer in layers:
                has_gradients = layer.u.grad is not None and layer.v.grad is not None  # neither is frozen
                if has_gradients and layer.sizes is not None and min(layer.sizes.ranks) < len(layer.u):
                    _mix_(layer, optimizer.state[layer.u], rate, sizes)

    optimizer.register_step_post_hook(mix)
    _load_means_as_saved_(optimizer)


def _load_means_as_saved_(optimizer: torch.optim.Optimizer) -> None:
    """Keeps the dtype of these means when a checkpoint is loaded, where torch rounds states to their parameter's."""
    saved = list[dict[str, Any]]()

    def keep(_: object, loaded: dict[str, Any]) -> None:
        indices = [index for group in loaded["param_groups"] for index in group["params"]]
        saved[:] = [loaded["state"].get(index, {}) for index in indices]

    def restore(_: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, state in zip(parameters, saved, strict=True):
            for key in {ROWS, COLUMNS} & state.keys():
                optimizer.state[parameter][key] = state[key].to(parameter.device)

    optimizer.register_load_state_dict_pre_hook(keep)
    optimizer.register_load_state_dict_post_hook(restore)


def _mix_(layer: NestedLayer, state: dict[str, Any], rate: float, sizes: Float[Tensor, " sizes"]) -> None:
    """Mixes a layer's components in place; `state` is the optimiser's of `layer.u`.

    That takes 3·r·(k - r)·(m + n) multiply-adds, where T tokens' forward and backward take about 3·T·r·(m + n).
    """
    r, dtype = min(layer.rank, len(layer.u)), torch.promote_types(layer.u.dtype, torch.float32)
    assert layer.u.grad is not None and layer.v.grad is not None
    of_size = layer.u.grad[:r], layer.v.grad[:r]
    u, v, of_u, of_v = (one.detach().to(dtype) for one in (layer.u, layer.v, *of_size))
    x, y = u[r:] @ of_u.T, -of_v @ v[r:].T
    squares = u.square().sum() + v.square().sum()
    if layer.is_sharded:
        processes.sum_([x, y, squares])
    x, y = _normalised(x, y, state)
    entry = (squares / (len(u) * sum(layer.matrix_shape))).clamp(min=LEAST).sqrt()
    scales = _scales_of_rest(layer, r, sizes).to(x, non_blocking=True)  # the CPU does not wait for a GPU
    step = (rate / entry).clamp(max=LONGEST) / math.sqrt(len(u)) * scales
    x, y = -step[:, None] * x, -step * y
    u[:r] += x.T @ u[r:]
    v[r:] -= x @ v[:r]
    u[r:] += y.T @ u[:r]
    v[:r] -= y @ v[r:]
    if dtype != layer.u.dtype:
        for factor, wide in ((layer.u, u), (layer.v, v)):
            factor.copy_(stochastically_rounded(wide))


def _scales_of_rest(layer: NestedLayer, r: int, sizes: Float[Tensor, " sizes"]) -> Float[Tensor, " rest"]:
    """For each component above the first r, the scale of the largest size that lacks it."""
    assert layer.sizes is not None
    ranks = torch.tensor(layer.sizes.ranks)[:, None]
    lacks = ranks <= torch.arange(r, len(layer.u))
    return sizes[(lacks * torch.arange(len(ranks))[:, None]).amax(0)]


def _normalised(
    x: Float[Tensor, "rest r"], y: Float[Tensor, "r rest"], state: dict[str, Any]
) -> tuple[Float[Tensor, "rest r"], Float[Tensor, "r rest"]]:
    """Both gradients over the roots of their running mean squares, by row and column of the whole as in Adafactor.

    As there, their root mean square is at most 1. The whole is k × k, with `y` above its diagonal and `x` below.
    """
    r = len(y)
    sums = {
        ROWS: torch.cat([y.square().sum(1), x.square().sum(1)]),
        COLUMNS: torch.cat([x.square().sum(0), y.square().sum(0)]),
    }
    for key, fresh in sums.items():
        state[key] = torch.lerp(state.get(key, torch.zeros_like(fresh)).to(fresh), fresh, 1 - MEMORY)
    rows, columns = state[ROWS], state[COLUMNS] / -torch.expm1(state["step"] * math.log(MEMORY))
    rows, columns = (rows / rows.sum().clamp(min=LEAST)).sqrt(), columns.sqrt()
    x = x / (torch.outer(rows[r:], columns[:r]) + math.sqrt(LEAST))
    y = y / (torch.outer(rows[:r], columns[r:]) + math.sqrt(LEAST))
    length = ((x.square().sum() + y.square().sum()) / max(1, x.numel() + y.numel())).sqrt().clamp(min=1)
    return x / length, y / length
