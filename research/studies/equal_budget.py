"""K separate models, each with 1/K of the training, against one elastic model with all of it (FlexRank, Fig. 4)."""

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from research.experiment import Experiment, Request
from research.figures import OTHER, OURS
from research.result import Result, between, by_budget, claim, measured, spread, spreads, table
from research.studies.language import LanguageBench, draw_by_budget, stories_settings


def run(request: Request) -> Result:
    """Runs the study, with the same decomposition, profiles, loss and total tokens on both sides."""
    bench = LanguageBench(request)
    part, elastic = bench.steps // len(bench.budgets), bench.consolidated(request.seeds)
    by_place = [
        bench.ledger.take_seeds(f"{budget:g}", request.seeds, _single, bench, place, part)
        for place, budget in enumerate(bench.budgets)
    ]
    separate = [list(losses) for losses in zip(*by_place, strict=True)]  # by seed, by budget
    runs = {"separate models": separate, "one elastic model": elastic}
    rows = [
        [name, *spreads(of), spread([statistics.fmean(one) for one in of])]
        for name, of in (bench.untrained() | runs).items()
    ]
    title = f"Held-out nats per token: {bench.config.name}, {bench.steps} steps in all, {part} for each separate model"
    tables = [table(title, ["", *bench.budgets, "mean"], rows)]
    data = {"budgets": bench.budgets, "runs": runs, "dense": bench.dense()}
    claims = [_claim(bench.budgets, separate, elastic)]
    return measured(bench.facts(seeds=request.seeds, steps_each=part), tables, claims, data)


def _single(bench: LanguageBench, place: int, steps: int, seed: int) -> float:
    """Returns nats per token at the one budget that a model is trained for."""
    profile = bench.profiles[place]
    return bench.nats(bench.trained([profile], steps=steps, seed=seed, name=f"training-{place}-{seed}"), profile)


def _claim(budgets: Sequence[float], separate: Any, elastic: Any) -> dict[str, Any]:
    gaps = [[e / s - 1 for e, s in zip(*pair, strict=True)] for pair in zip(elastic, separate, strict=True)]
    means = [statistics.fmean(one) for one in gaps]
    what = "the elastic model's loss over that of separate models, a mean over budgets, is at most 1 at the same total "
    here = f"{between(means, '+.1%')}; by budget {by_budget(budgets, zip(*gaps, strict=True), '+.1%')}"
    return claim(
        f"{what}training, every seed",
        "slightly better on average",
        here,
        max(means) <= 0,
        "a separate model has factors that no other size shares, and by the default method trains its norms too",
    )


EXPERIMENT = Experiment(
    "equal-budget", "One elastic model against separate models of the same total training",
    "K separate models, each with 1/K of the training tokens, against one elastic model with all of them",
    minutes=6, full_minutes=60, run=run, draw=functools.partial(draw_by_budget, colours=(OTHER, OURS)), seeds=(3, 3),
    settings=stories_settings, paper="the elastic model is slightly better on average (Fig. 4)",
)  # fmt: skip
