"""Submodels trained for one budget only, evaluated at all budgets, against the elastic model (FlexRank, Fig. 7)."""

import functools
from collections.abc import Sequence
from typing import Any

from research.experiment import Experiment, Request
from research.figures import GREEN, NEUTRAL, OTHER, OURS, PINK, SKY, YELLOW
from research.result import Result, by_budget, claim, measured, spreads
from research.studies.language import LanguageBench, draw_by_budget, stories_settings

#: In the figure: the elastic model, the one with more steps, and the single models.
COLOURS = (OURS, NEUTRAL, OTHER, YELLOW, PINK, SKY, GREEN)
Losses = Sequence[Sequence[float]]  #: by seed, by budget


def run(request: Request) -> Result:
    """Runs the study; each model, elastic or single, gets the configured steps."""
    bench = LanguageBench(request)
    elastic, singles = bench.consolidated(request.seeds), dict[str, Losses]()
    for budget, profile in zip(bench.budgets, bench.profiles, strict=True):
        name, training = f"trained at {budget:g} only", f"training-{budget:g}"
        singles[name] = bench.ledger.take_seeds(name, request.seeds, _trained, bench, [profile], bench.steps, training)
    # Whether the elastic model lacks steps or capacity: as many for each size as a single model has, for one seed.
    longer, profiles = bench.steps * len(bench.budgets), bench.profiles[::-1]
    patient = bench.ledger.take("elastic, longer, seed 0", _trained, bench, profiles, longer, "training-longer", 0)
    runs: dict[str, Losses] = {"elastic": elastic, f"elastic, {longer} steps, seed 0": [patient], **singles}
    rows = [[name, *spreads(of)] for name, of in {**bench.untrained(), **runs}.items()]
    claims = _claims(bench.budgets, elastic, list(singles.values()), patient)
    data = {"budgets": bench.budgets, "runs": runs, "dense": bench.dense()}
    return measured(bench.facts(seeds=request.seeds), [bench.table(rows)], claims, data)


def _trained(bench: LanguageBench, profiles: Sequence[Any], steps: int, name: str, seed: int) -> list[float]:
    """Returns nats per token at all budgets of a model trained at these profiles."""
    return bench.nats_by_budget(bench.trained(profiles, steps=steps, seed=seed, name=f"{name}-{seed}"))


def _claims(
    budgets: Sequence[float], elastic: Losses, singles: Sequence[Losses], patient: Sequence[float]
) -> list[dict[str, Any]]:
    """Returns the claims on the elastic models and on those trained for one budget each, in the budgets' order."""
    excess, elsewhere, left = [], [], []
    for place, budget in enumerate(budgets):
        single = [[losses[place] for losses in of_seed] for of_seed in zip(*singles, strict=True)]
        excess.append([one[place] / min(losses) - 1 for one, losses in zip(elastic, single, strict=True)])
        # The least loss here of a model trained for another budget, over that of the model trained for this one.
        others = [min([*one[:place], *one[place + 1 :]], default=one[place]) for one in single]
        elsewhere.append([other / one[place] - 1 for other, one in zip(others, single, strict=True)])
        left.append(f"{budget:g} {patient[place] / min(single[0]) - 1:+.1%}")
    why = f"each of its sizes had a share of the steps: with {len(budgets)} times the steps it is {', '.join(left)}"
    return [
        claim("elastic within 2 % of the best single-budget model's loss at each budget, every seed",
              "matches at each budget", by_budget(budgets, excess, "+.1%"),
              all(max(values) <= 0.02 for values in excess), f"{why} (seed 0)"),
        claim("a model trained for one budget is the best there by 2 % or more, every seed", "others degrade markedly",
              f"over it, the next best of the single models: {by_budget(budgets, elsewhere, '+.1%')}",
              all(min(values) >= 0.02 for values in elsewhere)),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "joint-vs-single", "One elastic model against models trained for one budget",
    "the loss of each single-budget model at all budgets, against the elastic model's, with equal steps each",
    minutes=14, full_minutes=150, run=run, draw=functools.partial(draw_by_budget, colours=COLOURS), seeds=(2, 3),
    settings=stories_settings,
    paper="singles degrade away from their budget; the elastic model matches the best of them at each (Fig. 7)",
)  # fmt: skip
