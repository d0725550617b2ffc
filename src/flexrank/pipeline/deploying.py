"""A run's deployed models: their forms and loads, within what limits, their sizes, and how they are written."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flexrank.batches import Batch
from flexrank.calibration import collect_rows
from flexrank.costs import Shape, dense_parameters
from flexrank.deployment import deploy, deployed_parameters_of, export
from flexrank.hf import models
from flexrank.latency import correct_load, observe_load, time_chain
from flexrank.pipeline.workspace import Workspace
from flexrank.planning import Activations, LayerPlan, Plans, fit_plans, form_key
from flexrank.profiles import ProfileChain, RankProfile
from flexrank.storage import directory_bytes, read_json, write_json
from flexrank.surgery import nested_layers
from flexrank.timing import Load


def activations(work: Workspace, model: nn.Module) -> Activations | None:
    """Calibration rows that the slack is chosen on, so that the dtype's error bound holds where the model is used."""
    if work.config.deployment.slack != "auto":
        return None
    return collect_rows(model, work.samples.calibration, nested_layers(model))


def plans_within(
    work: Workspace, model: nn.Module, chain: ProfileChain, rows: Activations | None, **limits: Any
) -> Plans:
    """How to deploy the largest model within the limits of `fit_plans`, slack included."""
    how: dict[str, Any] = {"dtype": work.deployed_dtype, "slack": work.config.deployment.slack, "activations": rows}
    times = work.times
    loads = None if times is None else observed_loads(work, model, chain, how)
    if limits.get("max_latency_ms") is not None:
        load = loads[-1] if loads else None
        chain = time_chain(model, work.deployed_base, work.samples.example, chain, times, load)
    return fit_plans(model, chain, times=times, loads=loads, **how, **limits)


def observed_loads(work: Workspace, model: nn.Module, chain: ProfileChain, how: Mapping[str, Any]) -> list[Load]:
    """What the run's models are given: one token (of a language model), one sample, a batch of them.

    Each is corrected by the middle size in the smallest forms, whose time depends on ranks and not on weights. That is
    measured once for a run and machine, and kept in RUN/loads.json: a stage done later chooses the same forms.
    """
    assert work.times is not None
    base, layers = work.deployed_base, nested_layers(model)
    linear = [name for name, layer in layers.items() if layer.geometry is None]
    batches, middle = _situations(work), chain.budgets[len(chain.budgets) // 2]
    loads = [observe_load(base, batch, linear) for batch in batches]
    key = {"times": work.times.path.stem, "profile": dict(chain.at(middle)), "rows": [load.rows for load in loads]}
    path = work.directory / "loads.json"
    kept = read_json(path) if path.is_file() else {}
    if kept.get("key") != key:
        work.times.measure([form_key(layers[name]) for name in linear])
        small = deploy(model, fit_plans(model, chain, middle, **how), dtype=work.deployed_dtype, base=base)
        measured = zip(loads, batches, strict=True)
        found = [correct_load(load, small, base, batch, work.times).correction for load, batch in measured]
        kept = {"key": key, "corrections": found}
        write_json(path, kept)
    return [Load(load.rows, correction) for load, correction in zip(loads, kept["corrections"], strict=True)]


def _situations(work: Workspace) -> list[Batch]:
    example: Any = work.samples.example
    one = {key: value[:1] for key, value in example.items()}
    token = [{key: value[:, :1] for key, value in one.items()}] if work.config.task == "language" else []
    return [*token, one, example]


def deploy_plans(work: Workspace, model: nn.Module, plans: Mapping[str, LayerPlan]) -> tuple[nn.Module, RankProfile]:
    """The deployed model, the base itself at full rank, and its ranks."""
    small = deploy(model, plans, dtype=work.deployed_dtype, base=work.base)
    return small, RankProfile({name: plan.rank for name, plan in plans.items()})


def deploy_within(
    work: Workspace, model: nn.Module, chain: ProfileChain, rows: Activations | None, **limits: Any
) -> tuple[nn.Module, RankProfile]:
    """The largest deployed model within the limits, and its ranks."""
    return deploy_plans(work, model, plans_within(work, model, chain, rows, **limits))


def export_within(work: Workspace, place: Path, **limits: Any) -> dict[str, Any]:
    """Exports the largest deployed model within the limits; tells what was exported."""
    model, chain = work.elastic("elastic")
    small, profile = deploy_within(work, model, chain, activations(work, model), **limits)
    return {**limits, **export_plans(work, small, profile, model, place)}


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
