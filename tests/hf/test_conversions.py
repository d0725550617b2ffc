"""Models whose files have other names and shapes than their modules: transformers converts both ways."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

import flexrank as fr
import tiny
from flexrank.errors import FlexrankError
from flexrank.files import read_json
from flexrank.hf import models
from flexrank.hf.quantizer import match_layers
from flexrank.nn.linalg import plain_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import nest_, select_layers
from flexrank.nn.switch import layer_shapes

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 64}
#: Attention's q, k and v, and gates of feed-forward parts, are one matrix in the files of these.
FUSED: dict[str, Callable[[], Any]] = {
    "nomic": lambda: t.NomicBertModel(t.NomicBertConfig(**SMALL)),
    "gte": lambda: t.GteModel(t.GteConfig(**SMALL)),
    "dinov2": lambda: t.Dinov2Model(
        t.Dinov2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4, use_swiglu_ffn=True
        )
    ),
}
#: Ranks by the layer's place: equal ones, other ones, and every third layer dense.
RANKS: dict[str, Callable[[int, int], int]] = {
    "equal": lambda place, full: 8,
    "different": lambda place, full: 6 + 3 * (place % 4),
    "some dense": lambda place, full: 8 if place % 3 else full,
}


def elastic(build: Callable[[], Any], exclude: Sequence[str] = ()) -> Any:
    """A model with random values, also in its norms, as an elastic one."""
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    for name, layer in select_layers(model, exclude=exclude).items():
        nest_(model, name, plain_svd(weight_matrix(layer).detach()))
    return model


def size_of(model: Any, rank: Callable[[int, int], int], **options: Any) -> Any:
    shapes = layer_shapes(model)
    return fr.deploy(model, {name: rank(place, min(shapes[name])) for place, name in enumerate(shapes)}, **options)


def batch_of(name: str) -> dict[str, Any]:
    return tiny.batch_for("vit") if name in ("dinov2", "vit") else tiny.token_batch()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", FUSED)
def test_factors_are_saved_as_they_are_where_files_join_the_weights_of_layers(
    name: str, ranks: str, tmp_path: Path
) -> None:
    small, batch = size_of(elastic(FUSED[name]), RANKS[ranks]), batch_of(name)
    expected = tiny.outputs(small, batch)
    small.save_pretrained(tmp_path / "first")
    again = t.AutoModel.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    for place in ("first", "second"):
        found, info = t.AutoModel.from_pretrained(tmp_path / place, output_loading_info=True)
        assert not any(info.values())
        assert torch.equal(tiny.outputs(found, batch), expected)


@pytest.mark.parametrize("name", ["gpt_neox", "vit", "nomic"])
def test_trusted_code_converts_names_as_transformers_own_classes_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.utils.hub.HF_MODULES_CACHE", str(tmp_path / "modules"))
    build = {"vit": lambda: t.ViTModel(t.ViTConfig(**tiny.IMAGE)), **FUSED}.get(name, lambda: tiny.build(name))
    small, batch = size_of(elastic(build), RANKS["different"]), batch_of(name)
    models.save_model(small, tmp_path / "small")
    auto = t.AutoModelForCausalLM if name == "gpt_neox" else t.AutoModel
    found, info = auto.from_pretrained(tmp_path / "small", trust_remote_code=True, output_loading_info=True)
    assert type(found).__module__.startswith("transformers_modules.") and not any(info.values())
    assert torch.equal(tiny.outputs(found, batch), tiny.outputs(small, batch))
    config = t.AutoConfig.from_pretrained(tmp_path / "small", trust_remote_code=True)  # which lm-eval reads first
    assert type(config).__module__ == type(found).__module__ and isinstance(config, type(small.config))
    models.save_model(found, tmp_path / "again")
    assert torch.equal(tiny.outputs(auto.from_pretrained(tmp_path / "again"), batch), tiny.outputs(small, batch))


def test_a_size_with_a_head_of_its_own_has_the_ties_of_its_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The artefact is of a model without a head, which is the embedding."""
    model = elastic(lambda: t.Qwen2Model(t.Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)))
    fr.save_elastic(model, tiny.chain_of(model), tmp_path)
    size = fr.FlexRankConfig(budget=0.5)
    found = t.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=size)
    assert found.lm_head.weight is found.model.embed_tokens.weight and "newly initialised" not in caplog.text
    assert torch.equal(found.lm_head.weight, model.embed_tokens.weight)


def test_the_base_model_itself_is_found_in_one_with_a_head_and_the_other_way_round() -> None:
    """For parameters of its own, such as Wav2Vec2's `masked_spec_embed`."""
    whole = tiny.build("bert", 0), t.BertForMaskedLM(tiny.build("bert").config)
    for model, items in ((whole[1], {"": 1, "encoder": 2}), (whole[0], {"bert": 1, "bert.encoder": 2})):
        prefix = "bert." if model is whole[1] else ""
        assert dict(match_layers(model, items, skip_missing=True)) == {prefix[:-1]: 1, f"{prefix}encoder": 2}
    assert dict(match_layers(whole[0], {"": 1, "encoder": 2})) == {"": 1, "encoder": 2}


def test_initialisers_do_not_read_the_weights_of_deployed_layers(tmp_path: Path) -> None:
    """Funnel's goes by the names of classes, and unpacks the shape of the weight of a "Linear"."""
    sizes = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1], "num_decoder_layers": 1}
    small = size_of(elastic(lambda: t.FunnelModel(t.FunnelConfig(vocab_size=64, **sizes))), RANKS["equal"])
    small.save_pretrained(tmp_path)
    found, info = t.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and tiny.same_state(found, small)


def test_a_size_of_which_blocks_were_removed_is_saved_with_those_that_are_left(tmp_path: Path) -> None:
    """The second block becomes the first, with ranks of its own; the head becomes a plain layer."""
    small = size_of(elastic(lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL))), lambda place, full: 3 + place)
    small.model.layers = small.model.layers[1:]
    small.model.layers[0].self_attn.layer_idx = 0
    small.config.num_hidden_layers, small.config.layer_types = 1, None
    small.lm_head = torch.nn.Linear(32, 64, bias=False)
    batch = tiny.token_batch()
    small.save_pretrained(tmp_path)
    found = t.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(tiny.outputs(found, batch), tiny.outputs(small, batch))
    assert type(found.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_size_in_half_precision_keeps_in_float32_what_transformers_does(dtype: torch.dtype, tmp_path: Path) -> None:
    """DeepSeek-V3 chooses experts by a bias of which bfloat16 has too few digits: 5.001 and 5.004 would be equal."""
    config = t.DeepseekV3Config(
        **SMALL, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=1,
    )  # fmt: skip
    model, bias = elastic(lambda: t.DeepseekV3ForCausalLM(config)), torch.tensor([5.001, 5.002, 5.003, 5.004])
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    small = fr.deploy(model, tiny.chain_of(model).at(0.5), dtype=dtype)
    small.save_pretrained(tmp_path)
    for found in (small, t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)):
        gate = found.model.layers[1].mlp.gate
        assert torch.equal(gate.e_score_correction_bias, bias) and gate.weight.dtype == dtype


def test_a_size_in_float16_keeps_in_float32_what_overflows(tmp_path: Path) -> None:
    config = t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    small = size_of(elastic(lambda: t.T5EncoderModel(config), exclude=["wo"]), RANKS["equal"], dtype=torch.float16)
    small.save_pretrained(tmp_path)
    for found in (small, t.T5EncoderModel.from_pretrained(tmp_path, dtype=torch.float16)):
        dense = found.encoder.block[0].layer[1].DenseReluDense
        assert (dense.wo.weight.dtype, dense.wi.latent.weight.dtype) == (torch.float32, torch.float16)


def test_a_deployed_model_is_not_decomposed_again() -> None:
    with pytest.raises(FlexrankError, match=r"layer '.*q_proj' is factorised already; take the base model or the"):
        select_layers(tiny.deployed("llama_tied"))


def test_layers_that_transformers_keeps_in_float32_are_deployed_so(tmp_path: Path) -> None:
    """T5's `wo`, because its outputs exceed float16's range of 65504: its slack is then float32's, too."""
    torch.manual_seed(0)
    model = tiny.build("t5")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight *= 300 if name.endswith(("wi.weight", "wo.weight")) else 1
    tiny.nest(model)
    batch, profile = tiny.batch_for("t5"), tiny.chain_of(model).at(0.5)
    fr.set_profile(model, profile)
    exact = tiny.outputs(model, batch)
    table = fr.find_slack(model, [profile], dtype=torch.float16)
    short = fr.deploy(model, profile, dtype=torch.float16)
    long = fr.find_slack(model, [profile], dtype=torch.float32)
    for name, part in short.named_modules():
        if isinstance(part, fr.nn.gauge_aligned.GaugeAlignedLayer):
            is_kept = name.endswith(".wo")
            assert part.latent.weight.dtype == (torch.float32 if is_kept else torch.float16)
            assert table.columns[name] == long.columns[name] or not is_kept
    assert table.dtype == "float16" and tiny.relative(tiny.outputs(short, batch), exact) < 0.02
    by_table = fr.deploy(model, profile, dtype=torch.float16, slack=table).state_dict()
    assert all(torch.equal(value, by_table[name]) for name, value in short.state_dict().items())
    short.save_pretrained(tmp_path)
    again = t.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float16)
    assert torch.equal(tiny.outputs(again, batch), tiny.outputs(short, batch))
    with pytest.raises(FlexrankError, match="this slack was chosen for float16; find_slack for float32"):
        fr.deploy(model, profile, slack=table)


def test_a_config_that_transformers_does_not_have_is_not_named_by_trusted_code(tmp_path: Path) -> None:
    class Own(t.LlamaConfig):
        pass

    small = size_of(elastic(lambda: t.LlamaForCausalLM(Own(**SMALL))), RANKS["equal"])
    models.save_model(small, tmp_path)
    assert "LlamaConfig" not in (code := (tmp_path / "modeling_flexrank.py").read_text()) and "Own" not in code
    assert "AutoConfig" not in read_json(tmp_path / "config.json")["auto_map"]
