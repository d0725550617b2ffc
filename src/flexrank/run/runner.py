"""The stages of a run, their order, and which of them still have to run."""

import contextlib
import dataclasses
import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank import processes
from flexrank.distill.optimizer import torchao_optimizers
from flexrank.errors import FlexrankError
from flexrank.files import read_json
from flexrank.hf import models
from flexrank.profiles.costs import full_ranks
from flexrank.run import stages
from flexrank.run.candidates import rank_constraints
from flexrank.run.cards import write_card
from flexrank.run.config import DistillationConfig, RunConfig, load_config
from flexrank.run.directory import (
    RunDirectory,
    code_digest,
    data_identity,
    fingerprint,
    model_identity,
    require_apart,
    texts_identity,
)
from flexrank.run.sizes import Sizes, export_size
from flexrank.run.workspace import Workspace

log = logging.getLogger("flexrank")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of a run; for most stages the name is also a verb of the command line."""

    name: str
    work: Callable[[Workspace, str], Sequence[str] | None]  # takes the stage's fingerprint; may return more outputs
    modules: tuple[str, ...]  # modules and subpackages of flexrank whose code it runs, beside `_ALL`
    keys: tuple[str, ...]  # dotted keys of the configuration it reads, beside those of the stages it needs
    needs: tuple[str, ...]  # stages whose files it reads
    outputs: tuple[str, ...]  # files and directories that it writes in the run directory
    extras: tuple[str, ...] = ()  # others that it may write, which nothing reads
    is_shared: bool = False  # all processes run it; process 0 runs any other stage alone
    is_timed: bool = False  # its files hold timings: when it runs again, so do the stages that read them

    @property
    def code(self) -> str:
        """The digest of the code that it runs."""
        return code_digest((*_ALL, *self.modules))


#: Modules and subpackages whose code every stage runs.
_ALL = ("run/stages", "run/samples", "run/workspace", "hf", "data", "nn", "profiles", "processes")
_DEPLOYED = ("deployment.dtype", "deployment.slack")
_HELD_OUT = ("data.evaluation", "data.half")
#: Where models are kept changes only rounding, and logs and checkpoints change nothing: a run continues when these
#: keys change.
_UNREAD = ("sharded", "gradient_checkpointing", "tracking", "checkpoint_every")
_TRAINED = tuple(f"distillation.{key}" for key in DistillationConfig.model_fields if key not in _UNREAD)
#: Stages that only read the trained model: asking for one must not train it again.
_READ_ONLY_STAGES = ("slack", "evaluate", "deploy")
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
        "distill", stages.distill, ("distill", "artefacts", "run/training", "run/trials"),
        (*_TRAINED, "data.training", "data.shuffle_buffer"), ("decompose", "allocate"),
        ("elastic", "history.json"), is_shared=True,
    ),
    Stage("slack", stages.slack, ("deployment", "run/sizes"), _DEPLOYED, ("distill",), ("slack.json",)),
    Stage(
        "evaluate_initial", stages.evaluate_initial, (), (*_HELD_OUT, "deployment.dtype"),
        ("decompose", "allocate"), ("evaluation_initial.json",), is_shared=True,
    ),
    Stage(
        "evaluate", stages.evaluate, ("deployment", "run/sizes", "run/measure"),
        (*_HELD_OUT, "evaluation", "device"), ("slack",),
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
    """The names of the stages, in order."""
    return tuple(stage.name for stage in STAGES)


def run_stages(config: RunConfig, until: str = "report") -> Outcome:
    """Runs a stage and all that it needs, skipping what is up to date; after an interruption the same call resumes.

    Raises:
        FlexrankError: the input of a stage is wrong (stages finished before it stay), or a stage that only reads a
            trained model, such as `deploy`, would train it again.
    """
    if until not in ("decompose", "probe", "allocate"):  # now, not after hours of probing
        if config.needs_torchao:
            torchao_optimizers()
        if config.distillation.tracking == "tensorboard":
            import tensorboard  # noqa: F401

    directory = RunDirectory(config.directory)
    source = models.resolve_source(config.model)
    require_apart(config, source)
    wanted = _needed(until)
    executed, codes = list[str](), dict[str, str]()
    with _locked_with_config(directory, config) as old:
        work = Workspace(config, directory)
        prints = processes.on_first_process(lambda: fingerprints(config, source))
        if until in _READ_ONLY_STAGES:
            codes = processes.on_first_process(lambda: _codes_as_trained(directory, old, config, source, prints))
            prints = processes.on_first_process(lambda: fingerprints(config, source, codes)) if codes else prints
        for stage in STAGES:
            if stage.name not in wanted:
                continue
            if processes.on_first_process(functools.partial(directory.is_finished, stage.name, prints[stage.name])):
                log.info("%s: up to date", stage.name)
                continue
            _do(stage, work, prints[stage.name], codes.get(stage.name, stage.code))
            executed.append(stage.name)
        # Only now: a setting that is refused must not cost another one its checkpoint, nor may what only reads.
        if not codes:
            processes.on_first_process(lambda: directory.remove_stale(prints, wanted))
    return Outcome(directory.path, tuple(executed), work, prints)


def export_one(
    outcome: Outcome, limits: Mapping[str, Any], place: Path | None = None, tune: int = 0, refit: bool = False
) -> dict[str, Any]:
    """Exports one size of a consolidated run, verified in a fresh process.

    Args:
        outcome: what `run_stages(config, "slack")` returned.
        limits: `budget`, `max_params`, `max_bytes`, `max_latency_ms`; at least one.
        place: where to write; RUN/exports/LIMITS by default.
        tune: distillation steps of this size alone, before it is exported; the elastic artefact stays as it is.
        refit: fits this size alone by `refit_` instead, without training.

    Returns:
        The limits, the directory and the sizes; with `tune` or `refit` also this size's own `quality`, and `shared`,
        the quality with the shared weights. If the run is finished, its directory gets the model's card too.

    Raises:
        FlexrankError: no profile is within the limits, the full size is to be tuned or refitted though it is the base
            model, or the export does not load; nothing is written then.
    """
    work = outcome.workspace
    alone = [f"tune-{tune}"] * bool(tune) + ["refit"] * refit
    name = "-".join([*(f"{key}-{limit}" for key, limit in limits.items()), *alone])
    with work.directory.locked():
        # Then the summary's table is of these weights. Asked before anything is written: an edited summary is refused.
        is_reported = work.directory.is_finished("report", outcome.fingerprints["report"])
        sizes = Sizes(work)
        profile = sizes.within(limits)
        is_base = profile == full_ranks(sizes.shapes) and len(sizes.chain.requested) > 1
        if (refit or tune) and is_base and work.config.distillation.method == "balanced":
            option = "--refit" if refit else "--tune"
            raise FlexrankError(f"{option}: this size is the base model itself, which it would follow; leave it out")
        place, qualities = place or work.directory / "exports" / name, {}
        checkpoint = None
        if tune or refit:
            shared = work.measure_quality(sizes.deployed(profile))
            if refit:
                sizes.refit_(profile, limits)
            else:
                checkpoint = sizes.tune_(profile, tune, limits)
            qualities = {"shared": shared, "quality": work.measure_quality(sizes.deployed(profile))}
        work.free_base()
        exported = {**limits, **export_size(sizes, sizes.deployed(profile), profile, place), **qualities}
        if checkpoint is not None:
            shutil.rmtree(checkpoint)
            with contextlib.suppress(OSError):  # others that were interrupted may be there
                checkpoint.parent.rmdir()
        if is_reported:
            write_card(place, read_json(work.directory / "summary.json"), exported, tune, refit)
        return exported


def fingerprints(config: RunConfig, source: str, codes: Mapping[str, str] = {}) -> dict[str, str]:
    """Each stage's fingerprint, for stages in `codes` with the code of this digest in place of the present one.

    The first covers model and data files, the probe's also its part of `allocation`, and that of the evaluation before
    consolidation whether there is one.
    """
    sources = {"model": model_identity(source), "data": data_identity(config.data)}
    if config.data.held_out is not None:
        sources["held_out"] = texts_identity(config.data.held_out)
    read = {"decompose": sources, **_values_beside_keys(config)}
    prints = dict[str, str]()
    for stage in STAGES:
        prints[stage.name] = _fingerprint(stage, config, prints, codes, read.get(stage.name))
    return prints


def _values_beside_keys(config: RunConfig) -> dict[str, Any]:
    """What some stages depend on beside the keys that are theirs as a whole."""
    probed = rank_constraints(config) | {"is_printed": config.allocation.method == "paper"}
    return {"probe": probed, "evaluate_initial": bool(config.distillation.steps)}


def _fingerprint(
    stage: Stage, config: RunConfig, prints: Mapping[str, str | None], codes: Mapping[str, str], read: Any
) -> str:
    """A stage's fingerprint from those of the stages that it needs."""
    needs = [prints[name] or "" for name in stage.needs]
    return fingerprint(stage.name, config, stage.keys, needs, codes.get(stage.name) or stage.code, read)


def check_report(path: Path) -> None:
    """Raises FlexrankError if a run's summary or probe was edited; warns if stages have other settings since."""
    directory = RunDirectory(path)
    if not (path / "stages").is_dir() or not (path / "summary.json").is_file():  # one of them alone
        return
    config, codes = load_config(path), directory.codes()
    prints = {name: directory.fingerprint_of(name) for name in stage_names()}
    for name in ("probe", "report"):
        directory.require_unedited(name)
    read = _values_beside_keys(config)
    for stage in STAGES[1:]:  # the first reads model and data, which may be elsewhere now
        if prints[stage.name] != _fingerprint(stage, config, prints, codes, read.get(stage.name)):
            log.warning("%s: the table is of an earlier state of this run; `flexrank run` makes it again", path)
            return


def _codes_as_trained(
    directory: RunDirectory, old: RunConfig | None, config: RunConfig, source: str, prints: Mapping[str, str]
) -> dict[str, str]:
    """The `code_digest` of the stages that made the trained model, if other code of flexrank has: it is used as it is.

    Raises FlexrankError if the model would be trained again for another reason.
    """
    trained = directory.fingerprint_of("distill")
    if old is None or trained in (None, prints["distill"]) or not directory.is_finished("distill", trained):
        return {}
    codes = {stage: code for stage, code in directory.codes().items() if stage in _needed("distill")}
    if fingerprints(config, source, codes)["distill"] == trained:
        log.warning("%s was trained by other code of flexrank, and is used as it is", directory / "elastic")
        return codes
    keys = [key for stage in STAGES if stage.name in _needed("distill") for key in stage.keys]
    # The probe also depends on whether slack is expected, which is not among its keys.
    changed = _changed_keys(old, config, keys) or _changed_keys(old, config, ["deployment.slack"])
    files = f"the files of model {config.model} or of its data, which are looked for from the current directory"
    unknown = f"its config.yaml, flexrank's own code, or {files}, are not what they were"
    why, place = "; ".join(changed[:2]) or unknown, directory / "elastic"
    ways = f"set that back, train again by `flexrank run`, or use it as it is by `flexrank deploy {place}`"
    raise FlexrankError(f"{place}: would be trained again ({why}); {ways}")


def _changed_keys(old: RunConfig, config: RunConfig, keys: Sequence[str]) -> list[str]:
    """A phrase for each of these keys, or of the keys of a section, whose value differs."""
    before, now = ({key: value for one in keys for key, value in _values(each, one)} for each in (old, config))
    return [f"{key} is {now.get(key)!r} and was {value!r}" for key, value in before.items() if now.get(key) != value]


def _values(config: RunConfig, key: str) -> list[tuple[str, Any]]:
    value = functools.reduce(getattr, key.split("."), config)
    fields = getattr(type(value), "model_fields", None)
    return [(key, value)] if fields is None else [(f"{key}.{name}", getattr(value, name)) for name in fields]


@contextlib.contextmanager
def _locked_with_config(directory: RunDirectory, config: RunConfig) -> Iterator[RunConfig | None]:
    """Locks the run directory for process 0 and writes the configuration; yields the previous one there, or None."""
    if not processes.is_first():
        yield None
        return
    with directory.locked(), directory.keep_config(config) as old:
        yield old


def _do(stage: Stage, work: Workspace, fingerprint: str, code: str) -> None:
    """Runs a stage, in all processes if it is shared; process 0 alone records it."""
    if not stage.is_shared:
        processes.on_first_process(lambda: _do_and_record(stage, work, fingerprint, code))
        return
    if processes.is_first():
        _do_and_record(stage, work, fingerprint, code)
    else:
        stage.work(work, fingerprint)
    processes.on_first_process(lambda: None)  # the others wait until the last file is written


def _do_and_record(stage: Stage, work: Workspace, fingerprint: str, code: str) -> None:
    """Runs and records a stage; if its files hold timings, makes the stages that read them run again."""
    start = time.perf_counter()
    with work.directory.replacing(stage.name):
        more = stage.work(work, fingerprint) or ()
    seconds = time.perf_counter() - start
    for reader in STAGES if stage.is_timed else ():
        if stage.name in reader.needs:
            work.directory.forget(reader.name)
    work.directory.finish(stage.name, fingerprint, code, (*stage.outputs, *more), stage.extras, seconds)
    log.info("%s: done in %.1f s", stage.name, seconds)


def _needed(until: str) -> set[str]:
    """A stage and all that it needs, directly or indirectly."""
    (stage,) = (stage for stage in STAGES if stage.name == until)
    return {until}.union(*map(_needed, stage.needs))
