"""K separate models, each with 1/K of the training, against one elastic model with all of it (FlexRank, Fig. 4)."""

from collections.abc import Mapping, Sequence
from typing import Any

from research.experiment import Experiment, Request
from research.figures import OTHER, OURS, draw_seeds
from research.result import Result, between, by_budget, claim, measured, spread, spreads, table
from research.studies.language import LanguageBench, nats_panel, stories_settings


def run(request: Request) -> Result:
    """Runs the study: the same DataSVD, profiles, loss and tokens in all on both sides."""
    bench = LanguageBench(request)
    part, untrained = bench.steps // len(bench.budgets), bench.untrained()
    elastic = bench.consolidated(request.seeds)
    separate = [[_single(bench, at, part, seed) for at in range(len(bench.budgets))] for seed in range(request.seeds)]
    gaps = [[e / s - 1 for e, s in zip(*pair, strict=True)] for pair in zip(elastic, separate, strict=True)]
    percent = [[100 * gap for gap in one] for one in gaps]
    named = {"separate models": separate, "one elastic model": elastic, "elastic over separate, %": percent}
    rows: list[list[Any]] = [["DataSVD, untrained", *untrained, sum(untrained) / len(untrained)]]
    rows += [[name, *spreads(runs), spread([sum(run) / len(run) for run in runs])] for name, runs in named.items()]
    title = (
        f"Held-out nats per token: {bench.config.name}, {bench.steps} steps in all, {part} for each of the "
        f"{len(bench.budgets)} separate models"
    )
    data = {"budgets": bench.budgets, "elastic": elastic, "separate": separate, "untrained": untrained}
    tables, claims = [table(title, ["", *bench.budgets, "mean"], rows)], [_claim(bench.budgets, gaps)]
    return measured(bench.facts(seeds=request.seeds, steps_each=part), tables, claims, data)


def _single(bench: LanguageBench, place: int, steps: int, seed: int) -> float:
    """Nats per token at the one budget that a model is trained for."""

    def compute() -> float:
        model = bench.trained([bench.profiles[place]], steps=steps, seed=seed, name=f"training-{place}-{seed}")
        return bench.nats_by_budget(model)[place]

    return bench.ledger.take(f"{bench.budgets[place]:g}, seed {seed}", compute)


def _claim(budgets: Sequence[float], gaps: Sequence[Sequence[float]]) -> dict[str, Any]:
    means = [sum(one) / len(one) for one in gaps]
    what = "the elastic model's loss, a mean over budgets, is at most that of separate models of the same total "
    here = f"{between(means, '+.1%')}; by budget {by_budget(budgets, zip(*gaps, strict=True), '+.1%')}"
    return claim(f"{what}training, every seed", "slightly better on average", here, max(means) <= 0, "not known")


def draw(data: Mapping[str, Any]) -> Any:
    """Nats per token against budget, both sides with the range over seeds."""
    figure, axes = nats_panel()
    draw_seeds(axes, data["budgets"], data["separate"], OTHER, "separate models, each 1/K of the training")
    draw_seeds(axes, data["budgets"], data["elastic"], OURS, "one elastic model")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    "equal-budget", "One elastic model against separate models of the same total training",
    "K separate models, each with 1/K of the training tokens, against one elastic model with all of them",
    minutes=6, full_minutes=60, run=run, draw=draw, seeds=(3, 3), settings=stories_settings,
    paper="the elastic model is slightly better on average (Fig. 4)",
)  # fmt: skip
