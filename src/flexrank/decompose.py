"""Stage one: every selected layer becomes ordered rank-one components (FlexRank, section 3.1)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from flexrank.calibrate import GradientLoss, LayerMoment, Side, moments_by_block
from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import Factors, data_svd, plain_svd, whitened_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import nest_
from flexrank.progress import track

Method = Literal["datasvd", "paper", "svd", "fisher"]
METHODS: tuple[Method, ...] = ("datasvd", "paper", "svd", "fisher")


@torch.no_grad()
def decompose_(
    model: nn.Module, moments: Mapping[str, LayerMoment] | Iterable[str], *, method: Method = "datasvd"
) -> dict[str, Tensor]:
    """Replaces each layer in place by its elastic form W = U Vᵀ at full rank, components in order of importance.

    Returns the energies (k,) of each layer's components, falling: their parts of the weighted squared output.

    Args:
        moments: from `collect_moments`; for "svd" the layers' names suffice.
        method: "datasvd" (without whitening), "fisher" (also weighted by the outputs' gradients), "paper" (whitened,
            FlexRank appendix C.1), or "svd" (weights alone).

    Raises:
        FlexrankError: an unknown method, a moment that the method needs and lacks, or values that are not finite.
    """
    _require_known(method)
    energies = {}
    for name in track(list(moments), "decomposing"):
        weight = weight_matrix(model.get_submodule(name)).detach()
        try:
            factors = _decompose(weight, moments[name] if isinstance(moments, Mapping) else None, method)
        except FlexrankError as error:
            raise FlexrankError(f"layer {name!r}: {error}") from error
        energies[name] = factors.energies
        nest_(model, name, factors)
    return energies


def decompose_by_block_(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Iterable[str],
    *,
    method: Method = "datasvd",
    gradient_loss: GradientLoss | None = None,
) -> dict[str, Tensor]:
    """`decompose_` of a stack of blocks, one at a time, so that memory holds the moments of one block, not of all.

    The last block comes first, so that every moment is that of the original model; gradients, which pass through the
    layers after, differ by the rounding of the factors there. For cost, arguments and errors see `moments_by_block`.
    Hold no layer yourself: it would stay in memory beside its elastic form. For "svd" call `decompose_` with the names.
    """
    _require_known(method)
    names, energies = list(layers), dict[str, Tensor]()
    side: Side = "input" if method == "paper" else "smaller"
    for moments in moments_by_block(model, batches, names, side=side, gradient_loss=gradient_loss):
        energies |= decompose_(model, moments, method=method)
        del moments  # before those of the next block are allocated
    return {name: energies[name] for name in names}


def _require_known(method: str) -> None:
    if method not in METHODS:
        raise FlexrankError(f"decomposition method {method!r} is unknown; it is one of {', '.join(METHODS)}")


def _decompose(weight: Tensor, moment: LayerMoment | None, method: Method) -> Factors:
    if method == "svd":
        return plain_svd(weight)
    if moment is None:
        raise FlexrankError(f"method {method!r} needs moments; call collect_moments first")
    if method == "paper" and moment.side != "input":
        raise FlexrankError("method 'paper' needs the input's moment; collect_moments(..., side='input') keeps it")
    if method == "paper":
        return whitened_svd(weight, moment.moment)
    gradient = moment.gradient_moment if method == "fisher" else None
    if method == "fisher" and gradient is None:
        raise FlexrankError("method 'fisher' needs collect_moments(..., gradient_loss=...)")
    if moment.side == "input":
        return data_svd(weight, input_moment=moment.moment, gradient_moment=gradient)
    return data_svd(weight, output_moment=moment.moment, mean_square=moment.mean_square, gradient_moment=gradient)
