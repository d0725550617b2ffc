"""A tensor of which every process holds a part, whole where it is used; gradients go back to the parts, summed."""

from typing import Any

import torch
from torch import Tensor

from flexrank import processes


class _Gathered(torch.autograd.Function):
    """Forward an all-gather, backward a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, size: int) -> Tensor:  # noqa: D102
        ctx.dim = dim
        return processes.gather(part, dim, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return processes.scatter_sum(gradient, ctx.dim), None, None


def gathered(part: Tensor, dim: int, size: int) -> Tensor:
    """The whole tensor, of `size` along `dim`, from the parts that `processes.part` gives; all processes must ask.

    Its gradient, of which each process has that of its own loss, goes back to the parts as the sum over processes.
    """
    whole: Tensor = _Gathered.apply(part, dim, size)
    return whole
