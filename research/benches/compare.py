"""Training-free rivals and flexrank's own decompositions: every method by every allocation, at every size.

Each method decomposes the same model from the same calibration; sizes are deployed parameters, gauge-aligned for all;
scores are of held-out samples that neither calibration nor probe has seen. What is finished is not done again.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from research.benches.contest import ALLOCATIONS, METHODS, OURS, Contest, Contestant, contests
from research.experiment import Experiment, Ledger, Request
from research.figures import GREEN, NEUTRAL, OTHER, PINK, SKY, YELLOW, draw_seeds, panels
from research.figures import OURS as BLUE
from research.result import Result, goal, measured, spread, spreads, table

#: By method and allocation, for each seed what `Contestant.sized` gives.
Sized = dict[str, dict[str, list[dict[str, Any]]]]
COLOURS = dict(zip(METHODS, (NEUTRAL, YELLOW, PINK, SKY, GREEN, OTHER, "#8c564b", BLUE, "#000000"), strict=True))
LINES = {"published": ":", "paper": "--", "joint": "-"}
#: Distances from the base model below this are drawn at it.
LEAST = 1e-4


def run(request: Request) -> Result:
    """Runs every contest."""
    compared = [(contest, *_measure(contest, request)) for contest in contests(request)]
    tables, claims, data = [], [], {}
    for contest, dense, parameters, sized, seconds in compared:
        tables.append(_table(contest, dense, parameters, sized, seconds))
        claims += [_claim(contest, sized, allocations) for allocations in (("published",), ALLOCATIONS)]
        measure = {"measure": contest.measure, "digits": contest.digits, "budgets": list(contest.budgets)}
        data[contest.name] = {**measure, "dense": dense, "parameters": parameters, "sized": sized, "seconds": seconds}
    settings = {contest.name: {**contest.facts, "levels": contest.levels} for contest, *_ in compared}
    memory = "not measured: one process holds all methods, one after the other"
    return measured({**settings, "seeds": request.seeds, "memory": memory}, tables, claims, data)


def _measure(contest: Contest, request: Request) -> tuple[dict[str, float], dict[str, int], Sized, dict[str, Any]]:
    """The base model's scores and parameters; what each method gives by allocation and seed; its seconds by seed."""
    facts = {
        "ranks": "searched as published",
        "model": contest.name,
        "half": request.half,
        "levels": contest.levels,
        **contest.facts,
    }
    ledger = Ledger(request.work, facts | {"budgets": list(contest.budgets)})
    dense = ledger.take("dense", contest.scored)
    sized: Sized = {method: {allocation: [] for allocation in ALLOCATIONS} for method in METHODS}
    seconds: dict[str, Any] = {method: [] for method in METHODS}
    for seed, method in itertools.product(range(request.seeds), METHODS):
        contestant, unit = Contestant(contest, method, seed), f"{method}, seed {seed}"
        probed = ledger.take(f"{unit}, probe", contestant.probed)
        seconds[method].append({key: probed[key] for key in ("decomposition_seconds", "probe_seconds")})
        for allocation in ALLOCATIONS:
            one = ledger.take(f"{unit}, {allocation}", contestant.sized, allocation, probed["table"])
            sized[method][allocation].append(one)
    return dense, ledger.take("parameters", contest.parameters), sized, seconds


def _table(
    contest: Contest,
    dense: Mapping[str, float],
    parameters: Mapping[str, int],
    sized: Sized,
    seconds: Mapping[str, Any],
) -> dict[str, Any]:
    """A row for each method and allocation: whether one artefact has all sizes, the scores, the seconds."""
    whole = [(parameters["others"] + budget * parameters["layers"]) / 1e6 for budget in contest.budgets]
    rows: list[list[Any]] = [["whole model at the budget, M parameters", None, *whole, None]]
    for method, allocation in itertools.product(METHODS, ALLOCATIONS):
        runs = sized[method][allocation]
        nested = "yes" if all(one["nested"] for one in runs) else "no"
        taken = [one["decomposition_seconds"] for one in seconds[method]]
        taken = [one + run["search_seconds"] for one, run in zip(taken, runs, strict=True)]
        if allocation != "published":
            taken = [a + one["probe_seconds"] for a, one in zip(taken, seconds[method], strict=True)]
        rows.append([f"{method}, {allocation}", nested, *_scores(contest, runs), spread(taken)])
    title = f"{contest.name}: {contest.measure} by budget (base {dense[contest.measure]:.{contest.digits}f}); seconds "
    title += "are those of calibration, decomposition, search of ranks and, but for published ones, probe"
    digits = [0, *[contest.digits] * len(contest.budgets), 0]
    return table(title, ["method, ranks", "nested", *contest.budgets, "seconds"], rows, digits)


def _scores(contest: Contest, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float] | None]:
    return spreads([row["scores"][contest.measure] for row in one["rows"]] for one in runs)


def _claim(contest: Contest, sized: Sized, allocations: Sequence[str]) -> dict[str, Any]:
    """Whether DataSVD with joint ranks is as good as each rival, to the table's digits and on average over seeds."""
    lost = []
    for place, budget in enumerate(contest.budgets):
        ours, best = _error(contest, sized["datasvd"]["joint"], place), math.inf
        for method, allocation in itertools.product(METHODS, allocations):
            error = _error(contest, sized[method][allocation], place)
            if method not in OURS and error < best:
                best, name = error, f"{method}, {allocation}"
        if ours > best + 0.5 * 10**-contest.digits:
            lost.append(f"{budget:g} to {name} by {ours - best:.2g}")
    rivals = "with their published ranks" if len(allocations) == 1 else "with flexrank's ranks too"
    what = f"{contest.name}: datasvd with joint ranks is behind no rival {rivals}"
    return goal(what, "at no budget", f"behind at {', '.join(lost) or 'none'} ({contest.measure})", not lost)


def _error(contest: Contest, runs: Sequence[Mapping[str, Any]], place: int) -> float:
    """The measure at a budget, over seeds, with the sign by which lower is better."""
    mean = statistics.fmean(one["rows"][place]["scores"][contest.measure] for one in runs)
    return mean if contest.measure.startswith("nats") else -mean


def draw(data: Mapping[str, Any]) -> Any:
    """Distance from the base model's quality over size: a panel for each model, a line for each method and ranks."""
    figure, all_axes = panels(len(data), (1.6 + 4.6 * len(data), 4.6))
    for axes, (name, one) in zip(all_axes, data.items(), strict=True):
        base = one["dense"][one["measure"]]
        for method, allocation in itertools.product(METHODS, ("published", "joint")):
            runs = one["sized"][method][allocation]
            shares = [
                statistics.fmean(row["share"] for row in rows) for rows in zip(*(r["rows"] for r in runs), strict=True)
            ]
            lines = [[max(LEAST, abs(row["scores"][one["measure"]] - base)) for row in r["rows"]] for r in runs]
            label = method if allocation == "published" else None
            style = {"linestyle": LINES[allocation], "markersize": 2.5, "linewidth": 1.2}
            draw_seeds(axes, shares, lines, COLOURS[method], label or "_", **style)
        axes.set(title=name, xlabel="deployed share of the layers' parameters", yscale="log")
        axes.set_ylabel(f"{one['measure']}: distance from the base model")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, title="dotted: published ranks\nsolid: joint")
    return figure


EXPERIMENT = Experiment(
    "compare", "Training-free rivals",
    "quality over size of plain SVD, FWSVD, ASVD, DRONE, SVD-LLM and its second version beside DataSVD and its Fisher "
    "form, each with its published ranks and with flexrank's, untrained", minutes=60, full_minutes=600,
    has_halves=True, seeds=(1, 3), run=run, draw=draw, takes_config=True,
)  # fmt: skip
