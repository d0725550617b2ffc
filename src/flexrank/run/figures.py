"""A run's figures, from its summary alone: quality over size, and the ranks of every layer at every budget."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.files import write_aside
from flexrank.run.tables import ordered_layers, split_block

Summary = Mapping[str, Any]

LOWER_IS_BETTER = frozenset({"nats_per_token"})
LABELS = {
    "cosine": "cosine to the teacher",
    "mrr": "retrieval MRR",
    "nats_per_token": "nats per token",
    "accuracy": "accuracy",
    "agreement": "agreement with the teacher",
}

# Okabe and Ito's palette, which the colour-blind and a grey print tell apart.
BEFORE, AFTER, BASE = "#E69F00", "#0072B2", "#555555"
#: The most layers whose ranks are written into the heatmap, and the most whose names are written beside it.
MOST_WITH_RANKS, MOST_WITH_NAMES = 48, 120


def save_figure(draw: Callable[[], Any], stem: Path, **options: Any) -> list[Path]:
    """Writes the figure that `draw` returns, in the common style, as STEM.png and STEM.svg, and returns their paths.

    The same figure gives the same bytes. `options` go to matplotlib's `savefig`.
    """
    import matplotlib

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "flexrank"}
    paths = []
    with matplotlib.rc_context(style):
        figure = draw()
        for ending, metadata in ((".png", {}), (".svg", {"Date": None})):
            path = stem.with_name(stem.name + ending)
            with write_aside(path) as aside:
                settings = {"dpi": 150, "bbox_inches": "tight", "metadata": metadata, **options}
                figure.savefig(aside, format=ending[1:], **settings)
            paths.append(path)
    return paths


def draw_figures(summary: Summary, directory: Path) -> list[Path]:
    """Writes quality.png and ranks.png, each with its .svg, and returns the paths of the two PNG files."""
    draws = {"quality": draw_quality, "ranks": draw_ranks}
    return [
        save_figure(functools.partial(draw, summary), directory / name, dpi=160, bbox_inches=None)[0]
        for name, draw in draws.items()
    ]


def draw_quality(summary: Summary) -> Any:
    """One panel per quality, over size: before and after consolidation, and the base model as a line."""
    from matplotlib.figure import Figure

    names = list(summary["base"]["quality"])
    figure = Figure(figsize=(4.7 * len(names) + 0.4, 3.9), layout="constrained")
    rows = sorted(summary["rows"], key=lambda row: row["relative_size"])
    sizes = [row["relative_size"] for row in rows]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        series = [(AFTER, "o", "consolidated", [row["quality"][name] for row in rows])]
        if all(row.get("quality_before") for row in rows):
            series.append((BEFORE, "s", "decomposed only", [row["quality_before"][name] for row in rows]))
        for colour, marker, label, values in series:
            axes.plot(sizes, values, color=colour, marker=marker, markersize=4.5, linewidth=1.8, zorder=3)
            is_above = (colour == AFTER) != (name in LOWER_IS_BETTER)
            _label_series(axes, label, colour, sizes, values, is_after=colour == AFTER, is_above=is_above)
        _finish_panel(axes, name, summary["base"])
    return figure


def _label_series(
    axes: Any, label: str, colour: str, sizes: list[float], values: list[float], *, is_after: bool, is_above: bool
) -> None:
    """Writes a series' name beside a point of it, on the side away from the other series."""
    at = min(2, len(sizes) - 1) if is_after else min(1, max(0, len(sizes) - 2))
    side = {"ha": "right" if is_after else "left", "va": "bottom" if is_above else "top"}
    shift = (-5 if is_after else 7, 4 if is_above else -4)
    axes.annotate(
        label, (sizes[at], values[at]), shift, textcoords="offset points", color=colour, weight="bold", **side
    )


def _finish_panel(axes: Any, name: str, base: Mapping[str, Any]) -> None:
    """Adds the base model's line, the labels and the scale of whole-model parameters to a panel."""
    direction = "lower is better" if name in LOWER_IS_BETTER else "higher is better"
    axes.set_title(f"{LABELS.get(name, name)} ({direction})", loc="left", fontsize=10)
    axes.set(xlabel="size of the factorised layers (share of dense parameters)", xlim=(0, 1.02), axisbelow=True)
    axes.margins(y=0.08)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.7)
    value, dense = base["quality"][name], base["params_layers"]
    axes.axhline(value, color=BASE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(f"base\n{value:.3f}", (1.02, value), (4, 0), textcoords="offset points", va="center", color=BASE)
    other = base["params_model"] - dense
    scale, unit = (1e6, "M") if base["params_model"] >= 1e6 else (1e3, "k")
    top = axes.secondary_xaxis(
        "top", functions=(lambda x: (x * dense + other) / scale, lambda x: (x * scale - other) / dense)
    )
    top.set_xlabel(f"parameters of the whole model ({unit})", fontsize=8, color=BASE)
    top.tick_params(labelsize=8, colors=BASE)


def draw_ranks(summary: Summary) -> Any:
    """Heatmap of each layer's rank as a share of its full rank: a line per layer, by block, and a column per budget."""
    from matplotlib.figure import Figure

    layers = ordered_layers(summary["layers"])
    rows = sorted(summary["rows"], key=lambda row: -row["budget"])
    lines, height = _line_numbers(layers)
    inches = 0.19 * height if len(layers) <= MOST_WITH_NAMES else min(0.05 * height, 22.0)
    figure = Figure(figsize=(min(4.4 + 0.5 * len(rows), 16), max(2.6, inches + 1.2)), layout="constrained")
    axes = figure.subplots()
    has_ranks = len(layers) <= MOST_WITH_RANKS
    for name in layers:
        full, ranks = min(summary["layers"][name]["shape"]), [row["ranks"][name] for row in rows]
        image = _draw_line(axes, lines[name], [rank / full for rank in ranks], ranks if has_ranks else [])
    axes.set_ylim(height, 0)
    axes.spines[:].set_visible(False)
    axes.set_xticks([column + 0.5 for column in range(len(rows))], [f"{row['budget']:g}" for row in rows])
    axes.set_xlabel("budget")
    _label_lines(axes, layers, lines)
    axes.set_title("Kept rank by layer and budget" + ("; the number is the rank" if has_ranks else ""), fontsize=10)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 3.0 / figure.get_figheight()), aspect=14, pad=0.03)
    bar.set_label("share of full rank")
    bar.outline.set_visible(False)
    return figure


def _draw_line(axes: Any, line: float, shares: Sequence[float], ranks: Sequence[int]) -> Any:
    """Draws one layer's cells, and writes `ranks` into them; returns the image, for the colour bar."""
    for column, rank in enumerate(ranks):
        colour = "black" if shares[column] > 0.55 else "white"
        axes.text(column + 0.5, line + 0.5, rank, ha="center", va="center", fontsize=6.5, color=colour)
    return axes.pcolormesh(range(len(shares) + 1), [line, line + 1], [shares], cmap="cividis", vmin=0, vmax=1)


def _line_numbers(layers: Sequence[str]) -> tuple[dict[str, float], float]:
    """Each layer's line from the top, with a free line above each named block, and the height of all lines."""
    lines: dict[str, float] = {}
    line, block = 0.0, ""
    for name in layers:
        if split_block(name)[0] != block:
            block = split_block(name)[0]
            line += 1.0 if block else 0.5
        lines[name] = line
        line += 1.0
    return lines, line


def _label_lines(axes: Any, layers: Sequence[str], lines: Mapping[str, float]) -> None:
    """Writes each block's name in bold on its free line and, where there is room, the rest of each layer's name."""
    labels: dict[float, str] = {}
    if len(layers) <= MOST_WITH_NAMES:
        labels = {lines[name] + 0.5: split_block(name)[1] for name in layers}
    blocks: dict[str, float] = {}
    for name in layers:
        blocks.setdefault(split_block(name)[0], lines[name] - 0.5)
    blocks.pop("", None)
    labels |= {line: block for block, line in blocks.items()}
    axes.set_yticks(list(labels), list(labels.values()), fontsize=7.5)
    axes.tick_params(length=0)
    for label in axes.get_yticklabels():
        if label.get_text() in blocks:
            label.set_weight("bold")
