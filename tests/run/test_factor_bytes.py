"""What the dry run counts for decomposing a layer against the tensors that are there meanwhile."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexrank.calibrate import LayerMoment
from flexrank.decompose import _decompose
from flexrank.run.dry_run.moments import factor_bytes


class Live(TorchDispatchMode):
    """The most bytes of tensors that operations inside the block have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._storages = 0, dict[StorageWeakRef, int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(one.untyped_storage()) for one in tree_leaves(args) if isinstance(one, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and StorageWeakRef(tensor.untyped_storage()) not in given:
                self._storages[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        self._storages = {one: size for one, size in self._storages.items() if not one.expired()}
        self.most = max(self.most, sum(self._storages.values()))
        return result


@pytest.mark.parametrize("method", ["datasvd", "fisher"])
@pytest.mark.parametrize("shape", [(64, 1024), (32, 2048), (1024, 64)])
def test_long_matrices_take_the_bytes_that_are_counted(shape: tuple[int, int], method: Any) -> None:
    """At most 10 % off where LAPACK's workspace, of the short side, is little."""
    m, n = shape
    rows = torch.randn(40, max(shape), dtype=torch.float64)
    moment, gradient = rows[:, :n].T @ rows[:, :n], rows[:, :m].T @ rows[:, :m]
    weight = torch.randn(shape)
    entry = LayerMoment("input", moment)
    if m < n:
        entry = LayerMoment("output", weight.double() @ moment @ weight.double().T, mean_square=1.0)
    entry.gradient_moment = gradient
    with Live() as live:
        _decompose(weight, entry, method)
    assert live.most == pytest.approx(factor_bytes(shape, method, entry.side == "input"), rel=0.1)
