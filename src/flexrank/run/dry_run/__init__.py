"""A dry run: layers, candidates, sizes by budget, memory and operations of a run, without loading a weight.

The architecture is built on the meta device, and runs one sample there. What depends on weights and data is unknown:
the ranks that allocation chooses, unless RUN/chain.json has them, and the slack of gauge alignment.
"""

from collections.abc import Sequence
from typing import Any

import torch

from flexrank.errors import FlexrankError
from flexrank.nn.select import dense_reasons
from flexrank.nn.switch import footprint
from flexrank.profiles.costs import expected_parameters
from flexrank.run.candidates import candidate_ranks, rank_constraints, require_reachable_budgets
from flexrank.run.config import RunConfig
from flexrank.run.dry_run import operations
from flexrank.run.dry_run.architecture import Architecture, build_architecture
from flexrank.run.dry_run.devices import LOCAL, Device, find_device, is_device
from flexrank.run.dry_run.memory import count_memory
from flexrank.run.dry_run.moments import moment_bytes
from flexrank.run.dry_run.plan import busiest_process_config, plan_notes, plan_run
from flexrank.run.dry_run.table import print_dry_run
from flexrank.run.tables import split_block
from flexrank.run.trials import trial_steps

__all__ = ["LOCAL", "dry_run", "find_device", "is_device", "print_dry_run"]

NOTES = (
    "budget: deployed over dense parameters of the factorised layers; sizes are those of each layer's largest rank "
    "within it, with the slack that allocation expects. A run allocates other ranks within the same budget, and once "
    "RUN/chain.json has them they are counted.",
    "memory: weights, gradients, AdamW's states, activations kept to go back (of the weights' dtype; in a step of one "
    "batch gradients take their place), second moments, the base model's outputs that probe and consolidation keep, "
    "and those of a batch; on a CPU also buffers, hidden "
    "states between blocks and factors that wait to be written. No workspaces, texts, or the libraries themselves.",
    "operations: products of all layers with a matrix, lm_head too, of attention (its whole square), of moments "
    "and factorisations; no norms, softmaxes, loss or optimiser. The probe's are the most it may take; replayed "
    "blocks save about half.",
)
NO_PLAN = "hours and money: add `--gpu h100`, another GPU, or `--gpu local` for this machine."


def dry_run(config: RunConfig, device: Device | None = None, devices: int = 1) -> dict[str, Any]:
    """Counts what a run of this config would take; no weights or data are read, and nothing is written.

    Args:
        config: the run's configuration.
        device: adds `plan`, what the run takes on `devices` devices of this kind, hours included; see `plan_run`.
        devices: the number of devices, with one process each.

    Returns:
        A JSON object: layers, parameters and sizes, `moments` and `memory` of one process in bytes, `operations` of all
        processes by stage, `tokens` in all, and `notes`, which say what is counted.

    Raises:
        FlexrankError: the architecture cannot be built, has no layer to factorise, or cannot reach a budget; or
            `devices` is out of range.
    """
    if devices < 1:
        raise FlexrankError(f"--gpus is {devices}; it is a number of devices, 1 or more")
    architecture = build_architecture(config)
    require_reachable_budgets(config, architecture.shapes)
    moments = moment_bytes(architecture, config).values()
    memory = count_memory(architecture, _counted_config(config, device, devices), devices)
    per_step = config.distillation.batch_size * config.distillation.accumulation
    tokens = config.distillation.steps * per_step * architecture.tokens
    plan = {"plan": plan_run(architecture, config, memory, tokens, device, devices)} if device else {}
    return {
        "name": config.name,
        "model": config.model,
        "architecture": config.architecture,
        "class": type(architecture.teacher).__name__,
        "task": config.task,
        "dtype": config.dtype,
        "sample_tokens": architecture.tokens,
        "layers": _layer_rows(architecture),
        "dense": _dense_rows(architecture, config),
        "parameters": _parameters(architecture),
        "probe": {
            "layers": len(architecture.shapes),
            "levels": config.probe.levels,
            "candidates": sum(map(len, candidate_ranks(config, architecture.shapes).values())),
            "evaluations": operations.evaluations(architecture, config),
        },
        "budgets": _budget_rows(architecture, config),
        "moments": {"all": sum(moments), "largest_block": max(moments)},
        "memory": memory,
        "samples_per_step": per_step,
        "steps": config.distillation.steps,
        "tokens": tokens,
        "operations": _operations(architecture, config),
        **plan,
        "notes": _notes(architecture, config, plan_notes(plan["plan"]) if plan else [NO_PLAN]),
    }


def _counted_config(config: RunConfig, device: Device | None, devices: int) -> RunConfig:
    """The config of the process that takes most memory; `auto` is a CPU if no GPU is named and none is here."""
    is_cpu = config.device == "auto" and device is None and not torch.cuda.is_available()
    return busiest_process_config(config.model_copy(update={"device": "cpu"}) if is_cpu else config, devices)


def _operations(architecture: Architecture, config: RunConfig) -> dict[str, int]:
    counts = {
        "calibration": operations.calibration(architecture, config),
        "decomposition": operations.decomposition(architecture, config),
        "probe": operations.probe(architecture, config),
        "consolidation": operations.consolidation(architecture, config),
    }
    return counts | {"all": sum(counts.values())}


def _layer_rows(architecture: Architecture) -> list[dict[str, Any]]:
    """The factorised layers, grouped by shape and by name within a block."""
    rows: dict[Any, dict[str, Any]] = {}
    for name, shape in architecture.shapes.items():
        kind = split_block(name)[1]
        row = rows.setdefault((kind, shape), {"kind": kind, "shape": list(shape), "layers": 0, "parameters": 0})
        row["layers"] += 1
        row["parameters"] += shape[0] * shape[1]
    return list(rows.values())


def _dense_rows(architecture: Architecture, config: RunConfig) -> list[dict[str, Any]]:
    """The modules that stay dense, grouped by name and reason, then all other parameters; a tied tensor counts once."""
    rows: dict[Any, dict[str, Any]] = {}
    model = architecture.teacher
    counted = {id(model.get_submodule(name).weight) for name in architecture.shapes}
    for name, reason in dense_reasons(model, config.layers.include, config.layers.exclude).items():
        kind = split_block(name)[1]
        row = rows.setdefault((kind, reason), {"kind": kind, "reason": reason, "modules": 0, "parameters": 0})
        own = {id(p): p for p in model.get_submodule(name).parameters(recurse=False) if id(p) not in counted}
        counted |= own.keys()
        row["modules"] += 1
        row["parameters"] += sum(p.numel() for p in own.values())
    rest = sum(p.numel() for p in model.parameters() if id(p) not in counted)
    reason = "norms, biases and tokens of its own"
    return [*rows.values(), {"kind": "all else", "reason": reason, "modules": 0, "parameters": rest}]


def _parameters(architecture: Architecture) -> dict[str, int]:
    """Parameters of the factorised layers and of the whole model, dense and elastic, and the trained ones."""
    student = list(architecture.student.parameters())
    return {
        "layers": architecture.dense_parameters,
        "model": sum(p.numel() for p in architecture.teacher.parameters()),
        "factors": sum(min(shape) * sum(shape) for shape in architecture.shapes.values()),
        "elastic_model": sum(p.numel() for p in student),
        "trained": sum(p.numel() for p in student if p.requires_grad),
    }


def _budget_rows(architecture: Architecture, config: RunConfig) -> list[dict[str, Any]]:
    """The size at each budget, deployed with the expected slack, at the ranks of `Architecture.profile`."""
    dtype, share = config.deployed_dtype(architecture.file_dtype), rank_constraints(config)["slack_share"]
    others, rows = footprint(architecture.student, dtype), []
    for budget in config.allocation.budgets:
        ranks = architecture.profile(budget, share)
        layers = sum(expected_parameters(shape, ranks[name], share) for name, shape in architecture.shapes.items())
        row = {
            "budget": budget,
            "mean_rank": sum(ranks.values()) / len(ranks),
            "relative_size": layers / architecture.dense_parameters,
            "params_layers": layers,
            "params_model": others.other_parameters + layers,
            "bytes": others.other_bytes + layers * dtype.itemsize,
        }
        rows.append(row)
    return rows


def _notes(architecture: Architecture, config: RunConfig, more: Sequence[str]) -> list[str]:
    """What the figures mean, one line each."""
    notes, name = [*NOTES, *more], type(architecture.teacher).__name__
    if config.distillation.autocast == "auto":
        notes.append("distillation.autocast auto: outputs are counted in the model's dtype, twice those of bfloat16.")
    if steps := trial_steps(config):
        notes.append(
            f"distillation.learning_rate: not given, so 3 to 7 trials of {steps} steps find it; they are not counted."
        )
    if config.task == "embedding":
        notes.append("tokens: as if every text had data.max_tokens; batches are padded to their longest text only.")
    if config.task == "classification" and not name.endswith("Classification"):
        notes.append(f"{name} is an encoder: its classification head is not counted, and a run needs a model with one.")
    return notes
