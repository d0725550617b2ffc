"""Training-free rivals and flexrank's own decompositions: every method with every allocation, at every size.

Each method decomposes the same model from the same calibration. Sizes are deployed parameters, gauge-aligned for all;
scores are on held-out samples that neither calibration nor probe has seen. Finished parts are not repeated. Rivals that
make a separate model for each size are compared too, those whose sizes are not ranks only as published. For a rival's
free constant, the setting that is best on the tuning half is compared (`tuning`).
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from research import figures
from research.baselines.method import Settings
from research.benches.tasks import format_base_score, shown_measures
from research.benches.training_free import (
    ALLOCATIONS,
    METHODS,
    OURS,
    SIZE_METHOD_NAMES,
    WHOLE,
    Benchmark,
    DecomposedModel,
    allocations_of,
    benchmarks,
    find_benchmark,
    measure_size_method,
    millions_at,
    obstacle,
    start_of,
)  # fmt: skip
from research.benches.tuning import as_error, best_settings, format_settings, run_trials
from research.experiment import Experiment, Ledger, Request
from research.result import Result, behind, goal, measured, spread, spreads, table

#: By method and allocation, the results of `DecomposedModel.measure_sizes` or `measure_size_method` for each seed.
ResultsByMethod = dict[str, dict[str, list[dict[str, Any]]]]
COLOURS = dict(zip(METHODS, (*figures.RIVALS, "#8c564b", figures.OURS, "#000000"), strict=True))
COLOURS |= dict(zip(SIZE_METHOD_NAMES, ("#7f3c8d", "#2f4f4f", "#b5a300", "#ff00a0"), strict=True))
#: Markers of size methods in the figure; with the dashes they distinguish lines by more than colour.
MARKERS = dict(zip(SIZE_METHOD_NAMES, ("s", "^", "D", "o"), strict=True))
LINE_STYLES = {"published": ":", "paper": "--", "joint": "-"}
#: Which of flexrank's own, with joint ranks, should be behind no rival with which ranks; "fisher" is the default, and
#: "refit" makes a model for each size.
CLAIMED = tuple(itertools.product(OURS, (ALLOCATIONS[:1], ALLOCATIONS)))


def run(request: Request) -> Result:
    """Runs every benchmark."""
    compared = benchmarks(request)
    data = {benchmark.name: _measure(benchmark, request) for benchmark in compared}
    tables = [
        _table(name, one, *shown)
        for name, one in data.items()
        for shown in shown_measures(one["dense"], one["measure"], one["digits"]).items()
    ]
    claims = [_claim(name, one, *claimed) for name, one in data.items() for claimed in CLAIMED]
    settings = {benchmark.name: {**benchmark.facts, "levels": benchmark.levels} for benchmark in compared}
    return measured({**settings, "seeds": request.seeds, "jobs": request.jobs}, tables, claims, data)


def _measure(benchmark: Benchmark, request: Request) -> dict[str, Any]:
    """Measures one model, and returns what is saved of it."""
    facts = {"model": benchmark.name, "half": request.half, "levels": benchmark.levels, **benchmark.facts}
    ledger = Ledger(request.work, facts | {"budgets": list(benchmark.budgets)})
    # First, in this process, so a base model that is yet to be trained is trained only once.
    dense, parameters = ledger.take("dense", benchmark.base_scores), ledger.take("parameters", benchmark.parameters)
    trials = run_trials(request, benchmark.name, ledger, (*METHODS, *SIZE_METHOD_NAMES))
    chosen = {method: best_settings(some) for method, some in trials.items()}
    elastic, separate = _measure_methods(request, benchmark.name, ledger, chosen)
    sized = {
        method: {allocation: [unit["sized"][allocation] for unit in units] for allocation in ALLOCATIONS}
        for method, units in elastic.items()
    }
    first = {method: units[allocations_of(method)[0]][0] for method, units in separate.items()}
    applicable = {method: units for method, units in separate.items() if "obstacle" not in first[method]}
    costs = ("decomposition_seconds", "probe_seconds", "peak_bytes")
    return {
        "measure": benchmark.measure, "digits": benchmark.digits, "budgets": list(benchmark.budgets),
        "dense": dense, "parameters": parameters, "sized": {**sized, **applicable}, "trials": trials,
        "seconds": {method: [{key: one[key] for key in costs} for one in units] for method, units in elastic.items()},
        "obstacles": {method: first[method]["obstacle"] for method in separate if method not in applicable},
    }  # fmt: skip


def _measure_methods(
    request: Request, name: str, ledger: Ledger, chosen: Mapping[str, Settings]
) -> tuple[dict[str, list[dict[str, Any]]], ResultsByMethod]:
    """Returns the results of `elastic_unit` by method and seed, and those of `size_method_unit` by allocation too.

    First the methods from whose factors others start, which need their tables; then all others at once.
    """
    seeds = range(request.seeds)

    def unit(method: str, seed: int, allocation: str = "") -> str:
        return _unit_name(method, chosen, seed, allocation)

    def table(method: str, seed: int) -> Any:
        return begun[unit(start_of(method), seed)]["table"] if start_of(method) else None

    elastic = {
        unit(method, seed): (elastic_unit, request, name, method, chosen.get(method, {}), seed)
        for seed, method in itertools.product(seeds, METHODS)
    }
    starts = {unit(start_of(method), seed) for seed, method in itertools.product(seeds, SIZE_METHOD_NAMES)}
    begun = ledger.take_all({one: elastic[one] for one in elastic if one in starts}, _call, request.jobs)
    separate = {
        unit(method, seed, one): (
            size_method_unit, request, name, method, chosen.get(method, {}), seed, one, table(method, seed),
        )
        for seed, method in itertools.product(seeds, SIZE_METHOD_NAMES)
        for one in allocations_of(method)
    }  # fmt: skip
    done = ledger.take_all(elastic | separate, _call, request.jobs)
    return {method: [done[unit(method, seed)] for seed in seeds] for method in METHODS}, {
        method: {one: [done[unit(method, seed, one)] for seed in seeds] for one in allocations_of(method)}
        for method in SIZE_METHOD_NAMES
    }


def _call(compute: Callable[..., Any], *arguments: Any) -> Any:
    return compute(*arguments)


def elastic_unit(request: Request, name: str, method: str, settings: Settings, seed: int) -> dict[str, Any]:
    """Returns a method's sensitivity table, its costs, and the sizes of each allocation."""
    model = DecomposedModel(find_benchmark(request, name), method, seed, settings)
    probed = model.probe()
    return {**probed, "sized": {one: model.measure_sizes(one, probed["table"]) for one in ALLOCATIONS}}


def size_method_unit(
    request: Request,
    name: str,
    method: str,
    settings: Settings,
    seed: int,
    allocation: str,
    table: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the result of `measure_size_method`, or why the method does not apply."""
    benchmark = find_benchmark(request, name)
    if reason := obstacle(benchmark, method):
        return {"obstacle": reason}
    return measure_size_method(benchmark, method, seed, settings, allocation, table)


def _unit_name(method: str, chosen: Mapping[str, Settings], seed: int, allocation: str = "") -> str:
    parts = (method, format_settings(chosen.get(method, {})), f"seed {seed}", allocation)
    return ", ".join(part for part in parts if part)


def _table(name: str, data: Mapping[str, Any], measure: str, places: int) -> dict[str, Any]:
    """Returns a row for each method and allocation: whether sizes are nested, the scores in `measure`, and the cost."""
    budgets = data["budgets"]
    rows: list[list[Any]] = [[WHOLE, None, *millions_at(budgets, data["parameters"]), None, None]]
    for method, allocation in _methods_and_allocations():
        runs = data["sized"].get(method, {}).get(allocation)
        label = f"{method}, {allocation}"
        rows.append([label, *(_cells(data, method, allocation, measure) if runs else [None] * (len(budgets) + 3))])
    title = f"{name}: {measure} by budget ({format_base_score(data['dense'], measure, places)}); seconds are those of "
    title += "calibration and decomposition, or of all models together, of the search of ranks and, but for published "
    title += "ones, of the probe; memory is what making a model takes beside what was held before"
    digits = [0, *[places] * len(budgets), 0, 0]
    return table(title + _notes(data), ["method, ranks", "nested", *budgets, "seconds", "added MB"], rows, digits)


def _methods_and_allocations() -> list[tuple[str, str]]:
    """Returns every method with each of its allocations."""
    return [(method, allocation) for method in (*METHODS, *SIZE_METHOD_NAMES) for allocation in allocations_of(method)]


def _cells(data: Mapping[str, Any], method: str, allocation: str, measure: str) -> list[Any]:
    """Returns, over all seeds, whether sizes are nested, the scores by budget, seconds and megabytes."""
    runs = data["sized"][method][allocation]
    nested = "yes" if all(run["nested"] for run in runs) else "no"
    peak = max(cost["peak_bytes"] for cost in data["seconds"].get(method, runs)) / 1e6
    return [nested, *_scores(measure, runs), spread(_seconds(data, method, allocation)), peak]


def _seconds(data: Mapping[str, Any], method: str, allocation: str) -> list[float]:
    """Returns the seconds of each seed.

    flexrank's ranks include the probe of the method's own factors, or of those that it starts from.
    """
    runs, costs = data["sized"][method][allocation], data["seconds"].get(method)
    seconds = [run.get("seconds", 0.0) + run.get("search_seconds", 0.0) for run in runs]
    if costs:
        seconds = [a + b["decomposition_seconds"] for a, b in zip(seconds, costs, strict=True)]
    if allocation == "published":
        return seconds
    probed = costs or data["seconds"][start_of(method)]
    return [a + b["probe_seconds"] for a, b in zip(seconds, probed, strict=True)]


def _notes(data: Mapping[str, Any]) -> str:
    """Says which methods use another setting than the first of their trials, and which do not apply and why."""
    tuned = {method: (trials[0]["settings"], best_settings(trials)) for method, trials in data["trials"].items()}
    notes = [
        f"{name} has {format_settings(new)}, the best of its trials" for name, (old, new) in tuned.items() if old != new
    ]
    notes += [f"{method} does not apply ({reason})" for method, reason in data["obstacles"].items()]
    return "".join(f"; {note}" for note in notes)


def _scores(measure: str, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float] | None]:
    return spreads([row and row["scores"][measure] for row in one["rows"]] for one in runs)


def _claim(name: str, data: Mapping[str, Any], our_method: str, allocations: Sequence[str]) -> dict[str, Any]:
    """Claims that ours with joint ranks is as good as each rival, to the digits shown and on average over seeds."""
    lost, sized = [], data["sized"]
    rivals = [method for method in (*METHODS, *SIZE_METHOD_NAMES) if method not in OURS and method in sized]
    for index, budget in enumerate(data["budgets"]):
        ours, best_error = _error(data, sized[our_method]["joint"], index), math.inf
        for method, allocation in itertools.product(rivals, allocations):
            error = _error(data, sized[method].get(allocation, []), index)
            if error < best_error:
                best_error, rival = error, f"{method}, {allocation}"
        if ours > best_error + 0.5 * 10 ** -data["digits"]:
            lost.append((budget, rival, ours - best_error))
    ranks = " with its own ranks" if len(allocations) == 1 else ", be its ranks its own or flexrank's"
    what = f"{name}: {our_method} with joint ranks is behind no rival{ranks}, of {len(rivals)} that apply"
    return goal(what, "at no budget", behind(lost, data["measure"]), not lost)


def _error(data: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], index: int) -> float:
    """Returns the measure at a budget, over seeds, signed so lower is better; infinite if no seed has it."""
    rows = [row for run in runs if (row := run["rows"][index])]
    if not rows:
        return math.inf
    mean = statistics.fmean(row["scores"][data["measure"]] for row in rows)
    return as_error(data["measure"], mean)


def draw(data: Mapping[str, Any]) -> Any:
    """Draws the distance from the base model's quality over size: a panel per model, a line per method and ranks."""
    figure, all_axes = figures.panels(len(data), (1.6 + 4.6 * len(data), 4.6))
    for axes, (name, one) in zip(all_axes, data.items(), strict=True):
        base = one["dense"][one["measure"]]
        for method, allocation in itertools.product((*METHODS, *SIZE_METHOD_NAMES), ("published", "joint")):
            if runs := one["sized"].get(method, {}).get(allocation):
                sizes = [rows for rows in zip(*(r["rows"] for r in runs), strict=True) if all(rows)]  # of every seed
                _draw_line(axes, method, allocation, list(zip(*sizes, strict=True)), base, one["measure"])
        axes.set(title=name, xlabel="deployed share of the layers' parameters")
        figures.name_distances(axes, one["measure"])
    shown = {
        label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    title = "dotted, dashed:\npublished ranks\nsolid: joint\nmarked: a model each size"
    figure.legend(list(shown.values()), list(shown), loc="outside right upper", fontsize=8, title=title)
    return figure


def _draw_line(
    axes: Any, method: str, allocation: str, runs: Sequence[Sequence[Mapping[str, Any]]], base: float, measure: str
) -> None:
    """Draws one method's distances over its shares, by seed; methods that make models alone have thin, marked lines."""
    shares = [statistics.fmean(row["share"] for row in rows) for rows in zip(*runs, strict=True)]
    lines = [[figures.shown_distance(measure, row["scores"][measure], base) for row in rows] for rows in runs]
    style: dict[str, Any] = {"linestyle": LINE_STYLES[allocation], "markersize": 2.5, "linewidth": 1.2}
    if method in SIZE_METHOD_NAMES:
        dash = (0, (6, 2)) if allocation == "published" else LINE_STYLES[allocation]
        style = {"linestyle": dash, "marker": MARKERS[method], "markersize": 4, "linewidth": 0.9}
    label = method if allocation == allocations_of(method)[-1] else "_"
    figures.draw_seeds(axes, shares, lines, COLOURS[method], label, **style)


EXPERIMENT = Experiment(
    "compare", "Training-free rivals",
    "quality over size of plain SVD, FWSVD, ASVD, DRONE, SVD-LLM, SVD-LLM V2, LEMS, PIFA, DataSVD and its Fisher form, "
    "each with its published ranks and with flexrank's, of SliceGPT and A3, and of ours fitted for each size alone "
    "(`refit`), untrained",
    minutes=90, full_minutes=900, has_halves=True, seeds=(1, 3), run=run, draw=draw, takes_config=True,
)  # fmt: skip
