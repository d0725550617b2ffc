"""What every benchmark is made of: its description, what it measured, and what they share.

A result is one JSON object, from which figure, printed tables and `docs/performance.md` are drawn:

    {"bench", "title", "command", "settings", "tables": [findings.table(…)], "claims": [findings.goal(…)],
     "data": what the figure needs, "seconds", "machine"}
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from research.findings import Result

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
KEYS = ("bench", "title", "command", "settings", "tables", "claims", "data", "seconds", "machine")


@dataclasses.dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        name: as `flexrank bench` knows it.
        title: of its section and figure.
        measures: what, against what.
        minutes: on two cores.
        run: gives {"settings", "tables", "claims", "data"}; its argument is what `takes` names, or None.
        draw: a result's `data` to a figure; None where tables say it all.
        takes: what directory it needs; None for none.
        tried: what was tried for this stage and left out, a sentence each; figures are in docs/log.md.
    """

    name: str
    title: str
    measures: str
    minutes: float
    run: Callable[[Path | None], Result]
    draw: Callable[[Mapping[str, Any]], Any] | None = None
    takes: str | None = None
    tried: tuple[str, ...] = ()
