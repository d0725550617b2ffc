"""Submodels trained for one budget alone, evaluated at all budgets, against the elastic model (FlexRank, Fig. 7)."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.experiments.language import LanguageBench, stories_settings
from flexrank.experiments.study import Ledger, Request, Result, Study, claim, count_seeds, spread, table
from flexrank.profiles import RankProfile


def run(request: Request) -> Result:
    """Runs the study: each model, elastic or single, gets the configured steps."""
    bench, seeds = LanguageBench(request), count_seeds(request, 3, 3)
    steps = bench.config.distillation.steps
    ledger = Ledger(request.work, bench.facts())
    found = []
    for seed in range(seeds):
        one = {"elastic": bench.consolidated(seed, request.work.parent)}
        for budget, profile in zip(bench.budgets, bench.profiles, strict=True):
            name = f"trained at {budget:g} only"
            path = ledger.directory / f"training-{budget:g}-{seed}"
            compute = functools.partial(_single, bench, profile, steps, seed, path)
            one[name] = ledger.take(f"{name}, seed {seed}", compute)
        found.append(one)
    untrained = ledger.take("untrained", lambda: bench.nats_by_budget(bench.decomposed()))
    dense = ledger.take("dense", lambda: bench.nats(bench.base))
    rows = [["DataSVD, untrained", *untrained]]
    rows += [[name, *map(spread, zip(*(one[name] for one in found), strict=True))] for name in found[0]]
    title = f"Held-out nats per token by budget: {bench.config.name}, {steps} steps each (original {dense:.3f})"
    return {
        "settings": bench.facts() | {"seeds": seeds},
        "tables": [table(title, ["", *(f"{budget:g}" for budget in bench.budgets)], rows)],
        "claims": _claims(bench.budgets, found),
        "data": {"budgets": bench.budgets, "found": found, "untrained": untrained, "dense": dense},
    }


def _single(bench: LanguageBench, profile: RankProfile, steps: int, seed: int, checkpoint: Path) -> list[float]:
    """Nats per token at all budgets, of a model trained at one profile."""
    return bench.nats_by_budget(bench.trained([profile], steps=steps, seed=seed, checkpoint=checkpoint))


def _claims(budgets: Sequence[float], found: Sequence[Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    excess = []
    for place in range(len(budgets)):
        best = [min(values[place] for name, values in one.items() if name != "elastic") for one in found]
        excess.append([one["elastic"][place] / least - 1 for one, least in zip(found, best, strict=True)])
    means = [sum(values) / len(values) for values in excess]
    told = ", ".join(
        f"{budget:g} {mean:+.1%} ({min(values):+.1%} to {max(values):+.1%})"
        for budget, mean, values in zip(budgets, means, excess, strict=True)
    )
    away = []
    for place, budget in enumerate(budgets):
        own = sum(one[f"trained at {budget:g} only"][place] for one in found)
        others = [
            sum(one[f"trained at {other:g} only"][place] for one in found) for other in budgets if other != budget
        ]
        away.append(own < min(others, default=float("inf")))
    why = (
        "the elastic model had a budget's share of the steps for each of its sizes, the single model all of them; the "
        "paper trains both thousands of steps longer"
    )
    return [
        claim("elastic within 2 % of the best single-budget model's loss at each budget", "matches at each budget",
              told, max(means) <= 0.02, "" if max(means) <= 0.02 else why),
        claim("a model trained for one budget is best at its own, and degrades elsewhere", "degrades markedly",
              f"best of the single models at {sum(away)} of {len(budgets)} budgets", all(away)),
    ]  # fmt: skip


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against budget: a line for each single model, the elastic one on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4), layout="constrained")
    axes = figure.subplots()
    budgets, found = data["budgets"], data["found"]
    colours = ["#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#009e73", "#999999"]
    single = [name for name in found[0] if name != "elastic"]
    for number, name in enumerate([*single, "elastic"]):
        runs = list(zip(*(one[name] for one in found), strict=True))
        means = [sum(values) / len(values) for values in runs]
        is_elastic = name == "elastic"
        colour = "#0072b2" if is_elastic else colours[number % len(colours)]
        axes.plot(budgets, means, "o-" if is_elastic else "--", color=colour, label=name, markersize=5,
                  linewidth=2 if is_elastic else 1.2, zorder=3 if is_elastic else 2)  # fmt: skip
        axes.fill_between(budgets, list(map(min, runs)), list(map(max, runs)), color=colour, alpha=0.15, linewidth=0)
        if not is_elastic:
            axes.plot(budgets[number], means[number], "s", color=colour, markersize=6)
    axes.axhline(data["dense"], color="#888888", linewidth=1, linestyle=":")
    place = (max(budgets), data["dense"])
    axes.annotate("original", place, (-2, 3), textcoords="offset points", ha="right", color="#666666")
    highest = max(max(one["elastic"]) for one in found)
    axes.set(xlabel="budget", ylabel="held-out nats per token", ylim=(data["dense"] * 0.93, highest * 1.6))
    axes.legend(frameon=False, fontsize=8)
    return figure


STUDY = Study(
    name="joint-vs-single",
    title="One elastic model against models trained for one budget",
    shows="the loss of each single-budget model at all budgets, against the elastic model's, with equal steps each",
    paper="singles degrade away from their budget; the elastic model matches the best of them at each (Fig. 7)",
    minutes=12,
    full_minutes=150,
    run=run,
    draw=draw,
    takes_model=True,
    settings=lambda full: stories_settings(distillation={"steps": 3000 if full else 300}),
)
