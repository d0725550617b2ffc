"""A run's deployed models: their forms and loads, within what limits, their sizes, and how they are written."""

import functools
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from flexrank.calibrate import collect_rows
from flexrank.data.batches import Batch
from flexrank.deployment import deploy, deployed_parameters_of, export
from flexrank.deployment.fitting import Fit, Limits, fit, is_within
from flexrank.deployment.latency import correct_load, latency_ratio, observe_load, seconds_of_forward, time_chain
from flexrank.deployment.planning import LayerPlan, Planner, Plans, forms_of_plans
from flexrank.deployment.timing import Load
from flexrank.files import directory_bytes, read_json, write_json
from flexrank.hf import models
from flexrank.nn.linalg import ERROR_MULTIPLE, SLACK_STEPS
from flexrank.nn.surgery import nested_layers
from flexrank.profiles import ProfileChain, RankProfile, SensitivityTable
from flexrank.profiles.costs import Shape, dense_parameters
from flexrank.run.workspace import Workspace

log = logging.getLogger("flexrank")

FORMS = "forms.json"
#: A model up to this ratio, to the hundredth, is as fast as its base. After one that was not, others are planned to be
#: faster by the margin; and before any was built, as if layers of low rank took so many times as long as in the table.
#: A quiet machine and a busy one put models' times in another order: the table speaks for the one, what is measured
#: now for the other.
NO_SLOWER, MARGIN, LEAST_CORRECTION = 1.0, 0.03, 1.05
#: A latency that was asked for is aimed at this much below; where more of it is unused, a larger model is looked for.
AIM, UNUSED = 0.02, 0.06
#: Seconds that a model and its base are timed in turn in each situation, at least.
PATIENCE = 1.0
#: Models that are built and timed for one size.
ATTEMPTS = 4


def planner_for(work: Workspace, model: nn.Module) -> Planner:
    """Plans by the run's settings; slack is chosen on calibration rows, so that the dtype's bound holds where used."""
    slack = work.config.deployment.slack
    rows = collect_rows(model, work.samples.calibration, nested_layers(model)) if slack == "auto" else None
    return Planner(model, dtype=work.deployed_dtype, slack=slack, activations=rows)


def plans_within(
    work: Workspace, planner: Planner, chain: ProfileChain, limits: Limits, *, are_kept: bool = True
) -> Plans:
    """How to deploy the largest model within the limits, slack included.

    Where forms are chosen by time, ranks and forms of least predicted error that are no slower than the base by the
    table of times, or the chain's in their quickest forms where a latency asks for those, are
    built and timed against the base, twice before they stand. Else the table, corrected by what was measured, plans
    others, until a model is no slower. Ranks and forms are kept in RUN/forms.json, so that a stage done later takes
    the same where they are within its limits; unless `are_kept` is False.
    """
    times, model, most = work.times, planner.model, limits.max_latency_ms
    is_quickest = times is not None and most is not None
    if most is not None:
        example = work.samples.example
        chain = time_chain(model, work.deployed_base, example, chain, times, is_quickest=is_quickest)
    if times is None:
        return fit(planner, chain, limits).plans
    batches = _situations(work)
    correction = LEAST_CORRECTION if most is None else 1.0
    rows = [observe_load(work.deployed_base, batch, _linear(model)).rows for batch in batches]
    loads, sensitivity = [Load(one, correction) for one in rows], _sensitivity(work)
    key = _key(work, chain, sensitivity, loads, limits, is_quickest=is_quickest)
    kept = _kept_forms(work).get(key)
    plans = None if kept is None else planner.of_forms(kept)
    if plans is not None and is_within(planner, chain, limits, plans):
        return plans
    refit = functools.partial(fit, planner, chain, limits, times, is_quickest=is_quickest, sensitivity=sensitivity)
    first = refit(loads)
    if is_quickest and not first.is_quickest:
        log.warning("%s: no size near is within it in its quickest forms; the smallest are taken", limits)
    if all(first.plans[name].slack is None for name in _linear(model)):
        return first.plans
    plans = _no_slower(work, model, first.plans, list(zip(loads, batches, strict=True)), refit, most)
    if are_kept:
        write_json(work.directory / FORMS, _kept_forms(work) | {key: forms_of_plans(plans)})
    return plans


def _sensitivity(work: Workspace) -> SensitivityTable | None:
    """The probe's errors, where ranks are chosen anew by them; the paper's, and interpolated ones, stay the chain's."""
    allocation = work.config.allocation
    if allocation.method != "joint":
        return None
    return SensitivityTable.from_json(read_json(work.directory / "sensitivity.json"))


def _no_slower(
    work: Workspace,
    model: nn.Module,
    plans: Plans,
    situations: list[tuple[Load, Batch]],
    refit: Callable[[list[Load]], Fit],
    max_latency_ms: float | None = None,
) -> Plans:
    """The first plans whose model is fast enough in every situation; else those nearest to it, the last one first.

    Within a latency, the largest that was tried, until one uses nearly all of it.
    """
    base, tried = work.deployed_base, []
    seconds = [seconds_of_forward(base, batch) for _, batch in situations]
    loads = [load for load, _ in situations]
    for attempt in range(ATTEMPTS):
        small, _ = deploy_plans(work, model, plans)
        ratios = [ratio_to_base(work, small, batch) for _, batch in situations]
        if max(_slowness(ratios, seconds[-1], max_latency_ms)) <= NO_SLOWER:
            # Of noisy times those that are fast enough are too fast: they must be so twice.
            again = [ratio_to_base(work, small, batch) for _, batch in situations]
            ratios = [max(two) for two in zip(ratios, again, strict=True)]
        slowness = _slowness(ratios, seconds[-1], max_latency_ms)
        tried.append((slowness, plans))
        if _is_enough(slowness, max_latency_ms):
            return plans
        if attempt == ATTEMPTS - 1:
            break
        loads = _corrected(work, small, loads, ratios, seconds, max_latency_ms)
        del small
        plans = refit(loads).plans
        if any(plans == other for _, other in tried):
            break
    return _best(tried, max_latency_ms)


def _corrected(
    work: Workspace,
    small: nn.Module,
    loads: Sequence[Load],
    ratios: Sequence[float],
    seconds: Sequence[float],
    max_latency_ms: float | None,
) -> list[Load]:
    """The loads, with corrections by which the next model is faster than it has to be."""
    assert work.times is not None
    found, margin = [], MARGIN if max_latency_ms is None else AIM
    for load, ratio, took in zip(loads, ratios, seconds, strict=True):
        corrected = correct_load(load, small, ratio + margin, took, work.times)
        # Towards a latency freely; else it only ever grows, so that the search ends.
        found.append(max(load, corrected, key=_correction) if max_latency_ms is None else corrected)
    return found


def _is_enough(slowness: Sequence[float], max_latency_ms: float | None) -> bool:
    is_used = max_latency_ms is None or slowness[0] >= NO_SLOWER - UNUSED
    return is_used and max(slowness) <= NO_SLOWER


def _best(tried: Sequence[tuple[tuple[float, ...], Plans]], max_latency_ms: float | None) -> Plans:
    """Within a latency the largest that is fast enough; else the first that is, or the nearest to it."""
    fast = [plans for slowness, plans in tried if max(slowness) <= NO_SLOWER]
    if fast and max_latency_ms is not None:
        return max(fast, key=_parameters)
    slowness, best = min(tried, key=lambda one: tuple(max(NO_SLOWER, ratio) for ratio in one[0]))
    if max(slowness) > NO_SLOWER:
        told = ", ".join(f"{one:.2f}" for one in reversed(slowness[1:]))
        told += f", and {slowness[0]:.2f} times the latency asked for" if slowness[0] > NO_SLOWER else ""
        log.warning("no size near is fast enough; the best takes so many times as long as the base: %s at most", told)
    return best


def _parameters(plans: Plans) -> int:
    return sum(plan.parameters for plan in plans.values())


def ratio_to_base(work: Workspace, small: nn.Module, batch: Batch, repeats: int = 15) -> float:
    """`latency_ratio` to the base as it would be deployed, for `PATIENCE` seconds at least."""
    return latency_ratio(small, work.deployed_base, batch, repeats, least_seconds=PATIENCE)


def _slowness(ratios: Sequence[float], base_seconds: float, max_latency_ms: float | None) -> tuple[float, ...]:
    """What is to be small: time over the limit, then over the base's, the situation that matters most first.

    In hundredths, the finest that two measurements of one model agree to.
    """
    over = 0.0 if max_latency_ms is None else 1e3 * base_seconds * ratios[-1] / max_latency_ms
    return tuple(round(one, 2) for one in (over, *reversed(ratios)))


def _correction(load: Load) -> float:
    return load.correction


def _linear(model: nn.Module) -> list[str]:
    return [name for name, layer in nested_layers(model).items() if layer.geometry is None]


def _kept_forms(work: Workspace) -> dict[str, Any]:
    path = work.directory / FORMS
    kept: dict[str, Any] = read_json(path) if path.is_file() else {}
    return kept


def _key(
    work: Workspace,
    chain: ProfileChain,
    sensitivity: SensitivityTable | None,
    loads: list[Load],
    limits: Limits,
    *,
    is_quickest: bool,
) -> str:
    """All that the choice of forms depends on, but for the weights, whose values change no times."""
    assert work.times is not None
    found: list[Any] = [metadata.version("flexrank"), work.times.path.stem, [load.rows for load in loads]]
    found += [chain.to_json(), None if sensitivity is None else sensitivity.to_json()]
    found += [limits.given(), is_quickest, work.config.deployment.slack, SLACK_STEPS, ERROR_MULTIPLE]
    found += [PATIENCE, ATTEMPTS, NO_SLOWER, MARGIN, LEAST_CORRECTION, AIM, UNUSED]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _situations(work: Workspace) -> list[Batch]:
    """What the run's models are given: one token (of a language model), one sample, a batch of them."""
    example: Any = work.samples.example
    one = {key: value[:1] for key, value in example.items()}
    token = [{key: value[:, :1] for key, value in one.items()}] if work.config.task == "language" else []
    return [*token, one, example]


def deploy_plans(work: Workspace, model: nn.Module, plans: Mapping[str, LayerPlan]) -> tuple[nn.Module, RankProfile]:
    """The deployed model, the base itself at full rank, and its ranks."""
    small = deploy(model, plans, dtype=work.deployed_dtype, base=work.base)
    return small, RankProfile({name: plan.rank for name, plan in plans.items()})


def deploy_within(
    work: Workspace, planner: Planner, chain: ProfileChain, limits: Limits
) -> tuple[nn.Module, RankProfile]:
    """The largest deployed model within the limits, and its ranks."""
    return deploy_plans(work, planner.model, plans_within(work, planner, chain, limits))


def export_within(work: Workspace, place: Path, limits: Limits) -> dict[str, Any]:
    """Exports the largest deployed model within the limits; tells what was exported."""
    model, chain = work.elastic("elastic")
    small, profile = deploy_within(work, planner_for(work, model), chain, limits)
    return {**limits.given(), **export_plans(work, small, profile, model, place)}


def export_plans(
    work: Workspace, small: nn.Module, profile: RankProfile, model: nn.Module, place: Path
) -> dict[str, Any]:
    """Exports what `deploy_plans` returned, verified in a fresh process; tells its sizes."""
    export(small, place, work.samples.example, tokenizer=work.tokenizer)
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    return {
        "directory": str(place),
        **sizes(small, profile, shapes),
        "bytes": directory_bytes(place),
        "dtype": str(work.deployed_dtype).removeprefix("torch."),
    }


def measure(work: Workspace, small: Any, profile: Mapping[str, int], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Ranks, parameters, bytes on disk (weights and config, as saved) and qualities of a deployed model."""
    (work.directory / "partial").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work.directory / "partial", prefix="evaluate-") as scratch:
        models.save_model(small, Path(scratch))
        size = directory_bytes(scratch)
    return {**sizes(small, profile, shapes), "bytes": size, "quality": work.judge(small)}


def sizes(small: nn.Module, profile: Mapping[str, int], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Mean rank, and parameters as they are in the deployed model."""
    fractions = [rank / min(shapes[name]) for name, rank in profile.items()]
    in_layers = deployed_parameters_of(small, profile)
    return {
        "relative_size": in_layers / sum(map(dense_parameters, shapes.values())),
        "mean_rank": sum(profile.values()) / len(profile),
        "mean_rank_fraction": sum(fractions) / len(fractions),
        "params_layers": in_layers,
        "params_model": sum(parameter.numel() for parameter in small.parameters()),
    }
