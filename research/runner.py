"""Runs an experiment and writes its result.json and its figure, each whole or not at all."""

import dataclasses
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flexrank.deployment.machine import machine_facts
from flexrank.errors import FlexrankError
from flexrank.files import write_json
from flexrank.run.config import RunConfig, load_config, parse_config
from flexrank.run.directory import RunDirectory
from research import experiment as registry
from research.assets import VARIABLE, asset_path
from research.experiment import BENCHES, STUDIES, Experiment, Request
from research.figures import save_figure
from research.page import write_pages
from research.result import RESULT, Result, print_result

RESULTS = Path("results")
#: Finished parts, decompositions and trained networks; a later run of the same settings goes on from them.
WORK = Path("runs", "reproduce")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line that change an experiment."""

    full: bool = False
    model: str | None = None
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    seeds: int | None = None
    domain: Path | None = None
    output: Path | None = None


def list_experiments() -> list[dict[str, Any]]:
    """Prints each experiment's cost and what it shows; returns the same as JSON."""
    experiments = [registry.find_experiment(name) for name in STUDIES + BENCHES]
    drawn = Table("name", "minutes", "--full", "--model", "shows", "the paper", box=None, padding=(0, 2, 1, 0))
    for one in experiments:
        full = "" if one.full_minutes is None else f"{one.full_minutes:g}"
        drawn.add_row(one.name, f"{one.minutes:g}", full, "any" if one.settings else "", one.shows, one.paper)
    _console().print(drawn)
    keys = ("name", "kind", "title", "shows", "paper", "minutes", "full_minutes")
    return [{key: getattr(one, key) for key in keys} | {"takes_model": one.settings is not None} for one in experiments]


def run_all(names: Sequence[str], options: Options) -> dict[str, Result]:
    """Runs the quick forms of these experiments, one after the other.

    Raises:
        FlexrankError: an option is given that belongs to one experiment.
    """
    if options != Options(seeds=options.seeds):
        raise FlexrankError("all experiments run as they are; only --seeds, --page and --json can be added")
    results = {}
    for name in names:
        own = options if registry.find_experiment(name).seeds else Options()
        results[name] = run_named(name, own)
    return results


def run_named(name: str, options: Options) -> Result:
    """Runs one experiment and prints its result.

    Raises:
        FlexrankError: the experiment is unknown, or an option does not fit it.
    """
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
    import matplotlib  # noqa: F401  # without it nothing is to be run in vain

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
    """The experiment's request, with the configuration of one that takes a model.

    Raises:
        FlexrankError: an option that the experiment does not take, or a wrong key or value.
    """
    _require_fitting(experiment, options)
    seeds = experiment.seeds[options.full] if experiment.seeds else 1
    return Request(
        WORK / experiment.name, options.full, options.seeds or seeds, _config(experiment, options), options.domain
    )


def _require_fitting(experiment: Experiment, options: Options) -> None:
    name = f"{experiment.kind} {experiment.name!r}"
    if (options.model or options.config or options.overrides) and experiment.settings is None:
        raise FlexrankError(f"{name} has models of its own; --model, --config and --set do not apply")
    if options.full and experiment.full_minutes is None:
        raise FlexrankError(f"{name} has one form, which is the whole of it; leave --full out")
    if options.full and options.config is not None:
        raise FlexrankError("--full is a study's own larger setting; with --config, the config says the size")
    if options.domain is not None and experiment.name != "adaptation":
        raise FlexrankError(f"{name} has no second domain; --domain belongs to adaptation")
    if options.domain is not None and not options.domain.exists():
        raise FlexrankError(f"--domain {options.domain}: no such file or folder of texts")
    if options.seeds is not None and experiment.seeds is None:
        raise FlexrankError(f"--seeds is {options.seeds}; nothing in {name} is repeated by seeds, leave it out")
    if options.seeds is not None and options.seeds < 1:
        raise FlexrankError(f"--seeds is {options.seeds}; it must be at least 1")


def _config(experiment: Experiment, options: Options) -> RunConfig | None:
    if experiment.settings is None:
        return None
    model = [] if options.model is None else [f"model={options.model}", f"name={_name_of(options.model)}"]
    changes = [*model, *options.overrides]
    if options.config is not None:
        return load_config(options.config, changes)
    config = parse_config(experiment.settings(options.full), experiment.name, changes)
    _require_assets(config)
    return config


def _require_assets(config: RunConfig) -> None:
    """Checks that what a study reads by default is there, unless the user gave something in its place."""
    assets = asset_path()
    sources = {"model": config.model, "data.path": config.data.path, "data.held_out": config.data.held_out}
    for key, value in sources.items():
        if value is not None and assets in Path(value).parents and not Path(value).exists():
            raise FlexrankError(f"{value}: missing; set {VARIABLE} to the folder that holds it, or give {key}")


def _name_of(model: str) -> str:
    """A run's name for a model: the last part of its own, without characters that a name cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).resolve().name).strip("-._") or "model"


def _label(experiment: Experiment, request: Request, options: Options) -> str:
    """The directory of the result: other settings never write over the two forms that the pages show."""
    parts = [experiment.name, *(["full"] if options.full else [])]
    if request.config is not None and (options.model or options.config or options.overrides):
        parts.append(request.config.name)
    if options.seeds is not None:
        parts.append(f"seeds-{options.seeds}")
    if options.domain is not None:
        parts.append(options.domain.stem)
    return "-".join(parts)


def _command(experiment: Experiment, options: Options) -> str:
    """The command that gives the result again."""
    given = {"model": options.model, "config": options.config, "seeds": options.seeds, "domain": options.domain}
    words = [f"--{option} {value}" for option, value in given.items() if value is not None]
    words += [f"--set {override}" for override in options.overrides]
    return " ".join(["python -m research", experiment.name, *(["--full"] if options.full else []), *words])


def refresh_pages() -> Mapping[Path, Sequence[str]]:
    """Writes the pages, and says what they lack."""
    pages = write_pages(RESULTS)
    for page, missing in pages.items():
        say(f"{page} written" + (f"; no results yet of {', '.join(missing)}" if missing else ""))
    return pages


def say(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)
