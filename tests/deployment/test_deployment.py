"""Deployed models against the elastic ones they come from, and exports that must be whole or absent."""

import itertools

import pytest
import torch
from torch import nn

import tiny_models
from flexrank import deployment
from flexrank.artefacts.deployed import load_deployed
from flexrank.deployment import deploy, deployed_parameters_of, export
from flexrank.deployment.fitting import fit_profile
from flexrank.deployment.planning import plan_layer
from flexrank.errors import FlexrankError
from flexrank.nn.layers import GaugeAlignedConv2d, GaugeAlignedLayer, GaugeAlignedLinear, NestedLayer
from flexrank.nn.surgery import full_profile, nested_layers, use_profile
from flexrank.profiles.costs import deployed_parameters
from tiny_models import agree, outputs

ALL = [*tiny_models.TRANSFORMERS, *tiny_models.PLAIN]

#: Whole-model bound in float32: every layer may add 2e-6 (`linalg.ERROR_FLOOR`) where slack is chosen.
WHOLE_MODEL = 5e-5


def relative(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture(params=ALL)
def named(request):
    return request.param, tiny_models.nest(tiny_models.build(request.param))


def test_deployed_equals_the_elastic_model_at_every_profile(named):
    name, model = named
    batch = tiny_models.batch_for(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for entry in tiny_models.chain_of(model).entries:
        with use_profile(model, entry.profile):
            wanted = outputs(model, batch)
        small = deploy(model, entry.profile)
        assert relative(outputs(small, batch), wanted) < WHOLE_MODEL
        assert not any(isinstance(module, NestedLayer) for module in small.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    owned = {parameter.data_ptr() for parameter in model.parameters()}
    assert owned.isdisjoint(parameter.data_ptr() for parameter in small.parameters() if parameter.numel())


def test_slack_zero_is_the_papers_form_and_counts_its_parameters(named):
    _, model = named
    entry = tiny_models.chain_of(model).entries[1]
    small = deploy(model, entry.profile, slack=0)
    layers = nested_layers(model)
    wanted = sum(deployed_parameters(layers[name].matrix_shape, rank) for name, rank in entry.profile.items())
    counted = 0
    for name in entry.profile:
        layer = small.get_submodule(name)
        matrices = (layer.latent, layer.expand) if isinstance(layer, GaugeAlignedLayer) else (layer,)
        counted += sum(matrix.weight.numel() for matrix in matrices)
    assert deployed_parameters_of(small, entry.profile) == counted == wanted == entry.parameters


def test_full_rank_is_dense_and_equals_the_original(named):
    name, model = named
    batch = tiny_models.batch_for(name)
    base = tiny_models.build(name)
    small = deploy(model, full_profile(model))
    assert not any(isinstance(module, GaugeAlignedLayer) for module in small.modules())
    assert relative(outputs(small, batch), outputs(base, batch)) < 1e-5
    assert torch.equal(outputs(deploy(model, full_profile(model), base=base), batch), outputs(base, batch))
    below = full_profile(model) | {next(iter(full_profile(model))): 3}
    assert not torch.equal(outputs(deploy(model, below, base=base), batch), outputs(base, batch))


def test_ties_modes_and_frozen_parameters_are_kept():
    model = tiny_models.nest(tiny_models.build("tied_blocks"))
    model.head.requires_grad_(False)
    model.train()
    model.first[1].eval()
    small = deploy(model, tiny_models.chain_of(model).entries[0].profile)
    assert isinstance(small.shared, GaugeAlignedLinear) and small.again is small.shared
    assert not any(parameter.requires_grad for parameter in small.head.parameters())
    assert all(parameter.requires_grad for parameter in small.shared.parameters())
    assert small.training and small.shared.training and small.shared.latent.training and not small.first[1].training
    language = tiny_models.nest(tiny_models.build("llama_tied"))
    small = deploy(language, tiny_models.chain_of(language).entries[0].profile)
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert small.lm_head.weight is not language.lm_head.weight


def test_elastic_factors_are_never_copied(monkeypatch):
    model = tiny_models.nest(tiny_models.build("bert"))

    def refuse(self, memo):
        raise AssertionError("an elastic layer was copied")

    monkeypatch.setattr(NestedLayer, "__deepcopy__", refuse, raising=False)
    deploy(model, tiny_models.chain_of(model).entries[0].profile)


@pytest.mark.parametrize("name", ["llama_tied", "convnet"])
def test_bfloat16_keeps_its_accuracy_and_non_persistent_buffers(name):
    model, batch = tiny_models.nest(tiny_models.build(name)), tiny_models.batch_for(name)
    entry = tiny_models.chain_of(model).entries[1]
    small = deploy(model, entry.profile, dtype=torch.bfloat16)
    plain = deploy(model, entry.profile, dtype=torch.bfloat16, slack=10**6)  # nothing aligned
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    with use_profile(model, entry.profile):
        wanted = outputs(model, batch)
    cast = batch if isinstance(batch, dict) else batch.bfloat16()
    assert relative(outputs(small, cast), wanted) <= 3 * relative(outputs(plain, cast), wanted) < 0.1
    persistent = model.state_dict().keys()
    for key, buffer in model.named_buffers():
        kept = dict(small.named_buffers())[key]
        assert key in persistent or (kept.dtype == buffer.dtype and torch.equal(kept, buffer))


def test_a_layers_form_is_the_one_with_fewest_parameters():
    layer = tiny_models.nest(nn.Sequential(nn.Linear(10, 6)))[0]
    for rank in range(1, 7):
        slacks = {slack: rank * (16 - rank + slack) for slack in range(rank + 1)}
        assert plan_layer(layer, rank, slack=99).parameters == min(slacks[rank], 60)
        for slack, aligned in slacks.items():
            plan = plan_layer(layer, rank, slack=slack)
            assert plan.parameters == min(aligned, 60)
            assert (plan.slack is None) == (aligned >= 60)
    with pytest.raises(FlexrankError, match="slack -1"):
        plan_layer(layer, 2, slack=-1)


def test_convolutions_become_convolutions():
    model = tiny_models.nest(tiny_models.build("convnet"))
    small = deploy(model, tiny_models.chain_of(model).entries[0].profile)
    assert isinstance(small[0], GaugeAlignedConv2d) and isinstance(small[6], GaugeAlignedLinear)
    dense = deploy(model, full_profile(model))
    assert type(dense[3]) is nn.Conv2d and dense[3].bias is None and dense[3].dilation == (2, 2)


def test_wrong_profiles_are_named():
    model = tiny_models.nest(tiny_models.build("perceptron"))
    for profile, message in (
        ({"0": 3, "2": 3}, "'4' is not in the profile"),
        ({"0": 3, "2": 3, "4": 3, "9": 1}, "'9' is not in the model"),
        ({"0": 13, "2": 3, "4": 3}, "'0': rank 13"),
    ):
        with pytest.raises(FlexrankError, match=message):
            deploy(model, profile)
    with pytest.raises(FlexrankError, match="'0': slack -1"):
        deploy(model, {"0": 3, "2": 3, "4": 3}, slack=-1)
    with pytest.raises(FlexrankError, match="no elastic layers"):
        deploy(nn.Linear(2, 2), {})


@pytest.mark.parametrize("slack", [0, 2, "auto"])
def test_fit_profile_finds_the_largest_that_really_fits(slack):
    model = tiny_models.nest(tiny_models.build("perceptron"))
    chain = tiny_models.chain_of(model, tuple(step / 20 for step in range(4, 21)))
    sizes = {}
    for entry in chain.entries:
        small = deploy(model, entry.profile, slack=slack)
        sizes[entry.profile] = (
            deployed_parameters_of(small, entry.profile),
            sum(p.numel() for p in small.parameters()),
        )
    for budget in (0.4, 0.55, 0.7, 0.9, 1.0):
        fitting = [
            entry.profile for entry in chain.entries if sizes[entry.profile][0] <= budget * chain.dense_parameters
        ]
        assert fit_profile(model, chain, budget, slack=slack) == fitting[-1]
    for limit in (300, 420, 601, 730):
        fitting = [entry.profile for entry in chain.entries if sizes[entry.profile][1] <= limit]
        assert fit_profile(model, chain, max_params=limit, slack=slack) == fitting[-1]
        assert fit_profile(model, chain, max_bytes=4 * limit, slack=slack) == fitting[-1]
        if slack == 0:  # the slack of bfloat16 differs
            assert fit_profile(model, chain, max_bytes=2 * limit, slack=slack, dtype=torch.bfloat16) == fitting[-1]


def test_fit_profile_says_when_nothing_fits():
    model = tiny_models.nest(tiny_models.build("perceptron"))
    chain = tiny_models.chain_of(model)
    with pytest.raises(FlexrankError, match="max_params=10 is too small"):
        fit_profile(model, chain, max_params=10)
    least = chain.relative_size(chain.entries[0])
    with pytest.raises(FlexrankError, match="slack included"):
        fit_profile(model, chain, least, slack=1)
    with pytest.raises(FlexrankError, match="needs a budget"):
        fit_profile(model, chain)


@pytest.fixture
def convnet():
    model = tiny_models.nest(tiny_models.build("convnet"))
    return deploy(model, tiny_models.chain_of(model).entries[1].profile)


def test_export_publishes_what_a_fresh_process_has_run(convnet, tmp_path):
    batch = tiny_models.batch_for("convnet")
    convnet.train()
    export(convnet, tmp_path / "small", batch, factory="tiny_models:convnet")
    assert convnet.training and convnet[1].training
    again = load_deployed(tmp_path / "small")
    assert agree(outputs(again, batch), outputs(convnet.eval(), batch))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == ["flexrank.json", "model.safetensors"]


def other_convnet():
    return nn.Sequential(*itertools.islice(tiny_models.convnet(), 6))


def shifted_convnet():
    class Shifted(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1e-3

    return Shifted(*tiny_models.convnet())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (other_convnet, "failed in a fresh process.*has no layer '6'"),
        (shifted_convnet, "outputs differ by"),
        ("tiny_models:nothing", "cannot be imported"),
        ("tiny_models", "not of the form"),
        (lambda: None, "cannot be imported by name"),
        (None, "needs factory="),
    ],
)
def test_a_failed_export_leaves_nothing_behind(convnet, tmp_path, factory, message):
    with pytest.raises(FlexrankError, match=message):
        export(convnet, tmp_path / "small", tiny_models.batch_for("convnet"), factory=factory)
    assert list(tmp_path.iterdir()) == []


def test_a_corrupted_export_leaves_the_old_one(convnet, tmp_path, monkeypatch):
    kept = tmp_path / "small"
    export(convnet, kept, tiny_models.batch_for("convnet"), factory="tiny_models:convnet")
    (kept / "old").write_text("old")
    run = deployment._run_verification

    def corrupt_and_run(artefact, scratch, timeout):
        path = artefact / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        run(artefact, scratch, timeout)

    monkeypatch.setattr(deployment, "_run_verification", corrupt_and_run)
    with pytest.raises(FlexrankError, match="does not match its checksum"):
        export(convnet, kept, tiny_models.batch_for("convnet"), factory=tiny_models.convnet)
    assert [path.name for path in tmp_path.iterdir()] == ["small"] and (kept / "old").read_text() == "old"


def test_outputs_that_are_not_finite_are_not_exported(convnet, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "_run_verification", lambda *arguments: pytest.fail("came too far"))
    convnet[1].weight.data.fill_(float("nan"))
    with pytest.raises(FlexrankError, match="not finite"):
        export(convnet, tmp_path / "small", tiny_models.batch_for("convnet"), factory="tiny_models:convnet")
    assert list(tmp_path.iterdir()) == []


def test_a_slow_fresh_process_is_ended(convnet, tmp_path):
    with pytest.raises(FlexrankError, match=r"within 0\.01 s"):
        export(
            convnet, tmp_path / "small", tiny_models.batch_for("convnet"), factory="tiny_models:convnet", timeout=0.01
        )
    assert list(tmp_path.iterdir()) == []
