"""Runs an experiment and writes its result.json and its figure, each atomically."""

import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from flexrank.data.halves import HALVES, Half
from flexrank.deployment.machine import machine_facts
from flexrank.errors import FlexrankError
from flexrank.files import write_json
from flexrank.run.config import RunConfig, load_config, parse_config
from flexrank.run.directory import RunDirectory
from research import experiment as registry
from research.assets import VARIABLE, asset_path
from research.experiment import BENCHES, COMPARISONS, STUDIES, Experiment, Request
from research.figures import save_figure
from research.page import write_pages
from research.result import RESULT, Result, print_result

RESULTS = Path("results")
#: Finished parts, decompositions and trained networks, from which a later run of the same settings resumes.
WORK = Path("runs", "reproduce")


@dataclasses.dataclass(frozen=True)
class Options:
    """The command-line options that change an experiment."""

    full: bool = False
    model: str | None = None
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    seeds: int | None = None
    domain: Path | None = None
    output: Path | None = None
    half: str = "reporting"
    tasks: str | None = None
    include_path: Path | None = None
    jobs: int | None = None

    @property
    def has_own_config(self) -> bool:
        """Whether the model, data or settings differ from the study's own."""
        return bool(self.model or self.config or self.overrides)


def list_experiments() -> list[dict[str, Any]]:
    """Prints each experiment's cost and what it shows, and returns the same as JSON."""
    experiments = [registry.find_experiment(name) for name in STUDIES + BENCHES + COMPARISONS]
    drawn = Table("name", "minutes", "--full", "--model", "shows", "the paper", box=None, padding=(0, 2, 1, 0))
    for one in experiments:
        costs = ("" if minutes is None else f"{minutes:g}" for minutes in (one.minutes, one.full_minutes))
        drawn.add_row(
            one.name, *costs, "any" if one.settings else "own" if one.takes_config else "", one.shows, one.paper
        )
    _console().print(drawn)
    keys = ("name", "kind", "title", "shows", "paper", "minutes", "full_minutes")
    return [{key: getattr(one, key) for key in keys} | {"takes_model": one.settings is not None} for one in experiments]


def run_all(names: Sequence[str], options: Options) -> dict[str, Result]:
    """Runs the quick forms of these experiments one after the other; `seeds` is the only option that may be set."""
    if options != Options(seeds=options.seeds):
        raise FlexrankError("all experiments run as they are; only --seeds, --page and --json can be added")
    results = {}
    for name in names:
        one = registry.find_experiment(name)
        if one.needs and one.needs not in os.environ:
            say(f"{one.kind} {name} is left out: it needs {one.needs}")
        else:
            results[name] = run_named(name, options if one.seeds else Options())
    return results


def run_named(name: str, options: Options) -> Result:
    """Runs one experiment and prints its result."""
    experiment = registry.find_experiment(name)
    request = request_of(experiment, options)
    minutes = experiment.full_minutes if options.full else experiment.minutes
    say(f"{experiment.kind} {name}: about {minutes:g} minutes on two cores")
    output = options.output or RESULTS / _label(experiment, request, options)
    result = run_experiment(experiment, request, output, _command(experiment, options))
    print_result(result, _console())
    return result


def run_experiment(experiment: Experiment, request: Request, output: Path, command: str) -> Result:
    """Runs the experiment, writes result.json, NAME.png and NAME.svg into `output`, and returns the result."""
    import matplotlib  # noqa: F401  # without it the experiment would run in vain

    start = time.perf_counter()
    with RunDirectory(request.work).locked():
        measured = experiment.run(request)
    form = "full" if request.full else "quick"
    facts = {"name": experiment.name, "title": experiment.title, "form": form, "command": command}
    result = {**facts, **measured, "seconds": time.perf_counter() - start, "machine": machine_facts()}
    write_json(output / RESULT, result)
    if experiment.draw is not None:
        save_figure(experiment.draw, result["data"], output / experiment.name)
    return result


def request_of(experiment: Experiment, options: Options) -> Request:
    """Returns the experiment's request; raises FlexrankError for an option it does not take, a wrong key or value."""
    _require_fitting(experiment, options)
    seeds = options.seeds or (experiment.seeds[options.full] if experiment.seeds else 1)
    work = WORK / (experiment.name + f"-{options.half}" * (options.half != "reporting"))
    model, config = options.model if experiment.takes_config else None, _config(experiment, options)
    half, jobs = cast(Half, options.half), 1 if options.jobs is None else options.jobs
    tasks = tuple(one.strip() for one in (options.tasks or "").split(",") if one.strip())
    return Request(
        work, options.full, half, seeds, config, model, options.domain, tasks, options.include_path, jobs
    )  # fmt: skip


def _require_fitting(experiment: Experiment, options: Options) -> None:
    name, full, seeds, domain = f"{experiment.kind} {experiment.name!r}", options.full, options.seeds, options.domain
    wrong = {
        f"{name} has models of its own; --model, --config and --set do not apply":
            options.has_own_config and experiment.settings is None and not experiment.takes_config,
        f"{name} changes no key of its own models; give --set with --config":
            experiment.takes_config and options.overrides and not options.config,
        f"{name} takes one of its own models by --model, or another by --config, not both":
            experiment.takes_config and options.model and options.config,
        f"{name} has one form, which is the whole of it; leave --full out": full and experiment.full_minutes is None,
        "--full is a study's own larger setting; with --config, the config says the size": full and options.config,
        f"{name} has no second domain; --domain belongs to adaptation": domain and experiment.name != "adaptation",
        f"--domain {domain}: no such file or folder of texts": domain and not domain.exists(),
        f"--half is {options.half!r}; it is one of {', '.join(HALVES)}": options.half not in HALVES,
        f"{name} scores no half of a held-out set; leave --half out":
            options.half != "reporting" and not (experiment.has_halves or experiment.settings),
        "--half is of a study's own texts; with --config set data.half":
            options.half != "reporting" and options.config,
        f"{name} scores no tasks of lm-eval; --tasks is of a comparison with --config":
            options.tasks is not None and not (experiment.takes_config and options.config),
        "--tasks names no task; write them as arc_easy,piqa":
            options.tasks is not None and not options.tasks.strip(" ,"),
        "--include-path needs --tasks": options.include_path is not None and options.tasks is None,
        f"--jobs is {options.jobs}; {name} runs its parts one after the other, leave it out":
            options.jobs is not None and not experiment.takes_config,
        f"--jobs is {options.jobs}; it must be at least 1": options.jobs is not None and options.jobs < 1,
        f"--seeds is {seeds}; nothing in {name} is repeated by seeds, leave it out":
            seeds is not None and experiment.seeds is None,
        f"--seeds is {seeds}; it must be at least 1": seeds is not None and seeds < 1,
    }  # fmt: skip
    for message, is_so in wrong.items():
        if is_so:
            raise FlexrankError(message)


def _config(experiment: Experiment, options: Options) -> RunConfig | None:
    if experiment.takes_config:
        return load_config(options.config, options.overrides) if options.config else None
    if experiment.settings is None:
        return None
    model = [] if options.model is None else [f"model={options.model}", f"name={_name_of(options.model)}"]
    half = [] if options.half == "reporting" else [f"data.half={options.half}"]
    changes = [*model, *half, *options.overrides]
    if options.config is not None:
        return load_config(options.config, changes)
    config = parse_config(experiment.settings(options.full), experiment.name, changes)
    sources = {"model": config.model, "data.path": config.data.path, "data.held_out": config.data.held_out}
    for key, value in sources.items():
        if value is not None and asset_path() in Path(value).parents and not Path(value).exists():
            raise FlexrankError(f"{value}: missing; set {VARIABLE} to the folder that holds it, or give {key}")
    return config


def _name_of(model: str) -> str:
    """Returns a run's name for a model: the last part of its path, without characters that are not allowed in names."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).resolve().name).strip("-._") or "model"


def _label(experiment: Experiment, request: Request, options: Options) -> str:
    """Returns the name of the result's directory; other settings never overwrite the two forms on the pages."""
    parts = [experiment.name, *["full"] * options.full]
    if request.config is not None and options.has_own_config:
        parts.append(request.config.name)
    if request.model is not None:
        parts.append(request.model)
    usual = 0 if experiment.takes_config or not experiment.seeds else experiment.seeds[options.full]
    if options.seeds is not None and not 0 < usual <= options.seeds:  # more seeds are the same form, only better
        parts.append(f"seeds-{options.seeds}")
    if options.half != "reporting":
        parts.append(options.half)
    if options.domain is not None:
        parts.append(options.domain.stem)
    if options.tasks is not None:
        parts.append("tasks")
    return "-".join(parts)


def _command(experiment: Experiment, options: Options) -> str:
    """Returns the command that reproduces the result."""
    given = {"model": options.model, "config": options.config, "seeds": options.seeds, "domain": options.domain}
    given |= {"tasks": options.tasks, "include-path": options.include_path, "output": options.output}
    arguments = ["python", "-m", "research", experiment.name, *["--full"] * options.full]
    arguments += ["--half", options.half] * (options.half != "reporting")
    arguments += [argument for option, value in given.items() if value for argument in (f"--{option}", str(value))]
    return shlex.join([*arguments, *(argument for override in options.overrides for argument in ("--set", override))])


def refresh_pages() -> None:
    """Writes the pages, and says which results they lack."""
    for page, missing in write_pages(RESULTS).items():
        say(f"{page} written" + (f"; no results yet of {', '.join(missing)}" if missing else ""))


def say(text: str) -> None:
    """Prints one line to standard error."""
    print(text, file=sys.stderr, flush=True)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)
