"""The stages of a run: what each reads, what it writes, and the calls to the library between.

A stage reads the configuration and the files of the stages it needs, and writes files of the run directory; nothing
passes between stages in memory but what a file would give again to the same bits.
"""

import contextlib
import copy
import importlib.util
import logging
import shutil
from typing import Any

import torch
from torch import nn

from flexrank.allocate import allocate_ranks
from flexrank.artefacts.elastic import save_elastic
from flexrank.calibrate import Side, collect_moments
from flexrank.decompose import decompose_, decompose_by_block_
from flexrank.deployment.fitting import Limits
from flexrank.distill import distill_, distillation_evaluator
from flexrank.errors import FlexrankError
from flexrank.files import read_json, write_json
from flexrank.hf import models
from flexrank.nn.surgery import footprint, full_profile, nested_layers, select_layers
from flexrank.probe import probe_sensitivity
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile, SensitivityTable
from flexrank.profiles.costs import dense_parameters, rank_levels
from flexrank.progress import track
from flexrank.run import report
from flexrank.run.deploying import (
    deploy_plans,
    deploy_within,
    export_plans,
    measure,
    planner_for,
    plans_within,
    ratio_to_base,
)
from flexrank.run.workspace import Workspace

log = logging.getLogger("flexrank")


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
        chain, planner = read_chain(work), planner_for(work, model)
        for budget in track(work.config.allocation.budgets, "evaluating before consolidation"):
            small, _profile = deploy_within(work, planner, chain, Limits(budget))
            rows.append({"budget": budget, "quality": work.judge(small)})
    write_json(work.directory / "evaluation_initial.json", {"rows": rows})


def evaluate(work: Workspace, _: str) -> None:
    """Sizes, qualities and latencies of the deployed model at each budget, and of the base: RUN/evaluation.json."""
    model, chain = work.elastic("elastic")
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    settings, planner = work.config.evaluation, planner_for(work, model)
    rows = []
    for budget in track(work.config.allocation.budgets, "evaluating"):
        small, profile = deploy_within(work, planner, chain, Limits(budget))
        row = {"budget": budget, **measure(work, small, profile, shapes), "latency_ratio": None}
        if settings.latency:
            row["latency_ratio"] = ratio_to_base(work, small, work.samples.example, settings.latency_repeats)
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
    planner = planner_for(work, model)
    # All are planned before the first is published, so that a budget out of reach changes nothing.
    budgets = work.config.deployment.budgets
    plans = {budget: plans_within(work, planner, chain, Limits(budget)) for budget in budgets}
    exports = []
    for budget, plan in plans.items():
        name = f"{budget:.2f}" if round(budget, 2) == budget else f"{budget!r}"
        small, profile = deploy_plans(work, model, plan)
        entry = export_plans(work, small, profile, model, place / name)
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
    table = SensitivityTable.from_json(read_json(work.directory / "sensitivity.json"))
    rows = [
        {
            **row,
            "quality_before": before.get(row["budget"]),
            "predicted_error": table.predicted_error(row["ranks"]),
        }
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


def read_chain(work: Workspace) -> ProfileChain:
    """The chain in RUN/chain.json."""
    return ProfileChain.from_json(read_json(work.directory / "chain.json"))


def _require_reachable_budgets(work: Workspace, model: nn.Module) -> None:
    """Refuses, before hours of probing, a budget below what the least probed ranks cost as they are deployed."""
    settings, layers, planner = work.config.probe, nested_layers(model), planner_for(work, model)
    cheapest = dense = 0
    for name, layer in layers.items():
        rank = rank_levels(layer.matrix_shape, settings.levels, settings.spacing)[0]
        cheapest += planner.layer(name, rank).parameters
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
