"""Small Llamas: held-out nats per token at every budget, by plain SVD, DataSVD with both allocations, consolidated."""

import copy
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flexrank.deployment.environment import assets_directory
from torch import nn

from flexrank.allocate import allocate_ranks
from flexrank.calibrate import collect_moments
from flexrank.data.metrics import nats_per_token
from flexrank.data.text import STORY_SEPARATOR, read_texts, token_blocks
from flexrank.decompose import decompose_
from flexrank.distill import distill_, distillation_evaluator
from flexrank.distill.objectives import LogitObjective
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from flexrank.probe import probe_sensitivity
from flexrank.profiles import RankProfile
from research.benches.bench import BUDGETS, Bench
from research.findings import Result
from research.findings import table as make_table

#: Blocks.
CALIBRATION, PROBE, EVALUATION, TRAINING, BATCH = 128, 16, 100, 3000, 8
LEVELS = 6
WHOLE_FILE = "\0"


class Subject(NamedTuple):
    """One model and its texts, as paths under the assets' folder."""

    model: str
    train: str
    held_out: str
    separator: str
    length: int
    training: dict[str, Any]


SUBJECTS = (
    Subject(
        "stories260k", "text/tinystories_train_v2.txt", "text/tinystories_val.txt", STORY_SEPARATOR, 256,
        {"steps": 1000, "learning_rate": 5e-4, "warmup_steps": 25},
    ),
    Subject(
        "pycode5m", "pycode5m/train_sample.txt", "pycode5m/val.txt", WHOLE_FILE, 512,
        {"steps": 400, "learning_rate": 1.5e-4, "warmup_steps": 10},
    ),
)  # fmt: skip


def run(_: Path | None = None) -> Result:
    """Runs the bench on every model; about a quarter of an hour on two cores."""
    assets = assets_directory("pycode5m", "stories260k", "text")
    found = {subject.model: _Bench(assets, subject).run() for subject in SUBJECTS}
    return {
        "settings": {subject.model: subject.training for subject in SUBJECTS},
        "tables": [_table(model, one) for model, one in found.items()],
        "claims": [],
        "data": found,
    }


def _table(model: str, found: Mapping[str, Any]) -> dict[str, Any]:
    minutes = found["seconds"] / 60
    title = f"{model}: nats per token (dense {found['dense']:.4f}; consolidated in {minutes:.1f} minutes)"
    rows = [[method, *values.values()] for method, values in found["results"].items()]
    return make_table(title, ["", *(f"{budget:g}" for budget in BUDGETS)], rows, digits=4)


class _Bench:
    """One model, its batches, and the scores so far."""

    def __init__(self, assets: Path, subject: Subject):
        self.subject = subject
        self.teacher: nn.Module = load_model(assets / subject.model, "language")
        tokenizer = load_tokenizer(assets / subject.model)

        def blocks(path: str, count: int) -> list[Any]:
            texts = read_texts(assets / path, subject.separator)
            return token_blocks(tokenizer, texts, subject.length, BATCH)[: -(-count // BATCH)]

        self.training = blocks(subject.train, TRAINING)
        self.evaluation = blocks(subject.held_out, EVALUATION)
        self.calibration = self.training[: CALIBRATION // BATCH]
        self.probe = self.training[len(self.calibration) :][: PROBE // BATCH]
        self.results: dict[str, dict[float, float]] = {}

    def run(self) -> dict[str, Any]:
        for method in ("svd", "datasvd"):
            model = self.decomposed(method)
            self.score(model, f"{method}, uniform", functools.partial(uniform_profile, model))
        objective = LogitObjective()
        evaluate = distillation_evaluator(self.teacher, self.probe, objective)
        table = probe_sensitivity(model, evaluate, LEVELS, spacing="parameters")
        chain = allocate_ranks(table, BUDGETS)
        self.score(model, "datasvd, paper", allocate_ranks(table, BUDGETS, method="paper", savings="ranks").at)
        self.score(model, "datasvd, joint", chain.at)
        start = time.perf_counter()
        settings = self.subject.training
        distill_(model, self.teacher, self.training, chain, objective=objective, autocast=torch.bfloat16, **settings)
        seconds = time.perf_counter() - start
        self.score(model, "consolidated", chain.at)
        dense = nats_per_token(self.teacher, self.evaluation)
        return {"dense": dense, "results": self.results, "seconds": seconds, "training": settings, "gap": chain.gap}

    def decomposed(self, method: Any) -> nn.Module:
        model = copy.deepcopy(self.teacher)
        decompose_(model, collect_moments(model, self.calibration, select_layers(model)), method=method)
        return model

    def score(self, model: nn.Module, method: str, profile: Callable[[float], RankProfile]) -> None:
        self.results[method] = {}
        for budget in BUDGETS:
            with use_profile(model, profile(budget)):
                self.results[method][budget] = nats_per_token(model, self.evaluation)


BENCH = Bench(
    name="language",
    title="Quality: small Llamas",
    measures="held-out nats per token at every budget, by plain SVD, DataSVD with both allocations, and consolidated",
    minutes=15,
    run=run,
)
