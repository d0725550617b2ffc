"""Deployed models against the elastic ones they come from."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import tiny
from flexrank.deployment import FlexRankConfig, deploy, deployed_parameters_of, find_slack
from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.gauge_aligned import GaugeAlignedConv2d, GaugeAlignedLayer, GaugeAlignedLinear
from flexrank.nn.switch import full_profile, nested_layers, set_budget, use_profile
from flexrank.profiles import SlackTable
from flexrank.profiles.costs import deployed_parameters
from tiny import outputs, relative

ALL = [*tiny.TRANSFORMERS, *tiny.PLAIN]

#: Whole-model bound in float32: every layer may add 2e-6 (`alignment.ERROR_FLOOR`) where slack is chosen.
WHOLE_MODEL = 5e-5


@pytest.fixture(params=ALL)
def named(request):
    return request.param, tiny.elastic(request.param)


@pytest.mark.parametrize("own", ["nothing", "vectors", "matrices"])
def test_deployed_equals_the_elastic_model_at_every_profile(named, own):
    name, model = named
    model = model if own == "nothing" else tiny.with_sizes(model, dense=own == "matrices")
    batch = tiny.batch_for(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for entry in tiny.chain_of(model).entries:
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
    entry = tiny.chain_of(model).entries[1]
    small = deploy(model, entry.profile, slack=0)
    layers = nested_layers(model)
    wanted = sum(deployed_parameters(layers[name].matrix_shape, rank) for name, rank in entry.profile.items())
    counted = 0
    for name in entry.profile:
        layer = small.get_submodule(name)
        matrices = (layer.latent, layer.expand) if isinstance(layer, GaugeAlignedLayer) else (layer,)
        counted += sum(matrix.weight.numel() for matrix in matrices)
    assert deployed_parameters_of(small, entry.profile) == counted == wanted == entry.parameters


def test_a_dense_layer_is_computed_in_float64_and_rounded_once():
    model = tiny.elastic("perceptron")
    small = deploy(model, full_profile(model), dtype=torch.float64)
    for name, layer in nested_layers(model).items():
        assert torch.equal(small.get_submodule(name).weight, layer.u.double().T @ layer.v.double())


def test_full_rank_is_dense_and_equals_the_original(named):
    name, model = named
    batch = tiny.batch_for(name)
    base = tiny.build(name)
    small = deploy(model, full_profile(model))
    assert not any(isinstance(module, GaugeAlignedLayer) for module in small.modules())
    assert relative(outputs(small, batch), outputs(base, batch)) < 1e-5
    assert torch.equal(outputs(deploy(model, full_profile(model), base=base), batch), outputs(base, batch))
    below = full_profile(model) | {next(iter(full_profile(model))): 3}
    assert not torch.equal(outputs(deploy(model, below, base=base), batch), outputs(base, batch))


def test_ties_modes_and_frozen_parameters_are_kept():
    model = tiny.elastic("tied_blocks")
    model.head.requires_grad_(False)
    model.train()
    model.first[1].eval()
    small = deploy(model, tiny.chain_of(model).entries[0].profile)
    assert isinstance(small.shared, GaugeAlignedLinear) and small.again is small.shared
    assert not any(parameter.requires_grad for parameter in small.head.parameters())
    assert all(parameter.requires_grad for parameter in small.shared.parameters())
    assert small.training and small.shared.training and small.shared.latent.training and not small.first[1].training
    language = tiny.elastic("llama_tied")
    small = deploy(language, tiny.chain_of(language).entries[0].profile)
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert small.lm_head.weight is not language.lm_head.weight


def test_elastic_factors_are_never_copied(monkeypatch):
    model = tiny.elastic("bert")

    def refuse(self, memo):
        raise AssertionError("a tensor was copied as it is")

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", refuse)  # in another dtype than it is to have
    small = deploy(model, tiny.chain_of(model).entries[0].profile, dtype=torch.bfloat16)
    deploy(model, full_profile(model), dtype=torch.bfloat16, base=small)


@pytest.mark.parametrize("name", ["llama_tied", "convnet"])
def test_bfloat16_keeps_its_accuracy_and_non_persistent_buffers(name):
    model, batch = tiny.elastic(name), tiny.batch_for(name)
    entry = tiny.chain_of(model).entries[1]
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


def test_a_layers_format_is_the_one_with_fewest_parameters():
    model = tiny.nest(nn.Sequential(nn.Linear(10, 6)))
    for rank in range(1, 7):
        for slack in range(rank + 1):
            aligned = rank * (16 - rank + slack)
            layer = deploy(model, {"0": rank}, slack=slack)[0]
            assert deployed_parameters_of(nn.Sequential(layer), ["0"]) == min(aligned, 60)
            assert isinstance(layer, GaugeAlignedLinear) == (aligned < 60)


def test_kept_slack_deploys_the_same_model_and_is_chosen_once(monkeypatch):
    model, batch = tiny.elastic("bert"), tiny.batch_for("bert")
    profiles = [entry.profile for entry in tiny.chain_of(model).entries]
    table = find_slack(model, profiles, dtype=torch.bfloat16)
    assert table.dtype == "bfloat16"
    again = [deploy(model, profile, dtype=torch.bfloat16) for profile in profiles]
    monkeypatch.setattr("flexrank.deployment.slack.resolve_slack", lambda *_: pytest.fail("slack was chosen again"))
    for profile, small in zip(profiles, again, strict=True):
        kept = deploy(model, profile, dtype=torch.bfloat16, slack=table)
        assert torch.equal(outputs(kept, batch), outputs(small, batch))
        shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
        assert table.parameters(profile, shapes) == deployed_parameters_of(kept, profile)
    assert find_slack(model, profiles, dtype=torch.bfloat16, known=table) == table
    for use in (functools.partial(deploy, slack=table), lambda *one: find_slack(one[0], one[1:], known=table)):
        with pytest.raises(FlexrankError, match="chosen for bfloat16; find_slack for float32"):
            use(model, profiles[0])


@torch.no_grad()
def test_slack_is_the_most_that_sizes_of_one_rank_need(monkeypatch):
    """Two sizes have rank 4 in layer 0; here a layer needs as many columns as its largest gain says."""
    model = tiny.nest(nn.Sequential(nn.Linear(20, 16, bias=False), nn.Linear(16, 20, bias=False)))
    sizes = [{"0": 4, "1": 2}, {"0": 4, "1": 5}, {"0": 6, "1": 6}]
    for name, layer in nested_layers(model).items():
        layer.u.fill_(1.0)
        layer.set_sizes_([size[name] for size in sizes])
        layer.sizes.outputs.copy_(torch.tensor([3.0, 2.0, 4.0])[:, None].expand(3, layer.out_features))
    monkeypatch.setattr("flexrank.deployment.slack.resolve_slack", lambda u, v, slack, dtype, inputs: int(u.max()))
    table = find_slack(model, sizes[1:])
    assert table.columns == {"0": {4: 2, 6: 4}, "1": {5: 2, 6: 4}}
    assert find_slack(model, sizes).columns == {"0": {4: 3, 6: 4}, "1": {2: 3, 5: 2, 6: 4}}
    assert find_slack(model, sizes[:1], known=table).columns == {"0": {4: 3, 6: 4}, "1": {2: 3, 5: 2, 6: 4}}


def test_slack_is_measured_on_the_activations_given(monkeypatch):
    model, rows, seen = tiny.nest(nn.Sequential(nn.Linear(40, 30))), torch.randn(64, 40), []
    monkeypatch.setattr(
        "flexrank.deployment.slack.resolve_slack", lambda u, v, slack, dtype, inputs: seen.append((slack, inputs)) or 5
    )
    assert find_slack(model, [{"0": 12}], activations={"0": rows}).at("0", 12) == 5
    find_slack(model, [{"0": 12}, {"0": 4}], slack=7)
    assert seen[0][0] == "auto" and seen[0][1] is rows
    assert [slack for slack, _ in seen[1:]] == [7, 4]  # at most the rank


def test_convolutions_become_convolutions():
    model = tiny.elastic("convnet")
    small = deploy(model, tiny.chain_of(model).entries[0].profile)
    assert isinstance(small[0], GaugeAlignedConv2d) and isinstance(small[6], GaugeAlignedLinear)
    dense = deploy(model, full_profile(model))
    assert type(dense[3]) is nn.Conv2d and dense[3].bias is None and dense[3].dilation == (2, 2)


def test_wrong_profiles_are_named():
    model = tiny.elastic("perceptron")
    for profile, message in (
        ({"0": 3, "2": 3}, "'4' is not in the profile"),
        (0.5, r"profile is a float; it is a mapping of layers to ranks, such as chain.at\(0.5\)"),
        ({"0": 3, "2": 3, "4": 3, "9": 1}, "'9' is not in the model"),
        ({"0": 13, "2": 3, "4": 3}, "'0': rank 13"),
    ):
        with pytest.raises(FlexrankError, match=message):
            deploy(model, profile)
    with pytest.raises(FlexrankError, match="^layer '0': no slack was chosen for rank 3"):
        deploy(model, {"0": 3, "2": 3, "4": 3}, slack=SlackTable("float32"))
    with pytest.raises(FlexrankError, match="no elastic layers"):
        deploy(nn.Linear(2, 2), {})


@pytest.mark.parametrize("slack", ["all", 1.5, None, -1, True])
def test_a_wrong_slack_is_one_line(slack):
    model = tiny.elastic("perceptron")
    for call in (lambda: deploy(model, full_profile(model), slack=slack), lambda: FlexRankConfig(0.5, slack=slack)):
        with pytest.raises(FlexrankError, match=f'slack is {slack!r}; it is "auto", a whole number of columns'):
            call()


@pytest.mark.parametrize("call", [deploy, lambda model, profile, **options: find_slack(model, [profile], **options)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'; it is a torch.dtype, such as torch.bfloat16"),
        ({"dtype": torch.int8}, "dtype is torch.int8; factors have one of torch.float64, torch.float32"),
        ({"activations": [torch.ones(3, 12)]}, "activations is a list; it is what collect_rows returns"),
    ],
)
def test_wrong_options_are_one_line(call, options, message):
    model = tiny.elastic("perceptron")
    with pytest.raises(FlexrankError, match=message):
        call(model, full_profile(model), **options)


def test_a_deployed_model_has_no_hooks_of_the_elastic_one():
    model, seen = tiny.elastic("perceptron"), []
    model.register_forward_hook(lambda *_: seen.append(1))  # the user's own stays
    chain = tiny.chain_of(model)
    set_budget(model, chain.budgets[0], chain=chain)
    small = deploy(model, chain.entries[0].profile)
    assert len(small._forward_hooks) == 1 and not small._forward_pre_hooks and not small._forward_hooks_always_called
    assert not [name for name in vars(small) if "lock" in name]
    outputs(small, tiny.batch_for("perceptron"))
    assert seen == [1] and len(model._forward_hooks) == 2


def test_a_base_with_computed_weights_is_deployed() -> None:
    """As torch.nn.utils.prune leaves them after a forward with gradients."""
    base, x = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(4, 12)
    model = tiny.nest(copy.deepcopy(base))
    prune.l1_unstructured(base[0], "weight", 0.3)
    expected = base(x).detach()
    small = deploy(model, {"0": 8, "2": 6}, base=base)
    assert torch.equal(small(x), expected)
