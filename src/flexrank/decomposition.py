"""Stage one: every selected layer becomes ordered rank-one components (FlexRank, section 3.1)."""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from flexrank.calibration import LayerMoment
from flexrank.errors import FlexrankError
from flexrank.linalg import Factors, data_svd, plain_svd, whitened_svd
from flexrank.progress import track
from flexrank.surgery import nest_
from flexrank.views import weight_matrix

Method = Literal["datasvd", "paper", "svd", "fisher"]
METHODS: tuple[Method, ...] = ("datasvd", "paper", "svd", "fisher")


@torch.no_grad()
def decompose_(
    model: nn.Module, moments: Mapping[str, LayerMoment] | Iterable[str], *, method: Method = "datasvd"
) -> dict[str, Tensor]:
    """Replaces each layer in place by its elastic form W = U Vᵀ at full rank, components in order of importance.

    Args:
        model: holds the layers that `moments` names.
        moments: from `collect_moments`; for "svd" the layers' names suffice.
        method: "datasvd" (without whitening), "fisher" (also weighted by the outputs' gradients), "paper" (whitened,
            FlexRank appendix C.1), or "svd" (weights alone).

    Returns:
        For each layer the components' energies (k,), falling: their part of the weighted squared output.

    Raises:
        FlexrankError: an unknown method, a moment that the method needs and lacks, or values that are not finite.
    """
    if method not in METHODS:
        raise FlexrankError(f"decomposition method {method!r} is unknown; it is one of {', '.join(METHODS)}")
    energies = {}
    for name in track(list(moments), "decomposing"):
        weight = weight_matrix(model.get_submodule(name)).detach()
        moment = moments[name] if isinstance(moments, Mapping) else None
        try:
            factors = _decompose(weight, moment, method)
        except FlexrankError as error:
            raise FlexrankError(f"layer {name!r}: {error}") from error
        energies[name] = factors.energies
        nest_(model, name, factors)
    return energies


def _decompose(weight: Tensor, moment: LayerMoment | None, method: Method) -> Factors:
    if method == "svd":
        return plain_svd(weight)
    if moment is None:
        raise FlexrankError(f"method {method!r} needs moments; call collect_moments first")
    if method == "paper":
        if moment.side != "input":
            raise FlexrankError("method 'paper' needs the input's moment; collect_moments(..., side='input') keeps it")
        return whitened_svd(weight, moment.moment)
    if method == "fisher" and moment.gradient_moment is None:
        raise FlexrankError("method 'fisher' needs collect_moments(..., gradient_loss=...)")
    gradient = moment.gradient_moment if method == "fisher" else None
    if moment.side == "input":
        return data_svd(weight, input_moment=moment.moment, gradient_moment=gradient)
    return data_svd(weight, output_moment=moment.moment, mean_square=moment.mean_square, gradient_moment=gradient)
