"""Shared by both quality benches: one model at every size, by simpler methods, by ours, and consolidated.

The full form adds the limit: a model trained for one budget alone, for as many steps as all of them together.
"""

import copy
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import flexrank as fr
from flexrank.data.batches import Batch
from flexrank.distill.objectives import FisherObjective
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from flexrank.profiles import ProfileChain, RankProfile, SensitivityTable
from research.experiment import BUDGETS, EVERY_RANK, Ledger, Request
from research.result import between, goal, spreads, table

BEFORE, AFTER = "fisher, joint", "consolidated"  #: rows of the model that is consolidated
SEPARATE_BUDGETS = (0.9, 0.8, 0.7, 0.5, 0.3)  #: budgets for which a model is trained separately
#: Scores of one model by measure, at each of `BUDGETS`; None where it was not scored.
Scores = Sequence[dict[str, float] | None]
#: train(model, profiles, seed, checkpoint): consolidates in place.
Train = Callable[[nn.Module, "ProfileChain | Sequence[RankProfile]", int, Path], None]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, its batches, and how it is scored."""

    teacher: nn.Module
    calibration: Sequence[Batch]
    probe: Sequence[Batch]
    objective: FisherObjective
    score: Callable[[nn.Module], dict[str, float]]
    exclude: Sequence[str] = ()

    def decomposed(self, method: Any) -> nn.Module:
        """Returns the elastic model."""
        model = copy.deepcopy(self.teacher)
        loss = self.objective.fisher_loss if method == "fisher" else None
        layers = select_layers(model, exclude=self.exclude)
        fr.decompose_(model, fr.collect_moments(model, self.calibration, layers, gradient_loss=loss), method=method)
        return model

    def scores(self, model: nn.Module, profile: Callable[[float], RankProfile]) -> Scores:
        """Returns the model's scores at each budget's profile."""
        scores = []
        for budget in BUDGETS:
            with use_profile(model, profile(budget)):
                scores.append(self.score(model))
        return scores

    def scores_as_loaded(self, model: nn.Module, chain: ProfileChain) -> Scores:
        """Returns the scores of an elastic model's one artefact, of which each budget loads only what it needs."""
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch, "elastic")
            fr.save_elastic(model, chain, directory)
            return [self.score(fr.load_elastic(directory, budget)[0]) for budget in BUDGETS]

    def measure_untrained(
        self, methods: Sequence[str], levels: int
    ) -> tuple[dict[str, Scores], nn.Module, ProfileChain]:
        """Returns scores at uniform ranks and by both allocations, and the model and joint chain of the last method."""
        models, results = {method: self.decomposed(method) for method in methods}, {}
        for method, model in models.items():
            results[f"{method}, uniform"] = self.scores(model, functools.partial(uniform_profile, model))
        evaluate = fr.distillation_evaluator(self.teacher, self.probe, self.objective)
        for method, model in models.items():
            errors = fr.probe_sensitivity(model, evaluate, levels, spacing="parameters", **EVERY_RANK)
            for name in ("paper", "joint"):
                chain = chain_of(name, errors, BUDGETS)
                results[f"{method}, {name}"] = self.scores(model, chain.at)
        return results, model, chain


def compare(
    subject: Subject, facts: Mapping[str, Any], training: Mapping[str, Any], request: Request, train: Train
) -> dict[str, Any]:
    """Returns the scores of the base model, untrained methods, consolidated seeds, and if `full` at `SEPARATE_BUDGETS`.

    `facts` has the `methods`, the last of which is consolidated, the probe's `levels`, and the model's name. Finished
    parts of an interrupted bench are not repeated, nor are untrained ones for another `training`.
    """

    def untrained() -> dict[str, Any]:
        results, _, chain = subject.measure_untrained(facts["methods"], facts["levels"])
        return {"dense": subject.score(subject.teacher), "results": results, "chain": chain.to_json()}

    def trained(profiles: ProfileChain | Sequence[RankProfile], name: str, seed: int) -> nn.Module:
        model, path = subject.decomposed(facts["methods"][-1]), ledger.directory / f"training-{name}-{seed}"
        train(model, profiles, seed, path)
        shutil.rmtree(path)
        return model

    def jointly(seed: int) -> Scores:
        return subject.scores_as_loaded(trained(chain, "all", seed), chain)

    def separately(budget: float) -> dict[str, float]:
        profile = chain.at(budget)
        with use_profile(trained([profile], f"{budget:g}", 0), profile) as model:
            return subject.score(model)

    first = Ledger(request.work, facts).take("untrained", untrained)
    chain, ledger = ProfileChain.from_json(first["chain"]), Ledger(request.work, {**facts, **training})
    results = {name: [scores] for name, scores in first["results"].items()}
    results[AFTER] = ledger.take_seeds("consolidated", request.seeds, jointly)
    if request.full:
        limits = {budget: ledger.take(f"alone, {budget:g}", separately, budget) for budget in SEPARATE_BUDGETS}
        results["each alone, all the steps"] = [[limits.get(budget) for budget in BUDGETS]]
    return {"dense": first["dense"], "results": results, "gap": first["chain"]["gap"]}


def chain_of(allocation: str, table: SensitivityTable, budgets: Sequence[float]) -> ProfileChain:
    """Returns ranks for these budgets from a table: by the printed search, or jointly with every rank a candidate."""
    if allocation == "paper":
        return fr.allocate_ranks(table, budgets, method="paper", savings="ranks")
    return fr.allocate_ranks(table, budgets, **EVERY_RANK)


def verdicts(
    model: str, results: Mapping[str, Sequence[Scores]], measure: str, goals: Mapping[float, float], is_loss: bool
) -> list[dict[str, Any]]:
    """Says whether consolidation makes no size worse, and reaches `goals` (by budget), for every seed."""
    sign = -1.0 if is_loss else 1.0
    before, after = (_by_budget(results[name], measure) for name in (BEFORE, AFTER))
    falls = {budget: max(sign * (before[budget][0] - score) for score in after[budget]) for budget in after}
    losers = [f"{budget:g} by {fall:.2g}" for budget, fall in falls.items() if fall > 0]
    title = f"{model}: no size is worse after consolidation than before, in {measure}, at any seed"
    why = "while the rate is high, small sizes pull shared components away" if losers else ""
    kept = goal(title, "none", ", ".join(losers) or "none", not losers, why)
    reached = all(sign * (score - goals[budget]) >= 0 for budget in goals for score in after[budget])
    shown = ", ".join(f"{budget:g} {between(after[budget], '.4f')}" for budget in goals)
    wanted = ", ".join(f"{budget:g} {value:.4f}" for budget, value in goals.items())
    bound = "at most" if is_loss else "at least"
    return [kept, goal(f"{model}: {measure} by size", f"{bound} {wanted}", shown, reached)] if goals else [kept]


def _by_budget(runs: Sequence[Scores], measure: str) -> dict[float, list[float]]:
    places = zip(BUDGETS, zip(*runs, strict=True), strict=True)
    return {budget: [one[measure] for one in scores if one is not None] for budget, scores in places}


def quality_table(title: str, results: Mapping[str, Sequence[Scores]], measure: str) -> dict[str, Any]:
    """Returns a row for each method and a column for each budget: the spread of `measure` over seeds, or None."""
    rows = [
        [name, *spreads([None if one is None else one[measure] for one in scores] for scores in runs)]
        for name, runs in results.items()
    ]
    return table(title, ["", *BUDGETS], rows, digits=4)
