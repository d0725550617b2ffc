"""A run's table, figures and page, from its saved `summary.json` alone.

Nothing here loads a model: `flexrank report` draws the same pictures again on any machine that has the JSON.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flexrank.errors import FlexrankError
from flexrank.files import read_json, require_keys, write_aside

Summary = Mapping[str, Any]

# Qualities where less is better; every other one rises with quality.
FALLING = frozenset({"nats_per_token", "loss", "kl", "kl_to_teacher", "perplexity", "distillation_loss"})
LABELS = {
    "cosine": "cosine to the teacher",
    "mrr": "retrieval MRR",
    "nats_per_token": "nats per token",
    "accuracy": "accuracy",
    "agreement": "agreement with the teacher",
    "kl": "KL to the teacher (nats)",
}

# Okabe and Ito's palette: told apart with every common colour blindness, and in grey.
BEFORE, AFTER, BASE = "#E69F00", "#0072B2", "#555555"
ANNOTATED_LAYERS, NAMED_LAYERS = 48, 120


def read_summary(directory: str | Path) -> dict[str, Any]:
    """Reads `summary.json` of a run directory.

    Raises:
        FlexrankError: the run has none yet, or it is no summary.
    """
    path = Path(directory) / "summary.json"
    if not path.is_file():
        raise FlexrankError(f"{path}: no such file; `flexrank run` writes it")
    summary = read_json(path)
    require_keys(summary, ("model", "base", "rows", "layers"), str(path))
    return summary


def print_table(summary: Summary, console: Console) -> None:
    """Prints the table, a row a budget, below the base's own row."""
    table = Table(title=f"{summary.get('name', summary['model'])}: every size from one set of weights", box=box.SIMPLE)
    header, rows = table_cells(summary)
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if console_note := note(summary):
        console.print(console_note, markup=False, highlight=False, soft_wrap=True)


def table_cells(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """The table as text: its header, and its rows, the base first."""
    names = list(summary["base"]["quality"])
    header = ["budget", "mean rank", "params, layers", "params, model", "on disk", *names, "latency"]
    base = summary["base"]
    rows = [["base", _rank(base), *_sizes(base), *(f"{base['quality'][name]:.4f}" for name in names), "1.00x"]]
    for row in summary["rows"]:
        qualities = [_change(row.get("quality_before"), row["quality"], name) for name in names]
        ratio = row["latency_ratio"]
        latency = "-" if ratio is None else f"{ratio:.2f}x"
        rows.append([f"{row['budget']:g}", _rank(row), *_sizes(row), *qualities, latency])
    return header, rows


def note(summary: Summary) -> str:
    """One line that says what the table's columns mean."""
    parts = ["budget: deployed over dense parameters of the factorised layers"]
    if any(row.get("quality_before") for row in summary["rows"]):
        parts.append("qualities: before > after consolidation, of the deployed model")
    if any(row["latency_ratio"] is not None for row in summary["rows"]):
        parts.append("latency: median time over the base's, run in turn on one batch")
    return "; ".join(parts) + "."


def write_report(directory: str | Path) -> list[Path]:
    """Writes figures/*.png and .svg, report.md and report.html from the run's summary; returns their paths.

    Raises:
        FlexrankError: there is no summary, or matplotlib is not installed.
    """
    directory = Path(directory)
    summary = read_summary(directory)
    figures = draw_figures(summary, directory / "figures")
    pages = [directory / "report.md", directory / "report.html"]
    for page, text in zip(pages, (_markdown(summary, figures), _page(summary, figures)), strict=True):
        with write_aside(page) as aside:
            aside.write_text(text, encoding="utf8")
    return [*figures, *pages]


def draw_figures(summary: Summary, directory: Path) -> list[Path]:
    """Draws `quality.png` and `ranks.png` (each with its .svg beside) and returns the two PNG paths.

    Raises:
        FlexrankError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise FlexrankError("figures need matplotlib: pip install 'flexrank[report]'") from error
    from matplotlib.figure import Figure

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "flexrank"}
    paths = []
    with matplotlib.rc_context(style):
        for name, draw in (("quality", _draw_quality), ("ranks", _draw_ranks)):
            figure = Figure(layout="constrained")
            draw(figure, summary)
            for ending, metadata in ((".png", {}), (".svg", {"Date": None})):
                with write_aside(directory / f"{name}{ending}") as aside:
                    figure.savefig(aside, format=ending[1:], dpi=160, metadata=metadata)
            paths.append(directory / f"{name}.png")
    return paths


def _draw_quality(figure: Any, summary: Summary) -> None:
    """Quality over size, a panel a quality: before and after consolidation, the base as a line."""
    names = list(summary["base"]["quality"])
    figure.set_size_inches(4.7 * len(names) + 0.4, 3.9)
    rows = sorted(summary["rows"], key=lambda row: row["relative_size"])
    sizes = [row["relative_size"] for row in rows]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        series = [(AFTER, "o", "consolidated", [row["quality"][name] for row in rows])]
        if all(row.get("quality_before") for row in rows):
            series.append((BEFORE, "s", "decomposed only", [row["quality_before"][name] for row in rows]))
        for colour, marker, label, values in series:
            axes.plot(sizes, values, color=colour, marker=marker, markersize=4.5, linewidth=1.8, zorder=3)
            _name_series(axes, label, colour, sizes, values, better=colour == AFTER, falling=name in FALLING)
        _finish_quality(axes, name, summary)


def _name_series(
    axes: Any, label: str, colour: str, sizes: list[float], values: list[float], *, better: bool, falling: bool
) -> None:
    """Writes a series' name beside it: the better one's on the outer side of the curve, the other's on the inner."""
    at = min(2, len(sizes) - 1) if better else min(1, max(0, len(sizes) - 2))
    side = {"ha": "right" if better else "left", "va": "bottom" if better != falling else "top"}
    shift = (-5 if better else 7, 4 if better != falling else -4)
    axes.annotate(
        label, (sizes[at], values[at]), shift, textcoords="offset points", color=colour, weight="bold", **side
    )


def _finish_quality(axes: Any, name: str, summary: Summary) -> None:
    """The base's line, labels, limits and the second scale of one quality panel."""
    direction = "lower is better" if name in FALLING else "higher is better"
    axes.set_title(f"{LABELS.get(name, name)} ({direction})", loc="left", fontsize=10)
    axes.set_xlabel("size of the factorised layers (share of dense parameters)")
    axes.set_xlim(0, 1.02)
    axes.margins(y=0.08)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    value = summary["base"]["quality"][name]
    axes.axhline(value, color=BASE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(f"base\n{value:.3f}", (1.02, value), (4, 0), textcoords="offset points", va="center", color=BASE)
    dense = summary["base"]["params_layers"]
    other = summary["base"]["params_model"] - dense
    scale, unit = (1e6, "M") if dense + other >= 1e6 else (1e3, "k")
    top = axes.secondary_xaxis(
        "top", functions=(lambda x: (x * dense + other) / scale, lambda x: (x * scale - other) / dense)
    )
    top.set_xlabel(f"parameters of the whole model ({unit})", fontsize=8, color=BASE)
    top.tick_params(labelsize=8, colors=BASE)


def _draw_ranks(figure: Any, summary: Summary) -> None:
    """Heatmap of kept rank: layers grouped by block, a column a budget."""
    layers = ordered_layers(summary["layers"])
    rows = sorted(summary["rows"], key=lambda row: -row["budget"])
    lines, height = _lines_of(layers)
    inches = 0.19 * height if len(layers) <= NAMED_LAYERS else min(0.05 * height, 22.0)
    figure.set_size_inches(min(4.4 + 0.5 * len(rows), 16), max(2.6, inches + 1.2))
    axes = figure.subplots()
    annotated = len(layers) <= ANNOTATED_LAYERS
    for name in layers:
        full = min(summary["layers"][name]["shape"])
        shares = [row["ranks"][name] / full for row in rows]
        edges = [lines[name], lines[name] + 1]
        image = axes.pcolormesh(range(len(rows) + 1), edges, [shares], cmap="cividis", vmin=0, vmax=1)
        for column, share in enumerate(shares if annotated else ()):
            text, colour = rows[column]["ranks"][name], "black" if share > 0.55 else "white"
            axes.text(column + 0.5, lines[name] + 0.5, text, ha="center", va="center", fontsize=6.5, color=colour)
    axes.set_ylim(height, 0)
    axes.spines[:].set_visible(False)
    axes.set_xticks([column + 0.5 for column in range(len(rows))], [f"{row['budget']:g}" for row in rows])
    axes.set_xlabel("budget")
    _name_lines(axes, layers, lines)
    axes.set_title("Kept rank by layer and budget" + ("; the number is the rank" if annotated else ""), fontsize=10)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 3.0 / figure.get_figheight()), aspect=14, pad=0.03)
    bar.set_label("share of full rank")
    bar.outline.set_visible(False)


def _lines_of(layers: Sequence[str]) -> tuple[dict[str, float], float]:
    """Each layer's line from the top, one free line above each named block, and the height of all."""
    lines: dict[str, float] = {}
    line, block = 0.0, ""
    for name in layers:
        if split_block(name)[0] != block:
            block = split_block(name)[0]
            line += 1.0 if block else 0.5
        lines[name] = line
        line += 1.0
    return lines, line


def _name_lines(axes: Any, layers: Sequence[str], lines: Mapping[str, float]) -> None:
    """Names each block in bold on its free line and, where there is room, each layer by the rest of its name."""
    labels: dict[float, str] = {}
    if len(layers) <= NAMED_LAYERS:
        labels = {lines[name] + 0.5: split_block(name)[1] for name in layers}
    seen = {""}
    for name in layers:
        block = split_block(name)[0]
        if block not in seen:
            labels[lines[name] - 0.5] = block
            seen.add(block)
    axes.set_yticks(list(labels), list(labels.values()), fontsize=7.5)
    axes.tick_params(length=0)
    for label in axes.get_yticklabels():
        if label.get_text() in seen:
            label.set_weight("bold")


def ordered_layers(layers: Mapping[str, Any]) -> list[str]:
    """Layer names as the model has them, those of one block together."""
    blocks: dict[str, list[str]] = {}
    for name in layers:
        block = split_block(name)[0]
        blocks.setdefault(block or name, []).append(name)
    return [name for names in blocks.values() for name in names]


def split_block(name: str) -> tuple[str, str]:
    """A layer's name as its block (up to the first number, it included) and the rest; no block where none is."""
    parts = name.split(".")
    for number, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: number + 1]), ".".join(parts[number + 1 :])
    return "", name


def _rank(row: Mapping[str, Any]) -> str:
    return f"{row['mean_rank']:.0f} ({row['mean_rank_fraction']:.0%})"


def _sizes(row: Mapping[str, Any]) -> list[str]:
    return [count(row["params_layers"]), count(row["params_model"]), f"{count(row['bytes'])}B"]


def count(number: int) -> str:
    """A count for people: 10.62M, 381k, 950."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.2f}{unit}" if number / scale < 100 else f"{number / scale:.0f}{unit}"
    return str(number)


def _change(before: Mapping[str, float] | None, after: Mapping[str, float], name: str) -> str:
    return f"{before[name]:.4f} > {after[name]:.4f}" if before else f"{after[name]:.4f}"


def _facts(summary: Summary) -> list[str]:
    """Lines of facts below the table."""
    lines = [note(summary)]
    if summary.get("allocation"):
        gap = summary["allocation"].get("gap")
        proof = "" if gap is None else f", proven within {gap:.2%} of the optimum"
        lines.append(f"The chain's ranks: {summary['allocation']['method']} allocation{proof}.")
    lines += [
        f"Deployed at {export['budget']:g}: {export['directory']}, {count(export['bytes'])}B, "
        + "".join(f"{LABELS.get(name, name)} {value:.4f}, " for name, value in (export.get("quality") or {}).items())
        + "verified in a fresh process."
        for export in summary.get("deployed", ())
    ]
    return lines


def _markdown(summary: Summary, figures: Sequence[Path]) -> str:
    header, rows = table_cells(summary)
    lines = [f"# {summary.get('name', summary['model'])}", "", f"Model: `{summary['model']}`", ""]
    lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"{fact}\n" for fact in _facts(summary))]
    lines += [f"![{figure.stem}](figures/{figure.name})\n" for figure in figures]
    return "\n".join(lines)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
th:first-child, td:first-child {{ text-align: left }}
img {{ max-width: 100%; height: auto; margin: 1rem 0 }}
.wide {{ overflow-x: auto }}
</style>
<h1>{title}</h1>
<p>Model: <code>{model}</code></p>
<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>
{rows}
</tbody></table></div>
{facts}
{figures}
</html>
"""


def _page(summary: Summary, figures: Sequence[Path]) -> str:
    """One HTML file that needs no other: the table, and the figures within it."""
    header, rows = table_cells(summary)
    return _PAGE.format(
        title=html.escape(str(summary.get("name", summary["model"]))),
        model=html.escape(str(summary["model"])),
        header="".join(f"<th>{html.escape(cell)}</th>" for cell in header),
        rows="\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows),
        facts="\n".join(f"<p>{html.escape(fact)}</p>" for fact in _facts(summary)),
        figures="\n".join(
            f'<img alt="{figure.stem}" src="data:image/png;base64,{base64.b64encode(figure.read_bytes()).decode()}">'
            for figure in figures
        ),
    )
