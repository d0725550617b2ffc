"""Moments of the gradients at layers' outputs, also where these are changed in place."""

import pytest
import torch
import transformers
from torch import nn

from flexrank.calibrate import collect_moments, collector
from flexrank.distill.objectives import FeatureObjective
from flexrank.errors import FlexrankError
from flexrank.nn.select import select_layers

LAYERS = {
    "linear": lambda: nn.Linear(6, 5),
    "without bias": lambda: nn.Linear(6, 5, bias=False),
    "Conv1D": lambda: transformers.pytorch_utils.Conv1D(5, 6),
    "convolution": lambda: nn.Conv2d(6, 5, 3),
}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("linear", (30, 6)),
        ("linear", (3, 10, 6)),
        ("linear", (6,)),
        ("linear", (2, 3, 5, 6)),
        ("without bias", (3, 10, 6)),
        ("Conv1D", (3, 10, 6)),
        ("convolution", (6, 7, 7)),
        ("convolution", (2, 6, 7, 7)),
    ],
)
def test_gradients_are_those_of_the_layer_before_an_activation_in_place(kind: str, shape: tuple[int, ...]) -> None:
    """Most outputs of more than two axes are views of what the layer has computed, and the views are changed."""

    def make(inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        last = nn.Conv2d(5, 4, 3) if kind == "convolution" else nn.Linear(5, 4)
        return nn.Sequential(LAYERS[kind](), nn.ReLU(inplace=inplace), last)

    x = torch.randn(shape)
    expected, moments = (
        collect_moments(model, [x], select_layers(model), gradient_loss=lambda y, _: y.square().sum())
        for model in (make(False), make(True))
    )
    for name in ("0", "2"):
        assert float(expected[name].gradient_moment.trace()) > 0
        torch.testing.assert_close(moments[name].gradient_moment, expected[name].gradient_moment)


def test_only_a_view_in_the_same_order_stands_for_what_was_computed() -> None:
    made = torch.randn(4, 4, requires_grad=True) * 1
    assert collector._computed(made.view(2, 8)) is made and collector._computed(made) is made
    for view in (made.T, made[:2], made[2:, :]):
        assert collector._computed(view) is view


def test_gradients_of_a_part_that_is_scaled_in_place_are_those_before_it() -> None:
    """Queries, keys and values of one layer, of which the queries are scaled: their gradient has the factor."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.qkv(x)
            q, k, v = y[..., :4], y[..., 4:8], y[..., 8:]
            q *= 0.25
            return q + 2 * k + 3 * v

    model, x = Fused(), torch.randn(2, 7, 4)
    moment = collect_moments(model, [x], select_layers(model), gradient_loss=lambda y, _: y.sum())["qkv"]
    gradient = torch.tensor([0.25] * 4 + [2.0] * 4 + [3.0] * 4).double()
    torch.testing.assert_close(moment.gradient_moment, 14 * torch.outer(gradient, gradient))


def test_a_checkpointed_part_counts_once() -> None:
    """It runs again in the backward pass. Oracle: the same model without checkpoints."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.utils.checkpoint.checkpoint(lambda y: self[1](self[0](y)), x, use_reentrant=False)
            return self[2](hidden)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(30, 6)
    expected, found = (
        collect_moments(one, [x, 2 * x], select_layers(one), gradient_loss=lambda y, _: y.square().sum())
        for one in (model, Checkpointed(*model))
    )
    for name in ("0", "2"):
        assert found[name].tokens == expected[name].tokens == 60
        torch.testing.assert_close(found[name].moment, expected[name].moment)
        torch.testing.assert_close(found[name].gradient_moment, expected[name].gradient_moment)


def test_a_model_of_inference_mode_is_refused_where_gradients_are_needed() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(6, 5))
    assert collect_moments(model, [torch.randn(7, 6)], select_layers(model))["0"].tokens == 7
    wanted = "parameter '0.weight' is of torch.inference_mode; load or copy the model outside of it"
    with pytest.raises(FlexrankError, match=wanted):
        collect_moments(model, [torch.randn(7, 6)], select_layers(model), gradient_loss=lambda y, _: y.sum())


def test_fisher_draws_anew_for_each_batch_and_alike_in_each_run() -> None:
    """Oracle: with y = W x and a projection z, G of the layer tends to the identity times the tokens."""
    model = nn.Sequential(nn.Linear(3, 3))
    batches = [torch.randn(16, 3) for _ in range(300)]
    layers = {"0": model[0]}
    loss = FeatureObjective().fisher_loss
    before = torch.random.get_rng_state()
    moment = collect_moments(model, batches, layers, gradient_loss=loss)["0"].gradient_moment
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(moment / 4800, torch.eye(3).double(), rtol=0.1, atol=0.06)
    assert torch.equal(collect_moments(model, batches, layers, gradient_loss=loss)["0"].gradient_moment, moment)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
def test_a_bias_that_dwarfs_the_products_leaves_their_moments(dtype: torch.dtype, bound: float) -> None:
    """The output's side is the smaller one. Oracle: the products in float64, which need not be computed again."""
    layer, x = nn.Linear(64, 32, dtype=dtype), torch.randn(500, 64, dtype=dtype)
    with torch.no_grad():
        layer.bias.mul_(1e8)
    model = nn.Sequential(layer, nn.Linear(32, 64, dtype=dtype))
    found = collect_moments(model, [x], select_layers(model))["0"].moment.double()
    products = x.double() @ layer.weight.detach().double().T
    assert (found - products.T @ products).norm() < bound * (products.T @ products).norm()
