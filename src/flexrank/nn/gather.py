"""Tensors sharded over processes: gathered where they are used, with gradients summed back into the parts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexrank import processes


def part(whole: Tensor, dim: int) -> Tensor:
    """This process's part of a tensor along a dimension; all but the last parts are equally long, as in torch.chunk."""
    size, step = whole.shape[dim], _step(whole.shape[dim])
    start, end = (min(size, step * number) for number in (processes.number(), processes.number() + 1))
    return whole.narrow(dim, start, end - start)


def gathered(part: Tensor, dim: int, size: int) -> Tensor:
    """The full tensor, of `size` along `dim`, from each process's `part`; all processes must call this.

    Each process computes the gradient of its own loss; the parts get the sum of these gradients over processes.
    """
    whole: Tensor = _Gathered.apply(part, dim, size)
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, size: int) -> Tensor:  # noqa: D102
        ctx.dim = dim
        own = _padded(part, dim, _step(size))
        every = own.new_empty(processes.count(), *own.shape)
        with processes.raising_process_lost():
            dist.all_gather_into_tensor(every.flatten(0, 1), own)
        return every.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        return scatter_sum(gradient, ctx.dim), None, None


def scatter_sum(whole: Tensor, dim: int) -> Tensor:
    """This process's part, along a dimension, of the sum of all processes' tensors; half precision sums in float32."""
    count, step = processes.count(), _step(whole.shape[dim])
    wide = _padded(whole, dim, step * count).to(torch.promote_types(whole.dtype, torch.float32))
    every = wide.unflatten(dim, (count, step)).movedim(dim, 0).contiguous()
    total = torch.empty_like(every[0])
    with processes.raising_process_lost():
        dist.reduce_scatter_tensor(total, every.flatten(0, 1))
    return total.narrow(dim, 0, part(whole, dim).shape[dim]).to(whole.dtype)


def _step(size: int) -> int:
    """The length of each process's part of `size` entries; the last parts may be shorter."""
    return -(-size // processes.count())


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor, contiguous and padded with zeros to `size` along `dim`."""
    missing = list(tensor.shape)
    missing[dim] = size - missing[dim]
    return torch.cat([tensor, tensor.new_zeros(missing)], dim) if missing[dim] else tensor.contiguous()
