"""Comparisons of any model: what they take from the configuration of a run."""

import dataclasses
import logging
from collections.abc import Collection, Iterable

from flexrank.data.batches import Batch
from flexrank.data.halves import Half
from flexrank.errors import FlexrankError
from flexrank.run.config import RunConfig
from flexrank.run.data_config import Section
from flexrank.run.directory import RunDirectory
from flexrank.run.samples import load_samples
from flexrank.run.workspace import Workspace
from research.benches.quality import Subject
from research.benches.tasks import task_measure
from research.experiment import Request

log = logging.getLogger("flexrank")

#: What every comparison takes; one that trains takes more. Sections stand for all of their keys.
TAKEN = frozenset(
    {"name", "task", "model", "device", "seed", "data", "layers", "allocation.budgets", "probe.levels"}
    | {"distillation.temperature"}
)
#: Where a run's results go and what becomes of its sizes, which nobody expects a comparison to take.
OF_RUNS = frozenset({"output", "deployment", "evaluation"})


def require_comparable(config: RunConfig, request: Request, taken: Collection[str] = TAKEN) -> None:
    """Names the keys that are given and not `taken`; raises FlexrankError if the configuration cannot be taken."""
    if ignored := _ignored_keys(config, taken):
        log.warning("%s: a comparison does not use %s", config.name, ", ".join(ignored))
    if request.seeds > 1 and (config.data.source != "text" or config.data.is_stream):
        source = "a stream" if config.data.is_stream else repr(config.data.source)
        raise FlexrankError(f"data.source is {source}; only of 'text' in memory seeds draw another calibration")
    if config.layers.include is not None:
        raise FlexrankError("layers.include is set; a comparison takes all layers but those of layers.exclude")
    if config.data.half is not None:
        raise FlexrankError(f"data.half is {config.data.half}; leave it out, settings are tried on the tuning half")


def _ignored_keys(config: RunConfig, taken: Collection[str]) -> list[str]:
    keys = list[str]()
    for name in sorted(config.model_fields_set - {*taken, *OF_RUNS}):
        part = getattr(config, name)
        keys += [f"{name}.{key}" for key in sorted(part.model_fields_set)] if isinstance(part, Section) else [name]
    return [key for key in keys if key not in taken]


def config_subject(request: Request, config: RunConfig, seed: int, half: Half) -> tuple[Subject, Iterable[Batch]]:
    """Returns the configuration's model, in float32, scored on this half, and the batches to train on.

    The seed is added to the configuration's, but all seeds are scored on the same samples. On the tuning half lm-eval's
    tasks are not scored.
    """
    data = config.data.model_copy(update={"half": half})
    seeded = config.model_copy(update={"seed": config.seed + seed, "data": data})
    workspace = Workspace(seeded, RunDirectory(request.work))
    if seed:
        scored = load_samples(config.model_copy(update={"data": data}), workspace.tokenizer)
        workspace.samples = dataclasses.replace(workspace.samples, quality_function=scored.quality_function)
    base, samples = workspace.base.float(), workspace.samples
    measure = task_measure(workspace, request)[0] if half == "reporting" else workspace.measure_quality
    parts = samples.calibration, samples.probe, workspace.objective(), measure
    return Subject(base, *parts, config.layers.exclude), samples.training
