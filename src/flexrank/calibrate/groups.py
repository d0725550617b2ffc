"""Which layers read the same tensor, and the hooks that tell."""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from flexrank.data.batches import Batch, call_model, model_device, to_device
from flexrank.errors import FlexrankError
from flexrank.nn.matrix import conv_geometry


class Version(NamedTuple):
    """A tensor as it stood when it was read: an operation in place later gives it another version.

    The storage is known and not held: once nobody else holds it, nobody can read it, and no other gets its identity.
    """

    storage: StorageWeakRef
    place: tuple[int, torch.Size, tuple[int, ...]]
    version: int


class Hooks:
    """Owns forward hooks for the length of a `with` block, and removes every one of them whatever happens."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Hooks":
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def add(self, handle: RemovableHandle) -> None:
        """Owns this hook too."""
        self._handles.append(handle)

    def watch(self, layer: nn.Module, see: Callable[[Tensor, Tensor], None]) -> None:
        """Calls `see(input, output)` after each forward of `layer`."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            see(args[0] if args else next(iter(kwargs.values())), output)

        self.add(layer.register_forward_hook(hook, with_kwargs=True))


@torch.no_grad()
def find_groups(model: nn.Module, batch: Batch, layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """Layers grouped by the very tensors they read in one batch, each group in order of its calls."""
    inputs, calls = Inputs(), dict[str, list[int]]()

    def note(name: str, tensor: Tensor, _: Tensor) -> None:
        calls.setdefault(name, []).append(inputs.number(tensor))

    with Hooks() as hooks:
        for name, layer in layers.items():
            hooks.watch(layer, functools.partial(note, name))
        call_model(model, to_device(batch, model_device(model)))
    silent = [name for name in layers if name not in calls]
    if silent:
        raise FlexrankError(f"layer {silent[0]!r} did not run on the first batch; exclude it (unused: {len(silent)})")
    groups: dict[Any, list[str]] = {}
    for name, numbers in calls.items():
        groups.setdefault((*numbers, conv_geometry(layers[name])), []).append(name)
    return list(groups.values())


class Inputs:
    """Numbers the tensors that layers read. Those who share one read it soon after each other (q, k, v; gate, up).

    Only the last few are known, and none is kept in memory.
    """

    def __init__(self, held: int = 8):
        self._held: collections.deque[tuple[int, Version]] = collections.deque(maxlen=held)
        self._count = 0

    def number(self, tensor: Tensor) -> int:
        """The number of this tensor as it stands: an operation in place makes it another."""
        version = version_of(tensor)
        for place, (number, other) in enumerate(self._held):
            if version == other:
                del self._held[place]
                self._held.append((number, other))  # read again: the last to be let go
                return number
        self._count += 1
        self._held.append((self._count, version))
        return self._count


def version_of(tensor: Tensor) -> Version:
    """The tensor as it stands now."""
    place = (int(tensor.storage_offset()), tensor.shape, tensor.stride())
    return Version(StorageWeakRef(tensor.untyped_storage()), place, 0 if tensor.is_inference() else tensor._version)
