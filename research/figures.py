"""The style of all figures: colours, panels, the band over seeds, bars, and how they are written."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.files import atomic_file
from flexrank.run.figures import STYLE
from research.measures import distance

#: Okabe and Ito's colour-blind-safe palette: ours; the paper's or a rival's method; neither; others.
OURS, OTHER, NEUTRAL = "#0072b2", "#d55e00", "#999999"
GREEN, YELLOW, PINK, SKY = "#009e73", "#e69f00", "#cc79a7", "#56b4e9"
#: The other methods in comparisons.
RIVALS = (SKY, NEUTRAL, OTHER, PINK, YELLOW, GREEN)


def panels(columns: int = 1, size: tuple[float, float] = (6, 3.8), rows: int = 1, **options: Any) -> tuple[Any, Any]:
    """Returns a figure of this size in inches and its axes, row by row; `options` go to matplotlib's `subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def draw_seeds(
    axes: Any, places: Sequence[float], runs: Sequence[Sequence[float]], colour: str, label: str, **line: Any
) -> None:
    """Draws the mean over seeds as a line and their range as a band; `runs` are (seeds, places)."""
    by_place = list(zip(*runs, strict=True))
    means = list(map(statistics.fmean, by_place))
    axes.plot(places, means, **{"marker": "o", "markersize": 4.5, "color": colour, "label": label, **line})
    axes.fill_between(places, list(map(min, by_place)), list(map(max, by_place)), color=colour, alpha=0.2, linewidth=0)


def shown_distance(measure: str, score: float, base: float) -> float:
    """Returns what is drawn for a score: the loss of accuracy, which may be negative, or another measure's distance."""
    return base - score if measure == "accuracy" else distance(measure, score, base)


def name_distances(axes: Any, measure: str) -> None:
    """Labels and scales the axis of `shown_distance`.

    Accuracy has a linear axis, because on a few images a logarithmic one would show noise.
    """
    axes.set(
        ylabel=f"{measure}: {'lost of' if measure == 'accuracy' else 'distance from'} the base model's",
        yscale="linear" if measure == "accuracy" else "log",
    )


def draw_level(axes: Any, height: float, label: str | None = None, **line: Any) -> None:
    """Draws a thin horizontal line at this height."""
    axes.axhline(height, **{"color": "#888888", "linewidth": 1, "linestyle": ":", "label": label, **line})


def draw_bars(axes: Any, names: Sequence[str], series: Mapping[str, Any], colours: Sequence[str], **style: Any) -> None:
    """Draws grouped bars: for each name, the value of each series. With a `style`, the bars are labelled in it."""
    width = 0.76 / len(series)
    for number, ((label, heights), colour) in enumerate(zip(series.items(), colours, strict=True)):
        shift = (number - (len(series) - 1) / 2) * (width + 0.02)
        places = [place + shift for place in range(len(names))]
        bars = axes.bar(places, heights, width, color=colour, label=label)
        if style:
            axes.bar_label(bars, **style)
    axes.set_xticks(range(len(names)), names)


def save_figure(draw: Callable[[Mapping[str, Any]], Any], data: Mapping[str, Any], stem: Path) -> None:
    """Writes the figure of `data` to STEM.png and STEM.svg; equal data give equal bytes."""
    import matplotlib

    with matplotlib.rc_context(STYLE | {"legend.frameon": False}):
        figure = draw(data)
        for form, metadata in (("png", {}), ("svg", {"Date": None})):
            with atomic_file(stem.with_name(f"{stem.name}.{form}")) as aside:
                figure.savefig(aside, format=form, dpi=150, bbox_inches="tight", metadata=metadata)
