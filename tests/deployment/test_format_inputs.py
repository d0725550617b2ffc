"""What an export for another runtime takes, and what is copied with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

import flexrank as fr
import tiny
from flexrank.deployment import formats
from flexrank.deployment.formats import export_to
from flexrank.deployment.runtimes import sample_inputs
from flexrank.errors import FlexrankError
from flexrank.hf import models

VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def deployed(model: Any, place: Path) -> Any:
    """A size of the model, saved and loaded, which then knows its directory."""
    small = fr.deploy(tiny.nest(model.eval()), tiny.chain_of(model).at(0.5))
    small.save_pretrained(place)
    return type(small).from_pretrained(place).eval()


def resnet() -> Any:
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=5, layer_type="basic")
    return t.ResNetForImageClassification(config)


def test_images_have_the_size_of_a_part_of_the_model(tmp_path: Path) -> None:
    config = t.CLIPConfig(vision_config=VISION | {"image_size": 32, "patch_size": 8}, num_labels=3)
    small = deployed(t.CLIPForImageClassification(config), tmp_path)
    assert sample_inputs(small, 2, 4)["pixel_values"].shape == (2, 3, 32, 32)


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        ({"size": {"height": 24, "width": 40}}, (24, 40)), ({"size": {"shortest_edge": 48}}, (48, 48)),
        ({"size": {"shortest_edge": 48}, "crop_size": {"height": 32, "width": 32}}, (32, 32)), ({"size": 40}, (40, 40)),
        ({}, (224, 224)), (None, (224, 224)),
    ],
)  # fmt: skip
def test_images_have_the_size_that_the_processor_makes(processor: Any, size: tuple[int, int], tmp_path: Path) -> None:
    """ResNet's own configuration has none."""
    small = deployed(resnet(), tmp_path)
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert sample_inputs(small, 2, 4)["pixel_values"].shape == (2, 3, *size)


def test_texts_are_as_long_as_the_model_reads_if_it_says_so(tmp_path: Path) -> None:
    """XLNet's configuration says -1; CANINE hashes characters, and has no vocabulary."""
    config = t.XLNetConfig(vocab_size=64, d_model=32, n_layer=1, n_head=4, d_inner=48)
    assert config.max_position_embeddings == -1
    assert sample_inputs(t.XLNetModel(config), 2, 9)["input_ids"].shape == (2, 9)
    llama = tiny.build("llama_tied")
    assert sample_inputs(llama, 2, 10**6)["input_ids"].shape == (2, llama.config.max_position_embeddings)
    canine = t.CanineModel(
        t.CanineConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    )
    with pytest.raises(FlexrankError, match="CanineModel: its configuration has no vocab_size"):
        sample_inputs(canine, 2, 4)


def test_a_model_that_memory_is_too_small_for_is_no_broken_model() -> None:
    with pytest.raises(RuntimeError, match="^DefaultCPUAllocator: "), models.clear_errors("model"):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(FlexrankError, match="model 'model' cannot be loaded: other"), models.clear_errors("model"):
        raise RuntimeError("other")


def test_whatever_a_library_raises_about_a_model_is_one_line(tmp_path: Path) -> None:
    """Of files that are newer than the library, it stumbles over keys and classes."""
    for error, words in (
        (KeyError("mystery"), "KeyError: 'mystery'"),
        (Exception("no variant"), "Exception: no variant"),
    ):
        with pytest.raises(FlexrankError, match=f"model 'new' cannot be loaded: {words}$"), models.clear_errors("new"):
            raise error
    with pytest.raises(ModuleNotFoundError, match="^no package$"), models.clear_errors("new"):
        raise ModuleNotFoundError("no package")
    tiny.build("llama_tied").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "swish9"}))
    with pytest.raises(FlexrankError, match="cannot be loaded: KeyError: 'swish9'$"):
        models.load_model(str(tmp_path), "language")


def test_an_export_inside_its_source_copies_neither_itself_nor_others(tmp_path: Path) -> None:
    source = tmp_path / "small"
    deployed(tiny.build("llama_tied"), source)
    (source / "extra").mkdir()
    (source / "extra" / "notes.txt").write_text("mine")
    for place in (source / "exports" / "first", source / "exports" / "second", tmp_path / "third"):
        export_to(source, "dense", place)
        assert {path.name for path in place.iterdir() if path.is_dir()} == {"extra"}
        assert (place / "extra" / "notes.txt").is_file()
    assert sorted(path.name for path in (source / "exports").iterdir()) == ["first", "second"]


def test_running_out_of_memory_is_no_fault_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed(tiny.build("llama_tied"), tmp_path / "small")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(RuntimeError, match="^DefaultCPUAllocator: "):
        export_to(tmp_path / "small", "torch", tmp_path / "out")
    assert not (tmp_path / "out").exists() and formats.BOUNDS
