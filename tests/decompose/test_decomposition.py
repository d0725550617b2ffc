"""The decomposed model against the original, and each method against its definition."""

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.artefacts.elastic import load_elastic
from flexrank.calibrate import LayerMoment, by_block, collect_moments
from flexrank.decompose import METHODS, decompose_, decompose_to_disk
from flexrank.distill.objectives import FeatureObjective
from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.linalg import plain_svd, whitened_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import select_layers
from flexrank.nn.switch import footprint, nested_layers, use_profile
from tiny import PLAIN, TRANSFORMERS, batch_for, build, outputs, relative


@pytest.mark.parametrize("name", [*TRANSFORMERS, *PLAIN])
@pytest.mark.parametrize("method", METHODS)
def test_full_rank_equals_the_original(name: str, method: str) -> None:
    model, batch = build(name), batch_for(name)
    before, layers = outputs(model, batch), select_layers(model)
    loss = FeatureObjective().fisher_loss if method == "fisher" else None
    side = "input" if method == "paper" else "smaller"
    decompose_(model, collect_moments(model, [batch], layers, side=side, gradient_loss=loss), method=method)
    assert nested_layers(model).keys() == layers.keys()
    # The whitened form inverts a moment of few tokens: it is held to the accuracy that its conditioning leaves.
    assert relative(outputs(model, batch), before) < (1e-3 if method == "paper" else 1e-5)


@pytest.mark.parametrize("name", ["perceptron", "convnet"])
def test_truncated_output_is_nearer_than_plain_svds(name: str) -> None:
    """One layer at a time, on the data it was calibrated on: DataSVD is the optimum, so it is never beaten."""
    batch = torch.randn(40, *batch_for(name).shape[1:])
    errors = {}
    for method in ("datasvd", "svd"):
        model = build(name)
        with torch.no_grad():
            layers = {"0": select_layers(model)["0"]}
            before = model[0](batch)
            decompose_(model, collect_moments(model, [batch], layers), method=method)
            with use_profile(model, {"0": 4}):
                errors[method] = float((model[0](batch) - before).norm())
    assert 0 < errors["datasvd"] < errors["svd"]


def test_paper_and_svd_are_the_named_procedures() -> None:
    batch = torch.randn(40, 12)
    for method, oracle in (("paper", whitened_svd), ("svd", lambda w, _: plain_svd(w))):
        model = build("perceptron")
        layers = select_layers(model)
        weight = weight_matrix(layers["0"]).detach().clone()
        moments = collect_moments(model, [batch], layers, side="input")
        energies = decompose_(model, moments, method=method)
        factors = oracle(weight, moments["0"].moment)
        torch.testing.assert_close(model[0].u.detach(), factors.u.float())
        torch.testing.assert_close(energies["0"], factors.energies)


def test_gradients_weigh_outputs_by_half_by_default() -> None:
    """Oracle: the least of tr(G (W − W_r) Σ (W − W_r)ᵀ) over W_r by an SVD of G^{1/2} W Σ^{1/2} in float64."""
    model, batch = build("perceptron"), torch.randn(40, 12)
    moments = collect_moments(model, [batch], select_layers(model), gradient_loss=FeatureObjective().fisher_loss)
    moment, weight = moments["0"], weight_matrix(model[0]).detach().double()
    gradient = moment.gradient_moment / moment.gradient_moment.diagonal().mean()
    weighting = (gradient + torch.eye(24)) / 2
    values, vectors = torch.linalg.eigh(weighting)
    root = (vectors * values.sqrt()) @ vectors.T
    inputs = batch.double().T @ batch.double()
    values, vectors = torch.linalg.eigh(inputs)
    singular = torch.linalg.svdvals(root @ weight @ (vectors * values.clamp(min=0).sqrt()))
    decompose_(model, moments)
    layer = nested_layers(model)["0"]
    for rank in (1, 4, 9):
        layer.rank = rank
        missing = weight - layer.matrix_in(torch.float64).detach()
        loss = float(torch.trace(weighting @ missing @ inputs @ missing.T))
        assert loss == pytest.approx(float(singular[rank:].square().sum()), rel=1e-3)


def test_wrong_uses_are_named() -> None:
    model = build("perceptron")
    moments = collect_moments(model, [torch.randn(4, 12)], select_layers(model))
    with pytest.raises(FlexrankError, match="method 'pca' is unknown; it is one of datasvd, paper, svd, fisher"):
        decompose_(model, moments, method="pca")
    with pytest.raises(FlexrankError, match="method 'fisher' needs"):
        decompose_(model, moments, method="fisher")
    with pytest.raises(FlexrankError, match="layer '0': method 'datasvd' needs moments"):
        decompose_(model, ["0"])
    assert moments["2"].side == "output"
    with pytest.raises(FlexrankError, match="layer '2': method 'paper' needs the input's moment"):
        decompose_(model, {"2": moments["2"]}, method="paper")
    decompose_(model, ["0", "2"], method="svd")
    assert list(nested_layers(model)) == ["0", "2"]


def test_nothing_is_replaced_if_any_layer_is_refused() -> None:
    """Sides of the three moments: input, output, input; and a weight that is not finite in the last layer."""
    model = build("perceptron")
    moments = collect_moments(model, [torch.randn(4, 12)], select_layers(model))
    with pytest.raises(FlexrankError, match="layer '2': method 'paper' needs the input's moment"):
        decompose_(model, moments, method="paper")
    assert not nested_layers_of(model)
    layers = list(select_layers(model))
    model.get_submodule(layers[-1]).weight.data[0, 0] = float("inf")
    for method in ("svd", "datasvd"):
        with pytest.raises(FlexrankError, match=f"layer '{layers[-1]}': the weight holds values that are not finite"):
            decompose_(model, moments, method=method)
        assert not nested_layers_of(model)


def nested_layers_of(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, NestedLayer)]


def test_a_dead_layer_is_named_by_whitening_only() -> None:
    model = build("perceptron")
    moments = collect_moments(model, [torch.zeros(4, 12)], {"0": model[0]}, side="input")
    with pytest.raises(FlexrankError, match="layer '0': the second moment is zero"):
        decompose_(model, moments, method="paper")
    decompose_(model, moments)


@pytest.mark.parametrize("name", ["llama_untied", "llama_tied", "gpt2", "bert", "dinov3"])
@pytest.mark.parametrize("method", ["datasvd", "paper", "fisher"])
def test_an_artefact_written_block_by_block_is_the_whole_model_at_once(name: str, method: str, tmp_path: Path) -> None:
    """To the bit, with gradients too: each block's are those of the original model."""
    batches = [batch_for(name)] * 2
    loss = FeatureObjective().fisher_loss if method == "fisher" else None
    whole, model = build(name), build(name)
    layers = select_layers(whole)
    side = "input" if method == "paper" else "smaller"
    moments = collect_moments(whole, batches, layers, side=side, gradient_loss=loss)
    decompose_(whole, moments, method=method)
    seen = {}

    def see(layer: str, nested: NestedLayer, moment: LayerMoment) -> None:
        seen[layer] = torch.equal(moment.moment, moments[layer].moment) and not nested.u.is_meta

    asked = method if method == "paper" else None  # by default "fisher" where there are gradients, else "datasvd"
    decompose_to_disk(model, batches, list(layers), tmp_path / "one", method=asked, gradient_loss=loss, on_layer=see)
    assert seen == dict.fromkeys(seen, True) and seen.keys() == layers.keys()
    assert all(layer.u.is_meta for layer in nested_layers(model).values())
    loaded, chain = load_elastic(tmp_path / "one")
    state = loaded.state_dict()
    assert state.keys() == whole.state_dict().keys()
    for key, value in whole.state_dict().items():
        assert torch.equal(state[key], value), key
    assert chain.footprint == footprint(whole) and chain.budgets == ()
    dense = sum(layer.in_features * layer.out_features for layer in nested_layers(whole).values())
    assert chain.entries[0].parameters == dense


def test_factors_have_the_dtype_in_which_blocks_compute(tmp_path: Path) -> None:
    model, batch = build("llama_tied").bfloat16(), batch_for("llama_tied")
    whole = copy.deepcopy(model).float()
    names = list(select_layers(model))
    decompose_to_disk(model, [batch], names, tmp_path / "one", dtype=torch.float32)
    decompose_(whole, collect_moments(whole, [batch], {name: whole.get_submodule(name) for name in names}))
    loaded, chain = load_elastic(tmp_path / "one")
    for key, value in whole.state_dict().items():
        assert loaded.state_dict()[key].dtype is value.dtype and torch.equal(loaded.state_dict()[key], value), key
    assert chain.footprint == footprint(whole) and loaded.config.dtype is torch.float32


def test_a_decomposition_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model, batch = build("llama_untied"), batch_for("llama_untied")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(FlexrankError, match="layer 'model.layers.1.mlp.up_proj': the weight holds values"):
        decompose_to_disk(model, [batch], list(select_layers(model)), tmp_path / "one")
    assert not any(tmp_path.iterdir())


def test_a_layer_of_two_names_is_written_once(tmp_path: Path) -> None:
    model, batch = build("tied_blocks"), batch_for("tied_blocks")
    whole = copy.deepcopy(model)
    layers = select_layers(model)
    decompose_(whole, collect_moments(whole, [batch], {name: whole.get_submodule(name) for name in layers}))
    decompose_to_disk(model, [batch], list(layers), tmp_path / "one")
    loaded, _ = load_elastic(tmp_path / "one", model=build("tied_blocks"))
    assert loaded.again is loaded.shared
    for key, value in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_no_block_is_held_on_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense layer goes when it is replaced, and a block's moments before the next block has any."""
    model, batch = build("llama_untied"), batch_for("llama_untied")
    names = list(select_layers(model, exclude=["lm_head"]))
    layers = {name: weakref.ref(model.get_submodule(name)) for name in names}
    moments: list[weakref.ref[torch.Tensor]] = []
    own, calls = by_block.Collector, list[int]()

    def allocate(*args: Any) -> Any:
        assert all(moment() is None for moment in moments)
        calls.append(len(moments))
        return own(*args)

    def see(name: str, _: NestedLayer, moment: LayerMoment) -> None:
        assert layers[name]() is None
        moments.append(weakref.ref(moment.moment))

    monkeypatch.setattr(by_block, "Collector", allocate)
    decompose_to_disk(model, [batch], names, tmp_path / "one", on_layer=see)
    assert calls == [0, 7] and len(moments) == 14
