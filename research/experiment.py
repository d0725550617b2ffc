"""The parts of every experiment: its description, the request it answers, and the ledger of its finished units.

A study reproduces a figure or table of the paper; a bench measures the package against a goal of ours or a rival.
"""

import dataclasses
import functools
import importlib
import json
import logging
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import flexrank
from flexrank.data.halves import Half
from flexrank.errors import FlexrankError
from flexrank.files import digest_json, read_json, write_json
from flexrank.run.config import RunConfig
from flexrank.run.directory import files_digest
from research.result import Result
from research.units import start, value_of

log = logging.getLogger("flexrank")

#: The sizes that experiments compare, as shares of the dense parameters.
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
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
#: Each uses its own models, or the model of a configuration. They take long, so they run only by name.
COMPARISONS = ("compare", "compare-trained", "ablation")
#: The paper's settings: every rank is a candidate, and slack is not counted.
EVERY_RANK: dict[str, Any] = {"min_saving": 0.0, "slack_share": 0.0}


@dataclasses.dataclass(frozen=True)
class Request:
    """How an experiment is to be run."""

    work: Path  #: the directory of finished parts, from which an interrupted experiment resumes
    full: bool = False  #: run the study at the paper's size instead of the quick form
    half: Half = "reporting"  #: the half of the held-out set that is scored; settings are chosen on the other
    seeds: int = 1
    config: RunConfig | None = None  #: the run's configuration, for an experiment that accepts any model
    model: str | None = None  #: which of a comparison's own models to run; None for all
    domain: Path | None = None  #: texts of a second domain, for `adaptation`; None for the study's default
    tasks: tuple[str, ...] = ()  #: lm-eval tasks on which a comparison also scores language models
    include_path: Path | None = None  #: a folder of lm-eval task files
    jobs: int = 1  #: parts of a comparison that run at once, each in its own process


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A study, a bench or a comparison."""

    name: str
    title: str
    shows: str
    minutes: float  #: of the quick form, on two cores
    run: Callable[[Request], Result]  #: returns `measured(…)`
    draw: Callable[[Mapping[str, Any]], Any] | None = None  #: makes a figure from a result's `data`
    paper: str = ""  #: what the paper says, and where; empty for a bench or a comparison
    full_minutes: float | None = None  #: None if there is only one form
    has_halves: bool = False  #: whether it reads a held-out set itself and scores half of it
    seeds: tuple[int, int] | None = None  #: defaults of the quick and the full form; None if nothing is random
    settings: Callable[[bool], dict[str, Any]] | None = None  #: maps `full` to a run's keys; set if any model will do
    needs: str = ""  #: an environment variable; without it `--benches` skips the experiment
    takes_config: bool = False  #: a comparison: for any configuration or --model, and its parts can run at once

    @property
    def kind(self) -> str:
        """`study`, `bench` or `comparison`."""
        return "study" if self.paper else "comparison" if self.takes_config else "bench"


def find_experiment(name: str) -> Experiment:
    """Returns the experiment of this name; raises FlexrankError if there is none."""
    if name not in STUDIES + BENCHES + COMPARISONS:
        known = ", ".join(STUDIES + BENCHES + COMPARISONS)
        raise FlexrankError(f"experiment {name!r} is unknown; it is one of {known}")
    package = "studies" if name in STUDIES else "benches"
    return importlib.import_module(f"research.{package}.{name.replace('-', '_')}").EXPERIMENT


@functools.cache
def _own_code() -> str:
    """SHA-256 of the code of flexrank and of all experiments."""
    roots = Path(flexrank.__file__).parent, Path(__file__).parent
    return files_digest(file for root in roots for file in sorted(root.rglob("*.py")))


class Ledger:
    """The finished units of a study, in one JSON file for each combination of settings, written after every unit.

    Units of other code, of flexrank or of the experiments, are not taken.
    """

    def __init__(self, work: Path, settings: Mapping[str, Any]):
        self.directory = work / digest_json({**settings, "code": _own_code()})[:16]
        self._path = self.directory / "units.json"
        self._units: dict[str, Any] = read_json(self._path)["units"] if self._path.is_file() else {}
        self._settings = dict(settings)

    def take(self, unit: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the unit's value (JSON), computing it from the arguments unless an earlier process has."""
        if unit not in self._units:
            value = json.dumps(compute(*arguments), allow_nan=False)
            self._units[unit] = json.loads(value)  # as a later process will read it
            write_json(self._path, {"settings": self._settings, "units": self._units})
        return self._units[unit]

    def take_all(self, units: Mapping[str, tuple[Any, ...]], compute: Callable[..., Any], jobs: int) -> dict[str, Any]:
        """Returns the values of `compute(*arguments)` by unit.

        Each missing unit runs in a fresh process, `jobs` of them at once; `jobs=0` runs them in this process.
        """
        if jobs == 0:
            return {name: self.take(name, compute, *arguments) for name, arguments in units.items()}
        missing = {name: arguments for name, arguments in units.items() if name not in self._units}
        waiting, running = list(reversed(missing.items())), dict[Any, tuple[str, BaseProcess]]()
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    name, arguments = waiting.pop()
                    receiver, process = start(compute, arguments)
                    running[receiver] = name, process
                for ready in wait(list(running)):
                    name, process = running.pop(ready)
                    self.take(name, value_of, ready, process)
                    log.info("done: %s; %d of %d are left", name, len(waiting) + len(running), len(missing))
        finally:  # after an error, nothing takes the values of those that still run
            for _, process in running.values():
                process.terminate()
                process.join()
        return {name: self._units[name] for name in units}

    def take_seeds(self, unit: str, seeds: int, compute: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns the values of `compute(*arguments, seed)`, one unit for each seed."""
        return [self.take(f"{unit}, seed {seed}", compute, *arguments, seed) for seed in range(seeds)]
