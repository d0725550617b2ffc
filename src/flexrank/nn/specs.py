"""Layers as JSON objects: the description of a layer in an artefact, and the empty layer built from it."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
from torch import nn

from flexrank.errors import FlexrankError
from flexrank.files import reads_format
from flexrank.nn.elastic import NestedConv2d, NestedLayer, NestedLinear
from flexrank.nn.gauge_aligned import GaugeAlignedConv2d, GaugeAlignedLayer, GaugeAlignedLinear
from flexrank.nn.matrix import FACTORISED, ConvGeometry, conv_geometry, matrix_shape

#: Version of the specs that `config.json` holds, and the keys that every spec has.
FORMAT = 1
KEYS = {"form", "shape", "rank", "bias"}


def require_format(version: int) -> None:
    """Raises FlexrankError for specs of another version."""
    if version != FORMAT:
        raise FlexrankError(f"config.json holds layers of format {version}; {reads_format(FORMAT)}")


def require_specs(layers: Any) -> None:
    """Raises FlexrankError unless these are `layer_spec`s by name."""
    specs = layers if isinstance(layers, Mapping) else {"layers": layers}
    wrong = next((name for name, spec in specs.items() if not _is_spec(spec)), None)
    if wrong is not None:
        raise FlexrankError(f"config.json: {wrong!r} in its quantization_config is not a flexrank layer; save it again")


def _is_spec(spec: Any) -> bool:
    if not isinstance(spec, Mapping) or not KEYS <= spec.keys():
        return False
    shape, is_whole = spec["shape"], spec["form"] != "aligned" or "aligned" in spec
    return is_whole and isinstance(shape, (list, tuple)) and len(shape) == 2


def require_dtype(dtype: Any) -> None:
    """Raises FlexrankError unless this is None or a torch.dtype that factors can have."""
    if not isinstance(dtype, (torch.dtype, NoneType)):
        raise FlexrankError(f"dtype is {dtype!r}; it is a torch.dtype, such as torch.bfloat16")
    if dtype not in (None, *FACTORISED):
        names = ", ".join(map(str, FACTORISED))
        raise FlexrankError(f"dtype is {dtype}; factors have one of {names}; quantise the size that is deployed")


def layer_spec(layer: nn.Module) -> dict[str, Any]:
    """The JSON object from which `build_layer` rebuilds an elastic, deployed or dense layer without its values."""
    bias: torch.Tensor | None
    sizes: dict[str, Any]
    if isinstance(layer, NestedLayer):
        form, shape, bias, sizes = "nested", layer.matrix_shape, layer.bias, {"rank": len(layer.u)}
        sizes |= {"sizes": layer.sizes.ranks} if layer.sizes else {}
        sizes |= {"dense": True} if layer.dense is not None else {}
    elif isinstance(layer, GaugeAlignedLayer):
        form, shape, bias = "aligned", layer.matrix_shape, getattr(layer.expand, "bias", None)
        sizes = {"rank": layer.rank, "aligned": layer.aligned}
    elif isinstance(layer, (nn.Linear, nn.Conv2d)):
        form, shape, bias = "dense", matrix_shape(layer), layer.bias
        sizes = {"rank": min(shape)}
    else:
        raise TypeError(f"{type(layer).__name__} is not a layer of flexrank")
    spec = {"form": form, "shape": list(shape), **sizes, "bias": bias is not None}
    geometry = conv_geometry(layer)
    return spec if geometry is None else spec | {"geometry": [geometry.in_channels, *map(list, geometry[1:])]}


def build_layer(spec: Mapping[str, Any], *, device: Any = None, dtype: Any = None) -> nn.Module:
    """The layer of a `layer_spec`, with uninitialised values. Raises FlexrankError for an unknown form."""
    (m, n), rank, bias, form = spec["shape"], spec["rank"], spec["bias"], spec["form"]
    placement: dict[str, Any] = {"device": device, "dtype": dtype}
    geometry = None
    if "geometry" in spec:
        channels, *pairs = spec["geometry"]
        geometry = ConvGeometry(channels, *((height, width) for height, width in pairs))
    if form == "nested":
        u, v, values = (torch.empty(size, **placement) for size in ((rank, m), (rank, n), (m,)))
        nested = (NestedConv2d if geometry else NestedLinear)(u, v, values if bias else None, geometry)
        if "sizes" in spec:
            nested.set_sizes_(spec["sizes"])
        if spec.get("dense"):
            nested.dense = nn.Parameter(torch.empty((m, n), **placement))
            nested.rank = nested.max_rank
        return nested
    if form == "aligned":
        kind = GaugeAlignedConv2d if geometry else GaugeAlignedLinear
        return kind((m, n), rank, spec["aligned"], geometry, bias=bias, **placement)
    if form == "dense":
        empty = {"bias": bias, **placement}
        return geometry.layer(m, **empty) if geometry else nn.Linear(n, m, **empty)
    raise FlexrankError(f"layer form {form!r} is unknown; this version knows nested, aligned and dense")
