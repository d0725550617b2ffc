"""`from_pretrained` with a budget: transformers loads a size of an elastic artefact."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import flexrank as fr
from flexrank.errors import FlexrankError
from flexrank.nn.gauge_aligned import GaugeAlignedLayer
from flexrank.nn.switch import use_profile
from tiny import AUTO, batch_for, build, chain_of, deployed, elastic, flip_a_bit, outputs, relative, same_state


def saved(name: str, directory: Path, **options: Any) -> Any:
    model = elastic(name)
    fr.save_elastic(model, chain_of(model), directory, **options)
    return model


@pytest.mark.parametrize("name", ["gpt2", "dinov3"])
def test_a_size_comes_by_its_budget(name: str, tmp_path: Path) -> None:
    """Oracles: the elastic model in memory at the budget's ranks, and at full rank the base model.

    `test_compatibility` has consolidated sizes of all architectures.
    """
    model, batch = saved(name, tmp_path / "elastic"), batch_for(name)
    auto = getattr(transformers, AUTO[name])
    small = auto.from_pretrained(tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=0.5))
    assert type(small) is type(model) and not small.training
    assert any(isinstance(layer, GaugeAlignedLayer) for layer in small.modules())
    with use_profile(model, chain_of(model).at(0.5)):
        assert relative(outputs(small, batch), outputs(model, batch)) < 1e-4
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in build(name).parameters())
    whole = auto.from_pretrained(tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=1.0))
    assert relative(outputs(whole, batch), outputs(build(name), batch)) < 1e-4
    assert all(parameter.requires_grad for parameter in small.parameters())
    small.save_pretrained(tmp_path / "small")
    again = auto.from_pretrained(tmp_path / "small")
    assert same_state(again, small) and relative(outputs(again, batch), outputs(small, batch)) < 1e-6
    assert not hasattr(again.config, "transformers_weights")


def test_a_class_of_one_architecture_does_not_take_what_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers tells only Auto classes' configurations where a model is."""
    for name in ("here", "there"):
        saved("llama_untied", tmp_path / name)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FlexrankError, match=r"LlamaForCausalLM.* cannot cut a size; take AutoModelForCausalLM\.from"):
        transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "there", quantization_config=fr.FlexRankConfig(budget=0.5)
        )


def test_a_size_in_fewer_digits_than_it_was_deployed_in_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto, batch = transformers.AutoModelForCausalLM, batch_for("llama_untied")
    deployed("llama_untied").save_pretrained(tmp_path / "small")
    with caplog.at_level(logging.WARNING, "flexrank"):
        whole = auto.from_pretrained(tmp_path / "small")
        double = auto.from_pretrained(tmp_path / "small", dtype=torch.float64)
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert relative(outputs(double, batch), outputs(whole, batch)) < 1e-5
        auto.from_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    assert "deployed in float32 and loaded in bfloat16, for which its slack is too narrow" in caplog.text


def test_many_files_another_dtype_and_tied_tensors(tmp_path: Path) -> None:
    model, batch = saved("llama_tied", tmp_path / "elastic", shard_bytes=20_000), batch_for("llama_tied")
    assert len(list((tmp_path / "elastic").glob("*.safetensors"))) > 2
    config = fr.FlexRankConfig(budget=0.5)
    small = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "elastic", quantization_config=config, dtype=torch.bfloat16
    )
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    assert small.lm_head.weight is small.model.embed_tokens.weight
    with use_profile(model, chain_of(model).at(0.5)):
        assert relative(outputs(small, batch), outputs(model, batch)) < 0.1
    tokens = small.generate(**{key: value[:2] for key, value in batch.items()}, max_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 13)


def test_limits_of_parameters_and_bytes(tmp_path: Path) -> None:
    model = saved("llama_untied", tmp_path / "elastic")
    chain = chain_of(model)
    limits = chain.model_parameters(chain.entries[1]), chain.model_bytes(chain.entries[2])
    auto = transformers.AutoModelForCausalLM
    found = [
        auto.from_pretrained(tmp_path / "elastic", quantization_config=fr.FlexRankConfig(**limit))
        for limit in ({"max_params": limits[0]}, {"max_bytes": limits[1]})
    ]
    for small, entry in zip(found, chain.entries[1:3], strict=True):
        with use_profile(model, entry.profile):
            assert relative(outputs(small, batch_for("llama_untied")), outputs(model, batch_for("llama_untied"))) < 1e-4


def test_another_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = saved("bert", tmp_path / "encoder"), batch_for("bert")
    config = fr.FlexRankConfig(budget=0.5)
    with caplog.at_level(logging.WARNING, "flexrank"):
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "encoder", quantization_config=config
        )
    assert "LOAD REPORT" not in caplog.text and "newly initialised: classifier.weight, classifier.bias" in caplog.text
    with use_profile(model, chain_of(model).at(0.5)):
        assert relative(outputs(classifier.bert, batch), outputs(model, batch)) < 1e-4
    causal = saved("llama_untied", tmp_path / "causal")
    base = transformers.AutoModel.from_pretrained(tmp_path / "causal", quantization_config=config)
    with use_profile(causal, chain_of(causal).at(0.5)), torch.no_grad():
        wanted = causal.model(**batch_for("llama_untied")).last_hidden_state
    assert relative(outputs(base, batch_for("llama_untied")), wanted) < 1e-4


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    auto, config = transformers.AutoModelForCausalLM, fr.FlexRankConfig(budget=0.5)
    with pytest.raises(FlexrankError, match="has no limit; give budget, max_params or max_bytes"):
        fr.FlexRankConfig()
    build("llama_tied").save_pretrained(tmp_path / "dense")
    with pytest.raises(FlexrankError, match="holds no elastic model"):
        auto.from_pretrained(tmp_path / "dense", quantization_config=config)
    saved("llama_tied", tmp_path / "elastic")
    with pytest.raises(FlexrankError, match="budget=0.01 is too small"):
        auto.from_pretrained(tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=0.01))
    with pytest.raises(OSError, match="no file named"):  # never random weights
        auto.from_pretrained(tmp_path / "elastic")
    flip_a_bit(tmp_path / "elastic" / "elastic.safetensors", 5000)
    with pytest.raises(FlexrankError, match="checksum"):
        auto.from_pretrained(tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=1.0))


def test_a_size_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several files, in the hub's cache; transformers asks for one of them."""
    snapshot = tmp_path / "hub" / "models--you--elastic" / "snapshots" / ("a" * 40)
    model, batch = saved("llama_tied", snapshot, shard_bytes=20_000), batch_for("llama_tied")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    small = transformers.AutoModelForCausalLM.from_pretrained(
        "you/elastic", quantization_config=fr.FlexRankConfig(budget=0.5), cache_dir=tmp_path / "hub"
    )
    whole, chain = fr.load_elastic("you/elastic")
    for one, profile in ((model, chain_of(model).at(0.5)), (whole, chain.at(0.5))):
        with use_profile(one, profile):
            assert relative(outputs(small, batch), outputs(one, batch)) < 1e-4
    with pytest.raises(FlexrankError, match="you/other: no such directory, and not fetched from the hub: "):
        fr.load_elastic("you/other")


@pytest.mark.parametrize("limits", [{"budget": "0.4"}, {"budget": 40}, {"max_params": "many"}, {"budget": True}])
def test_a_limit_that_is_wrong_is_named_before_a_model_is_made(limits: dict[str, Any]) -> None:
    model, ((name, value),) = elastic("perceptron"), limits.items()
    for attempt in (fr.FlexRankConfig, chain_of(model).at):
        with pytest.raises(FlexrankError, match=f"^{name} (is )?{value!r}"):
            attempt(**limits)
