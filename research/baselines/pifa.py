"""PIFA's reconstruction M: low-rank factors refitted layer after layer to two data flows (Zhao et al., ICML 2025).

The paper's compact form of a factorisation, the pivoted layer, is `pivoted.PivotedLinear`. As for every method, a layer
counts r·(m+n−r) stored parameters, and indices are not counted. The method's own ranks are uniform; the paper's
alternatives, densities by layer (OWL) and separate densities of attention and feed-forward, are left out. `make_at`
takes any ranks, such as those that flexrank chooses for the factors of SVD-LLM, from which PIFA starts.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flexrank.calibrate import STATE_BYTES, find_groups
from flexrank.calibrate.block_stream import States
from flexrank.calibrate.flow import Flow
from flexrank.data.batches import Batch, call_model, eval_mode, model_device, row_masks, to_device
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import input_rows, masked_rows, matrix_shape, weight_matrix
from flexrank.nn.select import nest_
from flexrank.profiles.costs import profile_parameters
from research.baselines import svd_llm
from research.baselines.method import (
    UNSEEN,
    CompressedModel,
    Layers,
    Loss,
    SizeMethod,
    dense_count,
    filled_ranks,
    parameter_count,
)  # fmt: skip
from research.baselines.statistics import input_moments

#: The paper's share λ of the dense flow's outputs in the targets; the rest is from the compressed flow's inputs.
MIX = 0.25
#: The weight of the old matrix in the fit of V, in the units of X Xᵀ, as in the paper's code.
PRIOR = 1e-3


def make(
    model: nn.Module, batches: Sequence[Batch], layers: Layers, loss: Loss, budget: float, mix: float = MIX
) -> CompressedModel:
    """Returns the model at the same share of every layer's parameters, filled up to the budget."""
    shapes = {name: matrix_shape(layer) for name, layer in layers.items()}
    return make_at(model, batches, layers, loss, filled_ranks(shapes, dict.fromkeys(shapes, budget), budget), mix)


@torch.no_grad()
def make_at(
    model: nn.Module, batches: Sequence[Batch], layers: Layers, loss: Loss, ranks: Mapping[str, int], mix: float = MIX
) -> CompressedModel:
    """Returns the model with every layer at its rank."""
    new, moments = copy.deepcopy(model), input_moments(model, batches, layers, loss)
    shapes = {name: matrix_shape(layer) for name, layer in layers.items()}
    batches = [to_device(batch, model_device(model)) for batch in batches]
    with eval_mode(model, new), States(STATE_BYTES) as states:
        flows = [Flow(one, batches, list(layers), states) for one in (model, new)]
        for group in find_groups(lambda: call_model(model, batches[0]), layers):
            own, cross = _products(flows, group[0], layers[group[0]], batches)
            for name in group:
                weight = weight_matrix(layers[name]).cpu().double()
                start = svd_llm.factors(weight, moments[name])
                u, v = refit(weight, start.v[: ranks[name]], mixed(own, cross, mix), own)
                nest_(new, name, Factors(u.T, v, torch.ones(len(v), dtype=torch.float64)))
    stored = profile_parameters(ranks, shapes)
    return CompressedModel(new, parameter_count(model) - dense_count(layers) + stored)


def mixed(own: Float[Tensor, "n n"], cross: Float[Tensor, "n n"], mix: float = MIX) -> Float[Tensor, "n n"]:
    """Returns M = (1 − λ) X Xᵀ + λ X₀ Xᵀ, with which the targets Y = (1 − λ) W X + λ W X₀ have Y Xᵀ = W M."""
    return (1 - mix) * own + mix * cross


def refit(
    weight: Float[Tensor, "m n"], v: Float[Tensor, "r n"], target: Float[Tensor, "n n"], own: Float[Tensor, "n n"]
) -> tuple[Float[Tensor, "m r"], Float[Tensor, "r n"]]:
    """Returns U and V for the least ‖Y − U V X‖² with Y Xᵀ = W · target, X Xᵀ = own: U given V, then V given U.

    U = Y Xᵀ Vᵀ (V X Xᵀ Vᵀ)⁻¹, then V = U⁺ (Y Xᵀ + ρ W) (X Xᵀ + ρ)⁻¹ with ρ = `PRIOR`. X Xᵀ may be singular, so for U
    it gets a ridge of `UNSEEN` times its largest eigenvalue, towards W like that of V; the paper has none.
    """
    ridge = UNSEEN * torch.linalg.eigvalsh(own)[-1] + torch.finfo(torch.float64).tiny
    identity = torch.eye(len(own), dtype=own.dtype, device=own.device)
    seen, wanted = own + ridge * identity, weight @ (target + ridge * identity)
    u = torch.linalg.solve(v @ seen @ v.T, wanted @ v.T, left=False)
    whole = torch.linalg.solve(own + PRIOR * identity, weight @ (target + PRIOR * identity), left=False)
    return u, torch.linalg.pinv(u) @ whole


def _products(
    flows: Sequence[Flow], name: str, layer: nn.Module, batches: Sequence[Batch]
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """Returns X Xᵀ and X₀ Xᵀ over real tokens: X₀ at a layer of the base model, X at that layer of the model so far.

    Products of a batch are in float32, like all moments of the calibration, and are summed in float64.
    """
    size = matrix_shape(layer)[1]
    own, cross = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))
    for batch, *calls in zip(batches, *(flow.inputs(name) for flow in flows), strict=True):
        base, now = (masked_rows(input_rows(layer, one[0]), row_masks(batch)).float() for one in calls)
        own += (now.T @ now).cpu()
        cross += (base.T @ now).cpu()
    return own, cross


PIFA = SizeMethod(
    "pifa", "Zhao et al., ICML 2025", make, lambda model, layers: None, make_at, "svd-llm",
    trials=tuple({"mix": mix} for mix in (MIX, 0.0, 0.5, 0.75)), tuned=("make", "make_at"),
)  # fmt: skip
