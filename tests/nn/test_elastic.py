"""Elastic layers against the dense forward of their own matrix, and layers rebuilt from their specs."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedConv2d, NestedLinear
from flexrank.nn.gauge_aligned import GaugeAlignedConv2d, GaugeAlignedLinear
from flexrank.nn.matrix import ConvGeometry, conv_geometry, input_rows, output_rows, weight_matrix
from flexrank.nn.specs import build_layer, layer_spec

GEOMETRY = ConvGeometry(3, (3, 2), (2, 1), (1, 0), (1, 2))


def nested_linear() -> NestedLinear:
    return NestedLinear(torch.randn(6, 8), torch.randn(6, 6), torch.randn(8))


def nested_sized_linear() -> NestedLinear:
    layer = nested_linear()
    layer.set_sizes_([2, 6])
    return layer


def nested_conv() -> NestedConv2d:
    return NestedConv2d(torch.randn(7, 7), torch.randn(7, 18), torch.randn(7), GEOMETRY)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_both_routes_of_a_linear_give_the_prefix(rank: int) -> None:
    layer = nested_linear()
    layer.rank = rank
    for tokens in (1, 4, 300):
        x = torch.randn(2, tokens, 6)
        expected = functional.linear(x, layer.u[:rank].T @ layer.v[:rank], layer.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_the_cheaper_route_is_taken() -> None:
    """Against a count of multiply-adds."""
    layer = nested_linear()
    for rank in range(1, 7):
        layer.rank = rank
        for tokens in (1, 2, 5, 100):
            factored, materialised = tokens * rank * (8 + 6), tokens * 8 * 6 + rank * 8 * 6
            assert layer.is_factored_cheaper(tokens) == (factored <= materialised)


@pytest.mark.parametrize("rank", [1, 4, 7])
def test_both_routes_of_a_convolution_give_the_prefix(rank: int) -> None:
    layer = nested_conv()
    layer.rank = rank
    for x in (torch.randn(1, 3, 4, 5), torch.randn(9, 3, 20, 21)):
        weight = (layer.u[:rank].T @ layer.v[:rank]).view(7, 3, 3, 2)
        expected = functional.conv2d(x, weight, layer.bias, *GEOMETRY[2:])
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        assert GEOMETRY.positions(x) == expected[:, 0].numel()


@torch.no_grad()
def test_vectors_of_a_size_by_hand() -> None:
    """Of three sizes two have rank 2: a rank alone takes the first that has it; between two, and with both routes."""
    ranks, places = (1, 2, 3, 5, 6), (0, 0, 2, 2, 2)
    for make, x in ((nested_linear, torch.randn(4, 6)), (nested_conv, torch.randn(3, 3, 5, 6))):
        layer = make()
        plain = [(layer.matrix.clone(), layer(x)) for layer.rank in ranks]
        layer.set_sizes_([2, 2, 5])
        sizes, (m, n) = layer.sizes, layer.matrix_shape
        assert all(torch.equal(layer(x), wanted) for layer.rank, (_, wanted) in zip(ranks, plain, strict=True))
        for vectors in (sizes.inputs, sizes.outputs, sizes.bias):
            vectors.copy_(torch.randn(vectors.shape))
        chosen = [*zip(ranks, places, [None] * 5, plain, strict=True), (2, 1, 1.0, plain[1]), (3, 1.25, 1.25, plain[2])]
        for layer.rank, place, given, (matrix, _) in chosen:
            if given is not None:
                sizes.position = given
            low, share = int(place), place % 1
            inputs, outputs, own = (
                (1 - share) * vectors[low] + share * vectors[min(low + 1, 2)]
                for vectors in (sizes.inputs, sizes.outputs, sizes.bias)
            )
            wanted, bias = outputs[:, None] * matrix * inputs, layer.bias + own
            torch.testing.assert_close(layer.matrix, wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer.active_bias, bias)
            for rows in (x, x.repeat(90, *[1] * (x.ndim - 1))):  # factored and materialised
                if layer.geometry is None:
                    expected = functional.linear(rows, wanted, bias)
                else:
                    expected = functional.conv2d(rows, wanted.view(m, 3, 3, 2), bias, *GEOMETRY[2:])
                torch.testing.assert_close(layer(rows), expected, rtol=1e-3, atol=1e-4)
        before = layer.active
        layer.set_sizes_([3])  # what was interpolated there
        torch.testing.assert_close(layer.active, before, rtol=1e-6, atol=1e-6)
        assert layer.sizes.ranks == [3] and layer.sizes.inputs.shape == (1, n)


@torch.no_grad()
def test_a_matrix_of_full_rank_is_apart_from_the_factors() -> None:
    for make, x in ((nested_linear, torch.randn(4, 6)), (nested_conv, torch.randn(3, 3, 5, 6))):
        layer = make()
        full, wanted = layer.max_rank, layer(x)
        layer.set_dense_()
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)
        assert not any(layer.is_factored_cheaper(tokens) for tokens in (1, 10**6))
        layer.set_sizes_([2, full])
        layer.sizes.inputs.copy_(torch.rand(2, layer.in_features))
        layer.sizes.outputs.copy_(torch.rand(2, layer.out_features))
        layer.rank = 2
        prefix = layer.active
        layer.rank = full
        layer.dense.copy_(torch.randn(layer.matrix_shape))
        expected = layer.sizes.outputs[1, :, None] * layer.dense * layer.sizes.inputs[1]
        assert torch.equal(layer.matrix, expected)
        bias = layer.bias
        if layer.geometry is None:
            torch.testing.assert_close(layer(x), functional.linear(x, expected, bias))
        else:
            torch.testing.assert_close(layer(x), functional.conv2d(x, expected.view(7, 3, 3, 2), bias, *GEOMETRY[2:]))
        layer.rank = 2
        torch.testing.assert_close(layer.active, prefix, rtol=0, atol=0)
        torch.testing.assert_close(layer.matrix, prefix[0].T @ prefix[1])


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_with_a_matrix_of_full_rank_under_autocast_and_its_gradients(has_bias: bool) -> None:
    layer, x = nested_linear(), torch.randn(5, 6)
    layer.bias = layer.bias if has_bias else None
    layer.set_dense_()
    layer.set_sizes_([2, 6])
    with torch.no_grad():
        layer.sizes.outputs += torch.rand(2, 8)
        layer.sizes.inputs += torch.rand(2, 6)
    assert layer.matrix.requires_grad
    layer(x).square().sum().backward()
    found = [parameter.grad.clone() for parameter in layer.sizes.parameters()]
    layer.zero_grad()
    functional.linear(x, layer.matrix, layer.active_bias).square().sum().backward()
    for ours, parameter in zip(found, layer.sizes.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)
        assert ours[1].abs().min() > 0 and not ours[0].any()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_ranks_between_the_factors_and_a_matrix_of_full_rank_do_not_exist() -> None:
    layer = nested_linear()
    layer.set_dense_()
    layer.u, layer.v = (nn.Parameter(factor.detach()[:3]) for factor in (layer.u, layer.v))
    assert layer.max_rank == 6
    for layer.rank in (1, 3, 6):
        pass
    for rank in (0, 4, 5, 7):
        with pytest.raises(FlexrankError, match=f"rank {rank} is out of range; this layer has 1 to 3, and 6"):
            layer.rank = rank


def test_rows_of_a_convolution_are_what_its_matrix_multiplies() -> None:
    conv = nn.Conv2d(3, 7, (3, 2), (2, 1), (1, 0), (1, 2), bias=False)
    assert conv_geometry(conv) == GEOMETRY
    x = torch.randn(4, 3, 9, 8)
    torch.testing.assert_close(input_rows(conv, x) @ weight_matrix(conv).T, output_rows(conv, conv(x)))


def test_wrong_ranks_are_named() -> None:
    layer = nested_linear()
    for rank in (0, 7):
        with pytest.raises(FlexrankError, match=f"rank {rank} is out of range; this layer has 1 to 6"):
            layer.rank = rank


def aligned_linear() -> GaugeAlignedLinear:
    return GaugeAlignedLinear.from_factors(torch.randn(8, 4), torch.randn(6, 4), torch.randn(8), slack=1)


def aligned_conv() -> GaugeAlignedConv2d:
    return GaugeAlignedConv2d.from_factors(torch.randn(9, 4), torch.randn(18, 4), None, GEOMETRY, slack=4)


def dense_linear() -> nn.Linear:
    return nn.Linear(6, 3, bias=False)


def dense_conv() -> nn.Conv2d:
    return nn.Conv2d(3, 7, (3, 2), (2, 1), (1, 0), (1, 2))


@pytest.mark.parametrize(
    "make", [nested_linear, nested_sized_linear, nested_conv, aligned_linear, aligned_conv, dense_linear, dense_conv]
)  # fmt: skip
def test_a_spec_rebuilds_its_layer(make: Any) -> None:
    layer = make()
    assert layer_spec(layer)["form"] == make.__name__.partition("_")[0]  # the word that files have
    again = build_layer(layer_spec(layer))
    again.load_state_dict(layer.state_dict())
    x = torch.randn(2, 6) if "linear" in make.__name__ else torch.randn(2, 3, 9, 8)
    assert type(again) is type(layer) and torch.equal(again(x), layer(x))
