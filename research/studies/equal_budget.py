"""K separate models, each with 1/K of the training, against one elastic model with all of it (FlexRank, Fig. 4)."""

from collections.abc import Mapping, Sequence
from typing import Any

from research.experiment import Experiment, Request
from research.figures import OTHER, OURS, draw_seeds, panels
from research.result import Result, between, by_budget, claim, spread, spreads, table
from research.studies.language import LanguageBench, stories_settings


def run(request: Request) -> Result:
    """Runs the study: the same DataSVD, profiles, loss and tokens in all on both sides."""
    bench, seeds = LanguageBench(request), range(request.seeds)
    part, places = bench.steps // len(bench.budgets), range(len(bench.budgets))
    elastic = bench.consolidated(request.seeds)
    units = [[f"{budget:g}, seed {seed}" for budget in bench.budgets] for seed in seeds]
    separate = [[bench.ledger.take(units[s][at], _single, bench, at, part, s) for at in places] for s in seeds]
    gaps = [[e / s - 1 for e, s in zip(*pair, strict=True)] for pair in zip(elastic, separate, strict=True)]
    return {
        "settings": bench.facts(seeds=request.seeds, steps_each=part),
        "tables": [_table(bench, part, separate, elastic, gaps)],
        "claims": [_claim(bench.budgets, gaps)],
        "data": {"budgets": bench.budgets, "elastic": elastic, "separate": separate, "untrained": bench.untrained()},
    }


def _single(bench: LanguageBench, place: int, steps: int, seed: int) -> float:
    model = bench.trained([bench.profiles[place]], steps=steps, seed=seed, name=f"training-{place}-{seed}")
    return bench.nats_by_budget(model)[place]


def _table(bench: LanguageBench, part: int, separate: Any, elastic: Any, gaps: Any) -> dict[str, Any]:
    percent = [[100 * gap for gap in one] for one in gaps]
    named = {"separate models": separate, "one elastic model": elastic, "elastic over separate, %": percent}
    untrained = bench.untrained()
    rows: list[list[Any]] = [["DataSVD, untrained", *untrained, sum(untrained) / len(untrained)]]
    for name, runs in named.items():
        rows.append([name, *spreads(runs), spread([sum(run) / len(run) for run in runs])])
    title = (
        f"Held-out nats per token: {bench.config.name}, {bench.steps} steps in all, {part} for each of the "
        f"{len(bench.budgets)} separate models"
    )
    return table(title, ["", *bench.budgets, "mean"], rows)


def _claim(budgets: Sequence[float], gaps: Sequence[Sequence[float]]) -> dict[str, Any]:
    means = [sum(one) / len(one) for one in gaps]
    return claim(
        "the elastic model's loss, a mean over budgets, is at most that of separate models of the same total training, "
        "every seed",
        "slightly better on average",
        f"{between(means, '+.1%')}; by budget {by_budget(budgets, zip(*gaps, strict=True), '+.1%')}",
        max(means) <= 0,
        "not known",
    )


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against budget, both sides with the range over seeds."""
    figure, (axes,) = panels()
    draw_seeds(axes, data["budgets"], data["separate"], OTHER, "separate models, each 1/K of the training")
    draw_seeds(axes, data["budgets"], data["elastic"], OURS, "one elastic model")
    axes.set(xlabel="budget", ylabel="held-out nats per token")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="equal-budget",
    title="One elastic model against separate models of the same total training",
    shows="K separate models, each with 1/K of the training tokens, against one elastic model with all of them",
    paper="the elastic model is slightly better on average (Fig. 4)",
    minutes=6,
    full_minutes=60,
    seeds=(3, 3),
    run=run,
    draw=draw,
    settings=lambda full: stories_settings(distillation={"steps": 3000 if full else 300}),
)
