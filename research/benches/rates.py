"""Which learning rates trained rivals are tried at, and which are best: one for all sizes, or one for each."""

from collections.abc import Mapping, Sequence
from typing import Any

from research.baselines.trained import TRAINED_METHODS
from research.baselines.trained.task import TrainedMethod
from research.benches.tuning import as_error, best_trial, trial_errors

#: A learning rate for each budget, largest first.
Rates = tuple[float, ...]


def first_rates(method: TrainedMethod, sizes: int) -> list[Rates]:
    """Returns the method's trials, each with one rate for all sizes."""
    return [(rate,) * sizes for settings in method.trials for rate in settings.values()]


def rates_alone(best: Mapping[str, Rates]) -> dict[str, list[Rates]]:
    """Returns half of the best rates, the rates and their doubles, for the methods that train each size by itself."""
    separate = {name: rates for name, rates in best.items() if not TRAINED_METHODS[name].is_one_artefact}
    return {name: [_scaled(rates, factor) for factor in (0.5, 1.0, 2.0)] for name, rates in separate.items()}


def _scaled(rates: Rates, factor: float) -> Rates:
    return tuple(factor * rate for rate in rates)


def trials_of(tried: Mapping[Rates, Sequence[Any]], base: float, measure: str) -> list[dict[str, Any]]:
    """Returns, from the rows by rates, the rates, each size's error and their mean, as `trial_errors` has it."""
    means = trial_errors(base, measure, list(tried.values()))
    return [
        {"rates": rates, "errors": [row and as_error(measure, row["scores"][measure]) for row in rows], "error": mean}
        for (rates, rows), mean in zip(tried.items(), means, strict=True)
    ]


def format_rates(rates: Rates) -> str:
    """Formats rates as text, as one if they are alike: `0.001`, or `0.0005 0.001`."""
    return " ".join(f"{rate:g}" for rate in (rates if len(set(rates)) > 1 else rates[:1]))


def best_rates(tried: Sequence[Mapping[str, Any]], by_size: bool) -> Rates:
    """Returns the rates of the best trial, or for each size the rate of its own best trial."""
    return tuple(one["rates"][place] for place, one in enumerate(_best_trials(tried, by_size)))


def next_rates(tried: Sequence[Mapping[str, Any]], by_size: bool) -> list[Rates]:
    """Returns the rates beyond those best ones that are at an edge of the tried; none for a method without sizes."""
    if all(one["error"] is None for one in tried):
        return []
    best = {one["rates"] for one in _best_trials(tried, by_size)}
    rates = sorted(one["rates"] for one in tried)  # each is a multiple of the others
    return [_scaled(edge, factor) for edge, factor in ((rates[0], 0.5), (rates[-1], 2.0)) if edge in best]


def _best_trials(tried: Sequence[Mapping[str, Any]], by_size: bool) -> list[Mapping[str, Any]]:
    """Returns the best trial for each size, which is one for all unless `by_size`."""
    places = range(len(tried[0]["rates"]))
    return [_best_trial_at(tried, place) if by_size else best_trial(tried) for place in places]


def _best_trial_at(tried: Sequence[Mapping[str, Any]], place: int) -> Mapping[str, Any]:
    """Returns the best trial of one size; that of all sizes if no trial has it."""
    known = [one for one in tried if one["errors"][place] is not None]
    return min(known, key=lambda one: one["errors"][place]) if known else best_trial(tried)
