"""Layers as JSON objects: what an artefact's document says of each, and the empty layer that it stands for."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flexrank.errors import FlexrankError
from flexrank.nn.layers import (
    GaugeAlignedConv2d,
    GaugeAlignedLayer,
    GaugeAlignedLinear,
    NestedConv2d,
    NestedLayer,
    NestedLinear,
    convolution,
)
from flexrank.nn.matrix import ConvGeometry, conv_geometry


def layer_spec(layer: nn.Module) -> dict[str, Any]:
    """What `build_layer` needs to rebuild an elastic, deployed or dense layer empty, as a JSON object."""
    if isinstance(layer, (NestedLayer, GaugeAlignedLayer)):
        m, n = layer.matrix_shape
        geometry: ConvGeometry | None = getattr(layer, "geometry", None)
        form = "nested" if isinstance(layer, NestedLayer) else "aligned"
        rank = layer.max_rank if isinstance(layer, NestedLayer) else layer.rank
        spec: dict[str, Any] = {"form": form, "shape": [m, n], "rank": rank}
        if isinstance(layer, GaugeAlignedLayer):
            spec |= {"aligned": layer.aligned, "bias": getattr(layer.expand, "bias", None) is not None}
            return spec | _geometry_json(geometry)
    elif isinstance(layer, (nn.Linear, nn.Conv2d)):
        geometry = conv_geometry(layer)
        weight = layer.weight.flatten(1)
        spec = {"form": "dense", "shape": list(weight.shape), "rank": min(weight.shape)}
    else:
        raise TypeError(f"{type(layer).__name__} is no layer of flexrank's")
    return spec | {"bias": layer.bias is not None} | _geometry_json(geometry)


def build_layer(spec: Mapping[str, Any], *, device: Any = None, dtype: Any = None) -> nn.Module:
    """An empty layer of a `layer_spec`; its values are to be loaded.

    Raises:
        FlexrankError: an unknown form.
    """
    (m, n), rank, bias = spec["shape"], spec["rank"], spec["bias"]
    geometry = _geometry_from_json(spec)
    placement: dict[str, Any] = {"device": device, "dtype": dtype}
    if spec["form"] == "nested":
        u, v = torch.empty(rank, m, **placement), torch.empty(rank, n, **placement)
        bias_value = torch.empty(m, **placement) if bias else None
        return NestedLinear(u, v, bias_value) if geometry is None else NestedConv2d(u, v, bias_value, geometry)
    if spec["form"] == "aligned":
        if geometry is None:
            return GaugeAlignedLinear((m, n), rank, spec["aligned"], bias=bias, **placement)
        return GaugeAlignedConv2d((m, n), rank, spec["aligned"], geometry, bias=bias, **placement)
    if spec["form"] == "dense":
        if geometry is None:
            return nn.Linear(n, m, bias=bias, **placement)
        return convolution(geometry, m, bias=bias, device=device, dtype=dtype)
    raise FlexrankError(f"layer form {spec['form']!r} is unknown; this version knows nested, aligned and dense")


def _geometry_json(geometry: ConvGeometry | None) -> dict[str, Any]:
    return {} if geometry is None else {"geometry": [geometry.in_channels, *map(list, geometry[1:])]}


def _geometry_from_json(spec: Mapping[str, Any]) -> ConvGeometry | None:
    if "geometry" not in spec:
        return None
    channels, *pairs = spec["geometry"]
    kernel, stride, padding, dilation = ((int(a), int(b)) for a, b in pairs)
    return ConvGeometry(int(channels), kernel, stride, padding, dilation)
