"""A tensor of which every process holds a part, whole where it is used; gradients go back to the parts, summed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexrank import processes


def part(whole: Tensor, dim: int) -> Tensor:
    """This process's part of a tensor, along a dimension; all are as long, but for the last ones, as torch.chunk's."""
    size, step = whole.shape[dim], _step(whole.shape[dim])
    start, end = (min(size, step * number) for number in (processes.number(), processes.number() + 1))
    return whole.narrow(dim, start, end - start)


def gathered(part: Tensor, dim: int, size: int) -> Tensor:
    """The whole tensor, of `size` along `dim`, from each process's `part`; all processes must ask.

    Its gradient, of which each process has that of its own loss, goes back to the parts as the sum over processes.
    """
    whole: Tensor = _Gathered.apply(part, dim, size)
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, size: int) -> Tensor:  # noqa: D102
        ctx.dim = dim
        own = _padded(part, dim, _step(size))
        every = own.new_empty(processes.count(), *own.shape)
        with processes.talking():
            dist.all_gather_into_tensor(every.flatten(0, 1), own)
        return every.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return scatter_sum(gradient, ctx.dim), None, None


def scatter_sum(whole: Tensor, dim: int) -> Tensor:
    """This process's part of the sum of all processes' tensors, along a dimension; half precision in float32."""
    count, step = processes.count(), _step(whole.shape[dim])
    wide = _padded(whole, dim, step * count).to(torch.promote_types(whole.dtype, torch.float32))
    every = wide.unflatten(dim, (count, step)).movedim(dim, 0).contiguous()
    total = torch.empty_like(every[0])
    with processes.talking():
        dist.reduce_scatter_tensor(total, every.flatten(0, 1))
    return total.narrow(dim, 0, part(whole, dim).shape[dim]).to(whole.dtype)


def _step(size: int) -> int:
    """How long each process's part of so many entries is; those of the last ones may be shorter."""
    return -(-size // processes.count())


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor, contiguous and with zeros up to a size."""
    missing = list(tensor.shape)
    missing[dim] = size - missing[dim]
    return torch.cat([tensor, tensor.new_zeros(missing)], dim) if missing[dim] else tensor.contiguous()
