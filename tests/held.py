"""Tensors that are in memory beside those from before, found among all of Python's objects."""

import gc
from collections.abc import Callable
from typing import Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


class Held:
    """Inside the block, an evaluator that notes bytes of new tensors as each evaluation begins and as it ends."""

    def __init__(self, evaluate: Callable[[nn.Module], float]):
        self._evaluate = evaluate
        self.kept: list[int] = []

    def __enter__(self) -> Self:
        self._before = live_storages()  # held, so that none of their addresses is given to another
        gc.freeze()  # what there is now is not looked through again
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is looked through again later either: conftest.py has frozen what libraries hold."""

    def evaluate(self, model: nn.Module) -> float:
        self._note()
        value = self._evaluate(model)
        self._note()
        return value

    @property
    def most(self) -> int:
        return max(self.kept)

    def _note(self) -> None:
        new = live_storages()
        self.kept.append(sum(new[place].nbytes() for place in new.keys() - self._before.keys()))


def live_storages() -> dict[int, torch.UntypedStorage]:
    """The memory of every tensor, by its address.

    What exporters trace with, and may keep, holds none; nor does what wraps other tensors, which are found themselves.
    """
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not holds_nothing(one)]
    return {(storage := tensor.untyped_storage()).data_ptr(): storage for tensor in tensors}


def holds_nothing(tensor: torch.Tensor) -> bool:
    if hasattr(type(tensor), "__tensor_flatten__"):  # such as torchao's
        return True
    return tensor.is_meta or isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor)
