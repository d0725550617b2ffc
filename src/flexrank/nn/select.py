"""Selecting the layers to factorise, explaining why others stay dense, and replacing layers."""

import fnmatch
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedConv2d, NestedLayer, NestedLinear, SizeVectors
from flexrank.nn.gauge_aligned import GaugeAlignedLayer
from flexrank.nn.linalg import Factors
from flexrank.nn.matrix import FACTORISED, bias_of, conv_geometry, is_layer, unsupported_reason, weight_matrix
from flexrank.nn.quantised import is_quantised

log = logging.getLogger("flexrank")
ParentSlot = tuple[nn.Module, str]  #: a module, and the name of one of its children


def select_layers(
    model: nn.Module, include: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> dict[str, nn.Module]:
    """Returns the layers to factorise by name, in the model's order, and logs why each other layer stays dense.

    `include` and `exclude` hold names or globs: `*.mlp.*`, or a part between dots such as `lm_head`. Raises
    FlexrankError if a pattern matches no module, or if no layer is left to factorise.
    """
    require_unwrapped(model)
    require_listed(include=include, exclude=exclude)
    for pattern in (*(include or ()), *exclude):
        if not any(_matches(name, pattern) for name, _ in model.named_modules()):
            wanted = "it is a name, a part of one, or a glob"
            raise FlexrankError(f"layer pattern {pattern!r} matches no module of {type(model).__name__}; {wanted}")
    require_merged(model)
    _require_not_deployed(model)
    reasons = dense_reasons(model, include, exclude)
    layers = {name: module for name, module in model.named_modules() if is_layer(module) and name not in reasons}
    for name, reason in reasons.items():
        log.info("left dense: %s (%s)", name, reason)
    if not layers:
        raise FlexrankError(f"no layer of {type(model).__name__} can be factorised; left dense: {_summary(reasons)}")
    return layers


def _summary(reasons: Mapping[str, str]) -> str:
    """Why layers stay dense, in one line: of many layers only the first."""
    shown = ", ".join(f"{name} ({reason})" for name, reason in itertools.islice(reasons.items(), 3))
    return (shown or "nothing") + f", and {len(reasons) - 3} others" * (len(reasons) > 3)


def require_listed(**names: object) -> None:
    """Raises FlexrankError if a string is given in place of several, as iteration would take its letters."""
    for what, given in names.items():
        if isinstance(given, str):
            raise FlexrankError(f"{what} is {given!r}; it is a list, such as [{given!r}]")


def dense_reasons(
    model: nn.Module, include: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> dict[str, str]:
    """Why each module that holds a matrix stays dense: not selected, tied, not supported, or too small."""
    owners, listed = _weight_owners(model), _listed(model)
    reasons = {}
    for name, module in model.named_modules():
        if is_layer(module):
            reason = _selection_reason(model, name, include, exclude) or _weight_reason(name, module, owners)
            if reason is None and listed & {id(module), id(module.weight), id(module.bias)}:
                reason = "the model keeps it elsewhere too, as in a list, where it would not be replaced"
        else:
            reason = unsupported_reason(module) or _unknown_reason(module)
        if reason is not None:
            reasons[name] = reason
    return reasons


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile and of data parallelism, which put a prefix on all names."""
    while True:
        if "_orig_mod" in model._modules:  # torch.compile's; its class is not imported, which takes a second
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def drop_autocast_(model: nn.Module) -> dict[str, Any]:
    """Removes what accelerate's `prepare` puts on a model, a `forward` in mixed precision; returns what that was."""
    own = vars(model)
    keys = ["_is_accelerate_prepared", *["forward", "_original_forward"] * ("_original_forward" in own)]
    dropped = {key: own.pop(key) for key in keys if key in own}
    original = dropped.get("_original_forward")
    if original is not None and getattr(original, "__func__", None) is not type(model).forward:
        own["forward"] = original  # a hook's
    return dropped


def require_unwrapped(model: nn.Module) -> None:
    """Raises FlexrankError if the model is a wrapper, of which names have a prefix and compiled code calls no hooks."""
    if not isinstance(model, nn.Module):
        raise FlexrankError(f"model is a {type(model).__name__}; it is a torch module, as from_pretrained returns")
    if unwrapped(model) is not model:
        raise FlexrankError(f"{type(model).__name__} wraps a model; give the model inside, and wrap what is deployed")
    if any(module._compiled_call_impl is not None for module in model.modules()):
        right = "give it as it was before compile(), and compile what is deployed"
        raise FlexrankError(f"{type(model).__name__} is compiled in place; {right}")


def require_merged(model: nn.Module) -> None:
    """Raises FlexrankError if peft's adapters wrap a layer: merged later, they would go into a weight of its own."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and callable(getattr(module, "merge", None)):
            raise FlexrankError(f"layer {name!r} has an adapter; first merge it into the weight: merge_and_unload()")


def _require_not_deployed(model: nn.Module) -> None:
    """Raises FlexrankError for a model that `deploy` made, whose factors would be factorised in their turn."""
    for name, module in model.named_modules():
        if isinstance(module, GaugeAlignedLayer):
            raise FlexrankError(f"layer {name!r} is factorised already; take the base model or the elastic one")


def require_in_memory(model: nn.Module) -> None:
    """Raises FlexrankError if a parameter has no values in memory, as where accelerate offloads it."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise FlexrankError(f"parameter {name!r} is not in memory; load the model without device_map or offloading")


def require_differentiable(model: nn.Module) -> None:
    """Raises FlexrankError if a parameter was made in inference mode: no gradient passes through it."""
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise FlexrankError(f"parameter {name!r} is of torch.inference_mode; load or copy the model outside of it")


def require_layers(layers: Mapping[str, nn.Module]) -> None:
    """Raises FlexrankError if one of these named modules cannot be factorised."""
    for name, module in layers.items():
        if not is_layer(module):
            reason = unsupported_reason(module) or _unknown_reason(module) or f"{type(module).__name__} has no matrix"
            raise FlexrankError(f"layer {name!r} cannot be factorised: {reason}; select_layers finds those that can")
        if weight_matrix(module).is_meta:
            raise FlexrankError(f"layer {name!r} has no weight in memory; load the model without device_map")


def require_own(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raises FlexrankError if a layer is not the model's, but for example that of a copy."""
    own = set(model.modules())
    for name, layer in layers.items():
        if layer not in own:
            raise FlexrankError(f"layer {name!r} is of another model; call select_layers on this one")


def nest_(model: nn.Module, name: str, factors: Factors, slots: Sequence[ParentSlot] = ()) -> NestedLayer:
    """Replaces the layer `name` with its `elastic_form`, and returns that.

    `slots` is the layer's entry in `parent_slots`; giving it saves a walk over the model for each of many layers.
    """
    nested = elastic_form(model.get_submodule(name), factors)
    for parent, child in slots or parent_slots(model, [name])[name]:
        setattr(parent, child, nested)
    return nested


def elastic_form(layer: nn.Module, factors: Factors) -> NestedLayer:
    """The elastic layer with these factors, and with the dtype, device and training mode of the given layer."""
    weight, bias, geometry = weight_matrix(layer), bias_of(layer), conv_geometry(layer)
    u, v = (factor.to(weight.device, weight.dtype).contiguous() for factor in (factors.u, factors.v))
    kind = NestedConv2d if geometry else NestedLinear
    nested = kind(u, v, None if bias is None else bias.detach().clone(), geometry)
    nested.requires_grad_(weight.requires_grad)
    if bias is not None and nested.bias is not None:
        nested.bias.requires_grad_(bias.requires_grad)
    return nested.train(layer.training)


def replace_layers(model: nn.Module, new: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Replaces the named modules with new ones, under every parent of a module that several share; returns the old."""
    slots, replaced = parent_slots(model, new), {name: _found(model, name) for name in new}
    for name, module in new.items():
        for parent, child in slots[name]:
            setattr(parent, child, module)
    return replaced


def parent_slots(model: nn.Module, names: Iterable[str]) -> dict[str, list[ParentSlot]]:
    """The parents of each named module, and its name under each of them, from one walk over the model."""
    found = {name: _found(model, name) for name in names}
    slots: dict[nn.Module, list[ParentSlot]] = {module: [] for module in found.values()}
    for parent in model.modules():
        for child, module in parent._modules.items():  # named_children names a shared child only once
            if module in slots:
                slots[module].append((parent, child))
    return {name: slots[module] for name, module in found.items()}


def _found(model: nn.Module, name: str) -> nn.Module:
    if not name:
        raise FlexrankError("the model itself is one layer; wrap it in nn.Sequential to replace it")
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        right = "named_modules() has its names"
        raise FlexrankError(f"{type(model).__name__} has no layer {name!r}; {right}") from error


def _selection_reason(model: nn.Module, name: str, include: Sequence[str] | None, exclude: Sequence[str]) -> str | None:
    if include is not None and not any(_matches(name, pattern) for pattern in include):
        return "not included"
    if any(_matches(name, pattern) for pattern in exclude):
        return "excluded"
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerEncoderLayer):
        return "torch's fused encoder layer reads its weight, and does not call it"
    return None


def _weight_reason(name: str, module: nn.Module, owners: Mapping[int, list[str]]) -> str | None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if id(weight) not in owners:
        return "its weight is computed, not a parameter"
    for part, parameter in (("weight", weight), ("bias", module.bias)):
        shared = [owner for owner in owners.get(id(parameter), ()) if owner != name]
        if shared:
            return f"{part} tied to {shared[0]}"
    if weight.dtype not in FACTORISED:
        return f"weight is {weight.dtype}"
    if is_quantised({name: weight}):
        return f"weight is quantised as {type(weight).__name__}"
    if min(weight_matrix(module).shape) < 2:
        return "a matrix of rank one has nothing to factorise"
    # accelerate's hooks move inputs between devices; the hook of the block around a factorised layer does so too.
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if (any(hooks) or "forward" in vars(module)) and not hasattr(module, "_hf_hook"):
        return "it has hooks, or a forward of its own"
    return "the model itself is one layer; wrap it in nn.Sequential" if not name else None


def _unknown_reason(module: nn.Module) -> str | None:
    """The reason for a module of an unknown kind that holds a matrix, such as fused experts; None without a matrix."""
    if isinstance(module, NestedLayer):
        return "elastic already"
    if isinstance(module, SizeVectors):  # a part of an elastic layer
        return None
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


def _listed(model: nn.Module) -> set[int]:
    """The modules and parameters that some module holds also in an attribute, a container or an object, by `id`."""
    attributes = {
        id(value): value
        for parent in model.modules()
        for key, value in vars(parent).items()
        if key not in ("_modules", "_parameters")
    }
    return {id(one) for value in attributes.values() for one in _held(value, depth=3)}


def _held(value: Any, depth: int) -> Iterator[nn.Module | nn.Parameter]:
    """The modules and parameters in a value, in containers and objects in each other up to this depth."""
    if isinstance(value, (nn.Module, nn.Parameter)):
        yield value
    elif depth and not isinstance(value, (torch.Tensor, type, ModuleType)):
        items = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for one in value if isinstance(value, (list, tuple, set, frozenset)) else items.values():
            yield from _held(one, depth - 1)


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern is a glob that matches the name, a part of the name between dots, or a parent's name."""
    return pattern in name.split(".") or fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
