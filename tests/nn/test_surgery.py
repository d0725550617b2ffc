"""Selecting and replacing layers, and switching sizes."""

import logging

import pytest
import torch
from torch import nn

from flexrank.errors import FlexrankError
from flexrank.nn import surgery
from flexrank.nn.linalg import plain_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.surgery import (
    footprint,
    full_matrices,
    full_profile,
    last_within,
    nest_,
    nested_layers,
    replace_layer,
    room_on,
    select_layers,
    set_profile,
    uniform_profile,
    use_profile,
)
from flexrank.profiles.costs import deployed_parameters
from tiny_models import TRANSFORMERS, batch_for, build, nest

EXPECTED = {
    "bert": 13,
    "llama_tied": 14,
    "llama_untied": 15,
    "gpt2": 8,
    "qwen3": 15,
    "phi3": 9,
    "vit": 14,
    "dinov3": 13,
}


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


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_was_frozen_stays_frozen(frozen: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    getattr(model[0], frozen).requires_grad_(False)
    nested = nest_(model, "0", plain_svd(weight_matrix(model[0]).detach()))
    assert nested.bias is not None
    assert nested.u.requires_grad == nested.v.requires_grad == (frozen == "bias")
    assert nested.bias.requires_grad == (frozen == "weight")


def test_grouped_convolutions_are_left_dense(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flexrank")

    class SamePadding(nn.Conv2d):
        """Whatever its forward does is its own."""

    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1), nn.Embedding(3, 4), SamePadding(4, 4, 3),
        nn.TransformerEncoderLayer(8, 2, 8),
    )  # fmt: skip
    assert list(select_layers(model)) == ["1"]
    assert "left dense: 0 (convolution with 4 groups)" in caplog.text
    assert "left dense: 2 (embedding)" in caplog.text
    assert "left dense: 3 (SamePadding is a Conv2d of its own kind)" in caplog.text
    assert "left dense: 4.linear1 (torch's fused encoder layer reads its weight, and does not call it)" in caplog.text


def test_what_is_no_known_layer_is_left_dense_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))

    caplog.set_level(logging.INFO, "flexrank")
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), Experts(), computed)
    assert list(select_layers(model)) == ["0"]
    assert "left dense: 1 (Experts with parameter gate_up_proj (3, 8, 4) is not supported)" in caplog.text
    assert "left dense: 2 (" in caplog.text


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
        replace_layer(model, "nothing", nn.ReLU())


def test_bias_dtype_mode_and_grad_flag_are_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 4, dtype=torch.bfloat16)).requires_grad_(False).train()
    bias = model[0].bias.clone()
    nested = nest_(model, "0", plain_svd(weight_matrix(model[0])))
    assert nested.u.dtype == torch.bfloat16 and nested.training and not nested.u.requires_grad
    assert torch.equal(nested.bias, bias)


def test_use_profile_is_reversible() -> None:
    model = nest(build("perceptron"))
    x = batch_for("perceptron")
    before = model(x)
    full = full_profile(model)
    with pytest.raises(RuntimeError, match="inside"), use_profile(model, dict.fromkeys(full, 2)):
        assert all(layer.rank == 2 for layer in nested_layers(model).values())
        assert not torch.allclose(model(x), before)
        raise RuntimeError("inside")
    assert torch.equal(model(x), before)


def test_uniform_profile_takes_each_layers_largest_rank_within_the_budget() -> None:
    model = nest(build("bert"))
    profile = uniform_profile(model, 0.5)
    for name, layer in nested_layers(model).items():
        m, n = layer.matrix_shape
        assert deployed_parameters((m, n), profile[name]) <= m * n / 2
        assert deployed_parameters((m, n), profile[name] + 1) > m * n / 2


def test_wrong_profiles_are_named() -> None:
    model = nest(build("perceptron"))
    full = full_profile(model)
    with pytest.raises(FlexrankError, match="layer 'x' is not in the model"):
        set_profile(model, full | {"x": 1})
    with pytest.raises(FlexrankError, match="layer '0': rank 99 is out of range; it has 1 to 12"):
        set_profile(model, full | {"0": 99})
    assert all(layer.rank == layer.max_rank for layer in nested_layers(model).values())
    with pytest.raises(FlexrankError, match="no elastic layers"):
        nested_layers(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "convnet", "tied_blocks"])
def test_footprint_counts_the_rest_once(name: str) -> None:
    model = build(name)
    matrices = sum(weight_matrix(layer).numel() for layer in select_layers(model).values())
    everything = sum(p.numel() for p in model.parameters())
    found = footprint(nest(model))
    assert found.other_parameters == everything - matrices
    assert found.bytes_per_parameter == 4
    halved = footprint(model, torch.bfloat16)
    whole = sum(b.numel() * b.element_size() for n, b in model.named_buffers() if "num_batches" in n)
    assert halved.other_bytes - whole == (found.other_bytes - whole) // 2 and halved.bytes_per_parameter == 2
    buffers = sum(b.numel() * b.element_size() for n, b in model.named_buffers() if n in model.state_dict())
    assert found.other_bytes == 4 * found.other_parameters + buffers


def test_matrices_take_half_of_a_gpus_free_memory_at_most(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert [room_on(torch.device(name), 80) for name in ("cpu", "cuda")] == [80, 60]
    assert last_within({"a": 1, "b": 2, "c": 3}, 5) == ["c", "b"] and last_within({"a": 1, "b": 9}, 5) == []


def test_full_matrices_keep_to_the_room_of_their_device(monkeypatch):
    model = nest(build("llama_untied"))
    layers = list(nested_layers(model).values())
    monkeypatch.setattr(surgery, "room_on", lambda device, room: layers[-1].matrix.nbytes)
    with full_matrices(model, 2**32):
        assert [layer.full_matrix is not None for layer in layers] == [False] * (len(layers) - 1) + [True]
