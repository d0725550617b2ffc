"""The matrix (outputs × inputs) of a layer: the only module that distinguishes layer types.

`nn.Linear` stores m × n, GPT-2's `Conv1D` stores n × m, and `nn.Conv2d` unfolds to C_out × C_in·h·w. A fused projection
(`c_attn`, `qkv_proj`, `gate_up_proj`) is one matrix.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

#: The dtypes of weights that can be factorised; a quantised weight claims to have one of them.
FACTORISED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ConvGeometry(NamedTuple):
    """What a convolution has besides its matrix and bias."""

    in_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def filters(self, matrix: Tensor) -> Tensor:
        """The matrix (m, C_in·h·w) as filters (m, C_in, h, w)."""
        return matrix.unflatten(1, (self.in_channels, *self.kernel_size))

    def layer(self, filters: int, *, bias: bool, device: Any, dtype: Any) -> nn.Conv2d:
        """A new convolution with this geometry and number of filters."""
        channels, kernel, stride, padding, dilation = self
        return nn.Conv2d(channels, filters, kernel, stride, padding, dilation, bias=bias, device=device, dtype=dtype)

    def positions(self, x: Tensor) -> int:
        """The number of output positions over images x (…, C, H, W), which count as tokens."""
        count = math.prod(x.shape[:-3])
        for size, kernel, stride, padding, dilation in zip(x.shape[-2:], *self[1:], strict=True):
            count *= (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        return count


class ConvAttributes:
    """The attributes of an `nn.Conv2d` that model code may read, of a layer that takes its place."""

    groups, padding_mode = 1, "zeros"

    in_channels = property(lambda self: self.geometry.in_channels)
    out_channels = property(lambda self: self.matrix_shape[0])
    kernel_size = property(lambda self: self.geometry.kernel_size)
    stride = property(lambda self: self.geometry.stride)
    padding = property(lambda self: self.geometry.padding)
    dilation = property(lambda self: self.geometry.dilation)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' `Conv1D` (weight in × out); transformers is not imported."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def unsupported_reason(module: nn.Module) -> str | None:
    """Why a layer that holds a matrix cannot be factorised; None if it can, or if it holds no matrix."""
    for kind in (nn.Conv2d, nn.Linear):  # a subclass's own forward may standardise the weight, or pad
        if isinstance(module, kind) and type(module) is not kind:
            return f"{type(module).__name__} is a {kind.__name__} of its own kind"
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return f"convolution with {module.groups} groups"
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return f"convolution with padding {module.padding!r}, mode {module.padding_mode!r}"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, (nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d, nn.Bilinear, nn.MultiheadAttention)):
        return f"{type(module).__name__} is not supported"
    return None


def is_layer(module: nn.Module) -> bool:
    """Whether the module is a layer that can be factorised."""
    has_matrix = isinstance(module, (nn.Linear, nn.Conv2d)) or is_conv1d(module)
    return has_matrix and unsupported_reason(module) is None


def matrix_shape(layer: nn.Module) -> tuple[int, int]:
    """(m, n) = (outputs, inputs) of the layer's matrix."""
    m, n = weight_matrix(layer).shape
    return m, n


def weight_matrix(layer: nn.Module) -> Tensor:
    """The layer's matrix (m, n): a view of its weight, in its dtype. Raises TypeError for any other module."""
    if isinstance(layer, nn.Linear):
        return layer.weight
    if isinstance(layer, nn.Conv2d):
        return layer.weight.flatten(1)
    if is_conv1d(layer):
        assert isinstance(layer.weight, Tensor)
        return layer.weight.T
    raise TypeError(f"{type(layer).__name__} has no matrix")


def bias_of(layer: nn.Module) -> Tensor | None:
    """The layer's bias (m,), or None."""
    return layer.bias if isinstance(layer.bias, Tensor) else None


def conv_geometry(layer: nn.Module) -> ConvGeometry | None:
    """The geometry of a convolution, dense or elastic; None for a linear layer."""
    if not isinstance(layer, nn.Conv2d):
        geometry = getattr(layer, "geometry", None)
        return geometry if isinstance(geometry, ConvGeometry) else None
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return ConvGeometry(layer.in_channels, *((int(pair[0]), int(pair[1])) for pair in pairs))


def input_rows(layer: nn.Module, inputs: Tensor) -> Tensor:
    """The layer's input as the rows (tokens, n) that its matrix multiplies."""
    geometry = conv_geometry(layer)
    if geometry is None:
        return inputs.reshape(-1, inputs.shape[-1])
    images = inputs if inputs.ndim == 4 else inputs.unsqueeze(0)
    _, kernel, stride, padding, dilation = geometry
    patches = functional.unfold(images, kernel, dilation=dilation, padding=padding, stride=stride)
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])


def output_rows(layer: nn.Module, outputs: Tensor) -> Tensor:
    """The layer's output as rows (tokens, m), in the order of `input_rows`."""
    rows = outputs if conv_geometry(layer) is None else outputs.movedim(-3, -1)
    return rows.reshape(-1, rows.shape[-1])


def match_mask_layout(masks: Iterable[Tensor], values: Tensor) -> list[Tensor]:
    """The (B, T) masks, transposed if the values (T, B, n) have time first, which is only visible if B is not T."""
    return [mask.T if values.shape[:-1] == mask.T.shape != mask.shape else mask for mask in masks]


def masked_rows(rows: Tensor, masks: Iterable[Tensor]) -> Tensor:
    """The rows of real tokens, by the first (B, T) mask that has one entry for each row.

    If no mask has as many entries (pooled vectors, patches of an image), all rows are returned.
    """
    for mask in masks:
        if len(rows) == mask.numel():
            return rows[mask.reshape(-1).to(rows.device)]
    return rows
