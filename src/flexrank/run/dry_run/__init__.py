"""The plan of a run, before a weight is loaded: layers, candidates, sizes by budget, memory, operations and hours.

The architecture is built on the meta device, whose tensors have shapes and no memory, and is decomposed and run there
for one sample. What a run finds only with weights and data is not known: the ranks that allocation chooses, the slack
of gauge alignment, activations.
"""

from collections.abc import Mapping
from typing import Any

import torch

from flexrank.errors import FlexrankError
from flexrank.nn.select import dense_reasons
from flexrank.nn.switch import footprint, uniform_profile
from flexrank.profiles.costs import deployed_parameters, rank_levels
from flexrank.run.config import RunConfig
from flexrank.run.dry_run.memory import count_memory, moment_bytes
from flexrank.run.dry_run.operations import candidates, count_operations, evaluations
from flexrank.run.dry_run.subject import Subject, make_subject
from flexrank.run.dry_run.table import print_plan
from flexrank.run.report import split_block

__all__ = ["DEFAULT_TFLOPS", "make_plan", "print_plan"]

#: Operations a second, in 10¹², that hours are told at when nobody says: a round number, not a measured one.
DEFAULT_TFLOPS = 100.0


def make_plan(config: RunConfig, tflops: float = DEFAULT_TFLOPS) -> dict[str, Any]:
    """Counts what a run of this config would do; nothing is computed, downloaded or written.

    Args:
        config: the run.
        tflops: operations a second in 10¹² that the machine sustains, for the hours.

    Returns:
        A JSON object: `layers` and `dense` (what is factorised, what is not and why), `parameters`, `probe`,
        `budgets`, `moments` and `memory` in bytes, `operations` and `hours` by stage, `tokens` in all, and `notes`,
        which say what is counted.

    Raises:
        FlexrankError: a rate that is not positive, an architecture that cannot be built or has no layer to
            factorise, or a budget that the probed ranks do not reach.
    """
    if not 0 < tflops < float("inf"):
        raise FlexrankError(f"--tflops is {tflops:g}; give 10^12 operations a second, a number above 0")
    subject = make_subject(config)
    _require_reachable_budgets(subject, config)
    settings, operations = config.distillation, count_operations(subject, config)
    per_step = settings.batch_size * settings.accumulation
    return {
        "name": config.name,
        "model": config.model,
        "architecture": config.architecture,
        "class": type(subject.teacher).__name__,
        "task": config.task,
        "dtype": config.dtype,
        "sample_tokens": subject.tokens,
        "layers": _layer_rows(subject),
        "dense": _dense_rows(subject, config),
        "parameters": _parameters(subject),
        "probe": _probe(subject, config),
        "budgets": _budget_rows(subject, config),
        "moments": _moments(subject, config),
        "memory": _with_sums(count_memory(subject, config)),
        "samples_per_step": per_step,
        "steps": settings.steps,
        "tokens": settings.steps * per_step * subject.tokens,
        "operations": operations | {"all": sum(operations.values())},
        "tflops": tflops,
        "hours": _hours(operations, tflops),
        "notes": _notes(subject, config),
    }


def _layer_rows(subject: Subject) -> list[dict[str, Any]]:
    """Factorised layers by their name within a block, and shape."""
    rows: dict[Any, dict[str, Any]] = {}
    for name, shape in subject.shapes.items():
        kind = split_block(name)[1]
        row = rows.setdefault((kind, shape), {"kind": kind, "shape": list(shape), "layers": 0, "parameters": 0})
        row["layers"] += 1
        row["parameters"] += shape[0] * shape[1]
    return list(rows.values())


def _dense_rows(subject: Subject, config: RunConfig) -> list[dict[str, Any]]:
    """Modules with a matrix that stay dense, by reason, and last what no matrix of a layer is; a tensor once."""
    rows: dict[Any, dict[str, Any]] = {}
    counted = {id(subject.teacher.get_submodule(name).weight) for name in subject.shapes}
    for name, reason in dense_reasons(subject.teacher, config.layers.include, config.layers.exclude).items():
        kind = split_block(name)[1]
        row = rows.setdefault((kind, reason), {"kind": kind, "reason": reason, "modules": 0, "parameters": 0})
        own = {id(p): p for p in subject.teacher.get_submodule(name).parameters(recurse=False) if id(p) not in counted}
        counted |= own.keys()
        row["modules"] += 1
        row["parameters"] += sum(p.numel() for p in own.values())
    rest = [p for p in subject.teacher.parameters() if id(p) not in counted]
    sizes = {"modules": 0, "parameters": sum(p.numel() for p in rest)}
    return [*rows.values(), {"kind": "all else", "reason": "norms, biases and tokens of its own", **sizes}]


def _parameters(subject: Subject) -> dict[str, int]:
    """Parameters of the factorised layers and of the whole model, dense and elastic, and of what is trained."""
    student = list(subject.student.parameters())
    return {
        "layers": sum(m * n for m, n in subject.shapes.values()),
        "model": sum(p.numel() for p in subject.teacher.parameters()),
        "factors": sum(min(shape) * sum(shape) for shape in subject.shapes.values()),
        "elastic_model": sum(p.numel() for p in student),
        "trained": sum(p.numel() for p in student if p.requires_grad),
    }


def _probe(subject: Subject, config: RunConfig) -> dict[str, int]:
    found = sum(map(len, candidates(subject, config).values()))
    sizes = {"layers": len(subject.shapes), "levels": config.probe.levels}
    return sizes | {"candidates": found, "evaluations": evaluations(subject, config)}


def _budget_rows(subject: Subject, config: RunConfig) -> list[dict[str, Any]]:
    """Sizes at each budget of its uniform profile: each layer's largest rank within it, deployed without slack."""
    dtype = getattr(torch, config.deployment.dtype or config.dtype)
    beside, rows = footprint(subject.student, dtype), []
    dense = sum(m * n for m, n in subject.shapes.values())
    for budget in config.allocation.budgets:
        ranks = uniform_profile(subject.student, budget)
        layers = sum(deployed_parameters(shape, ranks[name]) for name, shape in subject.shapes.items())
        row = {"budget": budget, "mean_rank": sum(ranks.values()) / len(ranks), "relative_size": layers / dense}
        row |= {"params_layers": layers, "params_model": beside.other_parameters + layers}
        rows.append(row | {"bytes": beside.other_bytes + layers * dtype.itemsize})
    return rows


def _moments(subject: Subject, config: RunConfig) -> dict[str, int]:
    """Bytes of the second moments of all layers, and of the block with most."""
    found = moment_bytes(subject, config.decomposition.method)
    return {"all": sum(found.values()), "largest_block": max(found.values())}


def _with_sums(memory: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return {stage: parts | {"all": sum(parts.values())} for stage, parts in memory.items()}


def _hours(operations: Mapping[str, int], tflops: float) -> dict[str, float | None]:
    """Hours at the rate; None for decomposition, whose float64 factorisations run far below any such rate."""
    hours = {stage: count / (tflops * 1e12) / 3600 for stage, count in operations.items() if stage != "decomposition"}
    return {stage: hours.get(stage) for stage in operations} | {"all": sum(hours.values())}


def _notes(subject: Subject, config: RunConfig) -> list[str]:
    """What the figures mean, a line each."""
    notes = [
        "budget: deployed over dense parameters of the factorised layers; sizes are those of each layer's largest rank "
        "within it, before the slack of gauge alignment. A run allocates other ranks within the same budget.",
        "memory: weights, gradients, AdamW's moments, second moments and outputs of a batch; no activations, no "
        "workspace.",
        "operations: products of all layers with a matrix, lm_head too, of attention (its whole square), of moments "
        "and factorisations; no norms, softmaxes, loss or optimiser. The probe's are the most it may take; replayed "
        "blocks save about half.",
        "hours: operations over the stated rate; none for decomposition, in float64, which runs far below it.",
    ]
    if config.distillation.autocast == "auto":
        notes.append("distillation.autocast auto: outputs are counted in the model's dtype, twice those of bfloat16.")
    if config.task == "embedding":
        notes.append("tokens: as if every text had data.max_tokens; batches are padded to their longest text only.")
    if config.task == "classification" and not type(subject.teacher).__name__.endswith("Classification"):
        notes.append(
            f"{type(subject.teacher).__name__} is an encoder: its classification head is not counted, and a run needs "
            "a model with one."
        )
    return notes


def _require_reachable_budgets(subject: Subject, config: RunConfig) -> None:
    """Refuses, as a run would after decomposing, a budget below what the least probed ranks cost."""
    levels, spacing = config.probe.levels, config.probe.spacing
    shapes = subject.shapes.values()
    cheapest = sum(deployed_parameters(shape, rank_levels(shape, levels, spacing)[0]) for shape in shapes)
    least = cheapest / sum(m * n for m, n in shapes)
    for key in ("allocation", "deployment"):
        smallest = min(getattr(config, key).budgets, default=1.0)
        if smallest < least:
            raise FlexrankError(
                f"{key}.budgets: {smallest} is too small; with probe.levels {levels} the least is {least:.4f}"
            )
