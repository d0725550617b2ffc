"""Which part of a model a process holds; what they compute together is in tests/test_processes.py."""

import pytest
import torch

from flexrank import processes
from flexrank.distill import distill_
from flexrank.errors import FlexrankError
from flexrank.nn.sharding import is_sharded, shard_, shard_blocks_, sharded_parameters
from tiny import build, chain_of, nest


@pytest.fixture
def second_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_group", processes._Group(1, 3, None, 1.0))


@pytest.mark.usefixtures("second_of_three")
def test_a_process_holds_columns_of_factors_and_rows_of_matrices() -> None:
    """Oracle: torch.chunk. Sizes that do not divide evenly, 16 by 3; what is in no layer stays whole."""
    model, whole = nest(build("perceptron")), nest(build("perceptron"))
    layer, theirs = model[2], whole[2]
    for one in (layer, theirs):
        one.set_dense_()
    layer.v.requires_grad_(False)
    shard_(model)
    assert is_sharded(model) and not is_sharded(whole)
    assert torch.equal(layer.u, theirs.u.chunk(3, 1)[1]) and layer.u.shape == (16, 6)
    assert torch.equal(layer.v, theirs.v.chunk(3, 1)[1]) and layer.v.shape == (16, 8)
    assert torch.equal(layer.dense, theirs.dense.chunk(3, 0)[1]) and layer.dense.shape == (6, 24)
    assert layer.u.requires_grad and not layer.v.requires_grad
    assert torch.equal(model[0].bias, whole[0].bias)
    assert (layer.matrix_shape, layer.max_rank) == ((16, 24), 16)
    places = sharded_parameters(model)
    assert len(places) == 2 * 3 + 1
    assert (places[layer.u], places[layer.v], places[layer.dense]) == ((1, 16), (1, 24), (0, 16))


def test_one_process_holds_all() -> None:
    model, base = nest(build("perceptron")), build("llama_tied")
    before = dict(model.named_parameters())
    shard_(model)
    shard_blocks_(base, [])
    assert not is_sharded(model) and sharded_parameters(model) == {}
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.usefixtures("second_of_three")
def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(FlexrankError, match="block by block; Sequential has no stack of them"):
        shard_blocks_(build("perceptron"), ["0", "2"])
    model = nest(build("perceptron"))
    chain = chain_of(model, (0.5,))
    shard_(model)
    with pytest.raises(FlexrankError, match="optimizer is adamw_8bit; of a sharded model it is adamw"):
        distill_(model, build("perceptron"), [torch.ones(3, 12)], chain, optimizer="adamw_8bit")
