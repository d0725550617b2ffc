"""The card of each artefact: what the hub reads of it, its numbers, and its code, which is run."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

import flexrank as fr
import tiny
from flexrank.artefacts import cards
from flexrank.hf.classes import auto_class
from flexrank.hf.models import load_model
from flexrank.profiles import ChainEntry, Footprint, ProfileChain
from tiny_runs import write_model

BASE = """---
license: other
license_name: of-ours
license_link: https://example.org/licence
language: [en, de]
library_name: transformers
tags: [fill-mask]
---
# The base model
"""
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run_card(place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a card's code gives values to, run beside the card."""
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    exec(CODE.findall((place / "README.md").read_text(encoding="utf8"))[0], names)
    return names


def data_of(place: Path) -> dict[str, Any]:
    """What the hub reads of a card."""
    return huggingface_hub.ModelCard.load(place / "README.md").data.to_dict()


@pytest.fixture
def artefacts(tmp_path: Path, verified_here: None) -> Path:
    """A model with a card, the elastic artefact of it, a size of that, and its dense form."""
    source = write_model(tmp_path / "source", "language")
    (source / "README.md").write_text(BASE, encoding="utf8")
    model = tiny.nest(load_model(source, "language"))
    fr.save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")
    elastic, chain = fr.load_elastic(tmp_path / "elastic")
    fr.export(fr.deploy(elastic, chain.entries[1].profile), tmp_path / "small", tiny.token_batch())
    fr.export_to(tmp_path / "small", "dense", tmp_path / "dense")
    return tmp_path


def test_the_licence_of_the_base_model_reaches_every_artefact(artefacts: Path) -> None:
    wanted = {"license": "other", "license_name": "of-ours", "license_link": "https://example.org/licence"}
    wanted |= {"language": ["en", "de"], "library_name": "transformers", "pipeline_tag": "text-generation"}
    for name in ("elastic", "small", "dense"):
        assert data_of(artefacts / name) == wanted | {"tags": ["flexrank", "low-rank"]}, name


def test_the_code_of_a_card_loads_its_artefact(artefacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tiny.token_batch()
    wanted = tiny.outputs(transformers.AutoModelForCausalLM.from_pretrained(artefacts / "small"), batch)
    elastic, chain = fr.load_elastic(artefacts / "elastic")
    for name, bound in (("small", 1e-6), ("dense", 1e-4)):
        found = run_card(artefacts / name, monkeypatch)["model"]
        assert tiny.relative(tiny.outputs(found, batch), wanted) < bound, name
    found = run_card(artefacts / "elastic", monkeypatch)["model"]
    with fr.use_profile(elastic, chain.entries[2].profile):  # the third of four sizes
        assert tiny.relative(tiny.outputs(found, batch), tiny.outputs(elastic, batch)) < 1e-4
    assert "LlamaForCausalLM, deployed for dense" in (artefacts / "dense" / "README.md").read_text(encoding="utf8")


def test_the_table_of_sizes_is_the_chains(artefacts: Path) -> None:
    text = (artefacts / "elastic" / "README.md").read_text(encoding="utf8")
    assert "AutoModelForCausalLM.from_pretrained(" in text and "LlamaForCausalLM.from" not in text
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == ["budget", "mean rank", "params, layers", "params, model", "bytes", "predicted error"]
    entries = fr.load_elastic(artefacts / "elastic")[1].entries
    others = sum(
        parameter.numel()
        for name, parameter in load_model(artefacts / "source", "language").named_parameters()
        if "_proj" not in name and "lm_head" not in name
    )
    for row, entry in zip(rows[2:], reversed(entries), strict=True):
        ranks = list(entry.profile.values())
        layers, model = entry.parameters, entry.parameters + others
        assert row == [
            f"{entry.requested:.4g}", f"{sum(ranks) / len(ranks):.4g}", f"{layers:,}", f"{model:,}", f"{4 * model:,}",
            f"{entry.error:.4g}",
        ]  # fmt: skip
    small = (artefacts / "small" / "README.md").read_text(encoding="utf8")
    profile = entries[1].profile.values()
    model = transformers.AutoModelForCausalLM.from_pretrained(artefacts / "small")
    assert f"{sum(one.numel() for one in model.parameters()):,} parameters." in small
    assert f"{len(profile)} of its layers are low-rank, of ranks {min(profile)} to {max(profile)}." in small


def test_a_size_shows_the_table_that_it_is_of(tmp_path: Path, verified_here: None) -> None:
    """Oracle: ranks r of layers m x n counted by hand, r (m + n - r) each, with 30 biases and four bytes a number."""
    model, full = tiny.elastic("perceptron"), {"0": 12, "2": 16, "4": 6}
    profiles = [fr.RankProfile(ranks) for ranks in ({"0": 2, "2": 2, "4": 1}, {"0": 6, "2": 8, "4": 3}, full)]
    values = zip(profiles, (165, 493, 768), (0.75, 0.125, 0.0), (0.25, 0.65, 1.0), strict=True)
    chain = ProfileChain(tuple(ChainEntry(*each) for each in values), 768, Footprint(30, 120, 4), "joint")
    fr.save_elastic(model, chain, tmp_path / "elastic", factory="tiny:perceptron")
    for limit in ({}, {"budget": 0.65}):  # the table is whole where larger sizes are not read
        elastic, _ = fr.load_elastic(tmp_path / "elastic", **limit)
        fr.save_deployed(fr.deploy(elastic, profiles[1]), tmp_path / "small", factory="tiny:perceptron")
        card = (tmp_path / "small" / "README.md").read_text()
        wanted = [
            "| 1 | 11.33 | 768 | 798 | 3,192 | 0 |",
            "| **0.65** | 5.667 | 493 | 523 | 2,092 | 0.125 |",
            "| 0.25 | 1.667 | 165 | 195 | 780 | 0.75 |",
        ]
        assert "\n".join(wanted) in card and "Its row below, as it was cut, is in bold." in card
        assert "Ranks are those of joint allocation" in card and card.count(cards.LICENCE) == 1
    fr.save_deployed(fr.deploy(elastic, {"0": 5, "2": 8, "4": 3}), tmp_path / "between")
    card = (tmp_path / "between" / "README.md").read_text()
    assert "| 0.65 | 5.667 |" in card and "bold" not in card
    fr.save_deployed(fr.deploy(elastic, profiles[1], slack=0), tmp_path / "exact")
    assert "have 64.2% of their dense parameters." in (tmp_path / "exact" / "README.md").read_text()  # 493 of 768
    for unknown in (model, tiny.with_sizes(elastic)):  # made in memory, and about to be trained
        fr.save_deployed(fr.deploy(unknown, profiles[1]), tmp_path / "unknown")
        assert "## Sizes" not in (tmp_path / "unknown" / "README.md").read_text()


def test_what_a_card_says_of_measures_goes_along(artefacts: Path) -> None:
    """The table of a run has qualities; `from_pretrained` cuts a size whose card has them, its dense form's too."""
    elastic = artefacts / "elastic"
    budget = fr.load_elastic(elastic)[1].budgets[1]
    table = f"## Sizes\n\n| budget | loss |\n| --- | --- |\n| {budget:g} | 1.25 |\n\nMade by hand.\n"
    (elastic / "README.md").write_text(f"# Mine\n\n{table}{cards.LICENCE}\n\n## Thanks\n\nto all\n")
    size = fr.FlexRankConfig(budget=budget)
    small = transformers.AutoModelForCausalLM.from_pretrained(elastic, quantization_config=size)
    fr.export(small, artefacts / "small", tiny.token_batch())
    fr.export_to(artefacts / "small", "dense", artefacts / "dense")
    for name in ("small", "dense"):
        text = (artefacts / name / "README.md").read_text()
        wanted = table.replace(f"{budget:g}", f"**{budget:g}**")
        assert f"{wanted}\n{cards.LICENCE}\n" in text and "Thanks" not in text, name


def test_models_of_torch_have_cards_whose_code_runs(
    tmp_path: Path, verified_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny.elastic("perceptron"), tiny.batch_for("perceptron")
    chain = tiny.chain_of(model)
    fr.save_elastic(model, chain, tmp_path / "elastic", factory="tiny:perceptron")
    small = fr.deploy(model, chain.entries[1].profile)
    fr.export(small, tmp_path / "small", batch, factory="tiny:perceptron")
    assert data_of(tmp_path / "small") == {"library_name": "pytorch", "tags": ["flexrank", "low-rank"]}
    found = run_card(tmp_path / "small", monkeypatch)["model"]
    assert torch.equal(tiny.outputs(found, batch), tiny.outputs(small, batch))
    names = run_card(tmp_path / "elastic", monkeypatch)
    assert len(names["chain"].entries) == 3  # up to the middle of four
    with fr.use_profile(model, chain.entries[2].profile):
        assert tiny.relative(tiny.outputs(names["model"], batch), tiny.outputs(model, batch)) < 1e-6


@pytest.mark.parametrize("name", [name for name in tiny.AUTO if name != "dinov3"])
def test_a_class_has_its_auto_class(name: str) -> None:
    assert auto_class(type(tiny.build(name)).__name__) == tiny.AUTO[name]


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("BertForTokenClassification", "AutoModelForTokenClassification"),
        ("BertForPreTraining", "AutoModelForPreTraining"),
        ("T5EncoderModel", "AutoModelForTextEncoding"),
        ("Gemma3ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("GPT2DoubleHeadsModel", None),
    ],
)
def test_a_rarer_class_has_the_auto_class_that_loads_it(kind: str, auto: str | None) -> None:
    assert auto_class(kind) == auto
    if auto:
        mapping, config = getattr(transformers, auto)._model_mapping, getattr(transformers, kind).config_class
        assert mapping[config] is getattr(transformers, kind)


def test_the_card_of_a_head_without_auto_class_reads_the_artefact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=8, n_positions=8)
    model = tiny.nest(transformers.GPT2DoubleHeadsModel(config).eval())
    fr.save_elastic(model, tiny.chain_of(model), tmp_path)
    assert type(run_card(tmp_path, monkeypatch)["model"]) is transformers.GPT2DoubleHeadsModel


def test_dense_layers_are_not_called_low_rank(tmp_path: Path, verified_here: None) -> None:
    model = tiny.nest(tiny.build("bert"))
    ranks = fr.nested_layers(model)
    profile = {name: min(layer.matrix_shape) for name, layer in ranks.items()}
    first = next(iter(profile))
    fr.export(fr.deploy(model, profile | {first: 3}), tmp_path / "one", tiny.batch_for("bert"))
    assert "1 of its layers are low-rank, of ranks 3 to 3." in (tmp_path / "one" / "README.md").read_text()


def test_no_checksum_covers_a_card(artefacts: Path) -> None:
    for name in ("elastic", "small", "dense"):
        (artefacts / name / "README.md").write_text("my own words\n## Sizes\nmany\n")
    fr.load_elastic(artefacts / "elastic")
    assert fr.inspect_artefact(artefacts / "small")["kind"] == "deployed"
    load_model(artefacts / "small", "language")
    fr.export_to(artefacts / "small", "dense", artefacts / "dense")
    text = (artefacts / "dense" / "README.md").read_text()
    assert "my own words" not in text and text.endswith("\n## Sizes\nmany\n")


@pytest.mark.parametrize(
    ("kind", "model", "before", "wanted"),
    [
        ("AutoModel", "org/name", {"license": "mit"}, ("org/name", "feature-extraction", "mit")),
        ("GPT2LMHeadModel", "org/name", {"base_model": "x/y"}, ("org/name", "text-generation", None)),
        ("BertModel", "./org/name", {"tags": ["flexrank"], "base_model": "x/y"}, ("x/y", "feature-extraction", None)),
        ("ViTForImageClassification", "name", {"tags": ["flexrank"]}, (None, "image-classification", None)),
        ("T5ForConditionalGeneration", "package:p/q", {"tags": None}, (None, None, None)),
        ("BertForMaskedLM", "gpt2", {"tags": 5}, ("gpt2", "fill-mask", None)),
        ("BertModel", "a/b", {"tags": "flexrank-x", "base_model": "x/y"}, ("a/b", "feature-extraction", None)),
    ],
)
def test_what_a_head_says(kind: str, model: str, before: dict[str, Any], wanted: tuple[str | None, ...]) -> None:
    data = huggingface_hub.ModelCard(cards.card_metadata(kind, model, before) + "# Title").data
    assert (data.base_model, data.pipeline_tag, data.license) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "# no head", "---\n- a list\n---\n", "---\nopen: yes", "---\na: [b\n---\n", "---\na: 2024-13-45\n---\n"],
)
def test_a_card_without_a_head_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert cards.read_card_metadata(tmp_path / "README.md") == cards.read_card_metadata(tmp_path / "nowhere") == {}


class Hub:
    """Stands in for the hub: what is pushed lies in a folder."""

    def __init__(self, place: Path):
        self.place = place

    def create_repo(self, name: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id=name)

    def create_commit(self, operations: list[Any], **_: Any) -> None:
        for one in operations:
            (self.place / one.path_in_repo).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(one.path_or_fileobj, self.place / one.path_in_repo)


def test_a_size_is_pushed_and_loaded_again(artefacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own `push_to_hub`, to a repository that the folder was uploaded to: our card stays."""
    from transformers.utils import hub

    load = huggingface_hub.ModelCard.load
    monkeypatch.setattr(hub, "hf_api", lambda: Hub(artefacts / "pushed"))
    monkeypatch.setattr(hub.ModelCard, "load", lambda *_, **__: load(artefacts / "small" / "README.md"))
    small = transformers.AutoModelForCausalLM.from_pretrained(artefacts / "small")
    small.push_to_hub("me/small")
    monkeypatch.undo()
    again = transformers.AutoModelForCausalLM.from_pretrained(artefacts / "pushed")
    assert tiny.same_state(again, small) and data_of(artefacts / "pushed") == data_of(artefacts / "small")
