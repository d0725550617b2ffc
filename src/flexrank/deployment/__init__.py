"""Makes an ordinary small model of an elastic model at a profile: each layer dense, low-rank or gauge-aligned."""

import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from flexrank.artefacts.cards import mark_size
from flexrank.deployment.exports import export
from flexrank.deployment.latency import entry_within_latency
from flexrank.deployment.slack import (
    Activations,
    active_factors,
    deployed_dtypes,
    find_slack,
    layer_slack,
    require_options,
    require_slack,
    table_dtype,
)
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.hf.classes import names_in_float32
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.experts import separate_experts
from flexrank.nn.gauge_aligned import GaugeAlignedConv2d, GaugeAlignedLayer, GaugeAlignedLinear, Slack
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.quantised import require_unquantised
from flexrank.nn.select import drop_autocast_, require_in_memory, unwrapped
from flexrank.nn.size_lock import drop_size_lock_
from flexrank.nn.specs import build_layer, layer_spec
from flexrank.nn.switch import detached_tensors, layer_shapes, nested_layers, submodel
from flexrank.profiles import SlackTable
from flexrank.profiles.chain import require_limits
from flexrank.profiles.costs import aligned_parameters, dense_parameters, full_ranks, is_dense

__all__ = ["FlexRankConfig", "deploy", "deployed_parameters_of", "export", "find_slack", "entry_within_latency"]


def deploy(
    model: nn.Module,
    profile: Mapping[str, int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    slack: Slack | SlackTable = "auto",
    activations: Activations | None = None,
    base: nn.Module | None = None,
) -> nn.Module:
    """Makes an ordinary deep copy of the elastic model at `profile`, each layer in the format with fewest parameters.

    The elastic model does not change. The copy keeps biases, mode, `requires_grad` and ties. A transformers model can
    be saved with `save_pretrained`, and loads with `from_pretrained` wherever flexrank is imported.

    Args:
        model: a model with elastic layers.
        profile: a rank for each elastic layer.
        dtype: of the copy; the model's by default. Non-persistent buffers (rotary frequencies) keep theirs.
        device: of the copy; the model's by default. An elastic model that is memory-mapped from its files need not fit
            on this device: layers are moved one at a time.
        slack: the number of columns left unaligned in every layer, at most its rank; "auto" chooses it by the dtype's
            error bound, 0 is the paper's form (FlexRank, eq. 7); or a table from `find_slack`.
        activations: input rows (t, n) of each layer, from `collect_rows`, on which "auto" measures the error; standard
            normal rows by default.
        base: the model before decomposition: if every rank is full, the result is a copy of it, bit for bit.

    Raises:
        FlexrankError: the profile does not fit the model, it has quantised weights, or a slack is negative or too
            small for a layer.
    """
    require_slack(slack)
    require_options(dtype, activations, nested_layers(model))
    model = unwrapped(model)
    require_in_memory(model)
    require_unquantised(model)
    if base is not None and profile == full_ranks(layer_shapes(model)):
        return _copied(unwrapped(base), {}, device, dtype).train(model.training)
    model = submodel(model, profile)
    layers, deployed = nested_layers(model), {}
    if isinstance(slack, SlackTable):
        slack.require_dtype(table_dtype(layers, dtype))
    for name, own in deployed_dtypes(model, dtype).items():
        there = layers[name] if device in (None, layers[name].u.device) else copy.deepcopy(layers[name]).to(device)
        columns = layer_slack(name, there, slack, own, activations or {})
        try:
            deployed[name] = _deploy_layer(there, columns, own)
        except FlexrankError as error:
            raise FlexrankError(f"layer {name!r}: {error}") from error
    small = _copied(model, {layer: deployed[name] for name, layer in layers.items()}, device, dtype)
    drop_size_lock_(small)
    first = next(iter(layers.values()))
    if first.chain is not None:
        small.flexrank_sizes = mark_size(first.card_sizes, first.chain, profile)
    dense = sum(dense_parameters(layer.matrix_shape) for layer in layers.values())
    small.flexrank_share = sum(map(_parameters_of, deployed.values())) / dense
    if models.is_transformers_model(small):
        from flexrank.hf.quantizer import attach  # which imports transformers

        attach(small, {name: layer_spec(layer) for name, layer in deployed.items()})
    return small


def FlexRankConfig(
    budget: float | None = None,
    *,
    max_params: int | None = None,
    max_bytes: int | None = None,
    slack: Slack = "auto",
) -> Any:
    """The `quantization_config` that makes `from_pretrained` cut a size from an elastic artefact and deploy it.

    Args:
        budget: a share of the factorised layers' dense parameters; the largest size within all limits is taken.
        max_params: of the whole model.
        max_bytes: of the whole model's tensors.
        slack: as for `deploy`.

    Raises:
        FlexrankError: no limit is given, a limit is not a number, or the budget is out of range.
    """
    from flexrank.deployment.loading import ElasticConfig  # which imports transformers

    limits = {"budget": budget, "max_params": max_params, "max_bytes": max_bytes}
    if all(limit is None for limit in limits.values()):
        raise FlexrankError("FlexRankConfig has no limit; give budget, max_params or max_bytes")
    require_limits(**limits)
    require_slack(slack)
    return ElasticConfig(limits, slack)


def deployed_parameters_of(small: nn.Module, layers: Iterable[str]) -> int:
    """The number of parameters, without biases, of a deployed model's named layers; `layers` may be a profile."""
    with separate_experts(small):
        return sum(_parameters_of(small.get_submodule(name)) for name in layers)


def _parameters_of(layer: nn.Module) -> int:
    if isinstance(layer, GaugeAlignedLayer):
        return aligned_parameters(layer.matrix_shape, layer.rank, layer.slack)
    return dense_parameters(matrix_shape(layer))


@torch.no_grad()
def _deploy_layer(layer: NestedLayer, slack: int, dtype: torch.dtype) -> nn.Module:
    if is_dense(layer.matrix_shape, layer.rank, slack):
        deployed = _dense_layer(layer, dtype)
    else:
        deployed = _factorised_layer(layer, slack, dtype)
    for name, parameter in deployed.named_parameters():
        source = layer.bias if name.endswith("bias") and layer.bias is not None else layer.u
        parameter.requires_grad_(source.requires_grad)
    return deployed.train(layer.training)


def _factorised_layer(layer: NestedLayer, slack: int, dtype: torch.dtype) -> nn.Module:
    (u, v), bias = active_factors(layer), layer.active_bias
    kind = GaugeAlignedConv2d if layer.geometry else GaugeAlignedLinear
    return kind.from_factors(u, v, bias, layer.geometry, slack=slack, dtype=dtype)


def _dense_layer(layer: NestedLayer, dtype: torch.dtype) -> nn.Module:
    dense = build_layer(layer_spec(layer) | {"form": "dense"}, device=layer.u.device, dtype=dtype)
    assert isinstance(dense, (nn.Linear, nn.Conv2d))
    dense.weight.copy_(layer.matrix_in(torch.float64).reshape(dense.weight.shape))
    bias = layer.active_bias
    if bias is not None and dense.bias is not None:
        dense.bias.copy_(bias)
    return dense


def _copied(
    model: nn.Module, replaced: Mapping[nn.Module, nn.Module], device: torch.device | None, dtype: torch.dtype | None
) -> Any:
    """A deep copy with modules replaced; each other tensor is created once, directly on `device` and in `dtype`.

    Buffers that are not part of the state keep their dtype, because they are recomputed when the model is loaded. So do
    tensors that transformers keeps in float32, such as the router's bias of DeepSeek-V3.
    """
    kept = names_in_float32(model, dtype)
    state = {id(value) for name, value in model.state_dict(keep_vars=True).items() if name not in kept}
    left = {inner for module in replaced for inner in module.modules()}
    # deepcopy uses what its memo holds as the copy of an object, so elastic weights are never copied.
    memo = detached_tensors(model) | {id(old): new for old, new in replaced.items()}
    for module in model.modules():
        for tensor in itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            if module not in left and id(tensor) not in memo:
                is_cast = id(tensor) in state and tensor.is_floating_point()
                made = tensor.detach().to(device, dtype if is_cast else None, copy=True)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    copied = copy.deepcopy(model, memo)
    drop_autocast_(copied)
    return copied
