"""K separate models, each with 1/K of the training, against one elastic model with all of it (FlexRank, Fig. 4)."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from research.findings import Result, between, claim, spread, table
from research.findings.figures import OTHER, OURS, draw_seeds
from research.studies.language import LanguageBench, stories_settings
from research.studies.study import Ledger, Request, Study, count_seeds


def run(request: Request) -> Result:
    """Runs the study: the same DataSVD, profiles, loss and tokens in all on both sides."""
    seeds, bench = count_seeds(request, 3, 3), LanguageBench(request)
    steps = bench.config.distillation.steps
    part = steps // len(bench.budgets)
    ledger = Ledger(request.work, bench.key())
    elastic = [bench.consolidated(seed, request.work.parent) for seed in range(seeds)]
    separate = [
        [
            ledger.take(f"{budget:g}, seed {seed}", functools.partial(_single, bench, ledger, place, part, seed))
            for place, budget in enumerate(bench.budgets)
        ]
        for seed in range(seeds)
    ]
    untrained = ledger.take("untrained", lambda: bench.nats_by_budget(bench.decomposed()))
    gaps = [[e / s - 1 for e, s in zip(*pair, strict=True)] for pair in zip(elastic, separate, strict=True)]
    title = (
        f"Held-out nats per token: {bench.config.name}, {steps} steps in all, {part} for each of the "
        f"{len(bench.budgets)} separate models"
    )
    rows: list[list[Any]] = [["DataSVD, untrained", *untrained, sum(untrained) / len(untrained)]]
    for name, runs in (("separate models", separate), ("one elastic model", elastic)):
        rows.append([name, *map(spread, zip(*runs, strict=True)), spread([sum(run) / len(run) for run in runs])])
    percent = [[100 * gap for gap in one] for one in gaps]
    means = spread([sum(gap) / len(gap) for gap in percent])
    rows.append(["elastic over separate, %", *map(spread, zip(*percent, strict=True)), means])
    return {
        "settings": bench.facts() | {"seeds": seeds, "steps_each": part},
        "tables": [table(title, ["", *(f"{budget:g}" for budget in bench.budgets), "mean"], rows)],
        "claims": _claims(bench.budgets, gaps),
        "data": {"budgets": bench.budgets, "elastic": elastic, "separate": separate, "untrained": untrained},
    }


def _single(bench: LanguageBench, ledger: Ledger, place: int, steps: int, seed: int) -> float:
    path = ledger.directory / f"training-{place}-{seed}"
    model = bench.trained([bench.profiles[place]], steps=steps, seed=seed, checkpoint=path)
    return bench.nats_by_budget(model)[place]


def _claims(budgets: Sequence[float], gaps: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    means = [sum(one) / len(one) for one in gaps]
    by_budget = [between(values, "+.1%") for values in zip(*gaps, strict=True)]
    told = ", ".join(f"{budget:g} {gap}" for budget, gap in zip(budgets, by_budget, strict=True))
    holds = max(means) <= 0
    return [
        claim(
            "the elastic model's loss, a mean over budgets, is at most that of separate models of the same total "
            "training, every seed",
            "slightly better on average",
            f"{between(means, '+.1%')}; by budget {told}",
            holds,
            "" if holds else "not found out",
        )
    ]


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against budget, both sides with the range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    draw_seeds(axes, data["budgets"], data["separate"], OTHER, "separate models, each 1/K of the training")
    draw_seeds(axes, data["budgets"], data["elastic"], OURS, "one elastic model")
    axes.set(xlabel="budget", ylabel="held-out nats per token")
    axes.legend(frameon=False)
    return figure


STUDY = Study(
    name="equal-budget",
    title="One elastic model against separate models of the same total training",
    shows="K separate models, each with 1/K of the training tokens, against one elastic model with all of them",
    paper="the elastic model is slightly better on average (Fig. 4)",
    minutes=6,
    full_minutes=60,
    run=run,
    draw=draw,
    takes_model=True,
    settings=lambda full: stories_settings(distillation={"steps": 3000 if full else 300}),
)
