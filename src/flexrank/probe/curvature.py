"""Predicts every probe from the moments of one calibration pass."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flexrank.calibrate import LayerMoment
from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.switch import footprint, nested_layers, require_whole_factors, restored_sizes
from flexrank.profiles import Footprint, SensitivityTable
from flexrank.profiles.costs import MIN_SAVING, SLACK_SHARE, Shape, Spacing, rank_levels


@torch.no_grad()
def curvature_sensitivity(
    model: nn.Module,
    moments: Mapping[str, LayerMoment],
    rows: int,
    num_levels: int = 10,
    *,
    spacing: Spacing = "blocks",
    min_saving: float = MIN_SAVING,
    slack_share: float = SLACK_SHARE,
) -> SensitivityTable:
    """Predicts every probe: ½ tr(G ΔW Σ ΔWᵀ), all ranks of all layers at once.

    This is the second-order rise of a divergence from the model itself, averaged over rows, if activations and
    gradients are independent and tokens uncorrelated (the K-FAC approximation). With H = (UᵀGU) ∘ (VᵀΣV), a layer's
    error at rank r is half the sum of H over the components after r.

    Args:
        moments: from `collect_moments(..., side="input", gradient_loss=objective.fisher_loss)` with these weights.
        rows: number of rows of the loss in the calibration data: real tokens (language), sentences, images.
        num_levels: number of ranks per layer, full rank included; this and the next three as in `costs.rank_levels`.
        min_saving: this and `slack_share` as for `allocate_ranks`, which leaves out the ranks that save less.

    Raises:
        FlexrankError: a layer's moment is missing, not of its input, or without gradients; or rows is below 1.
    """
    layers = nested_layers(model)
    require_whole_factors(layers)
    rises = {name: curvature_rises(name, layer, moments.get(name), rows) for name, layer in layers.items()}
    shapes = {name: layer.matrix_shape for name, layer in layers.items()}
    ranks = {name: rank_levels(shape, num_levels, spacing, min_saving, slack_share) for name, shape in shapes.items()}
    return curvature_table(rises, shapes, ranks, footprint(model))


def curvature_table(
    rises: Mapping[str, Tensor], shapes: Mapping[str, Shape], ranks: Mapping[str, tuple[int, ...]], rest: Footprint
) -> SensitivityTable:
    """The table of each layer's `curvature_rises` at its ranks; `rest` is the footprint of all other tensors."""
    errors = {name: tuple(rises[name][list(levels)].tolist()) for name, levels in ranks.items()}
    return SensitivityTable(shapes, ranks, errors, 0.0, rest)


@torch.no_grad()
def curvature_rises(name: str, layer: NestedLayer, moment: LayerMoment | None, rows: int) -> Tensor:
    """½ tr(G ΔW_r Σ ΔW_rᵀ) for r = 0 … k, averaged over `rows`: (k + 1,), float64, on the CPU."""
    if rows < 1:
        raise FlexrankError(f"rows is {rows}; it must be at least 1")
    if moment is None or moment.side != "input" or moment.gradient_moment is None:
        raise FlexrankError(f"layer {name!r}: curvature needs collect_moments(side='input', gradient_loss=...)")
    with restored_sizes([layer]):
        layer.rank = layer.max_rank
        u, v = (factor.double() for factor in layer.active)
    products = (u @ moment.gradient_moment.to(u.device) @ u.T) * (v @ moment.moment.to(v.device) @ v.T)
    after = products.flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0)
    # Both factors are positive semidefinite, and so is their product: values below zero are rounding errors.
    rises = torch.cat([after.clamp(min=0), after.new_zeros(1)]) / 2
    # An expert that no token chose has zero tokens and moments of zeros, and therefore no rise.
    return (rises / (max(1, moment.tokens) * rows)).cpu()
