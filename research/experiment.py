"""What every experiment is made of: its description, the request that it answers, and the ledger of its parts.

A study repeats a figure or table of the paper; a bench measures the package against a goal of ours or a rival.
"""

import dataclasses
import importlib
import json
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from flexrank.data.halves import Half
from flexrank.errors import FlexrankError
from flexrank.files import digest_json, read_json, write_json
from flexrank.run.config import RunConfig
from research.result import Result

#: In the order of the paper.
STUDIES = (
    "theory", "ranking", "front", "lm-profiles", "calibration-size", "layerwise", "joint-vs-single", "equal-budget",
    "vision", "adaptation", "gar",
)  # fmt: skip
#: Speed, stage by stage; then quality.
BENCHES = (
    "train", "calibrate", "decompose", "probe", "search", "saving", "memory", "larger", "start", "runtimes",
    "speculative", "cascade", "serving", "quantized", "sts", "language",
)  # fmt: skip
#: Each on models of its own, or on that of a configuration; they take long, and run by name alone.
COMPARISONS = ("compare", "compare-trained")
#: As the paper has it: every rank is a candidate, and no slack is counted.
EVERY_RANK: dict[str, Any] = {"min_saving": 0.0, "slack_share": 0.0}


@dataclasses.dataclass(frozen=True)
class Request:
    """How an experiment is to be run."""

    work: Path  #: of the finished parts, from which an interrupted experiment goes on
    full: bool = False  #: the paper's size of a study instead of the quick form
    half: Half = "reporting"  #: of the held-out set that is scored; settings are chosen on the other
    seeds: int = 1
    config: RunConfig | None = None  #: of a study that runs on any model
    model: str | None = None  #: of a comparison's own models the one to take; None for all
    domain: Path | None = None  #: texts of a second domain, for `adaptation`; None for the study's own
    tasks: tuple[str, ...] = ()  #: of lm-eval, that a comparison scores language models by too
    include_path: Path | None = None  #: a folder of task files
    jobs: int = 1  #: parts of a comparison that run at once, each in a process of its own


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A study or a bench."""

    name: str
    title: str
    shows: str
    minutes: float  #: of the quick form, on two cores
    run: Callable[[Request], Result]  #: gives `measured(…)`
    draw: Callable[[Mapping[str, Any]], Any] | None = None  #: a result's `data` to a figure
    paper: str = ""  #: what the paper says, with its place there; empty for a bench
    full_minutes: float | None = None  #: None where there is one form
    has_halves: bool = False  #: whether it scores half of a held-out set that it reads itself
    seeds: tuple[int, int] | None = None  #: of the quick form and the full one; None where nothing is random
    settings: Callable[[bool], dict[str, Any]] | None = None  #: (full) to a run's keys, where any model can be given
    has_jobs: bool = False  #: whether parts of it can run at once
    needs: str = ""  #: an environment variable, without which `--benches` leaves it out
    takes_config: bool = False  #: whether a configuration may stand in for models of its own, which --model names

    @property
    def kind(self) -> str:
        """`study`, `bench` or `comparison`."""
        return "study" if self.paper else "comparison" if self.takes_config else "bench"


def find_experiment(name: str) -> Experiment:
    """The experiment of this name; FlexrankError where there is none."""
    if name not in STUDIES + BENCHES + COMPARISONS:
        known = ", ".join(STUDIES + BENCHES + COMPARISONS)
        raise FlexrankError(f"experiment {name!r} is unknown; it is one of {known}")
    room = "studies" if name in STUDIES else "benches"
    return importlib.import_module(f"research.{room}.{name.replace('-', '_')}").EXPERIMENT


class Ledger:
    """The finished parts of a study, in one JSON file for each of its settings, written after every part."""

    def __init__(self, work: Path, settings: Mapping[str, Any]):
        self.directory = work / digest_json(settings)[:16]
        self._path = self.directory / "units.json"
        self._units: dict[str, Any] = read_json(self._path)["units"] if self._path.is_file() else {}
        self._settings = dict(settings)

    def take(self, unit: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        """The unit's value (JSON), computed from the arguments if no earlier process did."""
        if unit not in self._units:
            value = json.dumps(compute(*arguments), allow_nan=False)
            self._units[unit] = json.loads(value)  # as a later process will read it
            write_json(self._path, {"settings": self._settings, "units": self._units})
        return self._units[unit]

    def take_all(self, units: Mapping[str, tuple[Any, ...]], compute: Callable[..., Any], jobs: int) -> dict[str, Any]:
        """The values of `compute(*arguments)` by unit, each in a fresh process, `jobs` of them at once; 0 uses none."""
        missing = {name: arguments for name, arguments in units.items() if name not in self._units}
        if jobs == 0:
            return {name: self.take(name, compute, *arguments) for name, arguments in units.items()}
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
            futures = {pool.submit(compute, *arguments): name for name, arguments in missing.items()}
            try:
                for future in as_completed(futures):
                    self.take(futures[future], future.result)
            finally:  # after an error the others are not begun
                for future in futures:
                    future.cancel()
        return {name: self._units[name] for name in units}

    def take_seeds(self, unit: str, seeds: int, compute: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The values of `compute(*arguments, seed)`, each a unit by itself."""
        return [self.take(f"{unit}, seed {seed}", compute, *arguments, seed) for seed in range(seeds)]
