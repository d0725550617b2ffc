"""The configuration of a tiny run for a dry run, known by its architecture alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from flexrank.hf.models import save_config
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
