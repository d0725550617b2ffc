"""Selecting layers, saying why others stay dense, and replacing them."""

import logging
import types
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from flexrank.calibrate import collect_moments
from flexrank.decompose import decompose_
from flexrank.errors import FlexrankError
from flexrank.nn.linalg import plain_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import dense_reasons, nest_, replace_layers, select_layers
from tiny import TRANSFORMERS, batch_for, build, nest


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_layers_of_every_architecture_are_found(name: str) -> None:
    model = build(name)
    layers = select_layers(model)
    matrices = {n for n, p in model.named_parameters() if p.ndim >= 2}
    held = {n for n in matrices if n.rsplit(".", 1)[0] in layers}
    rest = {n for n in matrices - held if "embed" not in n and "wte" not in n and "wpe" not in n}
    assert not rest - {"vit.embeddings.patch_embeddings.projection.weight", "lm_head.weight"}, rest
    assert "lm_head" not in layers or model.get_input_embeddings().weight is not model.lm_head.weight


def test_a_tied_head_is_left_dense_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flexrank")
    assert "lm_head" not in select_layers(build("llama_tied"))
    assert "lm_head" in select_layers(build("llama_untied"))
    assert "left dense: lm_head (weight tied to model.embed_tokens)" in caplog.text


class SamePadding(nn.Conv2d):
    """Its forward may do anything."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))


def test_what_is_not_a_known_layer_is_left_dense_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flexrank")
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1), nn.Embedding(3, 4), SamePadding(4, 4, 3),
        nn.TransformerEncoderLayer(8, 2, 8), nn.Linear(4, 4), Experts(), nn.Linear(1, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    )  # fmt: skip
    assert list(select_layers(model)) == ["1", "5"]
    for reason in (
        "0 (convolution with 4 groups)",
        "2 (embedding)",
        "3 (SamePadding is a Conv2d of its own kind)",
        "4.linear1 (torch's fused encoder layer reads its weight, and does not call it)",
        "6 (Experts with parameter gate_up_proj (3, 8, 4) is not supported)",
        "7 (a matrix of rank one has nothing to factorise)",
        "8 (",
    ):
        assert f"left dense: {reason}" in caplog.text


def test_elastic_layers_are_elastic_already(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flexrank")
    with pytest.raises(
        FlexrankError, match=r"can be factorised; left dense: 0 \(elastic already\), 1 \(elastic already\)$"
    ):
        model = nest(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[0].set_sizes_([2, 4])  # with vectors that are a part of the layer
        select_layers(model)


def test_of_many_reasons_three_are_shown() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    wanted = r"left dense: 0 \(excluded\), 1 \(excluded\), 2 \(excluded\), and 2 others$"
    with pytest.raises(FlexrankError, match=wanted):
        select_layers(model, exclude=["*"])


def test_a_string_in_place_of_a_list_is_refused() -> None:
    """Its letters would be names: of layers 0 to 10, "10" would be layers 1 and 0."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(11)))
    for options in ({"include": "10"}, {"exclude": "10"}):
        with pytest.raises(FlexrankError, match=r"clude is '10'; it is a list, such as \['10'\]"):
            select_layers(model, **options)
    with pytest.raises(FlexrankError, match="moments is '10'; it is a list"):
        decompose_(model, "10", method="svd")
    assert all(type(layer) is nn.Linear for layer in model)


@pytest.mark.parametrize("hold", [
    lambda a, b: [a, b], lambda a, b: [[a, b]], lambda a, b: {"x": (a, b)}, lambda a, b: {a, b},
    lambda a, b: types.SimpleNamespace(first=a, rest=[b]),
])  # fmt: skip
def test_layers_that_are_held_elsewhere_too_stay_dense(hold: Callable[[nn.Module, nn.Module], Any]) -> None:
    """There they would run as they were: a reloaded model, where they are factorised, would answer otherwise."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model.steps = hold(model[0], model[1])
    assert list(select_layers(model)) == ["2"]
    assert dense_reasons(model)["1"].startswith("the model keeps it elsewhere too")


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_layers_whose_parameters_are_held_elsewhere_too_stay_dense(part: str) -> None:
    """There they would be whole at every size, and of a reloaded model they would have other values."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.tied = [getattr(model[0], part)]
    assert list(select_layers(model)) == ["1"]
    assert dense_reasons(model)["0"].startswith("the model keeps it elsewhere too")


def test_models_that_cannot_be_watched_are_refused() -> None:
    with pytest.raises(FlexrankError, match="model is a str; it is a torch module"):
        select_layers("bert")  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    with pytest.raises(FlexrankError, match="Sequential is compiled in place; give it as it was before compile"):
        select_layers(model)


def test_a_layer_with_hooks_or_a_forward_of_its_own_is_left_dense(caplog: pytest.LogCaptureFixture) -> None:
    """Its factors would lose them. What accelerate puts there moves inputs, as it does for the layer's block."""
    caplog.set_level(logging.INFO, "flexrank")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    layers: list[Any] = list(model)
    layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    layers[1].register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    layers[2].forward = lambda x: 2 * x
    layers[3].forward, layers[3]._hf_hook = layers[3].forward, object()
    assert list(select_layers(model)) == ["3", "4"]
    assert "left dense: 2 (it has hooks, or a forward of its own)" in caplog.text


def test_patterns_select() -> None:
    model = build("bert")
    assert all(".attention." in n for n in select_layers(model, include=["*.attention.*"]))
    assert "pooler.dense" in select_layers(model) and "pooler.dense" not in select_layers(model, exclude=["pooler"])
    with pytest.raises(FlexrankError, match="'poler' matches no module"):
        select_layers(model, exclude=["poler"])
    with pytest.raises(FlexrankError, match="no layer of Sequential can be factorised"):
        select_layers(nn.Sequential(nn.ReLU()))


def test_a_shared_module_is_replaced_everywhere() -> None:
    model = build("tied_blocks")
    x = batch_for("tied_blocks")
    expected = model(x)
    assert list(select_layers(model)) == ["first.0", "shared", "head"]
    nest(model)
    assert model.shared is model.again
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(FlexrankError, match="has no layer 'nothing'"):
        replace_layers(model, {"nothing": nn.ReLU()})


@pytest.mark.parametrize("frozen", [[], ["weight"], ["bias"], ["weight", "bias"]])
def test_bias_dtype_mode_and_grad_flags_are_kept(frozen: list[str]) -> None:
    model = nn.Sequential(nn.Linear(6, 4, dtype=torch.bfloat16)).train(bool(frozen))
    for name in frozen:
        getattr(model[0], name).requires_grad_(False)
    bias = model[0].bias.clone()
    nested = nest_(model, "0", plain_svd(weight_matrix(model[0]).detach()))
    assert nested.bias is not None and torch.equal(nested.bias, bias)
    assert nested.u.dtype == torch.bfloat16 and nested.training == bool(frozen)
    assert nested.u.requires_grad == nested.v.requires_grad == ("weight" not in frozen)
    assert nested.bias.requires_grad == ("bias" not in frozen)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_weights_that_are_not_plain_are_left_dense_or_refused() -> None:
    """Quantised ones, and of eight bits, stay dense; adapters are to be merged first, and weights to be in memory."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = build("perceptron")
    quantize_(model[2], Int8WeightOnlyConfig())
    model[0].weight = nn.Parameter(model[0].weight.to(torch.float8_e4m3fn), requires_grad=False)
    reasons = dense_reasons(model)
    assert reasons["0"] == "weight is torch.float8_e4m3fn" and reasons["2"] == "weight is quantised as Int8Tensor"
    adapted = peft.get_peft_model(build("llama_untied"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        FlexrankError, match=r"q_proj' has an adapter; first merge it into the weight: merge_and_unload"
    ):
        select_layers(adapted)
    assert len(select_layers(adapted.merge_and_unload())) == len(select_layers(build("llama_untied")))
    offloaded = build("perceptron")
    offloaded[2].to("meta")
    with pytest.raises(FlexrankError, match="layer '2' has no weight in memory; load the model without device_map"):
        collect_moments(offloaded, [batch_for("perceptron")], select_layers(offloaded))
