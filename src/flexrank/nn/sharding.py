"""Models sharded over processes: elastic layers by flexrank's own gathers, blocks of a base model by FSDP2.

An elastic layer's factors are sharded by columns, `u` (k × m) along m and `v` (k × n) along n, so any prefix of
components can be gathered by itself: at rank r that is r·(m + n) numbers, whatever k is.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.errors import FlexrankError
from flexrank.nn.blocks import block_stack
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.gather import part
from flexrank.nn.switch import nested_layers

if TYPE_CHECKING:  # these take a second to import
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

ShardDim = tuple[int, int]  #: the dimension along which a tensor is sharded, and its full size there


def shard_(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Shards an elastic model's layers over the processes in place, and moves the model to `device`.

    Layers are gathered as they run, up to the active rank. With one process the model is only moved.
    Use `distill_(…, gradient_checkpointing=True)` so the model's blocks do not keep what they have gathered.
    """
    if processes.count() > 1:
        for layer in nested_layers(model).values():
            for name, (dim, _) in layer.shard_dims().items():
                whole = getattr(layer, name)
                own = part(whole.detach(), dim).to(device, copy=True)
                setattr(layer, name, nn.Parameter(own, whole.requires_grad))
            layer.is_sharded = True
    model.to(device)


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's elastic layers are sharded over processes."""
    return any(isinstance(module, NestedLayer) and module.is_sharded for module in model.modules())


def require_whole(model: nn.Module, use: str) -> None:
    """Raises FlexrankError if the model is sharded: then other processes would have to gather the same layers."""
    if is_sharded(model):
        raise FlexrankError(f"{use} takes a whole model, and this one is sharded; load its artefact, or use it before")


def sharded_parameters(model: nn.Module) -> dict[nn.Parameter, ShardDim]:
    """The sharded parameters of the model's elastic layers, and how each is divided."""
    layers = [module for module in model.modules() if isinstance(module, NestedLayer) and module.is_sharded]
    return {getattr(layer, name): shard_dim for layer in layers for name, shard_dim in layer.shard_dims().items()}


def shard_blocks_(model: nn.Module, layers: Any, device: torch.device | str | None = None) -> None:
    """Shards the blocks that hold `layers` over the processes by FSDP2, and moves the model to `device`.

    By default the model stays on its device. A block is gathered as it runs. With one process the model is only moved;
    with several, a model without a stack of blocks raises FlexrankError.
    """
    if processes.count() > 1:
        from torch.distributed.fsdp import fully_shard

        blocks = block_stack(model, layers)
        if not blocks:
            what = f"{type(model).__name__} has no stack of them, so leave sharded out"
            raise FlexrankError(f"a base model is sharded block by block; {what}")
        mesh = _mesh(torch.device(device or next(model.parameters()).device))
        for _, block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    model.to(device)


def as_global(own: Tensor, shard_dim: ShardDim) -> "DTensor":
    """This process's part as a shard of the full tensor, in the same memory, for torch.distributed.checkpoint."""
    from torch.distributed.tensor import DTensor, Shard

    dim, size = shard_dim
    shape = torch.Size((*own.shape[:dim], size, *own.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    placements, mesh = [Shard(dim)], _mesh(own.device)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def _mesh(device: torch.device) -> "DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (processes.count(),))
