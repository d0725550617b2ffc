"""Experts made separate: transformers' fused ones are the oracle, and each token's own choice of experts."""

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flexrank as fr
import tiny
from flexrank.nn.experts import Experts, separate_experts
from tiny import outputs, relative

MIXTURES = ("mixtral", "qwen3_moe")


def chosen(model: Any, batch: Any, layer: int = 0) -> torch.Tensor:
    """The experts (T, k) that the tokens choose in one layer."""
    found: list[torch.Tensor] = []
    handle = model.model.layers[layer].mlp.gate.register_forward_hook(lambda *call: found.append(call[-1][2]))
    outputs(model, batch)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("name", MIXTURES)
def test_separate_experts_give_what_fused_ones_give(name: str) -> None:
    fused, model, batch = tiny.build(name), tiny.build(name), tiny.batch_for(name)
    assert fr.separate_experts_(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert not any("experts" in key for key in fr.select_layers(fused))
    width = 2 * fused.model.layers[0].mlp.experts.intermediate_dim
    layers = fr.select_layers(model)
    assert tuple(layers["model.layers.1.mlp.experts.3.gate_up"].weight.shape) == (width, 32)
    assert tuple(layers["model.layers.1.mlp.experts.3.down"].weight.shape) == (32, width // 2)
    assert relative(outputs(model, batch), outputs(fused, batch)) < 1e-6
    assert fr.separate_experts_(model) == [] and model.config.separate_experts
    low, fused = model.bfloat16(), fused.bfloat16()
    assert relative(outputs(low, batch), outputs(fused, batch)) < 2**-6


def test_gradients_pass_and_frozen_experts_stay_frozen() -> None:
    fused, batch = tiny.build("mixtral"), tiny.batch_for("mixtral")
    fused.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    model = copy.deepcopy(fused)
    fr.separate_experts_(model)
    for one in (fused, model):
        one(**batch).logits.square().sum().backward()
    wanted = fused.model.layers[1].mlp.experts.gate_up_proj.grad
    found = [model.get_submodule(f"model.layers.1.mlp.experts.{number}.gate_up").weight.grad for number in range(4)]
    torch.testing.assert_close(torch.stack(found), wanted, rtol=1e-4, atol=1e-5)
    frozen = model.model.layers[0].mlp.experts.get_submodule("2.down").weight
    assert not frozen.requires_grad and frozen.grad is None


def test_inside_the_block_experts_are_separate_on_the_same_tensors() -> None:
    model, batch = tiny.build("qwen3_moe"), tiny.batch_for("qwen3_moe")
    before, names = outputs(model, batch), list(model.state_dict())
    with pytest.raises(RuntimeError, match="halt"), separate_experts(model), torch.no_grad():
        assert isinstance(model.model.layers[1].mlp.experts, Experts)
        model.get_submodule("model.layers.1.mlp.experts.2.down").weight.zero_()
        raise RuntimeError("halt")
    assert list(model.state_dict()) == names and not hasattr(model.config, "separate_experts")
    assert not model.model.layers[1].mlp.experts.down_proj[2].any()
    assert not torch.equal(outputs(model, batch), before)


def test_models_without_experts_or_with_those_of_another_form_are_left() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    plain = tiny.build("llama_tied")
    assert fr.separate_experts_(plain) == [] and not hasattr(plain.config, "separate_experts")
    biased = GptOssForCausalLM(GptOssConfig(**tiny.DECODER, head_dim=8, num_local_experts=2, num_experts_per_tok=1))
    assert fr.separate_experts_(biased) == [] and hasattr(biased.model.layers[0].mlp.experts, "gate_up_proj")


def test_each_expert_is_calibrated_on_the_tokens_that_choose_it() -> None:
    """Oracle: the first layer's inputs, picked by the router's choice, token by token. Some experts have no token."""
    model = tiny.build("mixtral")
    fr.separate_experts_(model)
    batch = {"input_ids": torch.tensor([[5, 9]])}
    seen: list[torch.Tensor] = []
    block = model.model.layers[0].mlp
    handle = block.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, 1).double()))
    numbers = chosen(model, batch)
    handle.remove()
    layers = {name: layer for name, layer in fr.select_layers(model).items() if "layers.0.mlp.experts" in name}
    moments = fr.collect_moments(model, [batch], layers, side="input")
    for number in range(4):
        rows = seen[0][(numbers == number).any(1)]
        moment = moments[f"model.layers.0.mlp.experts.{number}.gate_up"]
        assert moment.tokens == len(rows)
        torch.testing.assert_close(moment.moment, rows.T @ rows, rtol=1e-4, atol=1e-6)
    assert len(numbers.unique()) < 4
    unused = fr.collect_rows(model, [batch], layers)
    assert min(len(rows) for rows in unused.values()) == 0


def test_padding_is_left_out_where_every_token_chooses_an_expert() -> None:
    """The rows are then as many as the mask's tokens, and in their order."""
    model, batch = tiny.build("mixtral"), tiny.token_batch()
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 4
    fr.separate_experts_(model)
    layers = fr.select_layers(model, include=["*.experts.1.gate_up"])
    rows = fr.collect_rows(model, [batch], layers)["model.layers.0.mlp.experts.1.gate_up"]
    alone = [{"input_ids": ids[mask.bool()][None]} for ids, mask in zip(*batch.values(), strict=True)]
    wanted = torch.cat([fr.collect_rows(model, [one], layers)["model.layers.0.mlp.experts.1.gate_up"] for one in alone])
    assert len(rows) == 27
    torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-5)


def test_an_expert_that_no_token_chose_is_decomposed_and_deployed_by_its_weights() -> None:
    model, short = tiny.build("mixtral"), [{"input_ids": torch.tensor([[5]])}]
    original, batch = tiny.build("mixtral"), tiny.batch_for("mixtral")
    fr.separate_experts_(model)
    layers = fr.select_layers(model)
    fr.decompose_(model, fr.collect_moments(model, short, layers))
    assert relative(outputs(model, batch), outputs(original, batch)) < 1e-5
    profile = tiny.chain_of(model).at(0.5)
    small = fr.deploy(model, profile, activations=fr.collect_rows(model, short, fr.nested_layers(model)))
    with fr.use_profile(model, profile):
        assert relative(outputs(small, batch), outputs(model, batch)) < 5e-5


def test_an_expert_that_no_token_chose_rises_by_nothing_in_curvature() -> None:
    model, short = tiny.build("mixtral"), [{"input_ids": torch.tensor([[5]])}]
    fr.separate_experts_(model)
    layers, loss = fr.select_layers(model, include=["model.layers.0.mlp.experts.*"]), fr.LogitObjective().fisher_loss
    moments = fr.collect_moments(model, short, layers, side="input", gradient_loss=loss)
    fr.decompose_(model, moments)
    table = fr.curvature_sensitivity(model, moments, rows=1, num_levels=3)
    unchosen = [name for name, moment in moments.items() if moment.tokens == 0]
    assert 0 < len(unchosen) < len(layers)
    assert all(set(table.errors[name]) == {0.0} for name in unchosen)


def test_without_any_row_slack_is_chosen_as_without_activations() -> None:
    model = tiny.elastic("perceptron")
    with torch.no_grad():
        model[0].u[:, 1] = model[0].u[:, 0] * (1 + 1e-5)  # the block that is inverted is nearly singular
    profile = tiny.chain_of(model).at(0.5)
    wanted = fr.find_slack(model, [profile])
    assert wanted.at("0", profile["0"]) > 0
    assert fr.find_slack(model, [profile], activations={"0": torch.empty(0, 12)}) == wanted


@pytest.mark.parametrize("name", MIXTURES)
def test_one_layer_of_one_expert_may_be_deployed_alone(name: str, tmp_path: Any) -> None:
    """The config says that the others are separate too; what plain transformers reads of them has no numbers."""
    from transformers import AutoModelForCausalLM

    model, batch = tiny.build(name), tiny.batch_for(name)
    fr.separate_experts_(model)
    tiny.nest(model, include=["model.layers.1.mlp.experts.2.down"])
    fr.save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")
    elastic, chain = fr.load_elastic(tmp_path / "elastic")
    small = fr.deploy(elastic, chain.at(0.5))
    small.save_pretrained(tmp_path / "small")
    stored = load_file(tmp_path / "small" / "model.safetensors")
    fused = "block_sparse_moe.experts.0.w1.weight" if name == "mixtral" else "mlp.experts.0.gate_proj.weight"
    assert stored[f"model.layers.0.{fused}"].numel() == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    size = AutoModelForCausalLM.from_pretrained(tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=0.5))
    for one in (small, again, size):
        with fr.use_profile(model, chain.at(0.5)):
            assert relative(outputs(one, batch), outputs(model, batch)) < 1e-5
