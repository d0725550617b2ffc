"""Submodels trained for one budget alone, evaluated at all budgets, against the elastic model (FlexRank, Fig. 7)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from flexrank.profiles import RankProfile
from research.experiment import Experiment, Request
from research.figures import GREEN, NEUTRAL, OTHER, OURS, PINK, SKY, YELLOW, draw_level, draw_seeds
from research.result import Result, by_budget, claim, measured, spreads
from research.studies.language import LanguageBench, nats_panel, stories_settings

Runs = dict[str, list[list[float]]]


def run(request: Request) -> Result:
    """Runs the study: each model, elastic or single, gets the configured steps."""
    bench = LanguageBench(request)
    runs: Runs = {"elastic": bench.consolidated(request.seeds)}
    for budget, profile in zip(bench.budgets, bench.profiles, strict=True):
        name = f"trained at {budget:g} only"
        runs[name] = bench.ledger.take_seeds(name, request.seeds, _single, bench, budget, profile)
    # Whether the elastic model lacks steps or room: as many for each size as a single model has, for one seed.
    longer = bench.steps * len(bench.budgets)
    patient = bench.ledger.take("elastic, longer, seed 0", _elastic, bench, longer)
    rows: list[list[Any]] = [
        ["DataSVD, untrained", *bench.untrained()],
        ["elastic", *spreads(runs["elastic"])],
        [f"elastic, {longer} steps, seed 0", *patient],
        *([name, *spreads(seeds)] for name, seeds in _singles(runs).items()),
    ]
    data = {"budgets": bench.budgets, "runs": runs, "patient": patient, "steps": longer, "dense": bench.dense()}
    claims = _claims(bench.budgets, runs, patient)
    return measured(bench.facts(seeds=request.seeds), [bench.table(rows)], claims, data)


def _single(bench: LanguageBench, budget: float, profile: RankProfile, seed: int) -> list[float]:
    """Nats per token at all budgets, of a model trained at one profile."""
    model = bench.trained([profile], steps=bench.steps, seed=seed, name=f"training-{budget:g}-{seed}")
    return bench.nats_by_budget(model)


def _elastic(bench: LanguageBench, steps: int) -> list[float]:
    return bench.nats_by_budget(bench.trained(bench.profiles[::-1], steps=steps, seed=0, name="training-longer-0"))


def _singles(runs: Runs) -> Runs:
    return {name: seeds for name, seeds in runs.items() if name != "elastic"}


def _claims(budgets: Sequence[float], runs: Runs, patient: Sequence[float]) -> list[dict[str, Any]]:
    excess, elsewhere, best = [], [], []
    for place, budget in enumerate(budgets):
        single = [[values[place] for values in one] for one in zip(*_singles(runs).values(), strict=True)]
        least = [min(one) for one in single]
        excess.append([one[place] / own - 1 for one, own in zip(runs["elastic"], least, strict=True)])
        own = [one[place] for one in runs[f"trained at {budget:g} only"]]
        # the least that any model trained for another budget loses here, over the one trained for this
        others = [min((v for v in s if v != o), default=o) for s, o in zip(single, own, strict=True)]
        elsewhere.append([other / o - 1 for other, o in zip(others, own, strict=True)])
        best.append(least[0])
    left = ", ".join(f"{b:g} {own / least - 1:+.1%}" for b, own, least in zip(budgets, patient, best, strict=True))
    why = f"each of its sizes had a share of the steps: with {len(budgets)} times the steps it is {left} (seed 0)"
    return [
        claim("elastic within 2 % of the best single-budget model's loss at each budget, every seed",
              "matches at each budget", by_budget(budgets, excess, "+.1%"),
              all(max(values) <= 0.02 for values in excess), why),
        claim("a model trained for one budget is the best there by 2 % or more, every seed", "others degrade markedly",
              f"over it, the next best of the single models: {by_budget(budgets, elsewhere, '+.1%')}",
              all(min(values) >= 0.02 for values in elsewhere)),
    ]  # fmt: skip


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against budget: a line for each single model, the elastic one on top."""
    figure, axes = nats_panel(size=(6.6, 4))
    budgets, runs = data["budgets"], data["runs"]
    colours = itertools.cycle((OTHER, YELLOW, PINK, SKY, GREEN, NEUTRAL))
    for place, ((name, seeds), colour) in enumerate(zip(_singles(runs).items(), colours, strict=False)):
        means = draw_seeds(axes, budgets, seeds, colour, name, linestyle="--", marker="")
        axes.plot(budgets[place], means[place], "s", color=colour, markersize=6)
    draw_seeds(axes, budgets, runs["elastic"], OURS, "elastic", linewidth=2, zorder=3)
    label = f"elastic, {data['steps']} steps"
    draw_seeds(axes, budgets, [data["patient"]], OURS, label, linestyle=":", marker="", zorder=3)
    draw_level(axes, data["dense"], "original")
    axes.set(ylim=(data["dense"] * 0.93, max(map(max, runs["elastic"])) * 1.6))
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(
    "joint-vs-single", "One elastic model against models trained for one budget",
    "the loss of each single-budget model at all budgets, against the elastic model's, with equal steps each",
    minutes=14, full_minutes=150, run=run, draw=draw, seeds=(2, 3), settings=stories_settings,
    paper="singles degrade away from their budget; the elastic model matches the best of them at each (Fig. 7)",
)  # fmt: skip
