"""Trained rivals beside flexrank: every method learns from the same texts, as many of them, and is scored alike.

Each part, a method with its rate and a seed, runs in its own process, whose seconds and peak memory are shown with its
quality. Seconds are CPU time of the process, which other work on the machine hardly changes. Rates are tried on the
tuning half, four for each method, and more while a best one is the smallest or the largest. The reporting half is
scored with the rate whose distance from the base model is least, as a geometric mean over budgets; a size that is
trained by itself has the rate that is best for it. Where such a size has all steps, these rates, their halves and their
doubles are tried at two budgets. Finished parts are not repeated. A method that does not know the model's architecture
has no row of numbers, and the table says why.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexrank.data.halves import Half
from flexrank.decompose import Method
from flexrank.deployment.machine import resident_peak
from flexrank.profiles.costs import total_dense
from research import figures
from research.baselines.method import NotApplicable
from research.baselines.trained import TRAINED_METHODS
from research.benches.rates import (
    Rates,
    best_rates,
    first_rates,
    format_rates,
    next_rates,
    rates_alone,
    trials_of,
)
from research.benches.tasks import format_base_score, shown_measures
from research.benches.training_benchmarks import (
    LEAST_STEPS,
    TrainingBenchmark,
    find_training_benchmark,
    training_benchmarks,
)
from research.benches.training_free import WHOLE, base_parameters, millions_at
from research.benches.tuning import as_error, trial_budgets
from research.experiment import Experiment, Ledger, Request
from research.result import Result, behind, goal, measured, spread, spreads, table

COLOURS = dict(zip(TRAINED_METHODS, (figures.OURS, *figures.RIVALS, "#000000", "#888888"), strict=True))
#: Ours, and the paper's.
DECOMPOSITIONS: tuple[Method, ...] = ("fisher", "datasvd")
#: A trial's steps over those of the comparison; how often a best rate at an edge of those tried asks for another.
TRIAL_SHARE, WIDENINGS = 0.5, 6
TOKENS, TIME, BEST = "equal tokens", "equal training time", "at its best"
#: What each size is trained with.
PANELS = {
    TOKENS: "as many training tokens for all sizes together",
    TIME: "steps for about the seconds that flexrank trains at equal tokens",
    BEST: "all steps for each size",
}
Unit = dict[str, Any]


def run(request: Request) -> Result:
    """Runs the comparison on every model."""
    data = {benchmark.name: _measure(benchmark, request) for benchmark in training_benchmarks(request)}
    tables = [
        _table(name, one, panel, measure, digits)
        for name, one in data.items()
        for panel in one["panels"]
        for measure, digits in shown_measures(one["base"], one["measure"], one["digits"]).items()
    ]
    claims = [claim for name, one in data.items() for claim in _claims(name, one)]
    settings = {name: {**one["facts"], "steps": one["steps"]} for name, one in data.items()}
    return measured({**settings, "seeds": request.seeds, "jobs": request.jobs}, tables, claims, data)


def _measure(benchmark: TrainingBenchmark, request: Request) -> dict[str, Any]:
    """Returns the base model's score and parameters, the trials with their errors, and each seed's results.

    The results are by panel and method.
    """
    facts = {"model": benchmark.name, "budgets": list(benchmark.budgets), "steps": benchmark.steps}
    facts |= {"levels": benchmark.levels, "usual_rate": benchmark.default_rate, "decompositions": list(DECOMPOSITIONS)}
    ledger, arguments = Ledger(request.work, {**facts, **benchmark.facts}), (request, benchmark.name)
    base = ledger.take("base", _base_scores, benchmark, "reporting")
    parameters = ledger.take("parameters", lambda: base_parameters(benchmark.subject_and_batches(0, "reporting")[0]))
    units = {f"tables, seed {seed}": (*arguments, seed) for seed in range(request.seeds)}
    sensitivities = list(ledger.take_all(units, sensitivity_unit, request.jobs).values())
    first = {name: first_rates(method, len(benchmark.budgets)) for name, method in TRAINED_METHODS.items()}
    trials = _tune(benchmark, ledger, request, sensitivities[0], first)
    best = {name: best_rates(some, not TRAINED_METHODS[name].is_one_artefact) for name, some in trials.items()}
    results: dict[str, dict[str, list[Unit]]] = {}
    for panel in PANELS:
        if panel == BEST:
            alone = _tune(benchmark, ledger, request, sensitivities[0], rates_alone(best), is_alone=True)
            trials |= {f"{name}, {BEST}": some for name, some in alone.items()}
            best |= {name: best_rates(some, by_size=False) for name, some in alone.items()}
        shares = _step_shares(results[TOKENS]) if panel == TIME else dict.fromkeys(best, 1.0)
        results[panel] = _measure_methods(ledger, request, benchmark.name, best, sensitivities, panel, shares)
    return {
        "measure": benchmark.measure, "digits": benchmark.digits, "budgets": list(benchmark.budgets), "base": base,
        "parameters": parameters,
        "steps": benchmark.steps, "facts": dict(benchmark.facts), "trials": trials, "panels": results,
        "probe_seconds": [one["seconds"] for one in sensitivities],
    }  # fmt: skip


def _step_shares(results: Mapping[str, Sequence[Unit]]) -> dict[str, float]:
    """Returns, by method, flexrank's seconds over its own.

    This is the share of the steps that takes as long as flexrank, if all steps take the same time.
    """
    known = {name: units for name, units in results.items() if "seconds" in units[0]}
    seconds = {name: statistics.fmean(unit["seconds"] for unit in units) for name, units in known.items()}
    return {name: round(seconds["flexrank"] / seconds.get(name, seconds["flexrank"]), 2) for name in results}


def _tune(
    benchmark: TrainingBenchmark,
    ledger: Ledger,
    request: Request,
    sensitivity: Unit,
    wanted: Mapping[str, Sequence[Rates]],
    is_alone: bool = False,
) -> dict[str, list[Any]]:
    """Returns the rates tried of each method, with its errors on the tuning half."""
    base = ledger.take("base, tuning half", _base_scores, benchmark, "tuning")[benchmark.measure]
    tried: dict[str, dict[Rates, Any]] = {name: {} for name in wanted}

    def unit(name: str, rates: Rates) -> str:
        return f"{name}, trial of {format_rates(rates)}" + f", {BEST}" * is_alone

    for _ in range(1 + WIDENINGS):
        units = {
            unit(name, rates): (
                request, benchmark.name, name, rates, 0, "tuning", TRIAL_SHARE, is_alone, sensitivity,
            )
            for name, some in wanted.items()
            for rates in some
        }  # fmt: skip
        done = ledger.take_all(units, method_unit, request.jobs)
        for name, some in wanted.items():
            tried[name] |= {rates: done[unit(name, rates)]["rows"] for rates in some}
        trials = {name: trials_of(some, base, benchmark.measure) for name, some in tried.items()}
        wanted = {
            name: next_rates(some, by_size=not (is_alone or TRAINED_METHODS[name].is_one_artefact))
            for name, some in trials.items()
        }
    return trials


def _measure_methods(
    ledger: Ledger,
    request: Request,
    model: str,
    best: Mapping[str, Rates],
    sensitivities: Sequence[Any],
    panel: str,
    shares: Mapping[str, float],
) -> dict[str, list[Unit]]:
    """Returns each seed's results by method, at its share of the steps; what equals equal tokens is not repeated."""

    def unit(name: str, seed: int) -> str:
        at = f"at {format_rates(best[name])}, seed {seed}"
        if panel == TIME and shares[name] != 1.0:  # the share may change with other seeds' seconds
            return f"{name}, {panel}, {shares[name]:g} of the steps, {at}"
        return f"{name}, {BEST if panel == BEST and not TRAINED_METHODS[name].is_one_artefact else TOKENS}, {at}"

    units = {
        unit(name, seed): (
            request, model, name, rates, seed, "reporting", shares[name], panel == BEST, sensitivities[seed],
        )
        for (name, rates), seed in itertools.product(best.items(), range(request.seeds))
    }  # fmt: skip
    done = ledger.take_all(units, method_unit, request.jobs)
    return {name: [done[unit(name, seed)] for seed in range(request.seeds)] for name in best}


def _base_scores(benchmark: TrainingBenchmark, half: Half) -> dict[str, float]:
    subject, _ = benchmark.subject_and_batches(0, half)
    return subject.score(subject.teacher)


def sensitivity_unit(request: Request, name: str, seed: int) -> dict[str, Any]:
    """Returns the sensitivity tables that ranks are chosen from, and their seconds, by decomposition."""
    benchmark, tables, seconds = find_training_benchmark(request, name), {}, {}
    for method in DECOMPOSITIONS:
        start = time.process_time()
        tables[method] = benchmark.table(seed, method)
        seconds[method] = time.process_time() - start
    return {"tables": tables, "seconds": seconds}


def method_unit(
    request: Request,
    name: str,
    method: str,
    rates: Rates,
    seed: int,
    half: Half,
    step_share: float,
    full_steps: bool,
    sensitivity: Unit,
) -> Unit:
    """Returns a method's rows by budget, its seconds without the probe's, and the peak memory of its process.

    If it does not apply to the model, the rows are None, and the result says why.
    """
    benchmark = find_training_benchmark(request, name)
    rate_of = dict(zip(benchmark.budgets, rates, strict=True))
    if full_steps and half == "tuning":
        benchmark = dataclasses.replace(benchmark, budgets=trial_budgets(benchmark.budgets))
    subject, batches = benchmark.subject_and_batches(seed, half)
    steps = max(LEAST_STEPS, round(step_share * benchmark.steps))
    steps_per_size = steps if full_steps else max(LEAST_STEPS, steps // len(benchmark.budgets))
    task = benchmark.training_task(subject, batches, sensitivity["tables"], seed, steps, steps_per_size)
    dense, others = total_dense(task.layers), task.parameter_limit(0)
    rows, seconds, start = [], 0.0, time.process_time()
    try:
        for size in TRAINED_METHODS[method].sizes_at(task, rate_of):
            seconds += time.process_time() - start
            share = size and (size[1] - others) / dense
            rows.append(size and {"parameters": size[1], "share": share, "scores": subject.score(size[0])})
            start = time.process_time()
    except NotApplicable as reason:
        return {"rows": [None] * len(benchmark.budgets), "obstacle": str(reason)}
    return {"rows": rows, "seconds": seconds + time.process_time() - start, "peak_bytes": resident_peak()}


def _table(name: str, data: Mapping[str, Any], panel: str, measure: str, places: int) -> dict[str, Any]:
    rows: list[list[Any]] = [[WHOLE, None, *millions_at(data["budgets"], data["parameters"]), None, None, None]]
    for method, runs in data["panels"][panel].items():
        one_artefact = "yes" if TRAINED_METHODS[method].is_one_artefact else "no"
        probes = [seconds.get(TRAINED_METHODS[method].table) for seconds in data["probe_seconds"]]
        rows.append([method, one_artefact, *_cells(measure, runs), None if None in probes else spread(probes)])
    base = format_base_score(data["base"], measure, places)
    title = f"{name}, {panel} ({PANELS[panel]}): {measure} by budget ({base})"
    title += _obstacles(data, panel)
    digits = [0, *[places] * len(data["budgets"]), 0, 0, 0]
    columns = ["method", "one artefact", *data["budgets"], "training s", "peak MB", "probe s"]
    return table(title, columns, rows, digits)


def _cells(measure: str, runs: Sequence[Unit]) -> list[Any]:
    """Returns the scores by budget, seconds and megabytes; None if the method does not apply."""
    scores = spreads([row and row["scores"][measure] for row in unit["rows"]] for unit in runs)
    if "obstacle" in runs[0]:
        return [*scores, None, None]
    return [*scores, spread([unit["seconds"] for unit in runs]), max(unit["peak_bytes"] for unit in runs) / 1e6]


def _obstacles(data: Mapping[str, Any], panel: str) -> str:
    """Says which methods do not apply, and why, for the table's title."""
    reasons = {name: runs[0]["obstacle"] for name, runs in data["panels"][panel].items() if "obstacle" in runs[0]}
    return "".join(f"; {name} does not apply ({reason})" for name, reason in reasons.items())


def _claims(name: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Claims that flexrank is first among one-artefact methods from .8 down, and behind none training sizes alone."""
    wanted = {
        "behind no other method of one artefact, from .8 down": (True, 0.8),
        "behind no method that trains each size by itself": (False, 1.0),
    }
    claims = []
    for what, (is_one, largest) in wanted.items():
        rivals = _rivals(data, is_one)
        lost = list(_lost_budgets(data, rivals, largest)) if rivals else []
        here = f"{behind(lost, data['measure'])}, of {len(rivals)} that apply"
        what = f"{name}, equal tokens: flexrank is {what}"
        claims.append(goal(what, "at no budget", here, bool(rivals) and not lost))
    return claims


def _rivals(data: Mapping[str, Any], is_one: bool) -> list[str]:
    """Returns the methods of this kind that apply to the model, except flexrank."""
    results = data["panels"][TOKENS]
    own = [name for name, method in TRAINED_METHODS.items() if method.is_one_artefact == is_one and name != "flexrank"]
    return [name for name in own if "obstacle" not in results[name][0]]


def _lost_budgets(data: Mapping[str, Any], rivals: Sequence[str], largest: float) -> Iterator[tuple[float, str, float]]:
    """Yields the budgets at which a method beats flexrank by more than half of the last digit shown: by how much."""
    results = data["panels"][TOKENS]
    for index, budget in enumerate(data["budgets"]):
        errors = {name: _error(data, results[name], index) for name in rivals}
        best = min(errors, key=lambda name: errors[name])
        distance = _error(data, results["flexrank"], index) - errors[best]
        if budget <= largest and distance > 0.5 * 10 ** -data["digits"]:
            yield budget, best, distance


def _error(data: Mapping[str, Any], runs: Sequence[Unit], index: int) -> float:
    """Returns the measure at a budget over seeds, where lower is better; infinite if the method has no such size."""
    rows = [unit["rows"][index] for unit in runs]
    return statistics.fmean(
        as_error(data["measure"], row["scores"][data["measure"]]) if row else math.inf for row in rows
    )


def draw(data: Mapping[str, Any]) -> Any:
    """Draws the distance from the base model's quality over size: a panel for each model, a line for each method."""
    figure, all_axes = figures.panels(len(data), (1.6 + 4.6 * len(data), 4.6))
    for axes, (name, one) in zip(all_axes, data.items(), strict=True):
        base = one["base"][one["measure"]]
        for method, runs in one["panels"][TOKENS].items():
            indices = [index for index in range(len(one["budgets"])) if all(unit["rows"][index] for unit in runs)]
            if not indices:
                continue
            shares = [statistics.fmean(unit["rows"][index]["share"] for unit in runs) for index in indices]
            lines = [
                [
                    figures.shown_distance(one["measure"], unit["rows"][index]["scores"][one["measure"]], base)
                    for index in indices
                ]
                for unit in runs
            ]
            dash = "-" if TRAINED_METHODS[method].is_one_artefact else ":"
            style = {"linestyle": dash, "markersize": 3, "linewidth": 1.4}
            figures.draw_seeds(axes, shares, lines, COLOURS[method], method, **style)
        axes.set(title=name, xlabel="deployed share of the layers' parameters")
        figures.name_distances(axes, one["measure"])
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside right upper", fontsize=8, title="solid: one artefact\ndotted: one for each size"
    )
    return figure


EXPERIMENT = Experiment(
    "compare-trained", "Trained rivals",
    "quality over size of flexrank beside its printed form, independent training, SVD-LLM with LoRA, ACIP, LLM-Pruner, "
    "nested widths and LayerSkip, at equal training tokens, at equal training time and, in some, each at its best",
    minutes=400, full_minutes=3000, has_halves=False, seeds=(1, 3), run=run, draw=draw, takes_config=True,
)  # fmt: skip
