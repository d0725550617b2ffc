"""`from_pretrained` with a budget: transformers loads a size of an elastic artefact."""

import dataclasses
import logging
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import flexrank as fr
from flexrank.deployment.limits import deploy_within_limits
from flexrank.errors import FlexrankError
from flexrank.nn.gauge_aligned import GaugeAlignedLayer
from flexrank.nn.switch import use_profile
from tiny import AUTO, batch_for, build, chain_of, deployed, elastic, flip_a_bit, nest, outputs, relative, same_state


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
    assert "deployed in float32 and loaded in bfloat16, for which its slack is too small" in caplog.text


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limits_hold_for_what_is_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    """Oracle: each size deployed in this dtype and counted by hand; an artefact of the other width too."""
    model = saved("llama_untied", tmp_path / "elastic")
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    fr.save_elastic(elastic("llama_untied").to(other), chain_of(model), tmp_path / "other")
    sizes = [fr.deploy(model, entry.profile, dtype=dtype) for entry in chain_of(model).entries]
    counts = [sum(one.numel() for one in size.parameters()) for size in sizes]
    assert counts == sorted(set(counts)) and len(counts) > 2
    limits = {"max_params": counts, "max_bytes": [count * dtype.itemsize for count in counts]}
    for name, wanted in limits.items():
        for place, count in enumerate(wanted):  # what a size counts when it is deployed is enough for it
            small, entry = deploy_within_limits(tmp_path / "elastic", {name: count}, dtype=dtype)
            assert entry.profile == chain_of(model).entries[place].profile
            assert sum(one.numel() for one in small.parameters()) == counts[place]
        refused = f"^{name}={wanted[0] - 1} is too small: the smallest size has {counts[0]:,} parameters and "
        with pytest.raises(fr.FlexrankError, match=refused + f"{counts[0] * dtype.itemsize:,} bytes, with its slack"):
            deploy_within_limits(tmp_path / "elastic", {name: wanted[0] - 1}, dtype=dtype)
        for less, place in ((0, 1), (1, 0)):
            small = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / ("other" if name == "max_bytes" else "elastic"),
                quantization_config=fr.FlexRankConfig(**{name: wanted[1] - less}), dtype=dtype,
            )  # fmt: skip
            found = sum(one.numel() for one in small.parameters())
            assert found <= counts[1] - less and found > 0.97 * counts[place]


def test_the_largest_of_sizes_between_the_requested_ones_is_returned(tmp_path: Path) -> None:
    model = elastic("llama_untied")
    chain = chain_of(model)
    entries = tuple(dataclasses.replace(one, requested=None) for one in chain.entries[1:])
    fr.save_elastic(model, dataclasses.replace(chain, entries=(chain.entries[0], *entries)), tmp_path / "elastic")
    for entry in chain.entries:
        count = sum(one.numel() for one in fr.deploy(model, entry.profile).parameters())
        small, found = deploy_within_limits(tmp_path / "elastic", {"max_params": count})
        assert found.profile == entry.profile and sum(one.numel() for one in small.parameters()) == count


def test_bytes_are_those_of_what_is_returned(tmp_path: Path) -> None:
    """Of BART, whose buffer has a dtype too; oracle: each size deployed and counted by hand."""
    model = elastic("bart").bfloat16()
    fr.save_elastic(model, chain_of(model), tmp_path / "elastic")
    wanted = []
    for entry in chain_of(model).entries:
        small = fr.deploy(model, entry.profile, dtype=torch.float32)
        tensors = {one.data_ptr(): one.nbytes for one in small.state_dict().values()}
        wanted.append(sum(tensors.values()))
    for place, size in enumerate(wanted):
        _, entry = deploy_within_limits(tmp_path / "elastic", {"max_bytes": size}, dtype=torch.float32)
        assert entry.profile == chain_of(model).entries[place].profile


def test_layers_of_two_dtypes_are_cut(tmp_path: Path) -> None:
    model = elastic("llama_untied")
    first = next(iter(fr.nested_layers(model).values())).bfloat16()
    fr.save_elastic(model, chain_of(model), tmp_path / "elastic")
    for limits in ({"budget": 0.5}, {"max_params": 11_000}):
        small, entry = deploy_within_limits(tmp_path / "elastic", limits)
        assert {one.dtype for one in small.parameters()} == {torch.float32, torch.bfloat16}
        assert entry.requested is not None and sum(one.numel() for one in small.parameters()) <= 11_000
    assert first.u.dtype == torch.bfloat16


def test_the_files_that_are_loaded_are_those_that_transformers_found(tmp_path: Path) -> None:
    """By another model's configuration, and by a revision of a repository in the hub's cache."""
    first, second = saved("llama_untied", tmp_path / "first"), nest(build("llama_untied", seed=7))
    fr.save_elastic(second, chain_of(second), tmp_path / "second")
    auto, batch, size = transformers.AutoModelForCausalLM, batch_for("llama_untied"), fr.FlexRankConfig(budget=0.5)
    with use_profile(second, chain_of(second).at(0.5)):
        wanted = outputs(second, batch)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "first")
    found = auto.from_pretrained(tmp_path / "second", config=config, quantization_config=size)
    assert relative(outputs(found, batch), wanted) < 1e-4
    place = tmp_path / "hub" / "models--you--elastic"
    (place / "refs").mkdir(parents=True)
    for name, commit, directory in (("main", "a" * 40, "first"), ("v2", "b" * 40, "second")):
        (place / "refs" / name).write_text(commit)
        shutil.copytree(tmp_path / directory, place / "snapshots" / commit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        found = auto.from_pretrained("you/elastic", revision="v2", quantization_config=size, cache_dir=tmp_path / "hub")
    assert relative(outputs(found, batch), wanted) < 1e-4
    assert not relative(outputs(found, batch), outputs(first, batch)) < 0.1


@pytest.mark.parametrize("kind", ["elastic", "small"])
def test_a_classifier_of_another_width_is_drawn_anew(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, verified_here: None
) -> None:
    """Ten classes where the artefact's factorised classifier has five."""
    model, options = saved("vit", tmp_path / "elastic"), {"num_labels": 10, "ignore_mismatched_sizes": True}
    if kind == "elastic":
        options["quantization_config"] = fr.FlexRankConfig(budget=0.5)
    fr.export(fr.deploy(model, chain_of(model).at(0.5)), tmp_path / "small", batch_for("vit"))
    found = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / kind, **options)
    body = found.vit(**batch_for("vit")).last_hidden_state[:, 0]
    assert type(found.classifier) is torch.nn.Linear and found.classifier.weight.std() > 0
    assert outputs(found, batch_for("vit")).shape == (len(body), 10)
    with use_profile(model, chain_of(model).at(0.5)):
        assert relative(body, model.vit(**batch_for("vit")).last_hidden_state[:, 0]) < 1e-4
    assert "classifier is (10, 32) here and (5, 32) in the artefact: newly initialised" in caplog.text
    found.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "again")
    assert relative(outputs(again, batch_for("vit")), outputs(found, batch_for("vit"))) < 1e-6


def test_a_classifier_that_is_no_layer_is_drawn_anew_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build("vit")
    fr.decompose_(model, list(fr.select_layers(model, exclude=["classifier"])), method="svd")
    fr.save_elastic(model, chain_of(model), tmp_path / "elastic")
    found = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "elastic", num_labels=10, ignore_mismatched_sizes=True,
        quantization_config=fr.FlexRankConfig(budget=0.5),
    )  # fmt: skip
    assert found.classifier.weight.shape == (10, 32) and outputs(found, batch_for("vit")).shape[1] == 10
    assert "newly initialised: classifier.weight, classifier.bias" in caplog.text


def test_a_size_is_cut_in_one_place(tmp_path: Path) -> None:
    saved("llama_untied", tmp_path / "elastic")
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    places["model.rotary_emb"] = "cpu"
    with pytest.raises(FlexrankError, match="device_map names several devices, but a size is cut on one"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=0.5), device_map=places,
            offload_folder=tmp_path / "offload",
        )  # fmt: skip


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


def test_layers_whose_parents_initialise_them(tmp_path: Path) -> None:
    """SigLIP's attention draws its projections itself, by their shapes; a head that the artefact lacks is drawn."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    vision = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=4)
    model = nest(transformers.SiglipVisionModel(vision).eval())
    fr.save_elastic(model, chain_of(model), tmp_path / "elastic")
    small = transformers.AutoModel.from_pretrained(
        tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=0.5)
    )
    batch = {"pixel_values": torch.randn(3, 3, 16, 16)}
    with use_profile(model, chain_of(model).at(0.5)):
        assert relative(outputs(small, batch), outputs(model, batch)) < 1e-4


def test_several_threads_leave_transformers_initialisers_as_they_were(tmp_path: Path) -> None:
    """Oracle: layers made afterwards have values of the size that torch draws."""
    saved("llama_untied", tmp_path / "elastic")
    before, interval = torch.nn.init.kaiming_uniform_, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: fr.load_elastic(tmp_path / "elastic", 0.5), range(24)))
    finally:
        sys.setswitchinterval(interval)
    assert torch.nn.init.kaiming_uniform_ is before
    assert 0.01 < float(torch.nn.Linear(64, 64).weight.detach().std()) < 0.2
    assert 0.01 < float(build("llama_untied").lm_head.weight.detach().std()) < 0.2


def test_a_dtype_by_name_is_refused(tmp_path: Path) -> None:
    saved("llama_untied", tmp_path / "elastic")
    with pytest.raises(FlexrankError, match=r"dtype is 'bfloat16'; it is a torch.dtype, such as torch.bfloat16"):
        fr.load_elastic(tmp_path / "elastic", max_bytes=10**9, dtype="bfloat16")
