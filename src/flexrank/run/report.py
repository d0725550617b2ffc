"""A run's table and pages, from its saved JSON files alone: any machine that has the files can draw them again."""

import html
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flexrank.artefacts.cards import table
from flexrank.errors import FlexrankError
from flexrank.files import read_json, require_keys, write_text
from flexrank.run.figures import LABELS, Summary, draw_figures
from flexrank.run.page import run_names, write_page
from flexrank.run.tables import count, new_table, print_line

log = logging.getLogger("flexrank")


def read_summary(directory: str | Path) -> dict[str, Any]:
    """Reads `summary.json` of a run directory.

    Raises:
        FlexrankError: the run has no summary yet, or the file is not one.
    """
    path = Path(directory) / "summary.json"
    if not path.is_file():
        raise FlexrankError(f"{path}: no such file; `flexrank run` writes it")
    summary = read_json(path)
    require_keys(summary, ("model", "base", "rows", "layers"), str(path))
    return summary


def write_report(directory: str | Path) -> list[Path]:
    """Writes report.md, report.html and, if matplotlib is installed, figures/*.png and .svg; returns all but the .svg.

    All are drawn from the run's summary, the page also from its sensitivity table; it needs nothing but a browser.

    Raises:
        FlexrankError: there is no summary.
    """
    directory = Path(directory)
    summary = read_summary(directory)
    figures = list[Path]()
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no figures are drawn: they need matplotlib, pip install 'flexrank[report]'; the page has them too")
    else:
        figures = draw_figures(summary, directory / "figures")
    text, page = directory / "report.md", directory / "report.html"
    write_text(text, _markdown(summary, figures))
    write_comparison([directory], page)
    return [*figures, text, page]


def write_comparison(directories: Sequence[Path], page: Path) -> None:
    """Writes one page of these finished runs, side by side. Raises as `read_summary`."""
    summaries = [read_summary(directory) for directory in directories]
    names = run_names(directories, summaries)
    tables = [_html_table(*each, number) for number, each in enumerate(zip(summaries, names, strict=True))]
    write_page(directories, summaries, tables, page)


def print_table(summary: Summary, console: Console) -> None:
    """Prints the table: the base model's row, then one row per budget."""
    header, rows = table_cells(summary)
    title = f"{summary.get('name', summary['model'])}: every size from one set of weights"
    shown = new_table(header, left=header[:1], title=title)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    print_line(console, note(summary))


def table_cells(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """The table as text: its header, and its rows, the base model first."""
    base = summary["base"]
    names = list(base["quality"])
    header = ["budget", "mean rank", "params, layers", "params, model", "on disk", *names, "latency"]
    is_timed = any(row["latency_ratio"] is not None for row in summary["rows"])
    own = [f"{base['quality'][name]:.4f}" for name in names]
    rows = [["base", *_sizes(base), *own, "1.00x" if is_timed else "-"]]
    for row in summary["rows"]:
        qualities = [_change(row.get("quality_before"), row["quality"], name) for name in names]
        ratio = row["latency_ratio"]
        rows.append([f"{row['budget']:g}", *_sizes(row), *qualities, "-" if ratio is None else f"{ratio:.2f}x"])
    return header, rows


def note(summary: Summary) -> str:
    """One line that says what the table's columns mean."""
    parts = ["budget: deployed over dense parameters of the factorised layers; bytes: in the deployed dtype"]
    if any(row.get("quality_before") for row in summary["rows"]):
        parts.append("qualities: before > after consolidation, in that dtype, and the base model's in its own")
    if any(row["latency_ratio"] is not None for row in summary["rows"]):
        parts.append("latency: median time over the base's, run in turn on one batch")
    return "; ".join(parts) + "."


def _sizes(row: Mapping[str, Any]) -> list[str]:
    rank = f"{row['mean_rank']:.0f} ({row['mean_rank_fraction']:.0%})"
    return [rank, count(row["params_layers"]), count(row["params_model"]), f"{count(row['bytes'])}B"]


def _change(before: Mapping[str, float] | None, after: Mapping[str, float], name: str) -> str:
    return f"{before[name]:.4f} > {after[name]:.4f}" if before else f"{after[name]:.4f}"


def _facts(summary: Summary) -> list[str]:
    """The lines below the table."""
    lines = [note(summary)]
    if summary.get("allocation"):
        gap = summary["allocation"].get("gap")
        proof = "" if gap is None else f", proven within {gap:.2%} of the optimum"
        lines.append(f"The chain's ranks: {summary['allocation']['method']} allocation{proof}.")
    for export in summary.get("deployed", ()):
        qualities = (export.get("quality") or {}).items()
        values = "".join(f"{LABELS.get(name, name)} {value:.4f}, " for name, value in qualities)
        place = f"Deployed at {export['budget']:g}: {export['directory']}, {count(export['bytes'])}B"
        lines.append(f"{place}, {values}verified in a fresh process.")
    return lines


def _markdown(summary: Summary, figures: Sequence[Path]) -> str:
    return "\n".join([
        f"# {summary.get('name', summary['model'])}\n",
        f"Model: `{summary['model']}`\n",
        *table(*table_cells(summary)),
        "",
        *(f"{fact}\n" for fact in _facts(summary)),
        *(f"![{figure.stem}](figures/{figure.name})\n" for figure in figures),
    ])  # fmt: skip


def _html_table(summary: Summary, name: str, number: int) -> str:
    """The HTML table, and the facts below it, of the run with this name and number on the page."""
    header, rows = table_cells(summary)
    budgets = ["", *(f' data-run="{number}" data-budget="{row["budget"]}"' for row in summary["rows"])]
    lines = [
        f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for mark, row in zip(budgets, rows, strict=True)
    ]
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(["<thead><tr>", head, "</tr></thead><tbody>\n", "\n".join(lines), "\n</tbody>"])
    facts = "\n".join(f"<p>{html.escape(fact)}</p>" for fact in _facts(summary))
    caption = f"<caption>{html.escape(name)}</caption>"
    region = '<div class="wide" tabindex="0" role="region" aria-label="all sizes">'
    return f"{region}<table>{caption}{body}</table></div>\n{facts}"
