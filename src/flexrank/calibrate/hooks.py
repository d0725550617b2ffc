"""Hooks that are removed when their `with` block ends, and the order in which a model's modules run."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

#: A module, and whether it returns (otherwise it is called).
Event = tuple[nn.Module, bool]


class Hooks(contextlib.ExitStack):
    """Holds forward hooks for the duration of a `with` block, and removes all of them whatever happens."""

    def remove_on_exit(self, handle: RemovableHandle) -> None:
        """Adds a hook to remove when the block ends."""
        self.callback(handle.remove)

    def on_forward(self, layers: Mapping[Any, nn.Module], callback: Callable[[Any, Tensor, Tensor], None]) -> None:
        """Calls `callback(name, input, output)` after each forward of each layer."""

        def hook(name: Any, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            callback(name, args[0] if args else next(iter(kwargs.values())), output)

        for name, layer in layers.items():
            self.remove_on_exit(layer.register_forward_hook(functools.partial(hook, name), with_kwargs=True))


@contextlib.contextmanager
def traced(model: nn.Module) -> Iterator[list[list[Event]]]:
    """Yields a list; each forward of the model inside the block appends the list of its events, in order."""
    forwards: list[list[Event]] = []

    def note(returns: bool, module: nn.Module, *_: object) -> None:
        if not forwards:  # a part of the model is called on its own, so forwards cannot be told apart
            forwards.append([])
        forwards[-1].append((module, returns))

    with Hooks() as hooks:
        hooks.remove_on_exit(model.register_forward_pre_hook(lambda *_: forwards.append([])))
        for module in model.modules():
            if module is not model:
                hooks.remove_on_exit(module.register_forward_pre_hook(functools.partial(note, False)))
                hooks.remove_on_exit(module.register_forward_hook(functools.partial(note, True)))
        yield forwards
