"""Streamed moments against the full data held at once."""

import functools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from flexrank.calibrate import Moments, collect_moments, collect_rows, collector, load_moments, save_moments
from flexrank.calibrate.structure import version_of
from flexrank.data.batches import call_model
from flexrank.decompose import decompose_
from flexrank.distill.objectives import FeatureObjective, LogitObjective
from flexrank.errors import FlexrankError
from flexrank.nn import linalg
from flexrank.nn.linalg import full_precision
from flexrank.nn.matrix import input_rows, weight_matrix
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from tiny import TRANSFORMERS, batch_for, build


def full_data(model: nn.Module, batches: list, layers: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Every unpadded input row of every layer, float64, by hooks of the test's own."""
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    mask: torch.Tensor | None = None

    def keep(name: str, layer: nn.Module, args: tuple, _: object) -> None:
        seen = input_rows(layer, args[0])
        rows[name].append(seen if mask is None or mask.numel() != len(seen) else seen[mask.reshape(-1).bool()])

    handles = [layer.register_forward_hook(functools.partial(keep, name)) for name, layer in layers.items()]
    with torch.no_grad():
        for batch in batches:
            mask = batch.get("attention_mask") if isinstance(batch, dict) else None
            call_model(model, batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).double() for name, parts in rows.items()}


def assert_moments_match(moments: Moments, layers: dict[str, nn.Module], rows: dict[str, torch.Tensor]) -> None:
    for name, moment in moments.items():
        second = rows[name].T @ rows[name]
        weight = weight_matrix(layers[name]).detach().double()
        expected = second if moment.side == "input" else weight @ second @ weight.T
        torch.testing.assert_close(moment.moment, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        assert moment.tokens == len(rows[name])
        assert moment.mean_square == pytest.approx(float(second.trace()) / second.shape[0], rel=1e-4)


def t5() -> Any:
    """An encoder-decoder: its decoder's cross-attention reads the encoder's rows."""
    torch.manual_seed(0)
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 40,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()


@pytest.mark.parametrize("has_decoder_mask", [True, False])
def test_an_encoder_decoder_counts_the_real_rows_of_both_sides(has_decoder_mask: bool) -> None:
    """Oracle: each sample alone, without its padding."""
    model, ids = t5(), torch.randint(1, 40, (2, 5), generator=torch.Generator().manual_seed(1))
    mask, decoder_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :3]}
    lengths = (2, 3)
    if has_decoder_mask:
        batch["decoder_attention_mask"], lengths = decoder_mask, (2, 2)
    layers = select_layers(model, exclude=["lm_head"])
    alone = [
        {"input_ids": ids[:1], "decoder_input_ids": ids[:1, :3]},
        {"input_ids": ids[1:, :2], "decoder_input_ids": ids[1:, : lengths[1]]},
    ]
    rows = full_data(model, alone, layers)
    assert_moments_match(collect_moments(model, [batch], layers, side="input"), layers, rows)
    assert {name: len(seen) for name, seen in collect_rows(model, [batch], layers).items()} == {
        name: len(seen) for name, seen in rows.items()
    }
    target = LogitObjective().target(model(**batch), batch)
    assert len(target) == (5 if has_decoder_mask else 6)


def test_masks_of_two_sides_that_cannot_be_told_apart_are_refused() -> None:
    model, ids = t5(), torch.ones(2, 4, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), "decoder_input_ids": ids}
    layers = select_layers(model, exclude=["lm_head"])
    padded = {"decoder_input_ids": ids, "decoder_attention_mask": batch["attention_mask"]}
    collect_moments(model, [batch | padded], layers)
    for one in (batch, {"input_ids": ids, **padded}, {"inputs_embeds": torch.ones(2, 4, 16), **padded}):
        with pytest.raises(FlexrankError, match=r"are both \(2, 4\) and differ.*pad one of the two to another length"):
            collect_moments(model, [one], layers)
    with pytest.raises(FlexrankError, match="T5ForConditionalGeneration has a decoder.*give decoder_input_ids"):
        collect_moments(model, [{"input_ids": ids, "labels": ids}], layers)


def test_the_callers_autocast_and_precision_change_no_moment_and_no_factor() -> None:
    model, again, batch = build("bert"), build("bert"), batch_for("bert")
    layers = select_layers(model)
    plain, before = collect_moments(model, [batch], layers), torch.get_float32_matmul_precision()
    decompose_(model, plain)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            other = collect_moments(again, [batch], select_layers(again))
            decompose_(again, other)
        assert torch.get_float32_matmul_precision() == "medium"  # as the caller has it
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(moment.moment, plain[name].moment) for name, moment in other.items())
    pairs = zip(nested_layers(again).values(), nested_layers(model).values(), strict=True)
    assert all(torch.equal(one.u, two.u) and torch.equal(one.v, two.v) for one, two in pairs)


def test_precision_that_was_set_for_each_backend_comes_back() -> None:
    """torch's older functions raise where its newer ones were used."""
    backend, root = torch.backends.mkldnn.matmul, torch.backends
    before, backend.fp32_precision = backend.fp32_precision, "bf16"
    try:
        with full_precision(torch.device("cpu")):
            inside = root.cuda.matmul, root.mkldnn.matmul, root.cudnn.conv, root.mkldnn.conv  # type: ignore[attr-defined]
            assert {one.fp32_precision for one in inside} == {"ieee"}
        assert backend.fp32_precision == "bf16"
    finally:
        backend.fp32_precision = before


@pytest.mark.parametrize("name", [*TRANSFORMERS, "perceptron", "convnet", "tied_blocks"])
@pytest.mark.parametrize("side", ["smaller", "input"])
def test_streamed_equals_full_data(name: str, side: str) -> None:
    model, batch = build(name), batch_for(name)
    batches = [batch, {k: v.flip(0) for k, v in batch.items()} if isinstance(batch, dict) else batch + 1]
    layers = select_layers(model)
    moments = collect_moments(model, iter(batches), layers, side=side)
    assert list(moments) == list(layers)
    assert_moments_match(moments, layers, full_data(model, batches, layers))
    if side == "input":
        assert all(moment.side == "input" for moment in moments.values())


def test_shared_inputs_are_accumulated_once_and_the_smaller_side_is_taken() -> None:
    model = build("llama_untied")
    moments = collect_moments(model, [batch_for("llama_untied")], select_layers(model))
    block = "model.layers.0."
    q, k, v = (moments[f"{block}self_attn.{p}_proj"].moment for p in "qkv")
    assert q is k and q is v
    assert moments[f"{block}mlp.gate_proj"].moment is moments[f"{block}mlp.up_proj"].moment
    down = moments[f"{block}mlp.down_proj"]
    assert down.side == "output" and down.moment.shape == (32, 32)


def test_model_is_left_as_it_was() -> None:
    model = build("tied_blocks").train().requires_grad_(False)
    statistics = model.first[1].running_mean.clone()
    collect_moments(model, [batch_for("tied_blocks")], select_layers(model), gradient_loss=lambda y, _: y.sum())
    assert model.training and not any(p.requires_grad for p in model.parameters())
    assert torch.equal(model.first[1].running_mean, statistics)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("value", [float("nan"), 1e20])
def test_a_value_that_is_not_finite_is_named_and_hooks_are_removed(value: float) -> None:
    """1e20 is finite, and its square is not."""
    model = build("perceptron")
    with pytest.raises(FlexrankError, match="layer '0' saw a value that is not finite in batch 1"):
        collect_moments(model, [torch.randn(2, 12), torch.full((2, 12), value)], select_layers(model))
    assert not any(module._forward_hooks for module in model.modules())


def test_gradient_moments_equal_autograd() -> None:
    model, x = build("perceptron"), batch_for("perceptron")
    target = torch.randn(3, 6)
    moments = collect_moments(
        model, [x, x + 1], select_layers(model), gradient_loss=lambda y, _: (y * target).pow(2).sum()
    )
    expected = torch.zeros(16, 16, dtype=torch.float64)
    for batch in (x, x + 1):
        hidden = model[2](model[1](model[0](batch))).detach().requires_grad_()
        (model[4](model[3](hidden)) * target).pow(2).sum().backward()
        expected += hidden.grad.double().T @ hidden.grad.double()
    torch.testing.assert_close(moments["2"].gradient_moment, expected, rtol=1e-4, atol=1e-6)


class Parting(nn.Module):
    """Two layers that share their input until `apart` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.apart = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x + 1 if self.apart else x)


def test_inputs_that_part_are_an_error() -> None:
    model = Parting()

    def batches():
        yield torch.randn(2, 4)
        yield torch.randn(2, 4)
        model.apart = True
        yield torch.randn(2, 4)

    with pytest.raises(FlexrankError, match="'a' and 'b' shared their input in the first batch and not in batch 2"):
        collect_moments(model, batches(), select_layers(model))


def test_an_input_changed_in_place_is_not_shared() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 9), nn.Linear(4, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            first = self.a(x)
            x += 1
            return first + self.b(x)

    model, x = InPlace(), torch.randn(5, 4)
    for is_inference in (False, True):  # in which tensors do not count the changes in place
        for loss in (None, FeatureObjective().fisher_loss):
            with torch.inference_mode(is_inference):
                moments = collect_moments(model, [x], select_layers(model), gradient_loss=loss)
            assert moments["a"].moment is not moments["b"].moment
            torch.testing.assert_close(moments["b"].moment, ((x + 1).T @ (x + 1)).double(), rtol=1e-5, atol=1e-5)
            assert (moments["b"].gradient_moment is None) == (loss is None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_places_of_many_rows_are_whole_numbers(dtype: torch.dtype) -> None:
    """float16 has no 2,999, and float32 none of the last places of 2^24 + 3 rows."""
    before, rows = torch.get_default_dtype(), 3000 if dtype is torch.float16 else 2**24 + 3
    x = torch.zeros(rows, 1)
    x[-1] = 7
    try:
        torch.set_default_dtype(dtype)
        layer = nn.Linear(1, 1, dtype=torch.float32)
        found = collect_rows(layer, [x], {"layer": layer}, count=5)["layer"]
    finally:
        torch.set_default_dtype(before)
    assert found[:, 0].tolist() == [0, 0, 0, 0, 7]


def test_wrong_inputs_are_named() -> None:
    model = build("perceptron")
    layers = select_layers(model)
    with pytest.raises(FlexrankError, match="layers is a list; it is a mapping of names to layers, as select_layers"):
        collect_moments(model, [torch.randn(2, 12)], list(layers))
    with pytest.raises(FlexrankError, match="calibration got no batches"):
        collect_moments(model, [], layers)
    with pytest.raises(FlexrankError, match="calibration saw no rows: the batches are empty"):
        collect_moments(model, [torch.randn(0, 12)], layers)
    with pytest.raises(FlexrankError, match="gradient_loss is <class .*; it is a function, such as an objective's"):
        collect_moments(model, [torch.randn(2, 12)], layers, gradient_loss=LogitObjective)
    encoder, batch = build("bert"), dict(batch_for("bert"))
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    with pytest.raises(FlexrankError, match="batch 0 has no real token, as its attention_mask is 0 everywhere; leave"):
        collect_moments(encoder, [batch], select_layers(encoder))
    with pytest.raises(FlexrankError, match="at least one batch"):
        collect_rows(model, [], layers)
    unused = build("perceptron")
    unused[1].add_module("extra", nn.Linear(3, 3))
    for collect in (collect_moments, collect_rows):
        with pytest.raises(FlexrankError, match="layer '1.extra' did not run on"):
            collect(unused, [torch.randn(2, 12)], select_layers(unused))
        with pytest.raises(FlexrankError, match="layer '0' is of another model; call select_layers on this one"):
            collect(unused, [torch.randn(2, 12)], layers)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(FlexrankError, match="layer '0': the weight holds values that are not finite"):
        collect_moments(model, [torch.randn(2, 12)], layers)


def test_a_tensors_version_is_its_place_and_values_and_does_not_hold_it() -> None:
    tensor, other = torch.ones(2, 3), torch.ones(2, 3)
    version = version_of(tensor)
    assert version == version_of(tensor.view(2, 3)) and hash(version) == hash(version_of(tensor.view(2, 3)))
    views = (other, tensor.T, tensor.view(6), tensor[:1], tensor[1:], torch.ones(2, 3))
    assert len({version, *map(version_of, views)}) == 7
    tensor.add_(1)
    assert version_of(tensor) != version  # another value in the same memory
    reference = weakref.ref(tensor)
    del tensor, views
    assert reference() is None and version_of(torch.ones(2, 3)) != version


def test_saved_moments_load_to_the_same_bits(tmp_path: Path) -> None:
    model = build("llama_untied")
    layers = select_layers(model)
    moments = collect_moments(
        model, [batch_for("llama_untied")], layers, gradient_loss=lambda out, _: out.logits.square().sum()
    )
    save_moments(moments, tmp_path / "moments.safetensors")
    again = load_moments(tmp_path / "moments.safetensors")
    assert list(again) == list(moments)
    for name, moment in moments.items():
        for field, value in vars(moment).items():
            loaded = getattr(again[name], field)
            assert torch.equal(loaded, value) if isinstance(value, torch.Tensor) else loaded == value
    q, k = (again[f"model.layers.0.self_attn.{p}_proj"] for p in "qk")
    assert q.moment is k.moment


def test_rows_are_real_activations_spread_over_the_batches() -> None:
    model, batch = build("bert"), batch_for("bert")
    layers = select_layers(model, exclude=["pooler"])
    batches = [{k: v.roll(shift, 1) if k == "input_ids" else v for k, v in batch.items()} for shift in range(20)]
    rows = collect_rows(model, batches, layers, count=64)
    for name in layers:
        assert len(rows[name]) == 64
        for part, index in zip(rows[name].split(4), sorted({round(i * 19 / 15) for i in range(16)}), strict=True):
            data = full_data(model, [batches[index]], {name: layers[name]})[name]
            places = torch.linspace(0, len(data) - 1, 4).long()
            torch.testing.assert_close(part.double(), data[places], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_by_strips_equal_one_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips and rows that do not divide the sizes; the oracle in float64."""
    monkeypatch.setattr(linalg, "STRIP", 5)
    monkeypatch.setattr(linalg, "ROWS", 7)
    monkeypatch.setattr(collector, "STRIP", 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 8), nn.Linear(8, 16)).to(dtype)
    batches = [torch.randn(20, 13).to(dtype), torch.randn(9, 13).to(dtype)]
    layers = select_layers(model)
    moments = collect_moments(model, batches, layers)
    assert moments["0"].side == "output" and moments["1"].side == "input"
    assert_moments_match(moments, layers, full_data(model, batches, layers))
    for moment in moments.values():
        assert moment.moment.dtype == torch.float64
        below = moment.moment.tril(-5)  # beside the blocks on the diagonal, it is a copy
        assert torch.equal(below, moment.moment.triu(5).T)
