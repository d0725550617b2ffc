"""What a study or a benchmark found: tables, claims with their verdicts, spreads, as JSON and as text.

A table's cell is a text, a number, None, or `spread(…)` of what several seeds or repeats gave.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.files import read_json, require_keys

RESULT = "result.json"
#: By what a sentence is: a claim of the paper, or a goal of ours.
VERDICTS = {
    "paper": {True: "agrees", False: "differs", None: "not comparable"},
    "goal": {True: "met", False: "missed", None: "not measured here"},
}

Result = dict[str, Any]
Cell = str | float | int | None | Mapping[str, float]
Row = Sequence[Any]  # of cells


def read_result(path: Path, keys: Sequence[str]) -> Result:
    """A saved result, which holds these keys.

    Raises:
        FlexrankError: it is missing, or is no such result.
    """
    result = read_json(path)
    if not isinstance(result, dict):
        raise FlexrankError(f"{path}: no result of a study or benchmark")
    require_keys(result, tuple(keys), str(path))
    return result


def between(values: Sequence[float], form: str = ".1%") -> str:
    """Values over seeds as text: their mean, and in brackets the least and the largest."""
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


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
    assert len(each) == len(columns) - 1, title
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


def goal(what: str, goal: str, here: str, holds: bool | None, why: str = "") -> dict[str, Any]:
    """One goal of ours beside what was measured; `holds` None where this machine cannot measure it."""
    return {"what": what, "goal": goal, "here": here, "holds": holds, "why": why}


def verdict(one: Mapping[str, Any]) -> tuple[str, str]:
    """The figure that a claim or goal names, and the word for how ours compares with it."""
    kind = "paper" if "paper" in one else "goal"
    return one[kind], VERDICTS[kind][one["holds"]]
