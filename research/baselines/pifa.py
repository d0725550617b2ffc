"""PIFA's reconstruction M: low-rank factors refitted layer after layer to two flows of data (Zhao et al., ICML 2025).

The paper's compact form of a factorisation, the pivoted layer, is `pivoted.PivotedLinear`; what it stores is counted
here as for every method, r·(m+n−r) parameters of a layer; indices are not counted for any. Ranks are uniform; the
paper's other densities by layer (OWL), and its densities of attention and feed-forward apart, are left out.
"""

import contextlib
import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.calibrate import Hooks, find_groups
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, row_masks, to_device
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import input_rows, masked_rows, matrix_shape, weight_matrix
from flexrank.nn.select import nest_
from flexrank.profiles.costs import dense_parameters, deployed_parameters, largest_rank
from research.baselines import svd_llm
from research.baselines.method import UNSEEN, Layers, Loss, Made, SizeMethod, dense_count, parameter_count
from research.baselines.statistics import input_moments

#: The paper's share λ of the dense flow's outputs in the targets; the rest are of the compressed flow's inputs.
MIX = 0.25
#: The weight of the old matrix in the fit of V, in the units of X Xᵀ, as the paper's code has it.
PRIOR = 1e-3


class _Reached(Exception):
    """Ends a forward whose rest is not needed."""


@torch.no_grad()
def make(model: nn.Module, batches: Sequence[Batch], layers: Layers, loss: Loss, budget: float) -> Made:
    """The model with every layer at its largest rank within the budget's share of its own parameters."""
    new, moments = copy.deepcopy(model), input_moments(model, batches, layers, loss)
    shapes = {name: matrix_shape(layer) for name, layer in layers.items()}
    ranks = {name: max(1, largest_rank(shape, budget * dense_parameters(shape))) for name, shape in shapes.items()}
    device = model_device(model)
    with eval_mode(model, new):
        for group in find_groups(lambda: call_model(model, to_device(batches[0], device)), layers):
            own, cross = _flows(model, new, batches, group[0])
            for name in group:
                weight = weight_matrix(layers[name]).double()
                start = svd_llm.factors(weight, moments[name])
                u, v = refit(weight, start.v[: ranks[name]], mixed(own, cross), own)
                nest_(new, name, Factors(u.T, v, torch.ones(len(v), dtype=torch.float64)))
    stored = sum(deployed_parameters(shape, ranks[name]) for name, shape in shapes.items())
    return Made(new, parameter_count(model) - dense_count(layers) + stored)


def mixed(own: Float[Tensor, "n n"], cross: Float[Tensor, "n n"], mix: float = MIX) -> Float[Tensor, "n n"]:
    """(1 − λ) X Xᵀ + λ X₀ Xᵀ, for which the targets (1 − λ) W X + λ W X₀ have the product W · this with X."""
    return (1 - mix) * own + mix * cross


def refit(
    weight: Float[Tensor, "m n"], v: Float[Tensor, "r n"], target: Float[Tensor, "n n"], own: Float[Tensor, "n n"]
) -> tuple[Float[Tensor, "m r"], Float[Tensor, "r n"]]:
    """U and V for the least ‖Y − U V X‖² with Y Xᵀ = W · target and X Xᵀ = own: U given V, then V given U.

    U = Y Xᵀ Vᵀ (V X Xᵀ Vᵀ)⁻¹, then V = U⁺ (Y Xᵀ + ρ W) (X Xᵀ + ρ)⁻¹ with ρ = `PRIOR`. For U, X Xᵀ may be singular: it
    gets a ridge of `UNSEEN` times its largest eigenvalue, towards W like that of V; the paper has none.
    """
    ridge = UNSEEN * torch.linalg.matrix_norm(own, 2) + torch.finfo(torch.float64).tiny
    identity = torch.eye(len(own), dtype=own.dtype, device=own.device)
    seen, wanted = own + ridge * identity, weight @ (target + ridge * identity)
    u = torch.linalg.solve(v @ seen @ v.T, wanted @ v.T, left=False)
    whole = torch.linalg.solve(own + PRIOR * identity, weight @ (target + PRIOR * identity), left=False)
    return u, torch.linalg.pinv(u) @ whole


def _flows(
    model: nn.Module, new: nn.Module, batches: Sequence[Batch], name: str
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """X Xᵀ and X₀ Xᵀ over real tokens, in float64: X at a layer of the model so far, X₀ at the same of the base."""
    size = matrix_shape(new.get_submodule(name))[1]
    own, cross = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))
    for batch in batches:
        batch = to_device(batch, model_device(model))
        base, now = (_inputs(one, batch, name).double().cpu() for one in (model, new))
        own += now.T @ now
        cross += base.T @ now
    return own, cross


def _inputs(model: nn.Module, batch: Batch, name: str) -> Float[Tensor, "t n"]:
    """The rows of real tokens that a layer reads at its first call."""
    layer, rows = model.get_submodule(name), list[Tensor]()

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows.append(masked_rows(input_rows(layer, args[0]), row_masks(batch)))
        raise _Reached

    with Hooks() as hooks, contextlib.suppress(_Reached):
        hooks.add(layer.register_forward_pre_hook(see))
        call_model(model, batch)
    return rows[0]


PIFA = SizeMethod("pifa", "Zhao et al., ICML 2025", make, lambda model, layers: None)
