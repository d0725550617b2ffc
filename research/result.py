"""The result of an experiment: tables, claims with their verdicts, and spreads, as JSON and as text.

A result is one JSON object; the figure, the printed tables and the pages are made from it alone:

    {"name", "title", "form", "command", "settings", "tables": [table(…)], "claims": [claim(…) or goal(…)],
     "data": what the figure needs, "seconds": of the last run, "machine"}

A table's cell is a text, a number, None, or the `spread(…)` of several seeds or repeats.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flexrank.errors import FlexrankError
from flexrank.files import read_json, require_keys

RESULT = "result.json"
KEYS = ("name", "title", "form", "command", "settings", "tables", "claims", "data", "seconds", "machine")
#: By the kind of claim: one of the paper, or a goal of ours.
VERDICTS = {
    "paper": {True: "agrees", False: "differs", None: "not comparable"},
    "goal": {True: "met", False: "missed", None: "not measured here"},
}

Result = dict[str, Any]
Cell = str | float | int | None | Mapping[str, float]


def read_result(directory: Path) -> Result:
    """Returns the result in a directory; raises FlexrankError if it is missing or is not a result."""
    path = directory / RESULT
    result = read_json(path)
    if not isinstance(result, dict):
        raise FlexrankError(f"{path}: no result of an experiment")
    require_keys(result, KEYS, str(path))
    return result


def measured(settings: Mapping[str, Any], tables: Sequence[Any], claims: Sequence[Any], data: Any) -> Result:
    """Returns the part of a result that an experiment's `run` provides."""
    return {"settings": settings, "tables": tables, "claims": claims, "data": data}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the mean, the sample standard deviation (0 for one value) and the count."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "sd": deviation, "n": len(values)}


def spreads(runs: Iterable[Sequence[float | None]]) -> list[dict[str, float] | None]:
    """Returns the spread over runs at each of their positions, without missing values; None if all are missing."""
    places = zip(*runs, strict=True)
    return [spread(values) if (values := [one for one in place if one is not None]) else None for place in places]


def between(values: Sequence[float], form: str = ".1%") -> str:
    """Formats values over seeds: their mean, and in brackets the least and the largest."""
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def by_budget(budgets: Sequence[float], values: Iterable[Sequence[float]], form: str = ".1%") -> str:
    """Formats the values at each budget by `between`."""
    return ", ".join(f"{budget:g} {between(of, form)}" for budget, of in zip(budgets, values, strict=True))


def behind(lost: Sequence[tuple[float, str, float]], measure: str) -> str:
    """Says at which sizes a rival is better, given as (size, rival, by how much), and where it is furthest ahead."""
    if not lost:
        return "behind at none"
    size, rival, most = max(lost, key=lambda one: one[2])
    sizes = " ".join(f"{one:g}" for one, *_ in lost)
    return f"behind at {sizes}; most at {size:g}, by {most:.2g} {measure} to {rival}"


def table(title: str, columns: Sequence[Any], rows: Sequence[Sequence[Any]], digits: Any = 3) -> dict[str, Any]:
    """Returns a table whose first column names the rows; columns are names or numbers such as budgets.

    `digits` is the number of digits after the point, or one such number for each column after the first.
    """
    assert all(len(row) == len(columns) for row in rows), title
    each = [digits] * (len(columns) - 1) if isinstance(digits, int) else list(digits)
    assert len(each) == len(columns) - 1, title
    names = [column if isinstance(column, str) else f"{column:g}" for column in columns]
    return {"title": title, "columns": names, "rows": [list(row) for row in rows], "digits": each}


def shown_rows(one: Mapping[str, Any]) -> list[list[str]]:
    """Returns a table's cells as text."""
    return [[str(row[0]), *map(shown, row[1:], one["digits"])] for row in one["rows"]]


def shown(cell: Cell, digits: int = 3) -> str:
    """Formats a cell: 1.234, 1.234 ± 0.005, 1.2e-08 where fixed digits would show zero, or – for None."""
    if cell is None:
        return "–"
    if isinstance(cell, str | int):
        return str(cell)
    if isinstance(cell, Mapping):
        mean, deviation = cell["mean"], cell["sd"]
        if cell["n"] == 1:
            return shown(mean, digits)
        is_tiny = mean != 0 and abs(mean) < 10**-digits
        return f"{mean:.1e} ± {deviation:.0e}" if is_tiny else f"{mean:.{digits}f} ± {deviation:.{digits}f}"
    return f"{cell:.1e}" if cell != 0 and abs(cell) < 10**-digits else f"{cell:.{digits}f}"


def claim(what: str, paper: str, here: str, holds: bool | None, why: str = "") -> dict[str, Any]:
    """Returns a claim of the paper beside our figure.

    `holds` is None if the two cannot be compared; `why` explains why they differ.
    """
    return {"what": what, "paper": paper, "here": here, "holds": holds, "why": "" if holds else why}


def goal(what: str, goal: str, here: str, holds: bool | None, why: str = "") -> dict[str, Any]:
    """Returns a goal of ours beside our figure; `holds` is None if this machine cannot measure it."""
    return {"what": what, "goal": goal, "here": here, "holds": holds, "why": why}


def claim_cells(one: Mapping[str, Any]) -> list[str]:
    """Returns a claim or goal as text: what it says, its figure, our figure and the verdict."""
    kind = "paper" if "paper" in one else "goal"
    return [one["what"], one[kind], one["here"], VERDICTS[kind][one["holds"]]]


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """Prints the tables, and each claim or goal beside our figure."""
    for one in result["tables"]:
        drawn = Table(*one["columns"], title=one["title"], box=None, padding=(0, 2), title_justify="left")
        for row in shown_rows(one):
            drawn.add_row(*row)
        console.print(drawn)
    for one in result["claims"]:
        what, figure, here, verdict = claim_cells(one)
        line = f"{what}: {'paper' if 'paper' in one else 'goal'} {figure}, here {here} ({verdict})"
        console.print(line + (f"; {one['why']}" if one["why"] else ""), markup=False, highlight=False, soft_wrap=True)
