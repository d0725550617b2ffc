"""The interactive page of one run or several: one HTML file that contains its data and needs no network."""

import html
import json
import shlex
import string
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from flexrank.files import read_json, write_text
from flexrank.run.figures import LABELS, LOWER_IS_BETTER
from flexrank.run.tables import ordered_layers, split_block

#: A tag at the top of page.html, by which `is_page` recognises a page.
MARK = b'<meta name="generator" content="flexrank">'


def write_page(runs: Sequence[Path], summaries: Sequence[Mapping[str, Any]], tables: Sequence[str], path: Path) -> None:
    """Writes the page of these run directories from their summaries and HTML tables; the whole file or nothing."""
    names = run_names(runs, summaries)
    data = {
        "runs": [_run(name, run, one) for name, run, one in zip(names, runs, summaries, strict=True)],
        "labels": LABELS,
        "lower": sorted(LOWER_IS_BETTER),
    }
    models = dict.fromkeys(str(summary["model"]) for summary in summaries)
    lead = ", ".join(f"<code>{html.escape(model)}</code>" for model in models)
    page = string.Template(_read("page.html")).substitute(
        title=html.escape(", ".join(names)), lead=f"Every size from one set of weights: {lead}",
        tables="\n".join(tables), style=_read("page.css"), script=_read("page.js"),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )  # fmt: skip
    write_text(path, page)


def is_page(path: Path) -> bool:
    """Whether this is a file that `write_page` wrote."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK in file.read(200)


def run_names(runs: Sequence[Path], summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The runs' names on a page: those of their configurations or, if two runs share a name, their directories."""
    names = [str(summary.get("name", summary["model"])) for summary in summaries]
    return names if len(set(names)) == len(names) else list(map(str, runs))


def _run(name: str, directory: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a run: sizes from small to large, and the sensitivity table if the run has one."""
    layers = ordered_layers(summary["layers"])
    split = [split_block(name) for name in layers]
    probe = directory / "sensitivity.json"
    table = read_json(probe) if probe.is_file() else None
    if table and table["ranks"].keys() != summary["layers"].keys():  # of a later probe, of other layers
        table = None
    return {
        "name": name, "directory": shlex.quote(str(directory)), "base": summary["base"], "layers": summary["layers"],
        "rows": sorted(summary["rows"], key=lambda row: row["budget"]),
        "blocks": list(dict.fromkeys(block for block, _ in split)),
        "modules": list(dict.fromkeys(module for _, module in split)),
        "sensitivity": table and {"ranks": table["ranks"], "errors": table["errors"]},
    }  # fmt: skip


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf8")
