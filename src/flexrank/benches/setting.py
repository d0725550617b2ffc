"""What the benches share: budgets, how a table is printed, and how a result is told."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.environment import machine_facts
from flexrank.storage import write_json

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> None:
    """Prints rows of numbers under columns on standard error, where it is not mixed with --json."""
    width = max(len(name) for name in rows)
    print(f"\n{title}\n{'':{width}}  " + "  ".join(f"{column:>7}" for column in columns), file=sys.stderr)
    for name, values in rows.items():
        cells = "  ".join("      –" if value is None else f"{value:7.4f}" for value in values)
        print(f"{name:{width}}  {cells}", file=sys.stderr, flush=True)


def finish(result: dict[str, Any], json_path: Path | None) -> dict[str, Any]:
    """Adds the machine to the result, writes it where a path is given, and returns it."""
    result["machine"] = machine_facts()
    if json_path is not None:
        write_json(json_path, result)
    return result
