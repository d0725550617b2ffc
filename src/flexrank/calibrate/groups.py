"""Which layers read the same tensor."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flexrank.calibrate.hooks import Hooks
from flexrank.data.batches import Batch, call_model, model_device, to_device
from flexrank.errors import FlexrankError
from flexrank.nn.matrix import conv_geometry

#: A tensor with its values: storage, place in it, and the number of operations in place. The storage is not held; when
#: nobody else holds it any more, no other storage gets its identity.
Version = tuple[StorageWeakRef, int, torch.Size, tuple[int, ...], int]


def version_of(tensor: Tensor) -> Version:
    """The tensor's version now."""
    version = 0 if tensor.is_inference() else tensor._version
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), version


@torch.no_grad()
def find_groups(model: nn.Module, batch: Batch, layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """Layers grouped by the tensors they read in one batch, each group in the order of its calls.

    Raises:
        FlexrankError: a layer does not run.
    """
    inputs, calls = RecentInputs(), dict[str, list[int]]()

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


class RecentInputs:
    """Numbers the tensors that layers read, and knows the last few of them again.

    Layers that share a tensor read it soon after each other (q, k, v; gate, up). No tensor is kept in memory.
    """

    def __init__(self, known: int = 8):
        self._known, self._count = known, 0
        self._numbers: dict[Version, int] = {}

    def number(self, tensor: Tensor) -> int:
        """The number of this tensor; an operation in place gives it another."""
        version = version_of(tensor)
        number = self._numbers.pop(version, None)
        if number is None:
            number = self._count = self._count + 1
        self._numbers[version] = number  # the tensor read last is forgotten last
        if len(self._numbers) > self._known:
            del self._numbers[next(iter(self._numbers))]
        return number
