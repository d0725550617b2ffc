"""Submodels trained for one budget alone, evaluated at all budgets, against the elastic model (FlexRank, Fig. 7)."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.profiles import RankProfile
from research.findings import Result, between, claim, spread, table
from research.findings.figures import OURS, draw_seeds
from research.studies.language import LanguageBench, stories_settings
from research.studies.study import Ledger, Request, Study, count_seeds


def run(request: Request) -> Result:
    """Runs the study: each model, elastic or single, gets the configured steps."""
    seeds, bench = count_seeds(request, 2, 3), LanguageBench(request)
    steps = bench.config.distillation.steps
    ledger = Ledger(request.work, bench.key())
    found = []
    for seed in range(seeds):
        one = {"elastic": bench.consolidated(seed, request.work.parent)}
        for budget, profile in zip(bench.budgets, bench.profiles, strict=True):
            name = f"trained at {budget:g} only"
            path = ledger.directory / f"training-{budget:g}-{seed}"
            compute = functools.partial(_single, bench, profile, steps, seed, path)
            one[name] = ledger.take(f"{name}, seed {seed}", compute)
        found.append(one)
    longer = steps * len(bench.budgets)
    path = ledger.directory / "training-longer-0"
    # Whether the elastic model lacks steps or room: as many for each size as a single model has, for one seed.
    patient = ledger.take("elastic, longer, seed 0", functools.partial(_elastic, bench, longer, path))
    untrained = ledger.take("untrained", lambda: bench.nats_by_budget(bench.decomposed()))
    dense = ledger.take("dense", lambda: bench.nats(bench.base))
    rows = [["DataSVD, untrained", *untrained]]
    rows += [[name, *map(spread, zip(*(one[name] for one in found), strict=True))] for name in found[0]]
    rows.insert(2, [f"elastic, {longer} steps, seed 0", *patient])
    title = f"Held-out nats per token by budget: {bench.config.name}, {steps} steps each (original {dense:.3f})"
    return {
        "settings": bench.facts() | {"seeds": seeds},
        "tables": [table(title, ["", *(f"{budget:g}" for budget in bench.budgets)], rows)],
        "claims": _claims(bench.budgets, found, patient),
        "data": {"budgets": bench.budgets, "found": found, "patient": patient, "steps": longer, "dense": dense},
    }


def _single(bench: LanguageBench, profile: RankProfile, steps: int, seed: int, checkpoint: Path) -> list[float]:
    """Nats per token at all budgets, of a model trained at one profile."""
    return bench.nats_by_budget(bench.trained([profile], steps=steps, seed=seed, checkpoint=checkpoint))


def _elastic(bench: LanguageBench, steps: int, checkpoint: Path) -> list[float]:
    return bench.nats_by_budget(bench.trained(bench.profiles[::-1], steps=steps, seed=0, checkpoint=checkpoint))


def _claims(
    budgets: Sequence[float], found: Sequence[Mapping[str, Sequence[float]]], patient: Sequence[float]
) -> list[dict[str, Any]]:
    excess, elsewhere = [], []
    for place, budget in enumerate(budgets):
        single = [[values[place] for name, values in one.items() if name != "elastic"] for one in found]
        excess.append([one["elastic"][place] / min(s) - 1 for one, s in zip(found, single, strict=True)])
        own = [one[f"trained at {budget:g} only"][place] for one in found]
        # the least that any model trained for another budget loses here, over the one trained for this
        elsewhere.append(
            [min(v for v in s if v != o) / o - 1 for s, o in zip(single, own, strict=True)]
            if len(budgets) > 1
            else [0.0]
        )
    within = all(max(values) <= 0.02 for values in excess)
    best = [
        min(values[place] for name, values in found[0].items() if name != "elastic") for place in range(len(budgets))
    ]
    left = ", ".join(f"{b:g} {own / least - 1:+.1%}" for b, own, least in zip(budgets, patient, best, strict=True))
    why = f"each of its sizes had a share of the steps: with {len(budgets)} times the steps it is {left} (seed 0)"
    return [
        claim("elastic within 2 % of the best single-budget model's loss at each budget, every seed",
              "matches at each budget", _by_budget(budgets, excess), within, "" if within else why),
        claim("a model trained for one budget is the best there by 2 % or more, every seed", "others degrade markedly",
              f"over it, the next best of the single models: {_by_budget(budgets, elsewhere)}",
              all(min(values) >= 0.02 for values in elsewhere)),
    ]  # fmt: skip


def _by_budget(budgets: Sequence[float], values: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{budget:g} {between(of, '+.1%')}" for budget, of in zip(budgets, values, strict=True))


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against budget: a line for each single model, the elastic one on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4), layout="constrained")
    axes = figure.subplots()
    budgets, found = data["budgets"], data["found"]
    colours = ["#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#009e73", "#999999"]
    single = [name for name in found[0] if name != "elastic"]
    for number, name in enumerate([*single, "elastic"]):
        is_elastic = name == "elastic"
        colour = OURS if is_elastic else colours[number % len(colours)]
        style: dict[str, Any] = {"linewidth": 2, "zorder": 3} if is_elastic else {"linestyle": "--", "marker": ""}
        means = draw_seeds(axes, budgets, [one[name] for one in found], colour, name, **style)
        if not is_elastic:
            axes.plot(budgets[number], means[number], "s", color=colour, markersize=6)
    told = f"elastic, {data['steps']} steps"
    draw_seeds(axes, budgets, [data["patient"]], OURS, told, linestyle=":", marker="", zorder=3)
    axes.axhline(data["dense"], color="#888888", linewidth=1, linestyle=":")
    place = (min(budgets), data["dense"])
    axes.annotate("original", place, (2, 3), textcoords="offset points", ha="left", color="#666666")
    highest = max(max(one["elastic"]) for one in found)
    axes.set(xlabel="budget", ylabel="held-out nats per token", ylim=(data["dense"] * 0.93, highest * 1.6))
    axes.legend(frameon=False, fontsize=8)
    return figure


STUDY = Study(
    name="joint-vs-single",
    title="One elastic model against models trained for one budget",
    shows="the loss of each single-budget model at all budgets, against the elastic model's, with equal steps each",
    paper="singles degrade away from their budget; the elastic model matches the best of them at each (Fig. 7)",
    minutes=14,
    full_minutes=150,
    run=run,
    draw=draw,
    takes_model=True,
    settings=lambda full: stories_settings(distillation={"steps": 3000 if full else 300}),
)
