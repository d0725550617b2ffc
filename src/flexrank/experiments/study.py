"""What every study is made of: its description, what was asked of it, its finished units, and what it found.

A result is one JSON object; figure, printed table and page are drawn from it alone:

    {"study", "title", "form", "command", "settings", "tables": [table(…)], "claims": [claim(…)],
     "data": what the figure needs, "seconds": of the last run, "machine"}

A table's cell is a text, a number, None, or `spread(…)` of what several seeds gave.
"""

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.config import RunConfig
from flexrank.errors import FlexrankError
from flexrank.storage import read_json, require_keys, write_json

RESULT = "result.json"
KEYS = ("study", "title", "form", "command", "settings", "tables", "claims", "data", "seconds", "machine")
VERDICTS = {True: "agrees", False: "differs", None: "not comparable"}

Result = dict[str, Any]
Cell = str | float | int | None | Mapping[str, float]
Row = Sequence[Any]  # of cells


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


def read_result(path: Path) -> Result:
    """A saved result.

    Raises:
        FlexrankError: it is missing, or is no result of a study.
    """
    result = read_json(path)
    if not isinstance(result, dict):
        raise FlexrankError(f"{path}: no result of a study")
    require_keys(result, KEYS, str(path))
    return result


def between(values: Sequence[float], form: str = ".1%") -> str:
    """Values over seeds as text: their mean, and in brackets the least and the largest."""
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def count_seeds(request: Request, quick: int, full: int) -> int:
    """How many seeds to run.

    Raises:
        FlexrankError: fewer than one were asked for.
    """
    if request.seeds is not None and request.seeds < 1:
        raise FlexrankError(f"--seeds is {request.seeds}; it must be at least 1")
    return request.seeds or (full if request.full else quick)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (of a sample; 0 for one value) and number."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "sd": deviation, "n": len(values)}


def table(title: str, columns: Sequence[str], rows: Sequence[Row], digits: Any = 3) -> dict[str, Any]:
    """A table of a result; the first column names the rows.

    Args:
        title: what it shows.
        columns: names.
        rows: of as many cells.
        digits: after the point; one number, or one for each column after the first.
    """
    assert all(len(row) == len(columns) for row in rows), title
    each = [digits] * (len(columns) - 1) if isinstance(digits, int) else list(digits)
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows], "digits": each}


def shown_rows(one: Mapping[str, Any]) -> list[list[str]]:
    """A table's cells as text."""
    return [[str(row[0]), *map(shown, row[1:], one["digits"])] for row in one["rows"]]


def claim(what: str, paper: str, here: str, holds: bool | None, why: str = "") -> dict[str, Any]:
    """One sentence of the paper beside what was found; `holds` None where the two cannot be compared.

    Args:
        what: the claim.
        paper: its figure there.
        here: ours, as measured in this run.
        holds: whether ours agrees.
        why: of a difference, the reason as far as it was found.
    """
    return {"what": what, "paper": paper, "here": here, "holds": holds, "why": why}


def shown(cell: Cell, digits: int = 3) -> str:
    """A cell as text: 1.234, 1.234 ± 0.005, 1.2e-08 for what its digits do not show, or – for nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, Mapping):
        mean, deviation = cell["mean"], cell["sd"]
        if cell["n"] == 1:
            return shown(mean, digits)
        if mean != 0 and abs(mean) < 10**-digits:
            return f"{mean:.1e} ± {deviation:.0e}"
        return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
    if isinstance(cell, str | int):
        return str(cell)
    if cell != 0 and abs(cell) < 10**-digits:
        return f"{cell:.1e}"
    return f"{cell:.{digits}f}"
