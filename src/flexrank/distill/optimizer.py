"""AdamW in the precision that memory allows: 16, 10, 8 or 6 bytes per trained parameter, gradients included."""

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
#: The learning rate of the vectors of the size with the largest loss, over that of all else: they get few of the steps.
VECTORS_RATE = 4.0
#: Loggers that warn, when torchao is imported, about kernels for other devices and deprecations inside it.
LOUD = "torchao", "torch.utils._pytree"


def require_known(name: str) -> None:
    """Raises FlexrankError unless `name` is that of an optimiser."""
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
    """Returns AdamW, with weight decay on matrices only; a group's `scale` multiplies the scheduled learning rate.

    `adam` holds further settings of AdamW: `betas` and `eps`.

    Weights in bfloat16, and 8-bit states, need torchao's AdamW. It rounds such weights stochastically, so steps
    far below their precision move them on average.
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
        # Last, so unsharded parameters are rounded by the same draws in all processes, whatever the parts' sizes.
        {"params": [one for one in matrices if one in parts], "weight_decay": weight_decay, "scale": 1.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adamw" and all(parameter.dtype is not torch.bfloat16 for parameter in trainable.values()):
        return torch.optim.AdamW(groups, lr=learning_rate, fused=True, **adam)
    kinds = torchao_optimizers()
    kind = kinds.AdamW8bit if name == "adamw_8bit" else kinds._AdamW
    optimizer: torch.optim.Optimizer = kind(groups, lr=learning_rate, bf16_stochastic_round=True, **adam)
    return optimizer


def scale_vectors_(optimizer: torch.optim.Optimizer, model: nn.Module, scales: Callable[[], list[float]]) -> None:
    """Scales the optimiser's steps of each size's vectors by that size's entry of `scales()`."""
    modules = [module for module in model.modules() if isinstance(module, SizeVectors)]
    vectors = [one for module in modules for one in module.parameters()]
    before = list[Tensor]()

    def keep(*_: Any) -> None:
        before[:] = [one.detach().clone() for one in vectors]

    @torch.no_grad()
    def scale(*_: Any) -> None:
        weight = torch.tensor(scales(), device=vectors[0].device)[:, None]  # moved to the device only once
        for one, old in zip(vectors, before, strict=True):
            one.copy_(torch.lerp(old, one, weight.to(one)))

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(scale)


def stochastically_rounded(values: Tensor) -> Tensor:
    """The values in bfloat16, each rounded up or down at random, with the value itself as the mean."""
    rounded: Tensor = torchao_optimizers().quant_utils._fp32_to_bf16_sr(values)
    return rounded


def torchao_optimizers() -> Any:
    """The optimisers of torchao, imported without its warnings about kernels that this machine does not need."""
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
    """Sets the learning rate of every group, multiplied by the group's `scale`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, which must not be replaced
            group["lr"].fill_(rate * group.get("scale", 1.0))
        else:
            group["lr"] = rate * group.get("scale", 1.0)


def update(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Takes the optimiser's step; its random rounding depends on `seed` alone, and torch's random state is restored."""
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.step()
        return
    is_cpu = optimizer.param_groups[0]["params"][0].device.type == "cpu"
    # On a CPU torchao's step would be compiled for every shape, which needs a compiler and takes minutes.
    eager = torch.compiler.set_stance("force_eager") if is_cpu else contextlib.nullcontext()
    with torch.random.fork_rng(range(torch.accelerator.device_count())), eager:  # `manual_seed` seeds all of them
        torch.manual_seed(seed)
        optimizer.step()


def states_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The optimiser's tensors of a parameter by name; an 8-bit state gives its parts, as `state//part`."""
    tensors: dict[str, Tensor] = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if hasattr(value, "__tensor_flatten__"):
            parts, _ = value.__tensor_flatten__()
            tensors |= {f"{key}//{part}": getattr(value, part) for part in parts}
        else:
            tensors[key] = value
    return tensors


def make_states_(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Creates the states of these parameters by taking a step; the caller then overwrites parameters and states."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer, 0)
    optimizer.zero_grad(set_to_none=True)
