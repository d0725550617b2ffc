"""Constants that training-free methods leave free: each has as many trials as trained rivals have.

A trial has half of the samples of calibration and probe, two budgets, and the method's own ranks. Its error is that of
trained rivals' trials: the distance from the base model's measure, as a geometric mean over budgets. Samples are of the
tuning half, whichever half is reported.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flexrank.data.batches import batch_rows, some_rows
from research.baselines import RANK_METHODS, RIVALS
from research.baselines.method import Settings
from research.benches.training_free import Benchmark, DecomposedModel, find_benchmark, measure_size_method, obstacle
from research.experiment import Ledger, Request
from research.measures import distance

#: Trials use the benchmark's budgets that are nearest to these.
BUDGETS = (0.8, 0.4)
Trial = dict[str, Any]


def run_trials(request: Request, name: str, ledger: Ledger, methods: Iterable[str]) -> dict[str, list[Trial]]:
    """Returns, for each method with a free constant, its settings, the paper's first, each with its error."""
    tuning = dataclasses.replace(request, half="tuning")
    benchmark, wanted = find_benchmark(tuning, name), list(_settings(methods))
    base = ledger.take("dense, tuning half", benchmark.base_scores)[benchmark.measure]
    units = {_unit_name(method, settings): (tuning, name, method, settings) for method, settings in wanted}
    done = ledger.take_all(units, trial_unit, request.jobs)
    found: dict[str, list[Trial]] = {}
    for method, settings in wanted:
        one = done[_unit_name(method, settings)]
        if "obstacle" not in one:
            found.setdefault(method, []).append({"settings": dict(settings), "rows": one["rows"]})
    for trials in found.values():
        errors = trial_errors(base, benchmark.measure, [one.pop("rows") for one in trials])
        for trial, error in zip(trials, errors, strict=True):
            trial["error"] = error
    return found


def _unit_name(method: str, settings: Settings) -> str:
    return f"{method}, trial of {format_settings(settings)}"


def _settings(methods: Iterable[str]) -> Iterator[tuple[str, Settings]]:
    """Yields the settings of each method; ours have none, and use their defaults."""
    for name in methods:
        for settings in RIVALS[name].trials if name in RIVALS else ():
            yield name, settings


def best_settings(trials: Sequence[Mapping[str, Any]]) -> Settings:
    """Returns the settings of least error, the first of equal ones."""
    return best_trial(trials)["settings"]


def best_trial(trials: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the trial of least error, the first of equal ones."""
    return min(trials, key=_error_of)


def format_settings(settings: Settings) -> str:
    """Formats settings as text: `alpha 0.5`."""
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in settings.items())


def _trial_benchmark(benchmark: Benchmark) -> Benchmark:
    """Returns the benchmark at the trials' budgets, with the first half of each batch."""

    def half(batches: Sequence[Any]) -> list[Any]:
        return [some_rows(batch, slice(-(-batch_rows(batch) // 2))) for batch in batches]

    def subject(seed: int) -> Any:
        one = benchmark.subject(seed)
        return dataclasses.replace(one, calibration=half(one.calibration), probe=half(one.probe))

    return dataclasses.replace(benchmark, budgets=trial_budgets(benchmark.budgets), subject=subject)


def trial_budgets(budgets: Sequence[float]) -> list[float]:
    """Returns those of the budgets that are nearest to `BUDGETS`, largest first."""
    return list(dict.fromkeys(min(budgets, key=lambda own: abs(own - wanted)) for wanted in BUDGETS))


def trial_unit(request: Request, name: str, method: str, settings: Settings) -> dict[str, Any]:
    """Returns the method's sizes at the trials' budgets, or why it does not apply."""
    benchmark = _trial_benchmark(find_benchmark(request, name))
    if method in RANK_METHODS:
        return DecomposedModel(benchmark, method, 0, settings).measure_sizes("published")
    if reason := obstacle(benchmark, method):
        return {"obstacle": reason}
    return measure_size_method(benchmark, method, 0, settings)


def as_error(measure: str, score: float) -> float:
    """Returns a score as an error, of which less is better."""
    return score if measure.startswith("nats") else -score


def trial_errors(base: float, measure: str, trials: Sequence[Sequence[Mapping[str, Any] | None]]) -> list[float | None]:
    """Returns, for each trial's sizes, the mean logarithm of their distances from the base model's measure.

    The mean is over the budgets at which any of the trials has a size; a trial that lacks one of these has None.
    """
    places = [place for place, rows in enumerate(zip(*trials, strict=True)) if any(rows)]
    return [_mean_log_distance(base, measure, [rows[place] for place in places]) for rows in trials]


def _mean_log_distance(base: float, measure: str, rows: Sequence[Mapping[str, Any] | None]) -> float | None:
    distances = [math.log(distance(measure, row["scores"][measure], base)) for row in rows if row]
    return statistics.fmean(distances) if distances and len(distances) == len(rows) else None


def _error_of(trial: Mapping[str, Any]) -> float:
    """Returns a trial's error; infinite if it has none."""
    return math.inf if trial["error"] is None else trial["error"]
