"""What a forward reveals about a model: which layers read the same tensor, and whether its blocks run in order."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flexrank.calibrate.hooks import Event, Hooks
from flexrank.errors import FlexrankError
from flexrank.nn.matrix import conv_geometry

#: Identifies a tensor and its values: storage, offset, shape, strides, and number of in-place operations. The storage
#: is not kept in memory, and no later one gets its identity.
Version = tuple[StorageWeakRef, int, torch.Size, tuple[int, ...], int]


def version_of(tensor: Tensor) -> Version:
    """The tensor's current version."""
    storage, place = StorageWeakRef(tensor.untyped_storage()), int(tensor.storage_offset())
    return storage, place, tensor.shape, tensor.stride(), 0 if tensor.is_inference() else tensor._version


@torch.no_grad()
def find_groups(run: Callable[[], object], layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """`groups_of`, where every layer must run."""
    groups = groups_of(run, layers)
    require_all_run(layers, [name for group in groups for name in group])
    return groups


def groups_of(run: Callable[[], object], layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """Groups the layers that run in `run()` by the tensors they read, and by geometry, in call order."""
    inputs: dict[str, list[Version]] = {}

    def note(name: str, tensor: Tensor, _: Tensor) -> None:
        inputs.setdefault(name, []).append(version_of(tensor))

    with Hooks() as hooks:
        hooks.on_forward(layers, note)
        run()
    groups: dict[Any, list[str]] = {}
    for name, versions in inputs.items():
        groups.setdefault((*versions, conv_geometry(layers[name])), []).append(name)
    return list(groups.values())


def require_all_run(layers: Iterable[str], called: Container[str]) -> None:
    """Raises FlexrankError if a layer is not among those that were called."""
    silent = [name for name in layers if name not in called]
    if silent:
        raise FlexrankError(f"layer {silent[0]!r} did not run on the first batch; exclude it (unused: {len(silent)})")


def runs_in_order(forwards: Iterable[Sequence[Event]], blocks: Sequence[nn.Module]) -> bool:
    """Whether every forward runs each block once, one after the other, in this order."""
    wanted = [(block, returns) for block in blocks for returns in (False, True)]
    chosen = set(wanted)
    return all([event for event in forward if event in chosen] == wanted for forward in forwards)
