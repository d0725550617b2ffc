"""Fused layers give what their layers' matrices give, whole and split over processes."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flexrank.errors import FlexrankError
from flexrank.nn.fused import FusedShards, Shard
from flexrank.nn.gauge_aligned import GaugeAlignedLinear

N = 12


class Layer(NamedTuple):
    """A layer's matrix and bias, and what its file holds."""

    matrix: Tensor
    bias: Tensor | None
    rank: int
    aligned: int
    files: dict[str, Tensor]


def layer(m: int, rank: int, slack: int = 0, *, bias: bool = False, seed: int = 0) -> Layer:
    """A random one in float64; rank 0 is dense."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(m, generator=generator, dtype=torch.float64) if bias else None
    if not rank:
        matrix = torch.randn(m, N, generator=generator, dtype=torch.float64)
        return Layer(matrix, values, 0, 0, {"weight": matrix} | ({} if values is None else {"bias": values}))
    u, v = (torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in (m, N))
    deployed = GaugeAlignedLinear.from_factors(u, v, values, slack=slack)
    return Layer(u @ v.T, values, rank, deployed.aligned, deployed.state_dict())


def server(
    layers: Sequence[Layer], rows: Sequence[range], columns: range = range(N), dtype: torch.dtype = torch.float64
):
    """A server's layer with these parts, loaded, and what multiplies by them."""
    shards = [
        Shard(f"layer{index}", tuple(one.matrix.shape), one.rank, one.aligned, part, columns)
        for index, (one, part) in enumerate(zip(layers, rows, strict=True))
    ]
    fused, module = FusedShards(shards), nn.Module()
    fused.add_to_(module, dtype)
    biases = torch.full((sum(map(len, rows)),), float("nan"), dtype=dtype)
    has_bias = any(one.bias is not None for one in layers)
    module.bias = nn.Parameter(biases, requires_grad=False) if has_bias else None
    for index, one in enumerate(layers):
        for name, values in one.files.items():
            fused.load_(module, name, values, index)
    return fused, module


def whole(layers: Sequence[Layer]) -> list[range]:
    return [range(len(one.matrix)) for one in layers]


QKV = [layer(10, 4, 1, bias=True), layer(6, 0, bias=True, seed=1), layer(6, 2, 2, bias=True, seed=2)]
X = torch.randn(2, 5, N, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def expected(layers: Sequence[Layer], x: Tensor = X) -> Tensor:
    return torch.cat([x @ one.matrix.T for one in layers], -1)


def test_three_layers_of_different_ranks_one_of_them_dense() -> None:
    fused, module = server(QKV, whole(QKV))
    torch.testing.assert_close(fused.multiply(module, X), expected(QKV))
    torch.testing.assert_close(module.bias.data, torch.cat([one.bias for one in QKV if one.bias is not None]))
    fused.require_complete(module)
    # Parameters of the factors and of the dense matrix, and no others: 3 of 4 aligned, none of 2.
    assert sum(one.numel() for one in module.parameters()) - len(module.bias) == 4 * N + 7 * 4 + 6 * N + 2 * N + 6 * 2


@pytest.mark.parametrize("one", [layer(9, 9, 0), layer(9, 1, 0), layer(20, 5, 5), layer(20, 12, 3), layer(7, 0)])
def test_one_layer_alone(one: Layer) -> None:
    fused, module = server([one], whole([one]))
    torch.testing.assert_close(fused.multiply(module, X), expected([one]))


def test_processes_hold_some_outputs_each_and_a_small_layer_is_held_twice() -> None:
    parts = []
    for start in (0, 5):
        rows = [range(start, start + 5), range(0, 6), range(start // 5 * 3, start // 5 * 3 + 3)]
        fused, module = server(QKV, rows)
        parts.append(fused.multiply(module, X) + module.bias)
    q, k, v = (X @ one.matrix.T + one.bias for one in QKV)
    torch.testing.assert_close(parts[0], torch.cat((q[..., :5], k, v[..., :3]), -1))
    torch.testing.assert_close(parts[1], torch.cat((q[..., 5:], k, v[..., 3:]), -1))


def test_no_output_of_a_process_is_expanded_where_all_of_its_rows_are_aligned() -> None:
    one = layer(10, 6, 0)
    fused, module = server([one], [range(0, 5)])
    assert module.get_parameter("expand.weight").numel() == 0
    torch.testing.assert_close(fused.multiply(module, X), expected([one])[..., :5])


def test_processes_hold_some_inputs_each_and_their_outputs_add_up() -> None:
    one = layer(10, 4, 1)
    total = torch.zeros(2, 5, 10, dtype=torch.float64)
    for columns in (range(0, 7), range(7, N)):
        fused, module = server([one], whole([one]), columns)
        total += fused.multiply(module, X[..., columns.start : columns.stop])
    torch.testing.assert_close(total, expected([one]))


def test_bfloat16_files_load_into_bfloat16_and_float32() -> None:
    one = layer(10, 4, 2)
    one = one._replace(files={name: values.bfloat16() for name, values in one.files.items()})
    exact = expected([one])
    for dtype in (torch.bfloat16, torch.float32):
        fused, module = server([one], whole([one]), dtype=dtype)
        error = fused.multiply(module, X.to(dtype)).double() - exact
        assert float(error.norm() / exact.norm()) < 0.03


def test_what_does_not_fit_is_refused() -> None:
    fused, module = server(QKV, whole(QKV))
    with pytest.raises(
        FlexrankError, match=r"layer0.latent.weight has the shape \(3, 12\); its config asks for \(4, 12\)"
    ):
        fused.load_(module, "latent.weight", torch.zeros(3, N), 0)
    with pytest.raises(FlexrankError, match=r"layer0.weight has the shape \(10, 12\); its config asks for \(0,\)"):
        fused.load_(module, "weight", torch.zeros(10, N), 0)
    module.bias = None
    with pytest.raises(FlexrankError, match="layer1 has a bias in its files, and none in the server's model"):
        fused.load_(module, "bias", torch.zeros(6), 1)


def test_float32_with_slack_for_it_is_not_served_in_half_precision() -> None:
    one = layer(10, 4, 1)
    files = {name: values.float() for name, values in one.files.items()}
    with pytest.raises(
        FlexrankError, match="deployed in torch.float32, and its slack does not suit torch.float16; serve"
    ):
        server([one._replace(files=files)], whole([one]), dtype=torch.float16)
    plain = layer(10, 4, 4)  # nothing is aligned, so nothing depends on the dtype
    fused, module = server([plain], whole([plain]), dtype=torch.bfloat16)
    fused.require_complete(module)


def test_a_missing_weight_is_named() -> None:
    layers = [QKV[0], QKV[2]]
    shards = [Shard(f"layer{at}", tuple(one.matrix.shape), one.rank, one.aligned, range(len(one.matrix)), range(N))
              for at, one in enumerate(layers)]  # fmt: skip
    fused, module = FusedShards(shards), nn.Module()
    fused.add_to_(module, torch.float64)
    module.bias = nn.Parameter(torch.zeros(16, dtype=torch.float64), requires_grad=False)
    fused.require_complete(module)  # a server's dummy weights
    for name, values in layers[0].files.items():
        fused.load_(module, name, values, 0)
    with pytest.raises(FlexrankError, match="layer1.weight is missing in the model's files"):
        fused.require_complete(module)
    for name, values in layers[1].files.items():
        if name != "expand.bias":
            fused.load_(module, name, values, 1)
    with pytest.raises(FlexrankError, match="layer1.expand.bias is missing in the model's files"):
        fused.require_complete(module)


def test_a_layer_of_which_nothing_came_is_named_if_another_was_loaded() -> None:
    names, one = set[str](), QKV[0]
    layers = []
    for at in range(2):
        shard = Shard(f"layer{at}", tuple(one.matrix.shape), one.rank, one.aligned, range(len(one.matrix)), range(N))
        layers.append((FusedShards([shard], names), nn.Module()))
        layers[at][0].add_to_(layers[at][1], torch.float64)
        layers[at][1].bias = None
    for fused, module in layers:
        fused.require_complete(module)  # a server's dummy weights
    first, module = layers[0]
    for name, values in one.files.items():
        if not name.endswith("bias"):
            first.load_(module, name, values, 0)
    first.require_complete(module)
    with pytest.raises(FlexrankError, match=r"layer1\.\S+ is missing in the model's files"):
        layers[1][0].require_complete(layers[1][1])
