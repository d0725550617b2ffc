"""Small Llamas: held-out nats per token at every budget, by plain SVD, DataSVD with both allocations, consolidated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexrank.data.metrics import nats_per_token
from flexrank.data.text import read_texts, token_blocks
from flexrank.distill.objectives import LogitObjective
from flexrank.hf.models import load_model, load_tokenizer
from research.assets import assets_directory
from research.benches.quality import BUDGETS, Subject, consolidate_
from research.experiment import Experiment, Request
from research.measures import STORY_SEPARATOR
from research.result import Result, table

#: Blocks.
CALIBRATION, PROBE, EVALUATION, TRAINING, BATCH = 128, 16, 100, 3000, 8
LEVELS = 6
WHOLE_FILE = "\0"


class Texts(NamedTuple):
    """One model and its texts, as paths under the assets' folder."""

    model: str
    train: str
    held_out: str
    separator: str
    length: int
    training: dict[str, Any]


SUBJECTS = (
    Texts(
        "stories260k", "text/tinystories_train_v2.txt", "text/tinystories_val.txt", STORY_SEPARATOR, 256,
        {"steps": 1000, "learning_rate": 5e-4, "warmup_steps": 25},
    ),
    Texts(
        "pycode5m", "pycode5m/train_sample.txt", "pycode5m/val.txt", WHOLE_FILE, 512,
        {"steps": 400, "learning_rate": 1.5e-4, "warmup_steps": 10},
    ),
)  # fmt: skip


def run(_: Request) -> Result:
    """Runs the bench on every model."""
    assets = assets_directory("pycode5m", "stories260k", "text")
    data = {texts.model: measure(assets, texts) for texts in SUBJECTS}
    return {
        "settings": {texts.model: texts.training for texts in SUBJECTS},
        "tables": [_table(model, one) for model, one in data.items()],
        "claims": [],
        "data": data,
    }


def measure(assets: Path, texts: Texts) -> dict[str, Any]:
    """Nats per token by method and budget, and the seconds of consolidation."""
    teacher, tokenizer = load_model(assets / texts.model, "language"), load_tokenizer(assets / texts.model)

    def blocks(path: str, count: int) -> list[Any]:
        documents = read_texts(assets / path, texts.separator)
        return token_blocks(tokenizer, documents, texts.length, BATCH)[: -(-count // BATCH)]

    training, evaluation = blocks(texts.train, TRAINING), blocks(texts.held_out, EVALUATION)
    calibration = training[: CALIBRATION // BATCH]
    probe = training[len(calibration) :][: PROBE // BATCH]
    objective = LogitObjective()
    subject = Subject(teacher, calibration, probe, objective, lambda model: {"nats": nats_per_token(model, evaluation)})
    results, model, _, chain = subject.without_training(("svd", "datasvd"), LEVELS)
    options = {"objective": objective, "autocast": torch.bfloat16, **texts.training}
    seconds = consolidate_(model, teacher, training, chain, **options)
    results["consolidated"] = subject.scores(model, chain.at)
    nats = {method: scores["nats"] for method, scores in results.items()}
    dense = subject.score(teacher)["nats"]
    return {"dense": dense, "results": nats, "seconds": seconds, "training": texts.training, "gap": chain.gap}


def _table(model: str, one: Mapping[str, Any]) -> dict[str, Any]:
    minutes = one["seconds"] / 60
    title = f"{model}: nats per token (dense {one['dense']:.4f}; consolidated in {minutes:.1f} minutes)"
    rows = [[method, *values.values()] for method, values in one["results"].items()]
    return table(title, ["", *BUDGETS], rows, digits=4)


EXPERIMENT = Experiment(
    name="language",
    title="Quality: small Llamas",
    shows="held-out nats per token at every budget, by plain SVD, DataSVD with both allocations, and consolidated",
    minutes=15,
    run=run,
)
