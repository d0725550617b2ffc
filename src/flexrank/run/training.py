"""How a run trains its elastic model: all sizes together, or one of them alone before it is exported."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank import processes
from flexrank.distill import Profiles, TrainingHistory, distill_, distillation_evaluator
from flexrank.hf import models
from flexrank.nn.sharding import is_sharded
from flexrank.nn.switch import use_profile
from flexrank.run.tracking import Track
from flexrank.run.workspace import Workspace

log = logging.getLogger("flexrank")
#: How far losses in float32 differ when the weights are equal, as those of the full model and of the base model are.
ROUNDING = 1e-6


def train_(
    work: Workspace,
    model: nn.Module,
    profiles: Profiles,
    steps: int,
    learning_rate: float,
    checkpoint: Path | None = None,
    weights: Any = None,
    on_step: Track | None = None,
    **options: Any,
) -> TrainingHistory:
    """Distils the base model into these profiles by the run's settings; warm-up takes the same share of the steps.

    `options` are passed to `distill_` in place of the run's settings; with another objective the forward passes are
    not set up for the run's own.
    """
    settings = work.config.distillation
    own = {
        "method": settings.method, "objective": work.objective(settings.weight_of_hidden_states, settings.top_k),
        "warmup_steps": round(steps * min(0.5, settings.warmup_steps / settings.steps)) if settings.steps else 0,
        "weight_decay": settings.weight_decay, "accumulation": settings.accumulation, "max_norm": settings.max_norm,
        "autocast": autocast_dtype(settings.autocast, work.device), "optimizer": settings.optimizer,
        "gradient_checkpointing": settings.gradient_checkpointing, "seed": work.config.seed,
        "checkpoint": checkpoint, "checkpoint_every": settings.checkpoint_every,
    }  # fmt: skip
    with contextlib.nullcontext() if "objective" in options else forward_settings(work, model):
        return distill_(
            model, work.base, work.samples.training, profiles, steps=steps, learning_rate=learning_rate,
            weights=weights, on_step=on_step, **own | options,
        )  # fmt: skip


def forward_settings(work: Workspace, model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The context of training: eager attention for embedding on a CPU, hidden states where the loss follows them."""
    if work.config.task == "embedding" and work.device.type == "cpu":
        return models.eager_attention(model)
    if work.config.task == "language" and work.config.distillation.weight_of_hidden_states:
        return models.hidden_states(model, work.base)
    return contextlib.nullcontext()


def probe_losses(work: Workspace, model: nn.Module, profiles: Sequence[Mapping[str, int]]) -> list[float]:
    """The distillation loss at each profile, averaged over the probe's samples."""
    evaluate = distillation_evaluator(work.base, work.samples.probe, work.probe_objective)
    losses = [0.0] * len(profiles)
    for number in range(len(profiles)) if is_sharded(model) else processes.share(len(profiles)):
        with use_profile(model, profiles[number]):
            losses[number] = evaluate(model)
    return losses if is_sharded(model) else processes.sums(*losses)


def log_degraded_sizes(budgets: Sequence[float], before: Sequence[float], after: Sequence[float]) -> None:
    """Logs in one line which sizes are further from the base model than before consolidation."""
    worse = [
        f"{budget:g}" for budget, old, new in zip(budgets, before, after, strict=True) if not new <= old + ROUNDING
    ]
    if worse:
        log.info("distill: further from the base model than before, on the probe's samples: %s", ", ".join(worse))
    else:
        log.info("distill: no size is further from the base model than before, on the probe's samples")


def autocast_dtype(choice: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype of consolidation: `auto` is bfloat16 if the hardware has it, otherwise None: no autocast."""
    if choice == "auto":
        if device.type == "cuda":
            has_units = torch.cuda.is_bf16_supported()
        else:
            # Older versions of torch cannot tell.
            features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
            has_units = bool(features.get("avx512_bf16") or features.get("amx_bf16"))
        choice = "bfloat16" if has_units else "off"
    return torch.bfloat16 if choice == "bfloat16" else None
