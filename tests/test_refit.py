"""One size of a decomposed model, fitted layer after layer to the base model."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexrank as fr
from flexrank import refit as refit_module
from flexrank.calibrate import Hooks
from flexrank.data.batches import call_model
from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.matrix import input_rows, weight_matrix
from flexrank.nn.switch import full_profile, nested_layers, use_profile
from tiny import VOCABULARY, build, chain_of, elastic, outputs, relative, same_state, token_batch, with_sizes

KINDS = ("llama_tied", "gpt2", "bert", "convnet", "stack")


def calibration(kind: str) -> list[Any]:
    """Two batches, of images or of texts, of which one is padded."""
    draw = torch.Generator().manual_seed(5)
    if kind in ("convnet", "stack"):
        return [torch.randn(4, 3, 8, 8, generator=draw) for _ in range(2)]
    ids = torch.randint(3, VOCABULARY, (2, 16, 12), generator=draw)
    masks = torch.ones_like(ids)
    masks[1, -1, -5:] = 0
    return [{"input_ids": a, "attention_mask": b} for a, b in zip(ids, masks, strict=True)]


def stack() -> nn.Module:
    """A stack of blocks of which one is a layer itself, so blocks cannot run alone."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1)) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), *blocks).eval()


def decomposed(kind: str) -> tuple[Any, Any, list[Any]]:
    """A model's elastic form, by calibration, the model itself, and the batches."""
    base, batches = stack() if kind == "stack" else build(kind), calibration(kind)
    model = copy.deepcopy(base)
    layers = fr.select_layers(model)
    fr.decompose_(model, fr.collect_moments(model, batches, layers))
    return model, base, batches


def small(model: nn.Module) -> dict[str, int]:
    return dict(chain_of(model).entries[1].profile)


def rows_of(model: nn.Module, batches: list[Any], name: str) -> Tensor:
    """What a layer of a whole model reads, of real tokens, in float64."""
    rows: list[Tensor] = []
    layer = model.get_submodule(name)
    with Hooks() as hooks, torch.no_grad():
        hooks.on_forward({name: layer}, lambda _, inputs, __: rows.append(inputs))
        for batch in batches:
            call_model(model, batch)
    if isinstance(batches[0], Tensor):
        return torch.cat([input_rows(layer, one) for one in rows]).double()
    masks = [batch["attention_mask"] > 0 for batch in batches]
    is_pooled = rows[0].ndim == 2
    return torch.cat([one if is_pooled else one[mask] for one, mask in zip(rows, masks, strict=True)]).double()


def fitted_by_hand(layer: NestedLayer, rank: int, x: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
    """The map (m, n) of this rank and its bias, by least squares over explicit rows, half of them the base model's."""
    weight, v, target = layer.u.T.double() @ layer.v.double(), layer.v[:rank].double(), (x + x0) / 2
    means = (x.mean(dim=0), target.mean(dim=0)) if layer.bias is not None else (torch.zeros(()),) * 2
    rows, wanted = x - means[0], target - means[1]
    extra = (1e-3 * rows.square().sum() / x.shape[1]).sqrt() * torch.eye(x.shape[1]).double()
    rows, wanted = torch.cat([rows, extra]), torch.cat([wanted, extra]) @ weight.T
    left = torch.linalg.lstsq(rows @ v.T, wanted).solution.T
    matrix = left @ torch.linalg.pinv(left) @ torch.linalg.lstsq(rows, wanted).solution.T
    if layer.bias is None:
        return matrix, torch.zeros(len(matrix)).double()
    return matrix, layer.bias.double() + weight @ means[1] - matrix @ means[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_layers_are_fitted_to_what_those_before_became(kind: str) -> None:
    """Oracle: of the finished model whole forwards, whose layers before the one in question are those it was fitted to.

    Components of DataSVD are orthogonal, so the fit of the right factor is a projection.
    """
    model, base, batches = decomposed(kind)
    before, profile = copy.deepcopy(nested_layers(model)), small(model)
    fr.refit_(model, profile, base, batches)
    for name, layer in nested_layers(model).items():
        x, x0 = (rows_of(one, batches, name) for one in (model, base))
        matrix, bias = fitted_by_hand(before[name], profile[name], x, x0)
        found = x @ layer.matrix.T.double() + (0 if layer.bias is None else layer.bias.double())
        assert relative(found, x @ matrix.T + bias) < 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_size_comes_nearer_to_the_base_model(kind: str) -> None:
    model, base, batches = decomposed(kind)
    profile = small(model)
    untouched, batch = copy.deepcopy(base), batches[1]
    with use_profile(model, profile):
        before = relative(outputs(model, batch), outputs(base, batch))
    fr.refit_(model, profile, base, batches)
    assert relative(outputs(model, batch), outputs(base, batch)) < 0.95 * before
    assert same_state(base, untouched) and base.training == untouched.training


@pytest.mark.parametrize("kind", KINDS)
def test_the_full_size_stays_the_base_model(kind: str) -> None:
    model, base, batches = decomposed(kind)
    fr.refit_(model, full_profile(model), base, batches)
    assert relative(outputs(model, batches[0]), outputs(base, batches[0])) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_has_this_size_alone_and_is_deployed_as_any(dtype: torch.dtype) -> None:
    model, base, batches = decomposed("gpt2")
    model, base, profile = model.to(dtype), base.to(dtype), small(model)
    with use_profile(model, profile):
        before = relative(outputs(model, batches[1]), outputs(base, batches[1]))
    model.train(dtype is torch.float32)
    first = next(iter(nested_layers(model).values()))
    first.u.requires_grad_(False)
    first.bias.requires_grad_(False)
    fr.refit_(model, profile, base, batches)
    layers = nested_layers(model)
    assert {name: len(layer.u) for name, layer in layers.items()} == profile
    assert all(layer.u.dtype == layer.bias.dtype == dtype for layer in layers.values())
    assert all(module.training == model.training for module in model.modules())
    first, second, *_ = layers.values()
    frozen = [not parameter.requires_grad for layer in (first, second) for parameter in layer.parameters()]
    assert frozen == [True, False, True, False, False, False]
    model.eval()
    assert relative(outputs(model, batches[1]), outputs(base, batches[1])) < 0.95 * before
    wanted = outputs(model, batches[0])
    assert relative(outputs(fr.deploy(model, profile), batches[0]), wanted) < (1e-4 if dtype is torch.float32 else 0.05)


def test_a_layer_that_runs_twice_is_fitted_to_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.relu(x)) - self.layer(torch.relu(-x))

    torch.manual_seed(0)
    base, batches = Twice(), [torch.randn(40, 6)]
    model = copy.deepcopy(base)
    fr.decompose_(model, fr.collect_moments(model, batches, fr.select_layers(model)))
    before = copy.deepcopy(model.layer)
    fr.refit_(model, {"layer": 2}, base, batches)
    x = torch.cat([torch.relu(batches[0]), torch.relu(-batches[0])]).double()
    assert relative(model.layer.matrix, fitted_by_hand(before, 2, x, x)[0]) < 1e-4


def test_a_base_model_in_training_mode_drops_nothing_meanwhile() -> None:
    torch.manual_seed(0)
    base, batches = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)), [torch.randn(50, 6)]
    model = copy.deepcopy(base).eval()
    fr.decompose_(model, fr.collect_moments(model, batches, fr.select_layers(model)))
    fr.refit_(model, full_profile(model), base, batches)
    assert base.training and base[1].training
    assert relative(outputs(model, batches[0]), outputs(base.eval(), batches[0])) < 1e-3


@torch.no_grad()
def test_a_mean_far_from_zero_costs_no_digits() -> None:
    """Oracle: least squares over explicit rows in float64; by float32's squares a millionth of them is lost."""
    torch.manual_seed(0)
    base, batches = nn.Sequential(nn.Linear(6, 6)), [torch.randn(300, 6) + 1000 * torch.arange(1, 7) for _ in range(2)]
    model = copy.deepcopy(base)
    fr.decompose_(model, fr.collect_moments(model, batches, fr.select_layers(model)))
    before = copy.deepcopy(model[0])
    fr.refit_(model, {"0": 3}, base, batches)
    x = torch.cat(batches).double()
    assert relative(model[0].matrix, fitted_by_hand(before, 3, x, x)[0]) < 1e-3


def test_long_batches_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, base, batches = decomposed("bert")
    parts, profile = copy.deepcopy(whole), small(whole)
    fr.refit_(whole, profile, base, batches)
    monkeypatch.setattr(refit_module, "ROWS", 7)
    fr.refit_(parts, profile, base, batches)
    assert relative(outputs(parts, batches[0]), outputs(whole, batches[0])) < 1e-4


def loaded(model: Any, directory: Path) -> Any:
    """The model at one budget, of whose artefact no more was read."""
    fr.save_elastic(model, chain_of(model), directory / "elastic")
    return fr.load_elastic(directory / "elastic", 0.5)[0]


def test_what_cannot_be_fitted_is_refused_in_one_line(tmp_path: Path) -> None:
    model, base, batches = decomposed("llama_tied")
    profile = small(model)
    name = next(iter(profile))
    cases: list[tuple[Any, Any, Any, str]] = [
        (model, profile | {name: 10**6}, batches, f"layer '{name}': rank 1000000 is out of range"),
        (model, profile, token_batch(), "batches is a dict"),
        (model, profile, [], "needs at least one"),
        (base, profile, batches, "has no elastic layers"),
        (with_sizes(copy.deepcopy(model)), profile, batches, "was consolidated or lacks components"),
        (loaded(model, tmp_path), profile, batches, "was consolidated or lacks components"),
    ]
    for one, ranks, some, message in cases:
        with pytest.raises(FlexrankError, match=message):
            fr.refit_(one, ranks, base, some)
    with pytest.raises(FlexrankError, match="is not in the base model; give the model that was decomposed"):
        fr.refit_(model, profile, build("bert"), batches)
    with torch.no_grad():
        weight_matrix(base.get_submodule(name))[0, 0] = torch.nan
    with pytest.raises(FlexrankError, match="reads a value that is not finite"):
        fr.refit_(model, profile, base, batches)


def test_experts_that_read_other_tokens_are_refused() -> None:
    model, base = elastic("mixtral"), build("mixtral")
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "gate.weight" in name:
                parameter.neg_()
    with pytest.raises(FlexrankError, match="reads other rows than in the base model"):
        fr.refit_(model, small(model), base, [token_batch()])


def test_batches_of_texts_are_fitted_as_those_of_tensors() -> None:
    """A model that reads strings itself; oracle: one of the same weights that reads their tensors."""

    def codes(texts: Iterable[str]) -> Tensor:
        return torch.tensor([[ord(letter) / 64 - 1 for letter in text] for text in texts])

    class Reading(nn.Sequential):
        def forward(self, *texts: str) -> Tensor:
            return super().forward(codes(texts))

    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    texts = ["".join(map(chr, row)) for row in torch.randint(32, 127, (40, 8)).tolist()]
    fitted = []
    for kind, batches in ((Reading, [texts[:20], texts[20:]]), (nn.Sequential, [codes(texts[:20]), codes(texts[20:])])):
        base = kind(copy.deepcopy(layer))
        model = copy.deepcopy(base)
        fr.decompose_(model, fr.collect_moments(model, batches, fr.select_layers(model)))
        before = nested_layers(model)["0"].matrix.clone()
        fr.refit_(model, {"0": 4}, base, batches)
        fitted.append(nested_layers(model)["0"].matrix)
        assert not torch.equal(fitted[-1], before)
    torch.testing.assert_close(*fitted)


def test_the_callers_autocast_changes_no_fit() -> None:
    model, base, batches = decomposed("bert")
    other, profile = copy.deepcopy(model), small(model)
    fr.refit_(model, profile, base, batches)
    with torch.autocast("cpu", torch.bfloat16):
        fr.refit_(other, profile, base, batches)
    assert same_state(model, other)
