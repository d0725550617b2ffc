"""Findings as Markdown: every number of a page is read from a saved result."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from research.findings import Result, shown_rows, verdict


def section(title: str, told: str, result: Result, figure: Path | None, claimed: tuple[str, str]) -> str:
    """One result as a section: what it is, its command and machine, figure, claims, tables and settings.

    Args:
        title: the heading.
        told: the sentence under it.
        result: with "command", "machine", "claims", "tables" and "settings".
        figure: the picture's path from the page, where there is one.
        claimed: headings of the claims' columns: what is claimed, and by whom.
    """
    parts = [
        f"## {title}",
        told,
        f"`{result['command']}` · {machine_line(result['machine'])}",
        "" if figure is None else f"![{title}]({figure})",
        _claims(result["claims"], claimed),
        *(f"{one['title']}\n\n{markdown(one['columns'], shown_rows(one))}" for one in result["tables"]),
        f"Settings: {_settings(result['settings'])}." if result["settings"] else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def beside(page: Path, path: Path) -> Path:
    """`path`, which is from the working directory as `page` is, as the page has to name it."""
    return Path(*[".."] * len(page.parent.parts)) / path


def machine_line(machine: Mapping[str, Any]) -> str:
    """Processor, threads, accelerator and torch in a few words."""
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    gpu = [machine["gpu"]] if "gpu" in machine else []
    return ", ".join([machine["processor"], threads, *gpu, f"torch {machine['torch']}"])


def told(one: Mapping[str, Any]) -> list[str]:
    """A claim's or goal's cells: what, its figure, ours, and the verdict."""
    figure, word = verdict(one)
    return [one["what"], figure, one["here"], word]


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    lines = [list(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    drawn = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([drawn[0], "|" + "---|" * len(lines[0]), *drawn[1:]])


def _claims(claims: Iterable[Mapping[str, Any]], claimed: tuple[str, str]) -> str:
    rows = [[*told(one), one["why"]] for one in claims]
    return markdown([*claimed, "here", "", "why"], rows) if rows else ""


def _settings(settings: Mapping[str, Any]) -> str:
    return "; ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
