"""What does not fit a run's model is refused before anything is calibrated; the model itself is the oracle."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from flexrank.data.images import Scaling
from flexrank.errors import FlexrankError
from flexrank.hf.classes import reads_both_sides
from flexrank.run.config import parse_config
from flexrank.run.directory import RunDirectory
from flexrank.run.fitting import require_fitting, require_fitting_inputs
from flexrank.run.samples import Samples
from flexrank.run.workspace import Workspace
from tiny_runs import refused, settings

PARTS = ("calibration", "probe", "training", "example")


def workspace(task: str, place: Path, **data: Any) -> Workspace:
    values = settings(place / "model", place / "data", place / "run", task)
    if task == "classification":
        values["data"] = {"source": "images", "path": str(place / "data.npz"), "calibration": 8, "batch_size": 8}
    values["data"] |= data
    config = parse_config(values)
    return Workspace(config, RunDirectory(config.directory))


def tokens(largest: dict[str, int]) -> Samples:
    """Samples with these largest tokens in their second batch; an example is one batch."""
    first = {"input_ids": torch.tensor([[1, 2, 3]])}
    parts: Any = {name: [first, {"input_ids": torch.tensor([[4, largest.get(name, 5), 6]])}] for name in PARTS}
    return Samples(**parts | {"example": parts["example"][1]}, quality_function=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", PARTS)
def test_a_token_without_an_embedding_is_refused_in_every_part(part: str, tmp_path: Path) -> None:
    work, model = workspace("language", tmp_path), tiny.llama_tied()
    for token, is_known in ((tiny.VOCABULARY - 1, True), (tiny.VOCABULARY, False)):
        samples: Any = tokens({part: token})
        work.__dict__["samples"] = samples
        if is_known:
            require_fitting_inputs(work, model)
            model(samples.example["input_ids"])
        else:
            with pytest.raises(FlexrankError, match="its tokenizer makes token 64, and its embedding ends at 63; save"):
                require_fitting_inputs(work, model)
            with pytest.raises(IndexError):
                model(torch.tensor([[token]]))


def test_a_stream_is_not_read_for_its_tokens(tmp_path: Path) -> None:
    def stream() -> Iterator[Any]:
        raise AssertionError
        yield

    work = workspace("language", tmp_path)
    work.__dict__["samples"] = Samples(**vars(tokens({})) | {"training": stream()})
    require_fitting_inputs(work, tiny.llama_tied())


def test_a_model_of_characters_has_no_end_of_tokens(tmp_path: Path) -> None:
    from transformers import CanineConfig, CanineModel

    work, model = workspace("embedding", tmp_path), CanineModel(CanineConfig(**tiny.ENCODER, num_hash_buckets=16))
    work.__dict__["samples"] = tokens({"example": 0x10FFFF})
    require_fitting_inputs(work, model)
    model(torch.tensor([[0x10FFFF] * 8]))


def test_an_encoder_decoder_embeds_nothing(tmp_path: Path) -> None:
    """Its forward fails on texts alone; the dry run and the run say so in one line."""
    model, work = tiny.t5(), workspace("embedding", tmp_path)
    work.__dict__["samples"] = tokens({})
    with pytest.raises(ValueError, match="input_ids"):
        model.base_model(torch.tensor([[1, 2]]))
    message = "task 'embedding' does not fit 't5', an encoder-decoder; take a model that is an encoder alone"
    with pytest.raises(FlexrankError, match=message):
        require_fitting_inputs(work, model)
    model.config.save_pretrained(tmp_path / "model")
    (tmp_path / "run.json").write_text(json.dumps(work.config.model_dump(mode="json")))
    assert message in refused("run", tmp_path / "run.json", "--dry-run")
    require_fitting_inputs(work, tiny.bert())


@pytest.mark.parametrize(
    ("classes", "channels", "means", "message"),
    [
        ([0, 4], 3, 3, None),
        ([0, 4], 3, 1, None),
        ([0, 5], 3, 3, "data.npz: y has the class 5; this model's are 0 to 4"),
        ([-1, 4], 3, 3, "y has the class -1; this model's are 0 to 4"),
        (
            [0, 4],
            0,
            3,
            r"images are \(1, 16, 16\) \(channels, height, width\); image_mean of preproc",
        ),
        ([0, 4], 4, 3, r"images are \(4, 16, 16\) .*; image_mean of preprocessor_config.json is of 3 channels"),
        ([0, 4], 0, 1, r"data.npz: images are \(1, 16, 16\) .*; this model takes \(3, 16, 16\)"),
    ],
)
def test_images_are_those_that_the_model_was_made_for(
    classes: list[int], channels: int, means: int, message: str | None, tmp_path: Path
) -> None:
    shape = (80, 16, 16, channels) if channels else (80, 16, 16)
    np.savez(tmp_path / "data.npz", x=np.full(shape, 7, np.uint8), y=np.array(classes * 40))
    (tmp_path / "model").mkdir()
    scaling = Scaling((0.5,) * means, (0.25,) * means)
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(scaling.to_json()))
    tiny.vit().config.save_pretrained(tmp_path / "model")
    work, model = workspace("classification", tmp_path), tiny.vit()
    if message is None:
        require_fitting_inputs(work, model)
        model(**work.samples.example)
        return
    with pytest.raises(FlexrankError, match=message) as caught:
        require_fitting_inputs(work, model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "longformer", "esm", "bert"])
@torch.no_grad()
def test_the_most_tokens_are_those_that_the_model_reads(kind: str, tmp_path: Path) -> None:
    """RoBERTa's positions begin after that of padding. Oracle: a forward pass of each length."""
    from transformers import AutoConfig, AutoModel

    more: dict[str, Any] = {"attention_window": 4} if kind == "longformer" else {}
    more |= {"vocab_size": 40, "max_position_embeddings": 34, "pad_token_id": 1}
    config = AutoConfig.for_model(kind, **tiny.ENCODER, **more)
    model, most = AutoModel.from_config(config).eval(), 0
    for length in range(28, 40, 4 if kind == "longformer" else 1):  # which Longformer pads to whole windows
        with contextlib.suppress(IndexError, RuntimeError):
            model(torch.full((1, length), 5))
            most = length
    assert most == (34 if kind == "bert" else 32)
    for tokens, is_refused in ((32, False), (most, False), (most + 1, True)):
        work = workspace("embedding", tmp_path, max_tokens=tokens)
        refusal = pytest.raises(FlexrankError, match=f"max_tokens is {tokens}; this model reads at most {most}")
        with refusal if is_refused else contextlib.nullcontext():
            require_fitting(work.config, model)


def test_a_language_model_sees_no_later_token(tmp_path: Path) -> None:
    """Oracle: whether another last token changes what is predicted before it."""
    from transformers import BertConfig, BertLMHeadModel, XLMConfig

    work, ids = workspace("language", tmp_path), torch.randint(3, tiny.VOCABULARY, (1, 8))
    work.__dict__["samples"] = tokens({})
    for is_decoder in (False, True):
        torch.manual_seed(0)
        model = BertLMHeadModel(BertConfig(**tiny.TEXT, is_decoder=is_decoder)).eval()
        other = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % tiny.VOCABULARY], 1)
        change = (model(ids).logits - model(other).logits)[:, :-1].abs().max()
        assert (change < 1e-5) == is_decoder
        message = "task 'language' does not fit 'bert', which reads later tokens too; take a causal model, or task 'emb"
        with contextlib.nullcontext() if is_decoder else pytest.raises(FlexrankError, match=message):
            require_fitting_inputs(work, model)
    require_fitting_inputs(work, tiny.gpt2())
    for causal in (False, True):  # XLM's config has another name for it
        config = XLMConfig(vocab_size=tiny.VOCABULARY, emb_dim=32, n_layers=1, n_heads=4, causal=causal)
        assert reads_both_sides(config) != causal


def test_a_classifier_of_texts_is_no_classifier_of_images(tmp_path: Path) -> None:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        PerceiverConfig,
        PerceiverForImageClassificationLearned,
    )

    model, work = BertForSequenceClassification(BertConfig(**tiny.TEXT)), workspace("classification", tmp_path)
    message = (
        "task 'classification' is of images, and does not fit BertForSequenceClassification, which reads input_ids"
    )
    with pytest.raises(FlexrankError, match=message):
        require_fitting(work.config, model)
    other = PerceiverConfig(num_latents=4, d_latents=16, num_blocks=1, num_self_attends_per_block=1, image_size=16)
    require_fitting(work.config, PerceiverForImageClassificationLearned(other))  # its main input has another name
    model.config.architectures = ["BertForSequenceClassification"]
    model.config.save_pretrained(tmp_path / "model")
    (tmp_path / "run.json").write_text(json.dumps(work.config.model_dump(mode="json")))
    assert message in refused("run", tmp_path / "run.json", "--dry-run")


def test_images_of_other_channels_are_refused_by_a_model_that_takes_any_size(tmp_path: Path) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5, layer_type="basic")
    model, work = ResNetForImageClassification(config), workspace("classification", tmp_path)
    for channels in (1, 3):
        image = torch.randn(1, channels, 12, 16)
        samples: Any = Samples(**dict.fromkeys(PARTS[:3], []), example={"pixel_values": image}, quality_function=None)  # type: ignore[arg-type]
        samples.__dict__["classes"] = torch.tensor([0, 4])
        work.__dict__["samples"] = samples
        with contextlib.nullcontext() if channels == 3 else pytest.raises(ValueError, match="channel dimension"):
            model(image)
        message = r"images are \(1, 12, 16\) .*; this model takes \(3, 12, 16\)"
        with contextlib.nullcontext() if channels == 3 else pytest.raises(FlexrankError, match=message):
            require_fitting_inputs(work, model)
