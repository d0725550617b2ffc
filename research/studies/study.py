"""What every study is made of: its description, what was asked of it, its finished units, and what it found.

A result is one JSON object; figure, printed table and page are drawn from it alone:

    {"study", "title", "form", "command", "settings", "tables": [table(…)], "claims": [claim(…)],
     "data": what the figure needs, "seconds": of the last run, "machine"}
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.files import read_json, write_json
from flexrank.run.config import RunConfig
from research.findings import Result

KEYS = ("study", "title", "form", "command", "settings", "tables", "claims", "data", "seconds", "machine")


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked of a study.

    Attributes:
        work: the directory of finished units, which an interrupted study goes on from.
        full: the paper's size of the study instead of the quick form.
        seeds: how many seeds; None for the study's own number.
        config: the model, data and settings of a study that runs on any model.
        domain: texts of a second domain, for `adaptation`; None for the study's own.
    """

    work: Path
    full: bool = False
    seeds: int | None = None
    config: RunConfig | None = None
    domain: Path | None = None


@dataclasses.dataclass(frozen=True)
class Study:
    """One figure or table of the paper.

    Attributes:
        name: as `flexrank reproduce` knows it.
        title: the figure's.
        shows: what it must show.
        paper: what the paper says, with its place there.
        minutes: of the quick form on two cores.
        run: a request to {"settings", "tables", "claims", "data"}.
        draw: a result's `data` to a figure.
        full_minutes: of the full form; None where `full` changes nothing.
        takes_model: whether it runs on any causal language model.
        settings: of those, the configuration of the study's own model: (full) to a mapping as in a YAML file.
    """

    name: str
    title: str
    shows: str
    paper: str
    minutes: float
    run: Callable[[Request], Result]
    draw: Callable[[Mapping[str, Any]], Any]
    full_minutes: float | None = None
    takes_model: bool = False
    settings: Callable[[bool], dict[str, Any]] | None = None


class Ledger:
    """The finished units of a study, in one JSON file for each setting of it, written after every unit."""

    def __init__(self, work: Path, settings: Mapping[str, Any]):
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self.directory = work / digest
        self._path = self.directory / "units.json"
        self._units: dict[str, Any] = read_json(self._path)["units"] if self._path.is_file() else {}
        self._settings = dict(settings)

    def take(self, unit: str, compute: Callable[[], Any]) -> Any:
        """The unit's value (JSON), computed if no earlier process did."""
        if unit not in self._units:
            self._units[unit] = json.loads(json.dumps(compute(), allow_nan=False))  # as a later process will read it
            write_json(self._path, {"settings": self._settings, "units": self._units})
        return self._units[unit]


def count_seeds(request: Request, quick: int, full: int) -> int:
    """How many seeds to run.

    Raises:
        FlexrankError: fewer than one were asked for.
    """
    if request.seeds is not None and request.seeds < 1:
        raise FlexrankError(f"--seeds is {request.seeds}; it must be at least 1")
    return request.seeds or (full if request.full else quick)
