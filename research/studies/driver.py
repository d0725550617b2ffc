"""Runs a study and writes what it found: result.json and the figure, each whole or not at all."""

import dataclasses
import functools
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flexrank.deployment.environment import assets_directory, machine_facts
from flexrank.errors import FlexrankError
from flexrank.files import write_json
from flexrank.run.config import RunConfig, load_config, parse_overridden
from flexrank.run.directory import RunDirectory
from research.findings import RESULT, Result
from research.findings.figures import save_figure
from research.findings.terminal import print_claims, print_table
from research.studies import NAMES, find_study
from research.studies.page import write_page
from research.studies.study import Request, Study

RESULTS = Path("results")
#: Finished units, decompositions and trained networks of studies; a later run of the same settings goes on from them.
WORK = Path("runs", "reproduce")


def reproduce(study: Study, request: Request, output: Path, command: str) -> Result:
    """Runs the study, writes result.json, NAME.png and NAME.svg into `output`, and returns the result.

    Raises:
        FlexrankError: as the study.
    """
    import matplotlib  # noqa: F401  # its absence is to be told before the study has run

    start = time.perf_counter()
    with RunDirectory(request.work).locked():
        found = study.run(request)
    facts = {"study": study.name, "title": study.title, "form": "full" if request.full else "quick", "command": command}
    result = {**facts, **found, "seconds": time.perf_counter() - start, "machine": machine_facts()}
    write_json(output / RESULT, result)
    save_figure(functools.partial(study.draw, result["data"]), output / study.name)
    return result


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What the command line asks of a study; see its options."""

    full: bool = False
    model: str | None = None
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    seeds: int | None = None
    domain: Path | None = None
    output: Path | None = None


def answer(name: str | None, listed: bool, every: bool, page: Path | None, wishes: Wishes) -> Any:
    """Lists the studies, or runs one or all and prints what they found; then writes the page.

    Returns:
        What `--json` prints: the list, the one result, or the results by name.

    Raises:
        FlexrankError: it is not said what to do, or an option does not fit it.
    """
    if listed:
        if name is not None or every or page is not None or wishes != Wishes():
            raise FlexrankError("--list tells all studies; it takes no other option but --json")
        studies = [find_study(one) for one in NAMES]
        _print_list(studies)
        return [_described(study) for study in studies]
    if (name is None) == (not every) and (every or page is None):
        raise FlexrankError("reproduce takes one study's NAME, or --all, or --list, or --page alone")
    if every and wishes != Wishes(seeds=wishes.seeds):
        raise FlexrankError("--all runs the quick forms as they are; it takes no option but --seeds, --page and --json")
    names = NAMES if every else () if name is None else (name,)
    found = {}
    for one in names:
        study = find_study(one)
        request = request_of(study, wishes)
        say(f"study {one}: about {_minutes(study, wishes.full)} minutes on two cores")
        place = wishes.output or RESULTS / _label(study, request, wishes)
        found[one] = reproduce(study, request, place, _command(study, wishes))
        print_result(found[one], Console(width=None if sys.stdout.isatty() else 160))
    if page is not None:
        missing = write_page(RESULTS, page)
        say(f"{page} written" + (f"; no results yet of {', '.join(missing)}" if missing else ""))
    return found[name] if name is not None else found


def request_of(study: Study, wishes: Wishes) -> Request:
    """The study's request: of those that take a model, with the configuration laid together and checked.

    Raises:
        FlexrankError: an option that the study does not take, or a wrong key or value.
    """
    given = wishes.model is not None or wishes.config is not None or bool(wishes.overrides)
    if given and not study.takes_model:
        raise FlexrankError(f"study {study.name!r} has a network of its own; --model, --config and --set do not apply")
    if wishes.full and study.full_minutes is None:
        raise FlexrankError(f"study {study.name!r} has one form, which is the whole of it; leave --full out")
    if wishes.full and wishes.config is not None:
        raise FlexrankError("--full is a study's own larger setting; with --config, the config tells the size")
    if wishes.domain is not None and study.name != "adaptation":
        raise FlexrankError(f"study {study.name!r} has no second domain; --domain belongs to adaptation")
    if wishes.domain is not None and not wishes.domain.exists():
        raise FlexrankError(f"--domain {wishes.domain}: no such file or folder of texts")
    if wishes.seeds is not None and wishes.seeds < 1:
        raise FlexrankError(f"--seeds is {wishes.seeds}; it must be at least 1")
    config = None
    if study.settings is not None:
        changes = [] if wishes.model is None else [f"model={wishes.model}", f"name={_name_of(wishes.model)}"]
        changes += wishes.overrides
        if wishes.config is not None:
            config = load_config(wishes.config, changes)
        else:
            config = parse_overridden(study.settings(wishes.full), changes, study.name)
            _require_assets(config)
    return Request(WORK / study.name, wishes.full, wishes.seeds, config, wishes.domain)


def _require_assets(config: RunConfig) -> None:
    """Sees that what a study reads by default is there, where the user gave nothing in its place."""
    assets = assets_directory()
    read = {"model": config.model, "data.path": config.data.path, "data.held_out": config.data.held_out}
    for key, value in read.items():
        if value is not None and assets in Path(value).parents and not Path(value).exists():
            raise FlexrankError(f"{value}: missing; set FLEXRANK_ASSETS to the folder that holds it, or give {key}")


def _name_of(model: str) -> str:
    """A run's name for a model: the last part of its own, of what may stand in a name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).resolve().name).strip("-._") or "model"


def _label(study: Study, request: Request, wishes: Wishes) -> str:
    """Where the result goes: the study's own two forms, which the page shows, are never written over by another."""
    parts = [study.name, *(["full"] if wishes.full else [])]
    if request.config is not None and (wishes.model or wishes.config or wishes.overrides):
        parts.append(request.config.name)
    if wishes.seeds is not None:
        parts.append(f"seeds-{wishes.seeds}")
    if wishes.domain is not None:
        parts.append(wishes.domain.stem)
    return "-".join(parts)


def _command(study: Study, wishes: Wishes) -> str:
    """The command that gives the result again."""
    given = {"--model": wishes.model, "--config": wishes.config, "--seeds": wishes.seeds, "--domain": wishes.domain}
    options = [f"{option} {value}" for option, value in given.items() if value is not None]
    options += [f"--set {override}" for override in wishes.overrides]
    return " ".join(["flexrank reproduce", study.name, *(["--full"] if wishes.full else []), *options])


def _minutes(study: Study, full: bool) -> str:
    return f"{study.full_minutes if full and study.full_minutes is not None else study.minutes:g}"


def _described(study: Study) -> dict[str, Any]:
    return {
        "name": study.name, "title": study.title, "shows": study.shows, "paper": study.paper,
        "minutes": study.minutes, "full_minutes": study.full_minutes, "takes_model": study.takes_model,
    }  # fmt: skip


def _print_list(studies: Sequence[Study]) -> None:
    drawn = Table("name", "minutes", "--full", "--model", "shows", "the paper", box=None, padding=(0, 2, 1, 0))
    for study in studies:
        full = "" if study.full_minutes is None else f"{study.full_minutes:g}"
        model = "any" if study.takes_model else ""
        drawn.add_row(study.name, f"{study.minutes:g}", full, model, study.shows, study.paper)
    Console(width=None if sys.stdout.isatty() else 160).print(drawn)


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """Prints the study's table, and each claim of the paper beside what was found."""
    print_table(result["tables"][0], console)
    print_claims(result, console)


def say(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)
