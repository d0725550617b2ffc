"""docs/results.md from the saved results: every number in it is read from a result.json."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.experiments import NAMES, find_study
from flexrank.experiments.study import RESULT, VERDICTS, Result, Study, read_result, shown_rows
from flexrank.storage import write_aside

_HEAD = """# The paper's evidence, reproduced

Made by `make results` from `results/*/result.json`; nothing in it is written by hand. Each study is one command; the
figures are drawn from the same files. ± is the standard deviation over seeds. *agrees* and *differs* are computed from
the numbers beside them.
"""


def write_page(results: Path, page: Path) -> list[str]:
    """Writes the page of all results under `results`; returns the studies that have none.

    Raises:
        FlexrankError: there is no result at all, or one is not whole.
    """
    sections, missing, overview = [], [], []
    for name in NAMES:
        study = find_study(name)
        directories = [path for path in (results / name, results / f"{name}-full") if (path / RESULT).is_file()]
        for path in directories:
            result = read_result(path / RESULT)
            sections.append(_section(study, result, path, page.parent))
            overview += [[_label(name, result), *_told(one)] for one in result["claims"]]
        missing += [] if directories else [name]
    if not sections:
        raise FlexrankError(f"{results}: holds no results; run flexrank reproduce NAME first")
    with write_aside(page) as aside:
        table = _markdown(["study", "claim", "paper", "here", ""], overview)
        aside.write_text("\n".join([_HEAD, table, "", *sections]), encoding="utf8")
    return missing


def _label(name: str, result: Mapping[str, Any]) -> str:
    return name + (" --full" if result["form"] == "full" else "")


def _told(one: Mapping[str, Any]) -> list[str]:
    return [one["what"], one["paper"], one["here"], VERDICTS[one["holds"]]]


def _section(study: Study, result: Result, directory: Path, beside: Path) -> str:
    full = result["form"] == "full"
    machine = result["machine"]
    where = ", ".join(
        [machine["processor"], f"{machine['threads']} threads", *([machine["gpu"]] if "gpu" in machine else [])]
    )
    facts = f"`{result['command']}` · {where}, torch {machine['torch']}"
    figure = Path(*[".."] * len(beside.parts)) / directory / f"{study.name}.png"
    parts = [
        f"## {study.title}" + (" (full)" if full else ""),
        f"Shows {study.shows}. The paper: {study.paper}.",
        facts,
        f"![{study.title}]({figure})",
        _claims(result["claims"]),
        *(f"{one['title']}\n\n{_markdown(one['columns'], shown_rows(one))}" for one in result["tables"]),
        f"Settings: {_settings(result['settings'])}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _claims(claims: Iterable[Mapping[str, Any]]) -> str:
    rows = [[*_told(one), one["why"]] for one in claims]
    return _markdown(["claim", "paper", "here", "", "why"], rows) if rows else ""


def _markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    drawn = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([drawn[0], "|" + "---|" * len(lines[0]), *drawn[1:]])


def _settings(settings: Mapping[str, Any]) -> str:
    return "; ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
