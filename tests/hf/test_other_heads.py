"""A size that is loaded by another config, class or head than it was saved with."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from test_elastic_loading import saved

import flexrank as fr
from flexrank.errors import FlexrankError
from flexrank.nn.switch import use_profile
from tiny import AUTO, batch_for, chain_of, deployed, elastic, nest, outputs, relative


def test_changed_rotary_settings_are_those_of_the_size_too(tmp_path: Path) -> None:
    """Oracle: the deployed size, which transformers itself loads by the changed config."""
    model = saved("llama_untied", tmp_path / "elastic")
    chain, auto, batch = chain_of(model), transformers.AutoModelForCausalLM, batch_for("llama_untied")
    fr.deploy(model, chain.at(0.5)).save_pretrained(tmp_path / "small")
    other = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    size = fr.FlexRankConfig(budget=0.5)
    plain, changed = (
        auto.from_pretrained(tmp_path / "elastic", quantization_config=size, **more) for more in ({}, other)
    )
    expected = auto.from_pretrained(tmp_path / "small", **other)
    assert relative(outputs(changed, batch), outputs(expected, batch)) < 1e-5
    assert relative(outputs(changed, batch), outputs(plain, batch)) > 1e-3


def test_buffers_that_a_parent_of_layers_computes_are_there(tmp_path: Path) -> None:
    """GPT-Neo's causal mask, in the module of its projections, whose initialiser does not run."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32}
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]], window_size=4)
    model = nest(transformers.GPTNeoForCausalLM(config).eval())
    fr.save_elastic(model, chain_of(model), tmp_path)
    auto, size = transformers.AutoModelForCausalLM, fr.FlexRankConfig(budget=0.5)
    small, batch = auto.from_pretrained(tmp_path, quantization_config=size), {"input_ids": torch.arange(12)[None]}
    with use_profile(model, chain_of(model).at(0.5)):
        assert relative(outputs(small, batch), outputs(model, batch)) < 1e-4


@pytest.mark.parametrize("shard_bytes", [2**28, 2**5])
@pytest.mark.parametrize(
    ("name", "changed"),
    [("llama_untied", {"intermediate_size": 40}), ("llama_untied", {"hidden_size": 16}),
     ("llama_untied", {"vocab_size": 70}), ("vit", {"image_size": 32})],
)  # fmt: skip
def test_what_is_no_head_is_never_drawn(name: str, changed: dict[str, int], shard_bytes: int, tmp_path: Path) -> None:
    saved(name, tmp_path / "elastic", shard_bytes=shard_bytes)
    with pytest.raises((FlexrankError, RuntimeError), match="another shape than in the artefact|size mismatch|sizes"):
        getattr(transformers, AUTO[name]).from_pretrained(
            tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=0.5), **changed
        )


def test_a_head_with_a_tensor_of_its_own_takes_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = saved("vit", tmp_path / "elastic", shard_bytes=2**12)
    size, auto = fr.FlexRankConfig(budget=0.5), transformers.AutoModelForMaskedImageModeling
    with caplog.at_level(logging.WARNING, "flexrank"):
        other = auto.from_pretrained(tmp_path / "elastic", quantization_config=size)
    (warning,) = (one.message for one in caplog.records if one.levelno == logging.WARNING)
    for name in ("cls_token", "position_embeddings"):
        assert torch.equal(getattr(other.vit.embeddings, name), getattr(model.vit.embeddings, name))
        assert name not in warning
    assert "mask_token" in warning


@pytest.mark.parametrize("kind", ["elastic", "small"])
def test_a_class_without_a_pooler_leaves_that_out(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = saved("bert", tmp_path / "elastic")
    fr.deploy(model, chain_of(model).at(0.5)).save_pretrained(tmp_path / "small")
    options = {"quantization_config": fr.FlexRankConfig(budget=0.5)} if kind == "elastic" else {}
    with caplog.at_level(logging.INFO, "flexrank"):
        tagger = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / kind, **options)
    assert "BertForTokenClassification has no pooler.dense, whose values in the artefact are left out" in caplog.text
    with use_profile(model, chain_of(model).at(0.5)):
        expected = model(**batch_for("bert")).last_hidden_state
    assert relative(tagger.bert(**batch_for("bert")).last_hidden_state, expected) < 1e-4
    with pytest.raises(FlexrankError, match="BertModel has no layer 'encoder.layer.1.*, which config.json says"):
        transformers.AutoModel.from_pretrained(tmp_path / kind, num_hidden_layers=1, **options)


def test_a_head_that_was_made_larger_and_saved_is_not_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a size whose head is dense, and of one whose factorised head transformers has newly drawn."""
    model = elastic("llama_untied")
    small, auto = fr.deploy(model, chain_of(model).at(1.0)), transformers.AutoModelForCausalLM
    small.resize_token_embeddings(70)
    small.save_pretrained(tmp_path / "larger")
    with caplog.at_level(logging.WARNING, "flexrank"):
        again = auto.from_pretrained(tmp_path / "larger")
    assert torch.equal(again.lm_head.weight, small.lm_head.weight) and "newly initialised" not in caplog.text
    deployed("vit").save_pretrained(tmp_path / "vit")
    auto = transformers.AutoModelForImageClassification
    other = auto.from_pretrained(tmp_path / "vit", num_labels=7, ignore_mismatched_sizes=True)
    other.save_pretrained(tmp_path / "other")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flexrank"):
        again = auto.from_pretrained(tmp_path / "other")
    assert torch.equal(again.classifier.weight, other.classifier.weight) and "newly initialised" not in caplog.text


def test_a_class_of_another_architecture_is_refused(tmp_path: Path) -> None:
    """It has none of the layers; without this all of its weights would be drawn."""
    deployed("llama_untied").save_pretrained(tmp_path / "small")
    with pytest.raises(
        FlexrankError, match="GPT2Model has none of the layers that config.json says are deployed; load"
    ):
        transformers.GPT2Model.from_pretrained(tmp_path / "small")


def test_a_classifier_whose_class_names_no_base_model_is_drawn_anew(tmp_path: Path) -> None:
    part = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.SiglipConfig(
        vision_config=part | {"image_size": 16, "patch_size": 4}, text_config=part | {"vocab_size": 64}
    )
    model = nest(transformers.SiglipForImageClassification(config).eval())
    assert model.base_model is model
    fr.save_elastic(model, chain_of(model), tmp_path)
    auto, options = transformers.AutoModelForImageClassification, {"ignore_mismatched_sizes": True}
    size = fr.FlexRankConfig(budget=0.5)
    other = auto.from_pretrained(tmp_path, quantization_config=size, num_labels=7, **options)
    assert other.classifier.out_features == 7
