"""A layer as its matrix (out × in): the only place that tells layer types apart.

`nn.Linear` stores m × n; GPT-2's `Conv1D` stores n × m; `nn.Conv2d` unfolds to C_out × C_in·h·w. Fused projections
(`c_attn`, `qkv_proj`, `gate_up_proj`) are one matrix.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional


class ConvGeometry(NamedTuple):
    """What a convolution needs beside its matrix."""

    in_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' `Conv1D` (weight in × out), told without importing transformers."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def unsupported_reason(module: nn.Module) -> str | None:
    """Why a layer that holds a matrix cannot be factorised; None where it can, or holds none."""
    if isinstance(module, nn.Conv2d):
        if type(module) is not nn.Conv2d:  # it may standardise its weight, or pad, in a forward of its own
            return f"{type(module).__name__} is a Conv2d of its own kind"
        if module.groups != 1:
            return f"convolution with {module.groups} groups"
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return f"convolution with padding {module.padding!r}, mode {module.padding_mode!r}"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, (nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d, nn.Bilinear, nn.MultiheadAttention)):
        return f"{type(module).__name__} is not supported"
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return f"{type(module).__name__} is a Linear of its own kind"
    return None


def is_layer(module: nn.Module) -> bool:
    """Whether the module is a layer that can be factorised."""
    if unsupported_reason(module) is not None:
        return False
    return isinstance(module, (nn.Linear, nn.Conv2d)) or is_conv1d(module)


def matrix_shape(layer: nn.Module) -> tuple[int, int]:
    """(m, n) = (outputs, inputs) of the layer's matrix."""
    weight = weight_matrix(layer)
    return weight.shape[0], weight.shape[1]


def weight_matrix(layer: nn.Module) -> Tensor:
    """The layer's matrix (m, n): a view of its weight, in its dtype.

    Raises:
        TypeError: the module is no layer with a matrix.
    """
    if isinstance(layer, nn.Linear):
        return layer.weight
    if isinstance(layer, nn.Conv2d):
        return layer.weight.flatten(1)
    if is_conv1d(layer):
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return weight.T
    raise TypeError(f"{type(layer).__name__} has no matrix")


def bias_of(layer: nn.Module) -> Tensor | None:
    """The layer's bias (m,), or None."""
    bias = layer.bias
    return bias if isinstance(bias, Tensor) else None


def conv_geometry(layer: nn.Module) -> ConvGeometry | None:
    """The geometry of a convolution, dense or elastic; None for a linear layer."""
    elastic = getattr(layer, "geometry", None)
    if isinstance(elastic, ConvGeometry):
        return elastic
    if not isinstance(layer, nn.Conv2d):
        return None
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    kernel, stride, padding, dilation = ((int(pair[0]), int(pair[1])) for pair in pairs)
    return ConvGeometry(layer.in_channels, kernel, stride, padding, dilation)


def input_rows(layer: nn.Module, inputs: Tensor) -> Tensor:
    """The layer's input as the rows (tokens, n) that its matrix multiplies."""
    geometry = conv_geometry(layer)
    if geometry is None:
        return inputs.reshape(-1, inputs.shape[-1])
    patches = functional.unfold(
        inputs if inputs.ndim == 4 else inputs.unsqueeze(0),
        geometry.kernel_size,
        dilation=geometry.dilation,
        padding=geometry.padding,
        stride=geometry.stride,
    )
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])


def output_rows(layer: nn.Module, outputs: Tensor) -> Tensor:
    """The layer's output as rows (tokens, m), in the order of `input_rows`."""
    if conv_geometry(layer) is None:
        return outputs.reshape(-1, outputs.shape[-1])
    outputs = outputs if outputs.ndim == 4 else outputs.unsqueeze(0)
    return outputs.permute(0, 2, 3, 1).reshape(-1, outputs.shape[1])


def masked_rows(rows: Tensor, mask: Tensor | None) -> Tensor:
    """The rows of real tokens: those where the (B, T) mask is set, where there is one row for each of its entries.

    Rows of any other number (a pooled vector for each sentence, patches of an image) are all kept.
    """
    if mask is None or rows.shape[0] != mask.numel():
        return rows
    return rows[mask.reshape(-1).to(rows.device)]
