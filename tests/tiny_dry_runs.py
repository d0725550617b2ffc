"""The configuration of a tiny run for a dry run, known by its architecture alone."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny
from flexrank.hf.models import save_config
from flexrank.nn.switch import nested_layers
from flexrank.profiles.costs import SLACK_SHARE
from flexrank.run.config import RunConfig, parse_config

BATCH, LENGTH = 3, 10

Build = Callable[[], Any]


def config_of(build: Build, place: Path, **more: Any) -> RunConfig:
    """A run of the tiny model, known by its config.json alone."""
    images = build in tiny.VISION
    task = "classification" if images else "embedding" if build is tiny.bert else "language"
    model = build()
    save_config(model, place)
    value: dict[str, Any] = {
        "name": "tiny", "task": task, "model": "nobody/nothing", "architecture": str(place / "config.json"),
        "data": {
            "source": "images" if images else "text", "path": "none", "max_tokens": LENGTH, "calibration": 2 * BATCH,
            "probe": 5, "batch_size": BATCH,
        },
        "probe": {"levels": 4}, "allocation": {"budgets": [0.9, 0.4]}, "deployment": {"budgets": []},
        "distillation": {"batch_size": BATCH, "accumulation": 2, "steps": 2},
    }  # fmt: skip
    for key, inner in more.items():
        value[key] = value.get(key, {}) | inner if isinstance(inner, dict) else inner
    return parse_config(value)


def batch_of(build: Build, rows: int = BATCH) -> Any:
    """A batch without padding."""
    generator = torch.Generator().manual_seed(0)
    if build in tiny.VISION:
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(3, tiny.VOCABULARY, (rows, LENGTH), generator=generator)}


def real(build: Build) -> Any:
    """The model on the CPU, with attention as plain products, which the counter sees."""
    torch.manual_seed(0)
    model = build()
    model.set_attn_implementation("eager")
    return model


def flops(run: Callable[[], Any]) -> int:
    """The operations that torch counts."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(one): one for one in tensors}.values())


def uniform(student: Any, budget: float, slack_share: float = SLACK_SHARE) -> tuple[dict[str, int], dict[str, int]]:
    """The largest rank of each layer within the budget, and its slack, by trying all ranks."""
    ranks, slack = {}, {}
    for name, layer in nested_layers(student).items():
        m, n = layer.matrix_shape
        slacks = {rank: math.ceil(slack_share * rank) for rank in range(1, min(m, n) + 1)}
        fitting = [rank for rank, p in slacks.items() if min(m * n, rank * (m + n - rank + p)) <= budget * m * n]
        ranks[name] = max(fitting)
        slack[name] = slacks[ranks[name]]
    return ranks, slack
