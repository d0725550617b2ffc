"""What figures of findings share: colours, the band over seeds, and how they are written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexrank.files import write_aside

#: Ours, the paper's or the rival's way, and what is neither: of Okabe and Ito's palette, told apart by all.
OURS, OTHER, NEUTRAL = "#0072b2", "#d55e00", "#999999"


def draw_seeds(
    axes: Any, places: Sequence[float], runs: Sequence[Sequence[float]], colour: str, label: str, **line: Any
) -> list[float]:
    """The mean over seeds as a line, from the least to the largest seed as a band.

    Args:
        axes: to draw on.
        places: along the abscissa.
        runs: a sequence of values a seed, one for each place.
        colour: of both.
        label: in the legend.
        line: of the line's style.

    Returns:
        The means.
    """
    by_place = list(zip(*runs, strict=True))
    means = [sum(values) / len(values) for values in by_place]
    axes.plot(places, means, **{"marker": "o", "markersize": 4.5, "color": colour, "label": label, **line})
    axes.fill_between(places, list(map(min, by_place)), list(map(max, by_place)), color=colour, alpha=0.2, linewidth=0)
    return means


def save_figure(draw: Callable[[], Any], stem: Path) -> list[Path]:
    """Writes what `draw` gives as STEM.png and STEM.svg; the same bytes for the same figure."""
    import matplotlib

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "flexrank"}
    written = []
    with matplotlib.rc_context(style):
        figure = draw()
        for ending in (".png", ".svg"):
            path = stem.with_name(stem.name + ending)
            with write_aside(path) as aside:
                metadata: dict[str, Any] = {"Date": None} if ending == ".svg" else {}
                figure.savefig(aside, format=ending[1:], dpi=150, metadata=metadata, bbox_inches="tight")
            written.append(path)
    return written
