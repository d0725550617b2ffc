"""Finding a model's stack of blocks, and replacing the forwards of modules for a while."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn


def block_stack(model: nn.Module, layers: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """The named children of the ModuleList or Sequential that holds most of these layers; empty if there is none."""
    names = list(layers)

    def held(stack: list[tuple[str, nn.Module]]) -> int:
        return sum(layer.startswith(f"{block}.") for layer in names for block, _ in stack)

    stacks = [
        [(f"{name}.{child}".removeprefix("."), block) for child, block in module.named_children()]
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    return max((stack for stack in stacks if len(stack) > 1 and held(stack)), key=held, default=[])


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside the block these modules run the given functions in place of their forwards."""
    own = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, before in own.items():
            module.__dict__.pop("forward")
            if before is not None:
                module.__dict__["forward"] = before
