"""Switching sizes, and what an elastic model holds beside its factors."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from flexrank.errors import FlexrankError
from flexrank.nn import switch
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import select_layers
from flexrank.nn.switch import footprint, full_matrices, full_profile, nested_layers, submodel, use_profile
from flexrank.profiles.costs import deployed_parameters
from tiny import batch_for, build, elastic, nest, outputs, with_sizes


def test_use_profile_is_reversible() -> None:
    model = elastic("perceptron")
    x = batch_for("perceptron")
    before = model(x)
    full = full_profile(model)
    with pytest.raises(RuntimeError, match="inside"), use_profile(model, dict.fromkeys(full, 2)):
        assert all(layer.rank == 2 for layer in nested_layers(model).values())
        assert not torch.allclose(model(x), before)
        raise RuntimeError("inside")
    assert torch.equal(model(x), before)


@torch.no_grad()
def test_sizes_of_one_rank_have_vectors_of_their_own() -> None:
    """In layer 0 two of three sizes have rank 2; what is set inside is as before after it."""
    model = nest(nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)))
    sizes = [{"0": 2, "1": 1}, {"0": 2, "1": 3}, {"0": 4, "1": 3}]
    for number, layer in enumerate(nested_layers(model).values()):
        layer.set_sizes_([size[str(number)] for size in sizes])
        layer.sizes.outputs.copy_(torch.arange(1.0, 4)[:, None].expand(3, layer.out_features))
    x, scales = torch.randn(3, 6), dict(enumerate((1.0, 4.0, 9.0)))  # the gains of both layers, multiplied

    def plain(first: int, second: int) -> torch.Tensor:
        (a, c), (b, d) = ((layer.u, layer.v) for layer in nested_layers(model).values())
        return x @ c[:first].T @ a[:first] @ d[:second].T @ b[:second]

    switch.set_profile(model, sizes[1])
    for number in (0, 2, 1):
        with use_profile(model, sizes[number]):
            torch.testing.assert_close(model(x), scales[number] * plain(*sizes[number].values()))
        torch.testing.assert_close(model(x), 4 * plain(2, 3))
    with use_profile(model, {"0": 2, "1": 2}):  # 18 + 14 parameters, between 18 + 8 and 18 + 18
        torch.testing.assert_close(model(x), (1 + 6 / 10) ** 2 * plain(2, 2))
    with use_profile(model, {"0": 1, "1": 1}):
        torch.testing.assert_close(model(x), plain(1, 1))
    with use_profile(model, {"0": 5, "1": 4}):
        torch.testing.assert_close(model(x), 9 * plain(5, 4))


@pytest.mark.parametrize("name", ["llama_tied", "bert", "convnet", "tied_blocks"])
def test_sizes_stand_side_by_side_on_the_same_tensors(name: str) -> None:
    """Oracle: the model itself, at one size after the other; two threads run two sizes of it at once."""
    model, batch = with_sizes(elastic(name)), batch_for(name)
    full = full_profile(model)
    profiles = [{layer: max(1, rank // part) for layer, rank in full.items()} for part in (3, 2)]
    sizes = [submodel(model, profile) for profile in profiles]
    wanted = []
    for profile in profiles:
        with use_profile(model, profile):
            wanted.append(outputs(model, batch))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: [outputs(size, batch) for size in sizes], range(8)))
        at_once = list(pool.map(lambda number: outputs(sizes[number % 2], batch), range(16)))
    assert all(torch.equal(one, other) for row in found for one, other in zip(row, wanted, strict=True))
    assert all(torch.equal(one, wanted[number % 2]) for number, one in enumerate(at_once))
    assert {layer: one.rank for layer, one in nested_layers(model).items()} == full
    memory = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for size in sizes:
        assert {tensor.data_ptr() for tensor in (*size.parameters(), *size.buffers())} == memory
        assert not {id(one) for one in size.modules()} & {id(one) for one in model.modules()}
    with pytest.raises(FlexrankError, match="rank 0 is out of range"):
        submodel(model, dict.fromkeys(full, 0))


def test_uniform_profile_takes_each_layers_largest_rank_within_the_budget() -> None:
    model = elastic("bert")
    profile = switch.uniform_profile(model, 0.5)
    for name, layer in nested_layers(model).items():
        m, n = layer.matrix_shape
        assert deployed_parameters((m, n), profile[name]) <= m * n / 2
        assert deployed_parameters((m, n), profile[name] + 1) > m * n / 2


def test_uniform_ranks_are_ranks_that_a_layer_has() -> None:
    model = with_sizes(elastic("perceptron"), dense=True)
    for layer in nested_layers(model).values():
        layer.u, layer.v = (nn.Parameter(factor.detach()[:3]) for factor in (layer.u, layer.v))
    assert set(switch.uniform_profile(model, 0.9).values()) == {3}
    assert switch.uniform_profile(model, 1.0) == full_profile(model)


def test_wrong_profiles_are_named() -> None:
    model = elastic("perceptron")
    full = full_profile(model)
    with pytest.raises(FlexrankError, match="layer 'x' is not in the model"):
        switch.set_profile(model, full | {"x": 1})
    for rank in (0, 99, 2.5, 2.0, "2"):
        with pytest.raises(FlexrankError, match=f"layer '0': rank {rank} is out of range; it has 1 to 12"):
            switch.set_profile(model, full | {"0": rank})
    assert all(layer.rank == layer.max_rank for layer in nested_layers(model).values())
    with pytest.raises(FlexrankError, match="no elastic layers"):
        nested_layers(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "convnet", "tied_blocks"])
def test_footprint_counts_the_rest_once(name: str) -> None:
    model = build(name)
    matrices = sum(weight_matrix(layer).numel() for layer in select_layers(model).values())
    everything = sum(p.numel() for p in model.parameters())
    rest = footprint(nest(model))
    assert rest.other_parameters == everything - matrices
    assert rest.bytes_per_parameter == 4
    halved = footprint(model, torch.bfloat16)
    whole = sum(b.numel() * b.element_size() for n, b in model.named_buffers() if "num_batches" in n)
    assert halved.other_bytes - whole == (rest.other_bytes - whole) // 2 and halved.bytes_per_parameter == 2
    buffers = sum(b.numel() * b.element_size() for n, b in model.named_buffers() if n in model.state_dict())
    assert rest.other_bytes == 4 * rest.other_parameters + buffers
    assert footprint(with_sizes(model)) == rest  # what a size has of its own merges


def test_matrices_take_half_of_a_gpus_free_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert [switch.max_bytes_on(torch.device(name), 80) for name in ("cpu", "cuda")] == [80, 60]
    assert switch.last_within({"a": 1, "b": 2, "c": 3}, 5) == ["c", "b"]
    assert switch.last_within({"a": 1, "b": 9}, 5) == []


def test_full_matrices_keep_to_the_room_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = elastic("llama_untied")
    layers = list(nested_layers(model).values())
    asked = []
    monkeypatch.setattr(switch, "max_bytes_on", lambda *of: asked.append(of) or layers[-1].matrix.nbytes)
    with full_matrices(model, 2**32):
        assert asked == [(torch.device("cpu"), 2**32)]
        assert [layer.full_matrix is not None for layer in layers] == [False] * (len(layers) - 1) + [True]


@torch.no_grad()
@pytest.mark.parametrize("dense", [False, True])
def test_full_matrices_have_the_vectors_of_their_size(dense: bool) -> None:
    model = with_sizes(elastic("perceptron"), dense=dense)
    x = torch.randn(5, 12)
    wanted = model(x)
    with full_matrices(model, 2**20):
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def test_weights_that_a_forward_has_computed_are_copied_too() -> None:
    """As torch.nn.utils.prune leaves them: they are part of a gradient's graph."""
    model = nest(build("perceptron"))
    prune.random_unstructured(nested_layers(model)["0"], "v", 0.5)
    x = torch.randn(4, 12)
    expected = model(x).detach()
    assert not nested_layers(model)["0"].v.is_leaf
    twin = submodel(model, full_profile(model))
    assert torch.equal(twin(x), expected)
