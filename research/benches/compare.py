"""Training-free rivals and flexrank's own decompositions: every method by every allocation, at every size.

Each method decomposes the same model from the same calibration; sizes are deployed parameters, gauge-aligned for all;
scores are of held-out samples that neither calibration nor probe has seen. What is finished is not done again. Beside
them, rivals that make a model of its own for each size, in one way alone.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from research import figures
from research.benches.contest import ALLOCATIONS, ALONE, METHODS, OURS, Contest, Contestant, contests, sized_alone
from research.benches.tasks import base_words, task_keys
from research.experiment import Experiment, Ledger, Request
from research.result import Result, behind, goal, measured, spread, spreads, table

#: By method and allocation, for each seed what `Contestant.sized` or `sized_alone` gives.
Sized = dict[str, dict[str, list[dict[str, Any]]]]
COLOURS = dict(zip(METHODS, (*figures.RIVALS, "#8c564b", figures.OURS, "#000000"), strict=True))
COLOURS |= dict(zip(ALONE, ("#7f3c8d", "#2f4f4f", "#b5a300"), strict=True))
#: Of `ALONE` in the figure, beside their dashes, so that lines differ by more than colour.
MARKERS = dict(zip(ALONE, ("s", "^", "D"), strict=True))
LINES = {"published": ":", "paper": "--", "joint": "-"}
#: Which of flexrank's own, with joint ranks, is to be behind no rival with which ranks; "fisher" is the default.
CLAIMED = (("datasvd", ("published",)), ("datasvd", ALLOCATIONS), ("fisher", ("published",)))


def run(request: Request) -> Result:
    """Runs every contest."""
    compared = [(contest, *_measure(contest, request)) for contest in contests(request)]
    tables, claims, data = [], [], {}
    for contest, dense, parameters, sized, seconds in compared:
        measures = {contest.measure: contest.digits} | dict.fromkeys(task_keys(dense), 3)
        tables += [_table(contest, one, dense, parameters, sized, seconds) for one in measures.items()]
        claims += [_claim(contest, sized, *one) for one in CLAIMED]
        measure = {"measure": contest.measure, "digits": contest.digits, "budgets": list(contest.budgets)}
        data[contest.name] = {**measure, "dense": dense, "parameters": parameters, "sized": sized, "seconds": seconds}
    settings = {contest.name: {**contest.facts, "levels": contest.levels} for contest, *_ in compared}
    return measured({**settings, "seeds": request.seeds}, tables, claims, data)


def _measure(contest: Contest, request: Request) -> tuple[dict[str, float], dict[str, int], Sized, dict[str, Any]]:
    """The base model's scores and parameters; what each method gives by allocation and seed; its effort by seed."""
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
        seconds[method].append({key: value for key, value in probed.items() if key != "table"})
        for allocation in ALLOCATIONS:
            one = ledger.take(f"{unit}, {allocation}", contestant.sized, allocation, probed["table"])
            sized[method][allocation].append(one)
    for seed, method in itertools.product(range(request.seeds), ALONE):
        if one := ledger.take(f"{method}, seed {seed}", sized_alone, contest, method, seed):
            sized.setdefault(method, {"published": []})["published"].append(one)
            own = {"decomposition_seconds": one["seconds"], "probe_seconds": 0.0, "peak_bytes": one["peak_bytes"]}
            seconds.setdefault(method, []).append(own)
    return dense, ledger.take("parameters", contest.parameters), sized, seconds


def _table(
    contest: Contest,
    shown: tuple[str, int],
    dense: Mapping[str, float],
    parameters: Mapping[str, int],
    sized: Sized,
    seconds: Mapping[str, Any],
) -> dict[str, Any]:
    """A row for each method and allocation: whether one artefact has all sizes, the scores `shown`, its effort."""
    measure, places = shown
    whole = [(parameters["others"] + budget * parameters["layers"]) / 1e6 for budget in contest.budgets]
    rows: list[list[Any]] = [["whole model at the budget, M parameters", None, *whole, None, None]]
    for method, allocation in (*itertools.product(METHODS, ALLOCATIONS), *((one, "published") for one in ALONE)):
        if method not in sized:
            rows.append([f"{method}, {allocation}", *[None] * (len(contest.budgets) + 3)])
            continue
        runs = sized[method][allocation]
        nested = "yes" if all(one["nested"] for one in runs) else "no"
        peak = max(one["peak_bytes"] for one in seconds[method]) / 1e6
        taken = [one["decomposition_seconds"] for one in seconds[method]]
        taken = [one + run.get("search_seconds", 0.0) for one, run in zip(taken, runs, strict=True)]
        if allocation != "published":
            taken = [a + one["probe_seconds"] for a, one in zip(taken, seconds[method], strict=True)]
        rows.append([f"{method}, {allocation}", nested, *_scores(measure, runs), spread(taken), peak])
    title = f"{contest.name}: {measure} by budget ({base_words(dense, measure, places)}); seconds "
    title += "are those of calibration, decomposition, search of ranks and, but for published ones, probe, or of all "
    title += "models together; memory is what making a model takes beside what was held before"
    digits = [0, *[places] * len(contest.budgets), 0, 0]
    return table(title, ["method, ranks", "nested", *contest.budgets, "seconds", "peak MB"], rows, digits)


def _scores(measure: str, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float] | None]:
    return spreads([row and row["scores"][measure] for row in one["rows"]] for one in runs)


def _claim(contest: Contest, sized: Sized, own: str, allocations: Sequence[str]) -> dict[str, Any]:
    """Whether one of ours with joint ranks is as good as each rival, to the digits shown and on average over seeds."""
    lost = []
    for place, budget in enumerate(contest.budgets):
        ours, best = _error(contest, sized[own]["joint"], place), math.inf
        for method, allocation in itertools.product((*METHODS, *ALONE), allocations):
            error = _error(contest, sized.get(method, {}).get(allocation, []), place)
            if method not in OURS and error < best:
                best, name = error, f"{method}, {allocation}"
        if ours > best + 0.5 * 10**-contest.digits:
            lost.append((budget, name, ours - best))
    rivals = "with their published ranks" if len(allocations) == 1 else "with flexrank's ranks too"
    what = f"{contest.name}: {own} with joint ranks is behind no rival {rivals}"
    return goal(what, "at no budget", behind(lost, contest.measure), not lost)


def _error(contest: Contest, runs: Sequence[Mapping[str, Any]], place: int) -> float:
    """The measure at a budget, over seeds, with the sign by which lower is better; infinite where no seed has any."""
    rows = [row for one in runs if (row := one["rows"][place])]
    if not rows:
        return math.inf
    mean = statistics.fmean(row["scores"][contest.measure] for row in rows)
    return mean if contest.measure.startswith("nats") else -mean


def draw(data: Mapping[str, Any]) -> Any:
    """Distance from the base model's quality over size: a panel for each model, a line for each method and ranks."""
    figure, all_axes = figures.panels(len(data), (1.6 + 4.6 * len(data), 4.6))
    for axes, (name, one) in zip(all_axes, data.items(), strict=True):
        base = one["dense"][one["measure"]]
        for method, allocation in itertools.product((*METHODS, *ALONE), ("published", "joint")):
            if runs := one["sized"].get(method, {}).get(allocation):
                _draw_line(
                    axes, method, allocation, [[row for row in r["rows"] if row] for r in runs], base, one["measure"]
                )
        axes.set(title=name, xlabel="deployed share of the layers' parameters")
        figures.name_distances(axes, one["measure"])
    shown = {
        label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    title = "dotted: published ranks\nsolid: joint\nmarked: a model each size"
    figure.legend(list(shown.values()), list(shown), loc="outside right upper", fontsize=8, title=title)
    return figure


def _draw_line(
    axes: Any, method: str, allocation: str, runs: Sequence[Sequence[Mapping[str, Any]]], base: float, measure: str
) -> None:
    """One method's distances over its shares, by seed; those that make models alone have thin dashes and a marker."""
    shares = [statistics.fmean(row["share"] for row in rows) for rows in zip(*runs, strict=True)]
    lines = [[figures.shown_distance(measure, row["scores"][measure], base) for row in rows] for rows in runs]
    style: dict[str, Any] = {"linestyle": LINES[allocation], "markersize": 2.5, "linewidth": 1.2}
    if method in ALONE:
        style = {"linestyle": (0, (6, 2)), "marker": MARKERS[method], "markersize": 4, "linewidth": 0.9}
    figures.draw_seeds(axes, shares, lines, COLOURS[method], method if allocation == "published" else "_", **style)


EXPERIMENT = Experiment(
    "compare", "Training-free rivals",
    "quality over size of plain SVD, FWSVD, ASVD, DRONE, SVD-LLM and its second version beside DataSVD and its Fisher "
    "form, each with its published ranks and with flexrank's, and of PIFA, SliceGPT and A3, untrained",
    minutes=60, full_minutes=600, has_halves=True, seeds=(1, 3), run=run, draw=draw, takes_config=True,
)  # fmt: skip
