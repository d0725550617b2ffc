"""Small Llamas: held-out nats per token at every budget, by plain SVD, DataSVD with both allocations, consolidated."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from flexrank.data.batches import Batch
from flexrank.data.metrics import nats_per_token
from flexrank.data.text import read_texts, token_blocks
from flexrank.distill.objectives import LogitObjective
from flexrank.hf.models import load_model, load_tokenizer
from research.assets import assets_directory
from research.benches.quality import Subject, consolidate_, quality_table
from research.experiment import Experiment, Request
from research.measures import STORY_SEPARATOR
from research.result import Result, measured

#: Blocks.
CALIBRATION, PROBE, EVALUATION, TRAINING, BATCH = 128, 16, 100, 3000, 8
LEVELS = 6


class Texts(NamedTuple):
    """One model and its texts, as paths under the assets' folder; tokens of a block."""

    model: str
    train: str
    held_out: str
    separator: str
    length: int
    training: dict[str, Any]


STORIES = Texts(
    "stories260k", "text/tinystories_train_v2.txt", "text/tinystories_val.txt", STORY_SEPARATOR, 256,
    {"steps": 1000, "learning_rate": 5e-4, "warmup_steps": 25},
)  # fmt: skip
PYCODE = Texts(
    "pycode5m", "pycode5m/train_sample.txt", "pycode5m/val.txt", "\0", 512,
    {"steps": 400, "learning_rate": 1.5e-4, "warmup_steps": 10},
)  # fmt: skip
SUBJECTS = (STORIES, PYCODE)


def run(_: Request) -> Result:
    """Runs the bench on every model."""
    data = {texts.model: measure(texts) for texts in SUBJECTS}
    tables = [_table(model, one) for model, one in data.items()]
    return measured({texts.model: texts.training for texts in SUBJECTS}, tables, [], data)


def subject_of(texts: Texts, evaluation: int = EVALUATION) -> tuple[Subject, Sequence[Batch]]:
    """The model, scored on this many held-out blocks, and the batches of its training."""
    assets = assets_directory(texts.model, texts.train, texts.held_out)
    tokenizer = load_tokenizer(assets / texts.model)

    def blocks(path: str, count: int) -> Sequence[Batch]:
        documents = read_texts(assets / path, texts.separator)
        return token_blocks(tokenizer, documents, texts.length, BATCH)[: -(-count // BATCH)]

    training, held_out = blocks(texts.train, TRAINING), blocks(texts.held_out, evaluation)
    calibration = training[: CALIBRATION // BATCH]
    probe = training[len(calibration) :][: PROBE // BATCH]
    teacher, objective = load_model(assets / texts.model, "language"), LogitObjective()
    score = functools.partial(_score, held_out)
    return Subject(teacher, calibration, probe, objective, score), training


def _score(held_out: Sequence[Batch], model: nn.Module) -> dict[str, float]:
    return {"nats": nats_per_token(model, held_out)}


def measure(texts: Texts) -> dict[str, Any]:
    """Nats per token by method and budget, and the seconds of consolidation."""
    subject, training = subject_of(texts)
    results, model, _, chain = subject.without_training(("svd", "datasvd"), LEVELS)
    options = {"objective": subject.objective, "autocast": torch.bfloat16, **texts.training}
    seconds = consolidate_(model, subject.teacher, training, chain, **options)
    results["consolidated"] = subject.scores(model, chain.at)
    nats = {method: scores["nats"] for method, scores in results.items()}
    dense = subject.score(subject.teacher)["nats"]
    return {"dense": dense, "results": nats, "seconds": seconds, "training": texts.training, "gap": chain.gap}


def _table(model: str, one: Mapping[str, Any]) -> dict[str, Any]:
    minutes = one["seconds"] / 60
    title = f"{model}: nats per token (dense {one['dense']:.4f}; consolidated in {minutes:.1f} minutes)"
    return quality_table(title, one["results"])


EXPERIMENT = Experiment(
    "language", "Quality: small Llamas",
    "held-out nats per token at every budget, by plain SVD, DataSVD with both allocations, and consolidated",
    minutes=15, run=run,
)  # fmt: skip
