"""Counts what a consolidation step saves in its forward pass for its backward pass, on tensors without values."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flexrank.calibrate import Hooks
from flexrank.data.batches import call_model
from flexrank.nn.blocks import block_stack
from flexrank.nn.switch import nested_layers
from flexrank.run.config import RunConfig


def kept_bytes(student: nn.Module, sample: Mapping[str, Tensor], config: RunConfig) -> int:
    """Bytes that autograd saves in a batch's forward pass, except parameters, in the dtype of the weights.

    With gradient checkpointing a block saves its input; all else that it saves is in memory for one block at a time.
    Autocast, which saves less, is not counted: meta tensors have none.
    """
    stack = [block for _, block in block_stack(student, nested_layers(student))]
    repeats = stack if config.distillation.gradient_checkpointing else []
    kept = _Kept(student)
    size = config.distillation.batch_size
    batch = {key: value.new_zeros((size, *value.shape[1:])) for key, value in sample.items()}
    with Hooks() as hooks, _Fused(), torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
        for block in repeats:
            enter = functools.partial(kept.enter, block)
            hooks.remove_on_exit(block.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.remove_on_exit(block.register_forward_hook(lambda *_: kept.leave()))
        call_model(student, batch)
    return kept.sizes[None] + max((size for block, size in kept.sizes.items() if block is not None), default=0)


class _Kept:
    """Saved bytes by block; None stands for what is outside the blocks, and for the blocks' inputs."""

    def __init__(self, model: nn.Module):
        self.sizes: dict[nn.Module | None, int] = {None: 0}
        self._block: nn.Module | None = None
        # Meta tensors have no address; their storages tell them apart as long as all are held.
        self._held: dict[int, Any] = {p.untyped_storage()._cdata: p for p in model.parameters()}

    def enter(self, block: nn.Module, _: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else next(iter(kwargs.values()))
        self.note(hidden)
        self._block = block
        self.sizes[block] = 0

    def leave(self) -> None:
        self._block = None

    def note(self, tensor: Tensor) -> Tensor:
        """Counts a tensor's memory once."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            self._held[storage._cdata] = tensor
            self.sizes[self._block] += storage.nbytes()
        return tensor


class _Fused(TorchFunctionMode):
    """Makes attention save what devices' fused kernels save; the meta device would save whole matrices of scores."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        query, key, value = args[:3]
        return _Attention.apply(query, key, value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError
