"""Many submodels of one small network trained at once, each with weights of its own, as one batched computation.

M copies of an elastic `nn.Sequential` are tensors with a leading axis M; a step is one batched product per layer.
Activations are (M, channels, height, width, N), so that unfolding copies runs of N numbers: with N first, two thirds of
a step were copies.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.distill.schedule import scheduled_rate
from flexrank.nn.elastic import NestedConv2d, NestedLayer, NestedLinear


class StackedNetwork(nn.Module):
    """M submodels of `model`, each at ranks of its own: images (N, C, H, W) to logits (M, N, classes).

    A submodel's components beyond its rank are zero and get no gradient, so that it is trained as it would be alone.
    """

    def __init__(self, model: nn.Sequential, ranks: Sequence[Sequence[int]]):
        super().__init__()
        self.steps = [(type(module), getattr(module, "geometry", None)) for module in model]
        for module in model:
            plain = isinstance(module, NestedLinear | nn.ReLU | nn.Flatten)
            if not plain and not (isinstance(module, NestedConv2d) and module.geometry[3:] == ((0, 0), (1, 1))):
                raise TypeError(f"{module} cannot be stacked: layers without padding or dilation, ReLU, Flatten")
        self.u, self.v, self.bias = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        self.masks: list[Tensor] = []
        layers = [module for module in model if isinstance(module, NestedLayer)]
        for layer, own in zip(layers, torch.tensor(ranks).T, strict=True):
            mask = (torch.arange(layer.max_rank) < own[:, None]).float()[:, :, None]  # (M, k, 1)
            assert layer.bias is not None
            self.masks.append(mask)
            self.u.append(layer.u.detach() * mask)  # (M, k, m)
            self.v.append(layer.v.detach() * mask)  # (M, k, n)
            self.bias.append(layer.bias.detach().repeat(len(own), 1)[:, :, None])  # (M, m, 1)

    @torch.no_grad()
    def randomise_(self, seed: int) -> None:
        """Fresh weights: the entries of each product U_r Vᵀ_r vary as torch's own initialisation of a layer does."""
        generator = torch.Generator().manual_seed(seed)
        for u, v, bias, mask in zip(self.u, self.v, self.bias, self.masks, strict=True):
            inputs = v.shape[2]
            scale = (1 / (3 * inputs * mask.sum(1, keepdim=True))) ** 0.25  # (M, 1, 1)
            for factor in (u, v):
                factor.copy_(torch.randn(factor.shape[1:], generator=generator) * scale * mask)
            bias.copy_((torch.rand(bias.shape[1:], generator=generator) * 2 - 1) / math.sqrt(inputs))

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        layers = iter(zip(self.u, self.v, self.bias, strict=True))
        values = images.permute(1, 2, 3, 0).unsqueeze(0)  # (1, C, H, W, N): shared until the first layer
        for kind, geometry in self.steps:
            if kind is nn.ReLU:
                values = values.relu()
            elif kind is nn.Flatten:
                values = values.flatten(1, -2)
            else:
                u, v, bias = next(layers)
                weight = u.transpose(1, 2) @ v  # (M, m, n)
                values = _linear(values, weight, bias) if geometry is None else _conv(values, weight, bias, geometry)
        return values.transpose(1, 2)


def _linear(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, weight, values.expand(len(weight), -1, -1))


def _conv(values: Tensor, weight: Tensor, bias: Tensor, geometry: Any) -> Tensor:
    patches = _Unfold.apply(values, geometry.kernel_size, geometry.stride)  # (1 or M, n, H'·W'·N)
    if len(patches) == 1:  # all read the same images: one product for all submodels
        output = (weight.flatten(0, 1) @ patches[0]).unflatten(0, weight.shape[:2]) + bias
    else:
        output = torch.baddbmm(bias, weight, patches)
    return output.unflatten(2, (*_out_size(values, geometry.kernel_size, geometry.stride), values.shape[-1]))


def _out_size(values: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> tuple[int, int]:
    (height, width), (rows, columns), (down, right) = values.shape[2:4], kernel, stride
    return (height - rows) // down + 1, (width - columns) // right + 1


class _Unfold(torch.autograd.Function):
    """(M, C, H, W, N) to patches (M, C·h·w, H'·W'·N). torch's own backward of `unfold` is three times slower here."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        ctx.kernel, ctx.stride, ctx.shape = kernel, stride, values.shape
        patches = values.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        return patches.permute(0, 1, 5, 6, 2, 3, 4).reshape(len(values), values.shape[1] * math.prod(kernel), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows, columns), (down, right) = ctx.kernel, ctx.stride
        total = gradient.new_zeros(ctx.shape)
        size = _out_size(total, ctx.kernel, ctx.stride)
        parts = gradient.reshape(*ctx.shape[:2], rows, columns, *size, ctx.shape[-1])
        for row in range(rows):
            for column in range(columns):
                window = total[:, :, row : row + down * size[0] : down, column : column + right * size[1] : right]
                window += parts[:, :, row, column]
        return total, None, None


def draw_rows(count: int, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """The rows of each step's batch: of a new permutation whenever the last has too few left."""
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < batch:
            order = torch.randperm(count, generator=generator)
        rows, order = order[:batch], order[batch:]
        yield rows


def train_stacked_(
    network: StackedNetwork, images: Tensor, targets: Tensor, *, steps: int, learning_rate: float, warmup_steps: int,
    batch: int, seed: int
) -> None:  # fmt: skip
    """Trains every submodel in place on the teacher's logits (N, classes), by AdamW with warm-up and a cosine schedule.

    All submodels see the same batches, drawn by the seed; their losses are added up, so that none feels another.
    """
    optimizer = torch.optim.AdamW(network.parameters(), learning_rate, weight_decay=0.0, fused=True)
    for step, rows in enumerate(draw_rows(len(images), batch, steps, seed)):
        optimizer.param_groups[0]["lr"] = scheduled_rate(step, steps, learning_rate, warmup_steps, 0.0)
        student = network(images[rows]).log_softmax(-1)
        teacher = targets[rows].log_softmax(-1).expand_as(student)
        optimizer.zero_grad(set_to_none=True)
        (functional.kl_div(student, teacher, log_target=True, reduction="sum") / batch).backward()
        optimizer.step()
