"""AdamW in the precision that memory allows: 16, 10, 8 or 6 bytes for each trained number, gradients included."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flexrank.errors import FlexrankError
from flexrank.nn.elastic import SizeVectors
from flexrank.nn.sharding import sharded_parameters

#: `adamw_8bit` keeps its states in blocks of 8-bit codes (torchao), at a quarter of float32's memory.
OptimizerName = Literal["adamw", "adamw_8bit"]
#: The learning rate of the vectors of the size with the greatest loss, over that of all else: few steps are theirs.
VECTORS_RATE = 4.0
#: Loggers that warn, as torchao is imported, of kernels for other devices and of deprecations inside it.
LOUD = "torchao", "torch.utils._pytree"


def require_known(name: str) -> None:
    """Raises FlexrankError unless it is an optimiser's name."""
    if name not in ("adamw", "adamw_8bit"):
        raise FlexrankError(f"optimizer {name!r} is unknown; it is adamw or adamw_8bit")


def make_optimizer(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    learning_rate: float,
    weight_decay: float = 0.0,
    name: OptimizerName = "adamw",
    **adam: Any,
) -> torch.optim.Optimizer:
    """AdamW, with decay of matrices alone; `scale` of a group is what a schedule's rate is multiplied by there.

    `adam` are further settings of AdamW: `betas` and `eps`.

    Weights in bfloat16, and states in 8 bits, need torchao's. It rounds such weights up or down by chance: steps far
    below their precision move them in the mean.
    """
    require_known(name)
    modules = [module for module in model.modules() if isinstance(module, SizeVectors)]
    own = {parameter for module in modules for parameter in module.parameters()}
    matrices, vectors = (
        [one for one in trainable.values() if one not in own and (one.ndim > 1) == wanted] for wanted in (True, False)
    )
    parts = sharded_parameters(model)
    groups: list[dict[str, Any]] = [
        {"params": [one for one in matrices if one not in parts], "weight_decay": weight_decay, "scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "scale": 1.0},
        {"params": [one for one in trainable.values() if one in own], "weight_decay": 0.0, "scale": VECTORS_RATE},
        # Last: what is whole in all processes is so rounded by the same draws, however large their parts are.
        {"params": [one for one in matrices if one in parts], "weight_decay": weight_decay, "scale": 1.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adamw" and all(parameter.dtype is not torch.bfloat16 for parameter in trainable.values()):
        return torch.optim.AdamW(groups, lr=learning_rate, fused=True, **adam)
    kinds = torchao_optimizers()
    kind = kinds.AdamW8bit if name == "adamw_8bit" else kinds._AdamW
    optimizer: torch.optim.Optimizer = kind(groups, lr=learning_rate, bf16_stochastic_round=True, **adam)
    return optimizer


def scale_vectors_(optimizer: torch.optim.Optimizer, model: nn.Module, shares: Callable[[], list[float]]) -> None:
    """Lets the optimiser's steps move each size's vectors by a share of their way: `shares()` has one for each size."""
    modules = [module for module in model.modules() if isinstance(module, SizeVectors)]
    vectors = [one for module in modules for one in module.parameters()]
    before = list[Tensor]()

    def keep(*_: Any) -> None:
        before[:] = [one.detach().clone() for one in vectors]

    @torch.no_grad()
    def scale(*_: Any) -> None:
        share = torch.tensor(shares(), device=vectors[0].device)[:, None]  # to the device but once
        for one, old in zip(vectors, before, strict=True):
            one.copy_(torch.lerp(old, one, share.to(one)))

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(scale)


def torchao_optimizers() -> Any:
    """The optimisers of torchao, imported without its warnings of kernels that this machine has no use for."""
    levels = {log: log.level for log in map(logging.getLogger, LOUD)}
    for log in levels:
        log.setLevel(logging.ERROR)
    try:
        import torchao.optim
    finally:
        for log, level in levels.items():
            log.setLevel(level)
    return torchao.optim


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group, scaled as the group says."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, which may not be exchanged
            group["lr"].fill_(rate * group.get("scale", 1.0))
        else:
            group["lr"] = rate * group.get("scale", 1.0)


def update(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Takes the optimiser's step; what it draws to round comes from `seed` alone, and torch's own state is left."""
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.step()
        return
    device = optimizer.param_groups[0]["params"][0].device
    is_cpu = device.type == "cpu"
    # On a CPU torchao's step would be compiled for every shape, which needs a compiler and takes minutes.
    eager = torch.compiler.set_stance("force_eager") if is_cpu else contextlib.nullcontext()
    with torch.random.fork_rng([] if is_cpu else [device]), eager:
        torch.manual_seed(seed)
        optimizer.step()


def states_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The optimiser's tensors of a parameter by name; of a state in 8 bits its parts, named after it."""
    tensors: dict[str, Tensor] = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if hasattr(value, "__tensor_flatten__"):
            parts, _ = value.__tensor_flatten__()
            tensors |= {f"{key}//{part}": getattr(value, part) for part in parts}
        else:
            tensors[key] = value
    return tensors


def make_states_(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Takes a step of these parameters, which makes their states: all of it is to be filled with other values."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer, 0)
    optimizer.zero_grad(set_to_none=True)
