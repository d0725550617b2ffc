"""Every key of a configuration has its stage: the first that runs again when the key changes, listed here by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from flexrank.run.config import RunConfig, load_config
from flexrank.run.runner import fingerprints

#: By the first stage that reads it, each key with another value than the run's; paths are below `sources`.
READ: dict[str, dict[str, Any]] = {
    "decompose": {
        "task": "embedding", "model": "embedding", "dtype": "bfloat16", "seed": 1,
        "data.source": "stdlib-docs", "data.path": "embedding/config.json", "data.held_out": "text.txt",
        "data.streaming": True, "data.column": "body", "data.subset": "small", "data.split": "test",
        "data.revision": "v1", "data.separator": "\n\n", "data.calibration": 32, "data.max_tokens": 16,
        "data.batch_size": 4, "layers.include": ("*mlp*",), "layers.exclude": ("*mlp*",),
        "decomposition.method": "datasvd", "probe.method": "curvature",
    },
    "probe": {
        "data.probe": 8, "probe.levels": 3, "probe.spacing": "ranks", "probe.target_bytes": 1000,
        "allocation.min_saving": 0.5, "allocation.method": "paper", "distillation.temperature": 2.0,
    },
    "allocate": {"allocation.savings": "ranks", "allocation.budgets": (0.6,)},
    "distill": {
        "data.training": 32, "data.shuffle_buffer": 10, "distillation.method": "paper", "distillation.steps": 4,
        "distillation.learning_rate": 1e-4, "distillation.warmup_steps": 2, "distillation.batch_size": 2,
        "distillation.accumulation": 2, "distillation.weights": (1.0, 2.0), "distillation.weight_decay": 0.1,
        "distillation.hidden_weight": 1.0, "distillation.autocast": "bfloat16", "distillation.optimizer": "adamw_8bit",
        "distillation.max_norm": 2.0, "distillation.top_k": 5,
    },
    "slack": {"deployment.dtype": "bfloat16", "deployment.slack": 3},
    "evaluate_initial": {"data.evaluation": 8, "data.half": "tuning"},
    "evaluate": {
        "device": "auto", "evaluation.latency": False, "evaluation.latency_batch_size": 2,
        "evaluation.latency_repeats": 5,
    },
    "deploy": {"deployment.budgets": (0.8,)},
    "report": {"name": "other"},
}  # fmt: skip
#: What changes no result: where a run is, what a dry run reads, and how memory and checkpoints are used.
UNREAD = {
    "output": "elsewhere", "architecture": "config.json", "decomposition.buffer_bytes": 2**20, "probe.replay_bytes": 0,
    "distillation.sharded": True, "distillation.gradient_checkpointing": True, "distillation.checkpoint_every": 1,
    "distillation.tracking": "tensorboard",
}  # fmt: skip


def keys(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)
        yield from keys(kind, f"{name}.") if is_section else [prefix + name]  # type: ignore[arg-type]


def changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    """The configuration with another value of a key, also one that does not go with the others."""
    section, _, name = key.rpartition(".")
    if not section:
        return config.model_copy(update={name: value})
    own = getattr(config, section)
    return config.model_copy(update={section: type(own).model_validate(own.model_dump() | needed(key) | {name: value})})


def needed(key: str) -> dict[str, Any]:
    """Other keys of its section, without which a key is refused."""
    return {"gradient_checkpointing": True} if key == "distillation.sharded" else {}


def test_every_key_has_its_place() -> None:
    listed = [key for values in (*READ.values(), UNREAD) for key in values]
    assert sorted(listed) == sorted(keys(RunConfig))


@pytest.mark.parametrize("stage", [*READ, None])
def test_a_key_makes_its_stage_the_first_to_run_again(stage: str | None, finished: Path, sources: Path) -> None:
    config = load_config(finished)
    before = fingerprints(config, config.model)
    for key, value in (UNREAD if stage is None else READ[stage]).items():
        one = changed(config, key, str(sources / value) if key in ("model", "data.path", "data.held_out") else value)
        after = fingerprints(one, one.model)
        assert next((name for name in before if before[name] != after[name]), None) == stage, key
