"""Findings on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from research.findings import shown_rows, verdict


def print_table(one: Mapping[str, Any], console: Console) -> None:
    """Prints one table of a result."""
    drawn = Table(*one["columns"], title=one["title"], box=None, padding=(0, 2), title_justify="left")
    for row in shown_rows(one):
        drawn.add_row(*row)
    console.print(drawn)


def print_claims(result: Mapping[str, Any], console: Console) -> None:
    """Prints each claim of the paper, or goal of ours, beside what was found."""
    for one in result["claims"]:
        figure, word = verdict(one)
        kind = "paper" if "paper" in one else "goal"
        told = f"{one['what']}: {kind} {figure}, here {one['here']} ({word})"
        console.print(told + (f"; {one['why']}" if one["why"] else ""), markup=False, highlight=False, soft_wrap=True)
