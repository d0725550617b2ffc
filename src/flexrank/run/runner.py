"""Which stages there are, in what order, and which of them a run must still do."""

import contextlib
import dataclasses
import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flexrank import processes
from flexrank.distill.optimizer import torchao_optimizers
from flexrank.errors import FlexrankError
from flexrank.files import read_json
from flexrank.hf import models
from flexrank.run import stages
from flexrank.run.candidates import rule
from flexrank.run.cards import write_card
from flexrank.run.config import DistillationConfig, RunConfig
from flexrank.run.directory import RunDirectory, data_identity, fingerprint, identity, model_identity
from flexrank.run.sizes import Sizes, export_size
from flexrank.run.workspace import Workspace

log = logging.getLogger("flexrank")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of a run, by its name on the command line."""

    name: str
    work: Callable[[Workspace, str], Sequence[str] | None]  # takes the stage's fingerprint; may return more outputs
    rooms: tuple[str, ...]  # of the package, whose code it alone runs
    keys: tuple[str, ...]  # of the configuration, dotted, beside those of the stages it needs
    needs: tuple[str, ...]  # stages whose files it reads
    outputs: tuple[str, ...]  # files and directories of the run directory
    extras: tuple[str, ...] = ()  # what it may write beside them, which nothing reads
    is_shared: bool = False  # all processes do it; any other stage process 0 does alone
    is_timed: bool = False  # its files hold times: when it is done again, so are the stages that read them


#: Rooms whose code every stage runs; `rooms` of a stage are those beside them.
_ALL = ("run/stages", "run/samples", "run/workspace", "hf", "data", "nn", "profiles", "processes")
_DEPLOYED = ("deployment.dtype", "deployment.slack")
_HELD_OUT = ("data.evaluation", "data.half")
#: Where models are kept changes nothing but rounding, and what is logged nothing: a run goes on with other settings.
_UNREAD = ("sharded", "gradient_checkpointing", "tracking")
_TRAINED = tuple(f"distillation.{key}" for key in DistillationConfig.model_fields if key not in _UNREAD)
#: Stages that read what training made, and are asked for that alone.
_READERS = ("slack", "evaluate", "deploy")
_DATA = (
    *("data.source", "data.path", "data.streaming", "data.column", "data.subset", "data.split", "data.revision"),
    *("data.separator", "data.max_tokens", "data.batch_size", "data.calibration"),
)
STAGES = (
    Stage(
        "decompose", stages.decompose, ("artefacts", "calibrate", "decompose", "probe/curvature", "distill/objectives"),
        ("model", "task", "dtype", "seed", *_DATA, "layers", "decomposition.method", "probe.method"), (),
        ("elastic_initial", stages.CURVATURE), is_shared=True,
    ),
    Stage(
        "probe", stages.probe, ("probe", "distill", "run/candidates", "run/targets"),
        (
            *("data.probe", "probe.method", "probe.levels", "probe.spacing", "probe.target_bytes"),
            "distillation.temperature",
        ),
        ("decompose",), ("sensitivity.json",), is_shared=True,
    ),
    Stage("allocate", stages.allocate, ("allocate", "run/candidates"), ("allocation",), ("probe",), ("chain.json",)),
    Stage(
        "distill", stages.distill, ("distill", "artefacts", "run/training"),
        (*_TRAINED, "data.training", "data.shuffle_buffer"), ("decompose", "allocate"),
        ("elastic", "history.json"), is_shared=True,
    ),
    Stage("slack", stages.slack, ("deployment", "run/sizes"), _DEPLOYED, ("distill",), ("slack.json",)),
    Stage(
        "evaluate_initial", stages.evaluate_initial, (), (*_HELD_OUT, "distillation.steps"),
        ("decompose", "allocate"), ("evaluation_initial.json",), is_shared=True,
    ),
    Stage(
        "evaluate", stages.evaluate, ("deployment", "run/sizes", "run/measure"), (*_HELD_OUT, "evaluation"), ("slack",),
        ("evaluation.json",), is_timed=True, is_shared=True,
    ),
    Stage(
        "deploy", stages.export_all, ("artefacts", "deployment", "run/sizes"),
        ("deployment", "evaluation.latency_batch_size", *_HELD_OUT), ("slack",), ("deployed.json",),
    ),
    Stage(
        "report", stages.summarise, ("run",), ("name",), ("evaluate_initial", "evaluate", "deploy"),
        ("summary.json",), ("figures", "report.md", "report.html", "elastic/README.md"),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run did: the stages that ran, in order, and the fingerprint of each stage, run or up to date."""

    directory: Path
    executed: tuple[str, ...]
    workspace: Workspace
    fingerprints: Mapping[str, str]


def stage_names() -> tuple[str, ...]:
    """The stages in order."""
    return tuple(stage.name for stage in STAGES)


def run_stages(config: RunConfig, until: str = "report") -> Outcome:
    """Runs a stage and all it needs, each only where it is not up to date; after an interruption the same call resumes.

    Raises:
        FlexrankError: a wrong input of any stage; what was finished before it stays. Or a stage that only reads a
            trained model, such as `deploy`, would train it again.
    """
    if until not in ("decompose", "probe", "allocate"):  # now, not after hours of probing
        if config.needs_torchao:
            torchao_optimizers()
        if config.distillation.tracking == "tensorboard":
            import tensorboard  # noqa: F401

    directory = RunDirectory(config.directory)
    source = models.resolve_source(config.model)
    wanted = _needed(until)
    executed: list[str] = []
    with _held(directory, config) as old:
        work = Workspace(config, directory)
        prints = processes.by_first(lambda: fingerprints(config, source))
        if until in _READERS:
            processes.by_first(lambda: _require_as_trained(directory, old, config, prints))
        for stage in STAGES:
            if stage.name not in wanted:
                continue
            if processes.by_first(functools.partial(directory.is_finished, stage.name, prints[stage.name])):
                log.info("%s: up to date", stage.name)
                continue
            _do(stage, work, prints[stage.name])
            executed.append(stage.name)
        # Not before: a refused setting must not cost another's checkpoint.
        processes.by_first(lambda: directory.remove_stale(prints))
    return Outcome(directory.path, tuple(executed), work, prints)


def export_one(outcome: Outcome, limits: Mapping[str, Any], place: Path | None = None, tune: int = 0) -> dict[str, Any]:
    """Exports one size of a consolidated run, verified in a fresh process.

    Args:
        outcome: of `run_stages(config, "slack")`.
        limits: `budget`, `max_params`, `max_bytes`, `max_latency_ms`; at least one.
        place: where to write; RUN/exports/LIMITS by default.
        tune: steps of distillation of this size alone, before it is exported; the elastic artefact stays as it is.

    Returns:
        What was asked, where it is, its sizes; with `tune` its `quality`, tuned, and that of the `shared` weights.
        Beside the model is its card, if the run is finished.

    Raises:
        FlexrankError: no profile is within the limits, or the export does not load; nothing is written then.
    """
    work = outcome.workspace
    name = "-".join(f"{key}-{limit}" for key, limit in (*limits.items(), *[("tune", tune)] * bool(tune)))
    with work.directory.locked(), _clear_disk_errors(work, "deploy"):
        # Whose table is of these weights; asked before anything is written, for an edited summary is refused.
        is_reported = work.directory.is_finished("report", outcome.fingerprints["report"])
        sizes = Sizes(work)
        profile = sizes.within(limits)
        place, qualities = place or work.directory / "exports" / name, {}
        if tune:
            shared = work.judge(sizes.deployed(profile))
            checkpoint = sizes.tune_(profile, tune, limits)
            qualities = {"shared": shared, "quality": work.judge(sizes.deployed(profile))}
        work.release()
        exported = {**limits, **export_size(sizes, sizes.deployed(profile), profile, place), **qualities}
        if tune:
            shutil.rmtree(checkpoint)
        if is_reported:
            write_card(place, read_json(work.directory / "summary.json"), exported, tune)
        return exported


def fingerprints(config: RunConfig, source: str) -> dict[str, str]:
    """Each stage's fingerprint; the first covers the files of model and data, the probe's its part of `allocation`."""
    sources = {"model": model_identity(source), "data": data_identity(config.data)}
    if config.data.held_out is not None:
        sources["held_out"] = identity(config.data.held_out)
    probed = rule(config) | {"is_printed": config.allocation.method == "paper"}
    read, prints = {"decompose": sources, "probe": probed}, dict[str, str]()
    for stage in STAGES:
        needs = [prints[name] for name in stage.needs]
        prints[stage.name] = fingerprint(
            stage.name, config, stage.keys, needs, (*_ALL, *stage.rooms), read.get(stage.name)
        )
    return prints


def _require_as_trained(
    directory: RunDirectory, old: RunConfig | None, config: RunConfig, prints: Mapping[str, str]
) -> None:
    """Refuses to replace a trained model for the sake of a stage that reads it."""
    trained = directory.fingerprint_of("distill")
    if old is None or trained in (None, prints["distill"]) or not directory.is_finished("distill", trained):
        return
    keys = [key for stage in STAGES if stage.name in _needed("distill") for key in stage.keys]
    # What the probe counts on of slack is no key of its own.
    changed = _changed_keys(old, config, keys) or _changed_keys(old, config, ["deployment.slack"])
    why = "; ".join(changed[:2]) or "flexrank's own code, or the files of the model or the data, are not as they were"
    place, ways = directory / "elastic", "`flexrank run` trains again, and `flexrank deploy"
    raise FlexrankError(f"{place}: would be trained again ({why}); {ways} {place}` takes it as it is")


def _changed_keys(old: RunConfig, config: RunConfig, keys: Sequence[str]) -> list[str]:
    """In words the keys, or those of a section, whose values differ."""
    before, now = ({key: value for one in keys for key, value in _values(each, one)} for each in (old, config))
    return [f"{key} is {now.get(key)!r} and was {value!r}" for key, value in before.items() if now.get(key) != value]


def _values(config: RunConfig, key: str) -> list[tuple[str, Any]]:
    value = functools.reduce(getattr, key.split("."), config)
    fields = getattr(type(value), "model_fields", None)
    return [(key, value)] if fields is None else [(f"{key}.{name}", getattr(value, name)) for name in fields]


@contextlib.contextmanager
def _held(directory: RunDirectory, config: RunConfig) -> Iterator[RunConfig | None]:
    """Inside the block the run directory is process 0's, and has this configuration; gives that the one before."""
    if not processes.is_first():
        yield None
        return
    with directory.locked(), directory.keep_config(config) as old:
        yield old


def _do(stage: Stage, work: Workspace, fingerprint: str) -> None:
    """Runs a stage, in all processes if it is a shared one; process 0 alone keeps its record."""
    if not stage.is_shared:
        processes.by_first(lambda: _do_and_record(stage, work, fingerprint))
        return
    if processes.is_first():
        _do_and_record(stage, work, fingerprint)
    else:
        stage.work(work, fingerprint)
    processes.by_first(lambda: None)  # the others wait for the last file


def _do_and_record(stage: Stage, work: Workspace, fingerprint: str) -> None:
    """Runs a stage; where its files hold times, forgets the stages that read them."""
    start = time.perf_counter()
    with work.directory.replacing(stage.name), _clear_disk_errors(work, stage.name):
        more = stage.work(work, fingerprint) or ()
    seconds = time.perf_counter() - start
    for reader in STAGES if stage.is_timed else ():
        if stage.name in reader.needs:
            work.directory.forget(reader.name)
    work.directory.finish(stage.name, fingerprint, (*stage.outputs, *more), stage.extras, seconds)
    log.info("%s: done in %.1f s", stage.name, seconds)


@contextlib.contextmanager
def _clear_disk_errors(work: Workspace, stage: str) -> Iterator[None]:
    """Turns what safetensors raises on a full disk, an error of its own kind, into one line."""
    try:
        yield
    except SafetensorError as error:
        raise FlexrankError(f"{work.directory.path}: {stage} cannot write its tensors ({error})") from error


def _needed(until: str) -> set[str]:
    """A stage and all that it needs, directly or not."""
    (stage,) = (stage for stage in STAGES if stage.name == until)
    return {until}.union(*map(_needed, stage.needs))
