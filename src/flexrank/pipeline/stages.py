"""The stages of a run: what each reads, what it writes, and the calls to the library between.

A stage reads the configuration and the files of the stages it needs, and writes files of the run directory; nothing
passes between stages in memory but what a file would give again to the same bits.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank import report
from flexrank.allocation import allocate_ranks
from flexrank.calibration import Side, collect_moments, collect_rows
from flexrank.checkpoint import load_elastic, save_elastic
from flexrank.config import RunConfig
from flexrank.costs import Shape, dense_parameters
from flexrank.decomposition import decompose_, decompose_by_block_
from flexrank.deployment import deploy, deployed_parameters_of, export
from flexrank.distillation import distill_, distillation_evaluator
from flexrank.errors import FlexrankError
from flexrank.evaluation import latency_ratio
from flexrank.hf import models
from flexrank.latency import time_chain
from flexrank.objectives import Objective, objective_for
from flexrank.pipeline.rundir import RunDirectory
from flexrank.pipeline.samples import Judge, Samples, load_samples
from flexrank.planning import Activations, LayerPlan, fit_plans, plan_layer
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile, SensitivityTable
from flexrank.progress import track
from flexrank.sensitivity import probe_sensitivity, rank_levels
from flexrank.storage import directory_bytes, read_json, write_json
from flexrank.surgery import footprint, full_profile, nested_layers, select_layers
from flexrank.timing import TimeTable

log = logging.getLogger("flexrank")


@dataclasses.dataclass
class Workspace:
    """A run at work: its configuration, its directory, and what more than one stage loads."""

    config: RunConfig
    directory: RunDirectory

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the models run."""
        if self.config.device == "cuda" and not torch.cuda.is_available():
            raise FlexrankError("device is 'cuda'; torch finds no GPU here, so write cpu or auto")
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(auto if self.config.device == "auto" else self.config.device)

    @functools.cached_property
    def base(self) -> Any:
        """The original model, in eval mode: the teacher."""
        dtype = getattr(torch, self.config.dtype)
        return models.load_model(self.config.model, self.config.task, dtype=dtype).to(self.device)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None for images."""
        return None if self.config.task == "classification" else models.load_tokenizer(self.config.model)

    @functools.cached_property
    def samples(self) -> Samples:
        """The run's data."""
        return load_samples(self.config, models.resolve_source(self.config.model), self.tokenizer)

    @functools.cached_property
    def judge(self) -> Judge:
        """Measures a model's qualities against the base."""
        return self.samples.judge(self.base)

    def objective(self, hidden_weight: float = 0.0, top_k: int | None = None) -> Objective:
        """The task's distillation loss."""
        temperature = self.config.distillation.temperature
        return objective_for(self.config.task, temperature=temperature, hidden_weight=hidden_weight, top_k=top_k)

    def elastic(self, name: str) -> tuple[nn.Module, ProfileChain]:
        """The elastic model in RUN/`name`, and its chain."""
        model, chain = load_elastic(self.directory / name)
        return model.to(self.device), chain

    @property
    def deployed_dtype(self) -> torch.dtype:
        """The dtype of deployed models."""
        return getattr(torch, self.config.deployment.dtype or self.config.dtype)

    @functools.cached_property
    def times(self) -> TimeTable | None:
        """What layers take on this machine; None where forms are chosen by parameters alone."""
        measured = self.config.deployment.forms == "measured"
        return TimeTable(self.deployed_dtype, self.device) if measured else None


def decompose(work: Workspace, _: str) -> None:
    """Calibrates and decomposes: RUN/elastic_initial, whose chain is the full model alone."""
    require_fitting_inputs(work)
    model, settings = copy.deepcopy(work.base), work.config.decomposition
    layers = list(select_layers(model, work.config.layers.include, work.config.layers.exclude))
    loss = work.objective().fisher_loss if settings.method == "fisher" else None
    batches = work.samples.calibration
    if settings.by_block:
        decompose_by_block_(model, batches, layers, method=settings.method, gradient_loss=loss)
    else:
        chosen = {name: model.get_submodule(name) for name in layers}
        side: Side = "input" if settings.method == "paper" else "smaller"
        moments = collect_moments(model, batches, chosen, side=side, gradient_loss=loss)
        del chosen  # a layer that is held on to stays in memory beside its elastic form
        decompose_(model, moments, method=settings.method)
    full = RankProfile(full_profile(model))
    dense = sum(dense_parameters(layer.matrix_shape) for layer in nested_layers(model).values())
    chain = ProfileChain((ChainEntry(full, dense, 0.0),), dense, footprint(model), "full")
    save_elastic(model, chain, work.directory / "elastic_initial", tokenizer=work.tokenizer)


def probe(work: Workspace, fingerprint: str) -> None:
    """Probes each layer: RUN/sensitivity.json. Layers already probed are kept through an interruption."""
    model, _ = work.elastic("elastic_initial")
    _require_reachable_budgets(work, model)
    evaluate = distillation_evaluator(work.base, work.samples.probe, work.objective())
    table = probe_sensitivity(
        model,
        evaluate,
        work.config.probe.levels,
        spacing=work.config.probe.spacing,
        checkpoint=work.directory.partial("probe", fingerprint, ".json"),
    )
    write_json(work.directory / "sensitivity.json", table.to_json())


def allocate(work: Workspace, _: str) -> None:
    """Chooses the ranks of every budget: RUN/chain.json."""
    table = SensitivityTable.from_json(read_json(work.directory / "sensitivity.json"))
    settings = work.config.allocation
    chain = allocate_ranks(
        table,
        settings.budgets,
        method=settings.method,
        savings=settings.savings,
        candidates_per_layer=settings.candidates_per_layer,
    )
    write_json(work.directory / "chain.json", chain.to_json())


def distill(work: Workspace, fingerprint: str) -> None:
    """Consolidates: RUN/elastic, one artefact of every size, and RUN/history.json."""
    settings = work.config.distillation
    model, _ = work.elastic("elastic_initial")
    chain = read_chain(work)
    history: dict[str, Any] = {"steps": 0, "losses": [], "budgets": []}
    if settings.steps:
        budgets = list(chain.budgets)
        short_texts = work.config.task == "embedding" and work.device.type == "cpu"
        with models.eager_attention(model) if short_texts else contextlib.nullcontext():
            done = distill_(
                model,
                work.base,
                work.samples.training,
                chain,
                objective=work.objective(settings.hidden_weight, settings.top_k),
                steps=settings.steps,
                learning_rate=settings.learning_rate,
                warmup_steps=settings.warmup_steps,
                weights=None if settings.weights is None else settings.weights[::-1],  # the chain's order is rising
                weight_decay=settings.weight_decay,
                accumulation=settings.accumulation,
                max_norm=settings.max_norm,
                autocast=autocast_dtype(settings.autocast, work.device),
                seed=work.config.seed,
                checkpoint=work.directory.partial("distill", fingerprint),
                checkpoint_every=settings.checkpoint_every,
            )
        history = {"steps": done.steps, "losses": done.losses, "budgets": [budgets[i] for i in done.profiles]}
    save_elastic(model, chain, work.directory / "elastic", tokenizer=work.tokenizer)
    write_json(work.directory / "history.json", history)


def evaluate_initial(work: Workspace, _: str) -> None:
    """Qualities before consolidation: RUN/evaluation_initial.json; no rows where nothing is consolidated."""
    rows = []
    if work.config.distillation.steps:
        model, _chain = work.elastic("elastic_initial")
        chain, rows_of = read_chain(work), activations(work, model)
        for budget in track(work.config.allocation.budgets, "evaluating before consolidation"):
            small, _profile = deploy_within(work, model, chain, rows_of, budget=budget)
            rows.append({"budget": budget, "quality": work.judge(small)})
    write_json(work.directory / "evaluation_initial.json", {"rows": rows})


def evaluate(work: Workspace, _: str) -> None:
    """Sizes, qualities and latencies of the deployed model at each budget, and of the base: RUN/evaluation.json."""
    model, chain = work.elastic("elastic")
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    settings, rows_of = work.config.evaluation, activations(work, model)
    rows = []
    for budget in track(work.config.allocation.budgets, "evaluating"):
        small, profile = deploy_within(work, model, chain, rows_of, budget=budget)
        row = {"budget": budget, **measure(work, small, profile, shapes), "latency_ratio": None}
        if settings.latency:
            row["latency_ratio"] = latency_ratio(small, work.base, work.samples.example, settings.latency_repeats)
        rows.append({**row, "ranks": dict(profile)})
    base = measure(work, work.base, full_profile(model), shapes)
    layers = {name: {"shape": list(shape)} for name, shape in shapes.items()}
    write_json(work.directory / "evaluation.json", {"base": base, "rows": rows, "layers": layers})


def export_all(work: Workspace, _: str) -> list[str]:
    """Exports each deployment budget to RUN/deployed/BUDGET, verified in a fresh process; returns their places.

    What holds no `flexrank.json` in RUN/deployed is somebody's own, and left.
    """
    place = work.directory / "deployed"
    place.mkdir(exist_ok=True)
    model, chain = work.elastic("elastic")
    rows = activations(work, model)
    # All are planned before the first is published, so that a budget out of reach changes nothing.
    budgets = work.config.deployment.budgets
    plans = {budget: plans_within(work, model, chain, rows, budget=budget) for budget in budgets}
    exports = []
    for budget, plan in plans.items():
        name = f"{budget:.2f}" if round(budget, 2) == budget else f"{budget!r}"
        small, profile = deploy_plans(work, model, plan)
        entry = _export(work, small, profile, model, place / name)
        exports.append({"budget": budget, **entry, "directory": f"deployed/{name}", "quality": work.judge(small)})
    places = [entry["directory"] for entry in exports]
    for other in place.iterdir():
        is_ours = other.name.endswith((".aside", ".old")) or (other / "flexrank.json").is_file()
        if is_ours and f"deployed/{other.name}" not in places:
            shutil.rmtree(other)
    write_json(work.directory / "deployed.json", exports)
    return places


def summarise(work: Workspace, _: str) -> None:
    """Joins what the stages measured into RUN/summary.json, and draws the figures and the page."""
    before = {row["budget"]: row["quality"] for row in read_json(work.directory / "evaluation_initial.json")["rows"]}
    found, chain = read_json(work.directory / "evaluation.json"), read_chain(work)
    predicted = {tuple(entry.profile.items()): entry.error for entry in chain.entries}
    rows = [
        {**row, "quality_before": before.get(row["budget"]), "predicted_error": predicted[tuple(row["ranks"].items())]}
        for row in found["rows"]
    ]
    summary = {
        "name": work.config.name,
        "model": work.config.model,
        "task": work.config.task,
        "base": found["base"],
        "rows": rows,
        "layers": found["layers"],
        "allocation": {"method": chain.method, "gap": chain.gap},
        "distillation": {"steps": work.config.distillation.steps},
        "deployed": read_json(work.directory / "deployed.json"),
        "seconds": work.directory.seconds(),
    }
    write_json(work.directory / "summary.json", summary)
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no figures and no page: they need matplotlib, pip install 'flexrank[report]'")
    else:
        report.write_report(work.directory.path)


def activations(work: Workspace, model: nn.Module) -> Activations | None:
    """Calibration rows that the slack is chosen on, so that the dtype's error bound holds where the model is used."""
    if work.config.deployment.slack != "auto":
        return None
    return collect_rows(model, work.samples.calibration, nested_layers(model))


def plans_within(
    work: Workspace, model: nn.Module, chain: ProfileChain, rows: Activations | None, **limits: Any
) -> dict[str, LayerPlan]:
    """How to deploy the largest model within the limits of `fit_plans`, slack included."""
    slack = work.config.deployment.slack
    if limits.get("max_latency_ms") is not None:
        base = work.base if work.deployed_dtype is work.base.dtype else copy.deepcopy(work.base).to(work.deployed_dtype)
        chain = time_chain(model, base, work.samples.example, chain, work.times)
    return fit_plans(model, chain, dtype=work.deployed_dtype, slack=slack, activations=rows, times=work.times, **limits)


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
    return {**limits, **_export(work, small, profile, model, place)}


def _export(work: Workspace, small: nn.Module, profile: RankProfile, model: nn.Module, place: Path) -> dict[str, Any]:
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


def read_chain(work: Workspace) -> ProfileChain:
    """The chain in RUN/chain.json."""
    return ProfileChain.from_json(read_json(work.directory / "chain.json"))


def _require_reachable_budgets(work: Workspace, model: nn.Module) -> None:
    """Refuses, before hours of probing, a budget below what the least probed ranks cost as they are deployed."""
    settings, layers, rows = work.config.probe, nested_layers(model), activations(work, model) or {}
    how: dict[str, Any] = {"dtype": work.deployed_dtype, "slack": work.config.deployment.slack}
    cheapest = dense = 0
    for name, layer in layers.items():
        rank = rank_levels(layer.matrix_shape, settings.levels, settings.spacing)[0]
        cheapest += plan_layer(layer, rank, rows=rows.get(name), **how).parameters
        dense += dense_parameters(layer.matrix_shape)
    for key in ("allocation", "deployment"):
        smallest = min(getattr(work.config, key).budgets, default=1.0)
        if smallest < cheapest / dense:
            raise FlexrankError(
                f"{key}.budgets: {smallest} is too small; with probe.levels {settings.levels} the least is "
                f"{cheapest / dense:.4f}"
            )


def require_fitting_inputs(work: Workspace) -> None:
    """Refuses texts longer than the model has positions for, and images of another size than it was made for."""
    config, data = work.base.config, work.config.data
    if work.config.task != "classification":
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and data.max_tokens > limit:
            raise FlexrankError(f"data.max_tokens is {data.max_tokens}; this model reads at most {limit}")
        return
    example: Any = work.samples.example
    side, found = getattr(config, "image_size", None), tuple(example["pixel_values"].shape[1:])
    if isinstance(side, int) and found != (config.num_channels, side, side):
        wanted = (config.num_channels, side, side)
        raise FlexrankError(
            f"data.path {data.path}: images are {found} (channels, height, width); this model takes {wanted}"
        )


def autocast_dtype(choice: str, device: torch.device) -> torch.dtype | None:
    """What consolidation computes in: `auto` is bfloat16 where the hardware has it, else the model's own dtype."""
    if choice == "auto":
        if device.type == "cuda":
            has_units = torch.cuda.is_bf16_supported()
        else:
            features: dict[str, Any] = getattr(
                torch.cpu, "get_capabilities", dict
            )()  # older versions of torch do not tell
            has_units = bool(features.get("avx512_bf16") or features.get("amx_bf16"))
        choice = "bfloat16" if has_units else "off"
    return torch.bfloat16 if choice == "bfloat16" else None
