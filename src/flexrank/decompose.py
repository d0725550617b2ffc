"""Stage one: decomposes every selected layer into ordered rank-one components (FlexRank, section 3.1)."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.artefacts.elastic import MARKERS, SHARD_BYTES, ElasticWriter
from flexrank.calibrate import STATE_BYTES, GradientLoss, LayerMoment, Placement, Side, moments_by_block
from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError
from flexrank.files import directory_aside
from flexrank.hf.models import mark_elastic
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.linalg import Factors, data_svd, full_precision, half_shrunk, plain_svd, whitened_svd
from flexrank.nn.matrix import matrix_shape, weight_matrix
from flexrank.nn.select import ParentSlot, nest_, parent_slots, require_layers, require_listed, require_unwrapped
from flexrank.nn.switch import footprint, full_profile, layer_shapes
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile
from flexrank.profiles.costs import Shape, total_dense
from flexrank.progress import track

Method = Literal["datasvd", "paper", "svd", "fisher"]
METHODS: tuple[Method, ...] = ("datasvd", "paper", "svd", "fisher")


@torch.inference_mode(False)  # whose tensors could not be trained
@torch.no_grad()
def decompose_(
    model: nn.Module, moments: Mapping[str, LayerMoment] | Iterable[str], *, method: Method | None = None
) -> dict[str, Tensor]:
    """Replaces each layer in place with its elastic form W = U Vᵀ at full rank, components in order of importance.

    Returns the energies (k,) of each layer's components, descending: what each adds to the weighted squared output.

    Args:
        moments: from `collect_moments`; for "svd" the layers' names suffice.
        method: "datasvd" (without whitening), "fisher" (also weighted by the outputs' gradients), "paper" (whitened,
            FlexRank appendix C.1), or "svd" (weights alone). By default "fisher" if moments have gradients, otherwise
            "datasvd".

    Raises:
        FlexrankError: the method is unknown, a moment that it needs is missing, or values are not finite.
    """
    require_unwrapped(model)
    require_listed(moments=moments)
    given = moments if isinstance(moments, Mapping) else dict[str, LayerMoment]()
    has_gradients = any(getattr(one, "gradient_moment", None) is not None for one in given.values())
    method = _chosen(method, has_gradients)
    slots = parent_slots(model, list(moments))
    require_layers({name: model.get_submodule(name) for name in slots})
    for name in slots:  # all, before the first is replaced
        _require_usable(model, name, given.get(name), method)
    energies = {
        name: _decompose_layer_(model, name, given.get(name), method, slots[name])[1]
        for name in track(list(slots), "decomposing")
    }
    mark_elastic(model)
    return energies


def decompose_to_disk(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Iterable[str],
    directory: str | Path,
    *,
    method: Method | None = None,
    side: Side = "smaller",
    gradient_loss: GradientLoss | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    state_bytes: int = STATE_BYTES,
    shard_bytes: int = SHARD_BYTES,
    on_layer: Callable[[str, NestedLayer, LayerMoment], None] | None = None,
    tokenizer: Any = None,
) -> None:
    """Decomposes a model one block at a time into an elastic artefact, for models that are larger than memory.

    Memory holds one block's weights, moments and factors, and one file of the artefact. A model that transformers
    loaded on the CPU in the dtype of its files (`dtype="auto"`) is memory-mapped: only what is used takes memory.
    Afterwards these layers of `model` have no values; read the artefact with `load_elastic`.
    With several processes, each decomposes layers of about equal total cost in every block; process 0 writes.

    Args:
        layers: names, from `select_layers`; do not hold references to the layers, which would keep them in memory.
        directory: the artefact's directory, written completely or not at all; its chain is the full model alone.
        method: this, `side` and `gradient_loss` as for `decompose_` and `collect_moments`.
        device: where each block computes, in `dtype`; its factors have that dtype. By default those of the model.
        state_bytes: most bytes of hidden states kept in memory between blocks; the rest goes to a temporary file.
        shard_bytes: approximate bytes of one file of the artefact, which is held in memory.
        on_layer: called with each layer's name, elastic form and moments, in the process that decomposes it.
    """
    method = _chosen(method, gradient_loss is not None)
    require_listed(layers=layers)
    placement = Placement(model, device, dtype)
    with directory_aside(directory, *MARKERS) if processes.is_first() else contextlib.nullcontext() as aside:
        writer = None if aside is None else ElasticWriter(model, aside, tokenizer, dtype, shard_bytes)
        for moments in moments_by_block(
            model, batches, layers, side="input" if method == "paper" else side, gradient_loss=gradient_loss,
            placement=placement, state_bytes=state_bytes,
        ):  # fmt: skip
            _decompose_block_(model, moments, method, on_layer, writer)
            del moments  # before those of the next block are allocated
        if writer is not None:
            writer.finish(_full_chain(model, dtype))


def _decompose_block_(
    model: nn.Module,
    moments: Mapping[str, LayerMoment],
    method: Method,
    on_layer: Callable[[str, NestedLayer, LayerMoment], None] | None,
    writer: ElasticWriter | None,
) -> None:
    """Decomposes a block's layers; process 0 writes its own as they are made, and then those of the others."""
    shapes = {name: matrix_shape(model.get_submodule(name)) for name in moments}
    owners, slots = decomposition_owners(shapes), parent_slots(model, shapes)
    for name in moments:
        _require_usable(model, name, moments[name], method)
    for name in [name for name in moments if owners[name] == processes.number()]:
        layer = _decompose_layer_(model, name, moments[name], method, slots[name])[0]
        if on_layer is not None:
            on_layer(name, layer, moments[name])
        if writer is not None:
            writer.put(name)
    for name in [name for name in moments if owners[name] != 0]:
        _send_to_first_(model, name, owners[name], slots[name])
        if writer is not None:
            writer.put(name)


def decomposition_owners(shapes: Mapping[str, Shape], among: int | None = None) -> dict[str, int]:
    """The process that decomposes each layer of a block, balanced by the layers' costs (`processes.assign_by_cost`)."""
    return processes.assign_by_cost({name: math.prod(shape) * min(shape) for name, shape in shapes.items()}, among)


@torch.no_grad()
def _send_to_first_(model: nn.Module, name: str, owner: int, slots: Sequence[ParentSlot]) -> None:
    """Copies an elastic layer from its owner into process 0's model; the owner frees its values."""
    layer = model.get_submodule(name)
    if processes.is_first():
        weight = weight_matrix(layer)
        u, v = (weight.new_empty(min(weight.shape), size) for size in weight.shape)
        processes.to_first_([u, v], owner)
        nest_(model, name, Factors(u, v, weight.new_empty(0)), slots)
    elif isinstance(layer, NestedLayer):
        processes.to_first_([layer.u, layer.v], owner)
        layer.to("meta")


def _full_chain(model: nn.Module, dtype: torch.dtype | None) -> ProfileChain:
    """The chain of a decomposed model before allocation: the full model alone."""
    dense = total_dense(layer_shapes(model))
    full = ChainEntry(RankProfile(full_profile(model)), dense, 0.0)
    return ProfileChain((full,), dense, footprint(model, dtype), "full")


@torch.no_grad()
def _decompose_layer_(
    model: nn.Module, name: str, moment: LayerMoment | None, method: Method, slots: Sequence[ParentSlot]
) -> tuple[NestedLayer, Tensor]:
    """Replaces one layer; returns its elastic form, and the energies of its components."""
    weight = weight_matrix(model.get_submodule(name)).detach()
    try:
        with full_precision(weight.device):  # whatever the caller has set
            factors = _decompose(weight, moment, method)
    except FlexrankError as error:
        raise FlexrankError(f"layer {name!r}: {error}") from error
    return nest_(model, name, factors, slots), factors.energies


def _chosen(method: Method | None, has_gradients: bool) -> Method:
    """Returns the method if it is known, or the default for None."""
    if method is None:
        return "fisher" if has_gradients else "datasvd"
    if method not in METHODS:
        raise FlexrankError(f"decomposition method {method!r} is unknown; it is one of {', '.join(METHODS)}")
    return method


def _require_usable(model: nn.Module, name: str, moment: LayerMoment | None, method: Method) -> None:
    """Raises FlexrankError if a layer's weight is not finite, or its moment is not what the method needs."""
    layer = model.get_submodule(name)
    if not bool(torch.isfinite(weight_matrix(layer)).all()):
        raise FlexrankError(f"layer {name!r}: the weight holds values that are not finite")
    if method != "svd" and (problem := _moment_problem(matrix_shape(layer), moment, method)):
        raise FlexrankError(f"layer {name!r}: {problem}")


def _moment_problem(shape: Shape, moment: LayerMoment | None, method: Method) -> str | None:
    if not isinstance(moment, LayerMoment):
        return f"method {method!r} needs moments; call collect_moments first"
    (m, n), gradient = shape, moment.gradient_moment
    width = n if moment.side == "input" else m
    if moment.moment.shape != (width, width) or (gradient is not None and gradient.shape != (m, m)):
        return f"is {m} x {n}, and its moments are of another shape; collect them with this model"
    if method == "paper" and moment.side != "input":
        return "method 'paper' needs the input's moment; collect_moments(..., side='input') keeps it"
    if method == "fisher" and gradient is None:
        return "method 'fisher' needs collect_moments(..., gradient_loss=...)"
    return None


def _decompose(weight: Tensor, moment: LayerMoment | None, method: Method) -> Factors:
    if method == "svd":
        return plain_svd(weight)
    assert moment is not None  # `_require_usable`
    own, gradient = moment.moment.to(weight.device), None  # one of a file is on the CPU
    if method == "paper":
        return whitened_svd(weight, own)
    if method == "fisher":
        assert moment.gradient_moment is not None
        gradient = half_shrunk(moment.gradient_moment.to(weight.device))
    if moment.side == "input":
        return data_svd(weight, input_moment=own, gradient_moment=gradient)
    return data_svd(weight, output_moment=own, mean_square=moment.mean_square, gradient_moment=gradient)
