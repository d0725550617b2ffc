"""Selecting layers, replacing them, and switching an elastic model between sizes."""

import contextlib
import fnmatch
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from flexrank.errors import FlexrankError
from flexrank.nn.layers import NestedConv2d, NestedLayer, NestedLinear
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import bias_of, conv_geometry, is_layer, unsupported_reason, weight_matrix
from flexrank.profiles import Footprint, RankProfile
from flexrank.profiles.costs import largest_rank

log = logging.getLogger("flexrank")


def select_layers(
    model: nn.Module, include: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> dict[str, nn.Module]:
    """The layers to factorise, by name, in the model's order; what stays dense is logged with its reason.

    Args:
        model: any torch module.
        include: names or globs ("*.mlp.*", or a part between dots such as "lm_head"); all layers by default.
        exclude: the same, taken out.

    Raises:
        FlexrankError: a pattern matches no module, or nothing is left to factorise.
    """
    for pattern in (*(include or ()), *exclude):
        if not any(_matches(name, pattern) for name, _ in model.named_modules()):
            raise FlexrankError(f"layer pattern {pattern!r} matches no module of {type(model).__name__}")
    layers, reasons = {}, dense_reasons(model, include, exclude)
    for name, module in model.named_modules():
        if name not in reasons and is_layer(module):
            layers[name] = module
    for name, reason in reasons.items():
        log.info("left dense: %s (%s)", name, reason)
    if not layers:
        raise FlexrankError(f"no layer of {type(model).__name__} can be factorised; left dense: {reasons or 'nothing'}")
    return layers


def dense_reasons(
    model: nn.Module, include: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> dict[str, str]:
    """Why each module that holds a matrix stays dense: not selected, tied, not supported, or too small."""
    owners = _weight_owners(model)
    reasons = {}
    for name, module in model.named_modules():
        reason = unsupported_reason(module)
        if reason is None and is_layer(module):
            selection = _selection_reason(name, include, exclude) or _parent_reason(model, name)
            reason = selection or _weight_reason(name, module, owners)
        elif reason is None:
            reason = _unknown_reason(module)
        if reason is not None:
            reasons[name] = reason
    return reasons


def nest_(model: nn.Module, name: str, factors: Factors) -> NestedLayer:
    """Replaces the layer `name` by its elastic form with these factors, in the layer's dtype, device and mode."""
    layer = model.get_submodule(name)
    weight, geometry, bias = weight_matrix(layer), conv_geometry(layer), bias_of(layer)
    u, v = (factor.to(weight.device, weight.dtype).contiguous() for factor in (factors.u, factors.v))
    bias_requires_grad = bias is not None and bias.requires_grad
    bias = None if bias is None else bias.detach().clone()
    nested: NestedLayer = NestedLinear(u, v, bias) if geometry is None else NestedConv2d(u, v, bias, geometry)
    nested.requires_grad_(weight.requires_grad)
    if nested.bias is not None:
        nested.bias.requires_grad_(bias_requires_grad)
    replace_layer(model, name, nested.train(layer.training))
    return nested


def replace_layer(model: nn.Module, name: str, new: nn.Module) -> None:
    """Puts `new` wherever the module called `name` stands: a module shared by several parents stays shared.

    Raises:
        FlexrankError: there is no such module, or it is the model itself.
    """
    if not name:
        raise FlexrankError("the model itself is one layer; wrap it in nn.Sequential to replace it")
    try:
        old = model.get_submodule(name)
    except AttributeError as error:
        raise FlexrankError(f"{type(model).__name__} has no layer {name!r}") from error
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):  # named_children would tell a shared child once
            if child is old:
                setattr(parent, child_name, new)


def nested_layers(model: nn.Module) -> dict[str, NestedLayer]:
    """The elastic layers by name.

    Raises:
        FlexrankError: the model has none.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, NestedLayer)}
    if not layers:
        raise FlexrankError(f"{type(model).__name__} has no elastic layers; decompose it first")
    return layers


def full_profile(model: nn.Module) -> dict[str, int]:
    """The full rank of every elastic layer."""
    return {name: layer.max_rank for name, layer in nested_layers(model).items()}


def uniform_profile(model: nn.Module, budget: float) -> RankProfile:
    """The same budget for every layer alone: its largest rank whose deployed parameters are within it."""
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    return RankProfile({name: max(1, largest_rank((m, n), budget * m * n)) for name, (m, n) in shapes.items()})


def set_profile(model: nn.Module, profile: Mapping[str, int]) -> None:
    """Sets the active ranks of all elastic layers.

    Raises:
        FlexrankError: the profile names other layers than the model has, or a rank is out of range.
    """
    layers = nested_layers(model)
    require_fitting(layers, profile)
    for name, rank in profile.items():
        layers[name].rank = rank


def require_fitting(layers: Mapping[str, NestedLayer], profile: Mapping[str, int]) -> None:
    """Checks that a profile gives each elastic layer, and no other, a rank that it has.

    Raises:
        FlexrankError: it does not.
    """
    for name in profile.keys() ^ layers.keys():
        where = "profile" if name in layers else "model"
        raise FlexrankError(f"layer {name!r} is not in the {where}; profile and model must name the same layers")
    for name, rank in profile.items():
        if not 1 <= rank <= layers[name].max_rank:
            raise FlexrankError(f"layer {name!r}: rank {rank} is out of range; it has 1 to {layers[name].max_rank}")


@contextlib.contextmanager
def use_profile(model: nn.Module, profile: Mapping[str, int]) -> Iterator[nn.Module]:
    """The model at this profile inside the block (the paper's 𝒯_m), and as it was after it."""
    before = {name: layer.rank for name, layer in nested_layers(model).items()}
    set_profile(model, profile)
    try:
        yield model
    finally:
        set_profile(model, before)


@contextlib.contextmanager
@torch.no_grad()
def full_matrices(model: nn.Module, room: int) -> Iterator[None]:
    """Inside the block full rank costs what the dense layer does: its matrix is made once, r·m·n multiply-adds a call.

    Args:
        model: elastic; its weights stay as they are inside the block.
        room: most bytes of matrices that are kept; the last layers' come first. On a GPU, half of what is free there
            at most.
    """
    layers = nested_layers(model)
    if layers:
        room = room_on(next(iter(layers.values())).u.device, room)
    sizes = {name: layer.u.element_size() * math.prod(layer.matrix_shape) for name, layer in layers.items()}
    for name in last_within(sizes, room):
        layers[name].full_matrix = layers[name].u.T @ layers[name].v
    try:
        yield
    finally:
        for layer in layers.values():
            layer.full_matrix = None


def room_on(device: torch.device, room: int) -> int:
    """So many bytes, but on a GPU no more than half of those free: the model's own outputs need the rest."""
    if device.type != "cuda":
        return room
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    half = (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if half < room:
        log.info("full layers' matrices take up to %d bytes, half of what is free on %s", half, device)
    return min(room, half)


def last_within(sizes: Mapping[str, int], room: int) -> list[str]:
    """The names from the last on whose sizes add up to no more than `room`."""
    names = list(sizes)[::-1]
    sums = itertools.accumulate(sizes[name] for name in names)
    return [name for name, total in zip(names, sums, strict=True) if total <= room]


def footprint(model: nn.Module, dtype: torch.dtype | None = None) -> Footprint:
    """What an elastic model holds beside its factors; tied tensors count once, buffers as their state does.

    With `dtype`, as it would be with every floating tensor in it.
    """

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize

    layers = nested_layers(model).values()
    factors = {id(parameter) for layer in layers for parameter in (layer.u, layer.v)}
    others = [parameter for parameter in model.parameters() if id(parameter) not in factors]
    persistent = {id(value): value for value in model.state_dict(keep_vars=True).values()}
    buffers = [buffer for buffer in model.buffers() if id(buffer) in persistent]
    return Footprint(
        other_parameters=sum(p.numel() for p in others),
        other_bytes=sum(map(size, (*others, *buffers))),
        bytes_per_parameter=dtype.itemsize if dtype else max(layer.u.element_size() for layer in layers),
    )


def _selection_reason(name: str, include: Sequence[str] | None, exclude: Iterable[str]) -> str | None:
    if include is not None and not any(_matches(name, pattern) for pattern in include):
        return "not included"
    if any(_matches(name, pattern) for pattern in exclude):
        return "excluded"
    return None


def _parent_reason(model: nn.Module, name: str) -> str | None:
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "torch's fused encoder layer reads its weight, and does not call it"
    return None


def _weight_reason(name: str, module: nn.Module, owners: Mapping[int, list[str]]) -> str | None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if id(weight) not in owners:
        return "its weight is computed, not a parameter"
    shared = [owner for owner in owners[id(weight)] if owner != name]
    if shared:
        return f"weight tied to {shared[0]}"
    if not weight.is_floating_point():
        return f"weight is {weight.dtype}"
    if min(weight_matrix(module).shape) < 2:
        return "a matrix of rank one has nothing to factorise"
    return "the model itself is one layer; wrap it in nn.Sequential" if not name else None


def _unknown_reason(module: nn.Module) -> str | None:
    """Names a matrix held by a module that is no layer we know, such as fused experts."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1:
            return f"{type(module).__name__} with parameter {name} {tuple(parameter.shape)} is not supported"
    return None


def _weight_owners(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners


def _matches(name: str, pattern: str) -> bool:
    """Whether a glob or dotted part names the module or something that holds it."""
    parts = name.split(".")
    if pattern in parts or fnmatch.fnmatchcase(name, pattern):
        return True
    return any(".".join(parts[:end]) == pattern for end in range(1, len(parts)))
