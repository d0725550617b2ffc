"""A run's figures, from its summary alone: quality over size, and the ranks of every layer at every budget."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.files import atomic_file
from flexrank.run.tables import ordered_layers, split_block

Summary = Mapping[str, Any]

LOWER_IS_BETTER = frozenset({"nats_per_token"})
LABELS = {
    "cosine": "cosine to the base model",
    "mrr": "retrieval MRR",
    "nats_per_token": "nats per token",
    "accuracy": "accuracy",
    "agreement": "agreement with the base model",
}

# Okabe and Ito's palette, whose colours stay distinct to colour-blind readers and in grey print.
BASE = "#555555"
SERIES = {"quality": ("consolidated", "#0072B2", "o"), "quality_before": ("decomposed only", "#E69F00", "s")}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "flexrank"}
#: The most layers whose ranks are written into the heatmap, and the most whose names are written beside it.
MOST_WITH_RANKS, MOST_WITH_NAMES = 48, 120


def draw_figures(summary: Summary, directory: Path) -> list[Path]:
    """Writes quality.png and ranks.png, each with its .svg, and returns the paths of the two PNG files.

    The same summary gives the same bytes.
    """
    import matplotlib

    draws = {"quality": draw_quality, "ranks": draw_ranks}
    for name, draw in draws.items():
        with matplotlib.rc_context(STYLE):
            figure = draw(summary)
            for form, metadata in (("png", {}), ("svg", {"Date": None})):
                with atomic_file(directory / f"{name}.{form}") as aside:
                    figure.savefig(aside, format=form, dpi=160, metadata=metadata)
    return [directory / f"{name}.png" for name in draws]


def draw_quality(summary: Summary) -> Any:
    """One panel per quality, over size: before and after consolidation, and the base model as a line."""
    from matplotlib.figure import Figure

    names = list(summary["base"]["quality"])
    figure = Figure(figsize=(4.7 * len(names) + 0.4, 3.9), layout="constrained")
    rows = sorted(summary["rows"], key=lambda row: row["relative_size"])
    sizes = [row["relative_size"] for row in rows]
    kinds = [kind for kind in SERIES if all(row.get(kind) for row in rows)]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for kind in kinds:
            _draw_series(axes, kind, sizes, [row[kind][name] for row in rows], name in LOWER_IS_BETTER)
        _finish_panel(axes, name, summary["base"])
    return figure


def _draw_series(axes: Any, kind: str, sizes: list[float], values: list[float], is_loss: bool) -> None:
    """Draws a line, with its name beside one of its points, on the side away from the other line."""
    label, colour, marker = SERIES[kind]
    axes.plot(sizes, values, color=colour, marker=marker, markersize=4.5, linewidth=1.8, zorder=3)
    is_after = kind == "quality"
    at = min(2, len(sizes) - 1) if is_after else min(1, max(0, len(sizes) - 2))
    side = {"ha": "right" if is_after else "left", "va": "bottom" if is_after != is_loss else "top"}
    shift = (-5 if is_after else 7, 4 if is_after != is_loss else -4)
    # On white, because it may lie on the base model's line.
    style = {"color": colour, "weight": "bold", "bbox": {"facecolor": "white", "linewidth": 0, "pad": 1}, "zorder": 1.5}
    axes.annotate(label, (sizes[at], values[at]), shift, textcoords="offset points", **style, **side)


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
    lines, headings, height = _line_numbers(layers)
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
    _label_lines(axes, lines, headings)
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


def _line_numbers(layers: Sequence[str]) -> tuple[dict[str, float], dict[float, str], float]:
    """Each layer's line from the top, each block's heading by the middle of the free line above it, and the height."""
    lines: dict[str, float] = {}
    headings: dict[float, str] = {}
    line, block = 0.0, ""
    for name in layers:
        if split_block(name)[0] != block:
            block = split_block(name)[0]
            headings |= {line + 0.5: block} if block else {}
            line += 1.0 if block else 0.5
        lines[name] = line
        line += 1.0
    return lines, headings, line


def _label_lines(axes: Any, lines: Mapping[str, float], headings: dict[float, str]) -> None:
    """Writes the headings in bold and, where there is room, the rest of each layer's name."""
    names = {line + 0.5: split_block(name)[1] for name, line in lines.items()}
    labels = (names if len(lines) <= MOST_WITH_NAMES else {}) | headings
    axes.set_yticks(list(labels), list(labels.values()), fontsize=7.5)
    axes.tick_params(length=0)
    for line, label in zip(labels, axes.get_yticklabels(), strict=True):
        label.set_weight("bold" if line in headings else "normal")
