"""Layers as JSON objects: how an artefact describes each, and the empty layer of a description."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedConv2d, NestedLayer, NestedLinear
from flexrank.nn.gauge_aligned import GaugeAlignedConv2d, GaugeAlignedLayer, GaugeAlignedLinear
from flexrank.nn.matrix import ConvGeometry, conv_geometry, matrix_shape


def layer_spec(layer: nn.Module) -> dict[str, Any]:
    """What `build_layer` needs to rebuild an elastic, deployed or dense layer empty, as a JSON object."""
    if isinstance(layer, NestedLayer):
        form, shape, sizes, has_bias = "nested", layer.matrix_shape, {"rank": layer.max_rank}, layer.bias is not None
    elif isinstance(layer, GaugeAlignedLayer):
        form, shape, sizes = "aligned", layer.matrix_shape, {"rank": layer.rank, "aligned": layer.aligned}
        has_bias = getattr(layer.expand, "bias", None) is not None
    elif isinstance(layer, (nn.Linear, nn.Conv2d)):
        form, shape, has_bias = "dense", matrix_shape(layer), layer.bias is not None
        sizes = {"rank": min(shape)}
    else:
        raise TypeError(f"{type(layer).__name__} is not a layer of flexrank")
    spec: dict[str, Any] = {"form": form, "shape": list(shape), **sizes, "bias": has_bias}
    geometry = conv_geometry(layer)
    return spec if geometry is None else spec | {"geometry": [geometry.in_channels, *map(list, geometry[1:])]}


def build_layer(spec: Mapping[str, Any], *, device: Any = None, dtype: Any = None) -> nn.Module:
    """The layer of a `layer_spec`, with uninitialised values; an unknown form is a FlexrankError."""
    (m, n), rank, bias, form = spec["shape"], spec["rank"], spec["bias"], spec["form"]
    geometry = _geometry(spec)
    placement: dict[str, Any] = {"device": device, "dtype": dtype}
    if form == "nested":
        u, v = torch.empty(rank, m, **placement), torch.empty(rank, n, **placement)
        bias_value = torch.empty(m, **placement) if bias else None
        return NestedLinear(u, v, bias_value) if geometry is None else NestedConv2d(u, v, bias_value, geometry)
    if form == "aligned":
        kind = GaugeAlignedLinear if geometry is None else GaugeAlignedConv2d
        return kind((m, n), rank, spec["aligned"], geometry, bias=bias, **placement)
    if form == "dense":
        if geometry is None:
            return nn.Linear(n, m, bias=bias, **placement)
        return geometry.layer(m, bias=bias, **placement)
    raise FlexrankError(f"layer form {form!r} is unknown; this version knows nested, aligned and dense")


def _geometry(spec: Mapping[str, Any]) -> ConvGeometry | None:
    if "geometry" not in spec:
        return None
    channels, *pairs = spec["geometry"]
    kernel, stride, padding, dilation = ((int(a), int(b)) for a, b in pairs)
    return ConvGeometry(int(channels), kernel, stride, padding, dilation)
