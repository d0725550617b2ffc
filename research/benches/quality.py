"""What both benches of quality do: one model at every size, by simpler methods, by ours, and consolidated."""

import copy
import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from flexrank import allocate_ranks, collect_moments, decompose_, distillation_evaluator, probe_sensitivity
from flexrank.data.batches import Batch
from flexrank.distill.objectives import Objective
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from flexrank.profiles import ProfileChain, RankProfile
from research.experiment import EVERY_RANK, Ledger, Request
from research.result import spreads, table

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
#: Of one model by measure, at each of `BUDGETS`.
Scores = list[dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, its batches, and how one is scored."""

    teacher: nn.Module
    calibration: Sequence[Batch]
    probe: Sequence[Batch]
    objective: Objective
    score: Callable[[nn.Module], dict[str, float]]
    exclude: Sequence[str] = ()

    def decomposed(self, method: Any) -> nn.Module:
        """The elastic model."""
        model = copy.deepcopy(self.teacher)
        loss = self.objective.fisher_loss if method == "fisher" else None
        layers = select_layers(model, exclude=self.exclude)
        decompose_(model, collect_moments(model, self.calibration, layers, gradient_loss=loss), method=method)
        return model

    def scores(self, model: nn.Module, profile: Callable[[float], RankProfile]) -> Scores:
        """The model's at each budget's profile."""
        scores = []
        for budget in BUDGETS:
            with use_profile(model, profile(budget)):
                scores.append(self.score(model))
        return scores

    def without_training(
        self, methods: Sequence[str], levels: int
    ) -> tuple[dict[str, Scores], nn.Module, ProfileChain]:
        """Scores at uniform ranks, and of SVD and DataSVD by both allocations; DataSVD's model and joint chain."""
        models, results = {method: self.decomposed(method) for method in methods}, {}
        for method, model in models.items():
            results[f"{method}, uniform"] = self.scores(model, functools.partial(uniform_profile, model))
        evaluate = distillation_evaluator(self.teacher, self.probe, self.objective)
        for method in ("svd", "datasvd"):
            model = models[method]
            errors = probe_sensitivity(model, evaluate, levels, spacing="parameters", **EVERY_RANK)
            joint = allocate_ranks(errors, BUDGETS, **EVERY_RANK)
            paper = allocate_ranks(errors, BUDGETS, method="paper", savings="ranks")
            for name, chain in (("paper", paper), ("joint", joint)):
                results[f"{method}, {name}"] = self.scores(model, chain.at)
        return results, model, joint


def compare(
    subject: Subject, facts: Mapping[str, Any], training: Mapping[str, Any], request: Request,
    train: Callable[..., Scores],
) -> dict[str, Any]:  # fmt: skip
    """The base model's scores, each method's untrained, and those of every seed's `train(model, chain, seed, path)`.

    `facts` has the `methods`, the probe's `levels`, and the model's name. What an interrupted bench has finished is not
    done again, what is untrained not for another `training` either; `path` is of a checkpoint.
    """

    def untrained() -> dict[str, Any]:
        results, _, chain = subject.without_training(facts["methods"], facts["levels"])
        return {"dense": subject.score(subject.teacher), "results": results, "chain": chain.to_json()}

    def trained(seed: int) -> Scores:
        path = ledger.directory / f"training-{seed}"
        scores = train(subject.decomposed("datasvd"), ProfileChain.from_json(first["chain"]), seed, path)
        shutil.rmtree(path)
        return scores

    first = Ledger(request.work, facts).take("untrained", untrained)
    ledger = Ledger(request.work, {**facts, **training})
    results = {name: [scores] for name, scores in first["results"].items()}
    results["consolidated"] = ledger.take_seeds("consolidated", request.seeds, trained)
    return {"dense": first["dense"], "results": results, "gap": first["chain"]["gap"]}


def quality_table(title: str, results: Mapping[str, Sequence[Scores]], what: str) -> dict[str, Any]:
    """A row for each method, a column for each budget, of one measure; the spread over seeds where there are some."""
    rows = [
        [name, *spreads([one[what] for one in scores] for scores in runs)] for name, runs in results.items()
    ]  # fmt: skip
    return table(title, ["", *BUDGETS], rows, digits=4)
