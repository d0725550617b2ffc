"""Rank allocation: the printed algorithm and the joint one, on synthetic sensitivities of ever deeper models."""

import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flexrank.allocate import allocate_ranks
from flexrank.profiles import Footprint, SensitivityTable
from research.experiment import BUDGETS, EVERY_RANK, Experiment, Request
from research.figures import NEUTRAL, OTHER, OURS, draw_seeds, panels
from research.measures import unconstrained_bounds
from research.result import Result, goal, measured, table

LAYERS = (4, 12, 48, 112, 224)
LEVELS = (10, 20)
WIDTH = 512
# One block of a Llama-like model: q, k, v, o, gate, up, down, in widths.
BLOCK = ((1, 1), (0.25, 1), (0.25, 1), (1, 1), (4, 1), (4, 1), (1, 4))
# All see the same errors, the monotone fit, because only then is an excess over the joint optimum the method's own. The
# last one has the goal.
METHODS: dict[str, dict[str, Any]] = {
    "paper, ranks": {"method": "paper", "savings": "ranks", "monotone_errors": True},
    "paper, parameters": {"method": "paper", "monotone_errors": True},
    "paper, grid 4096": {"method": "paper", "grid": 4096, "monotone_errors": True},
    "joint, gap 0.1 %": {"gap": 0.001, "time_limit": 20.0},
    "joint, gap 1 %": {"gap": 0.01},
}
EXPECTED = 15.0  # seconds: the printed algorithm is not run where it would take longer
GROWTH = 3.0  # exponent of its time in the layers: its states grow about as the square, and the layers add one
SECONDS, GAP = 10.0, 0.01


def run(_: Request) -> Result:
    """Times every method on every table; errors are over a proven bound for any profile, nested or not."""
    rows = [row for levels in LEVELS for row in _measure_depths(levels)]
    settings = {"budgets": list(BUDGETS), "width": WIDTH, "growth": GROWTH}
    return measured(settings, [_table(rows)], [_speed(rows[-1])], {"rows": rows})


def _measure_depths(levels: int) -> Iterator[dict[str, Any]]:
    before: dict[str, dict[str, Any]] = {}
    for layers in LAYERS:
        sensitivities = synthetic_table(layers, levels)
        bounds = unconstrained_bounds(sensitivities, BUDGETS, **EVERY_RANK)
        size = {"layers": layers, "levels": levels}
        for name, options in METHODS.items():
            row, last = {**size, "method": name}, before.get(name)
            expected = last["seconds"] * (layers / last["layers"]) ** GROWTH if last else 0.0
            if name.startswith("paper") and expected > EXPECTED:
                yield {**row, "expected": expected}
            else:
                before[name] = row | _measure(sensitivities, options, bounds)
                yield before[name]


def synthetic_table(layers: int, levels: int) -> SensitivityTable:
    """Returns tails of power-law spectra at log-normal scales, with 10 % noise, for layers of Llama-like blocks."""
    random = np.random.default_rng(0)
    shapes, ranks, errors = {}, {}, {}
    for index in range(layers):
        name, (m, n) = f"layer{index}", (int(widths * WIDTH) for widths in BLOCK[index % 7])
        full = min(m, n)
        probed = np.unique(np.round(np.linspace(0, 1, levels + 1)[1:] * full).astype(int))
        spectrum = np.arange(1, full + 1) ** -random.uniform(0.5, 2.0)
        tail = 1 - np.cumsum(spectrum)[probed - 1] / spectrum.sum()
        noise = np.exp(0.1 * random.standard_normal(len(probed)))
        values = random.lognormal(-3, 1.2) * tail * noise
        shapes[name], ranks[name] = (m, n), tuple(probed.tolist())
        errors[name] = (*values[:-1].tolist(), 0.0)
    return SensitivityTable(shapes, ranks, errors, 1.0, Footprint(0, 0, 4))


def _measure(sensitivities: SensitivityTable, options: Mapping[str, Any], bounds: Sequence[float]) -> dict[str, Any]:
    start = time.perf_counter()
    chain = allocate_ranks(sensitivities, BUDGETS, **EVERY_RANK, **options)
    seconds = time.perf_counter() - start
    errors = [entry.error for entry in reversed(chain.requested)]  # in the order of BUDGETS, largest first
    states = re.search(r"(\d+) states", chain.method)
    return {
        "seconds": seconds, "states": int(states[1]) if states else None, "entries": len(chain.entries),
        "gap": chain.gap,
        "above": [error / bound - 1 for error, bound in zip(errors, bounds, strict=True)],
        "sum_above": math.fsum(errors) / math.fsum(bounds) - 1,
    }  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    cells: list[list[Any]] = []
    for row in rows:
        head = [f"{row['layers']} × {row['levels']}", row["method"]]
        if "expected" in row:
            cells.append([*head, f"not run: {row['expected']:.0f} s expected", *[None] * 6])
            continue
        gap = None if row["gap"] is None else 100 * row["gap"]
        above = (100 * one for one in (row["sum_above"], statistics.fmean(row["above"]), max(row["above"])))
        cells.append([*head, row["seconds"], row["states"], row["entries"], gap, *above])
    columns = ["layers × levels", "method", "seconds", "states", "profiles", "proven gap, %"]
    columns += ["error of the sum, %", "mean over budgets, %", "worst budget, %"]
    title = "Time, and predicted error above a bound of any profile's at the budget, nested or not; the printed "
    title += f"algorithm is not run above {EXPECTED:g} s, as the time at fewer layers foretells"
    return table(title, columns, cells, (0, 2, 0, 0, 4, 3, 3, 3))


def _speed(largest: Mapping[str, Any]) -> Result:
    what = f"{largest['layers']} × {largest['levels']}, {len(BUDGETS)} budgets, allocated with a proven gap"
    here = f"{largest['seconds']:.2f} s at a proven gap of {largest['gap']:.2%}"
    holds = largest["seconds"] <= SECONDS and largest["gap"] <= GAP
    return goal(what, f"{SECONDS:g} s at {GAP:.0%}", here, holds)


def draw(data: Mapping[str, Any]) -> Any:
    """Draws seconds over layers, for the most levels."""
    levels = max(row["levels"] for row in data["rows"])
    rows = [row for row in data["rows"] if row["levels"] == levels and "seconds" in row]
    figure, (axes,) = panels(size=(5.6, 3.6))
    lines = ((OTHER, ":"), (OTHER, "-"), (NEUTRAL, "-"), (OURS, ":"), (OURS, "-"))
    for name, (colour, dash) in zip(METHODS, lines, strict=True):
        places, seconds = zip(*((row["layers"], row["seconds"]) for row in rows if row["method"] == name), strict=True)
        draw_seeds(axes, places, [seconds], colour, name, linestyle=dash)
    ticks = sorted({row["layers"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel=f"layers of {levels} ranks", ylabel="seconds")
    axes.set_xticks(ticks, list(map(str, ticks)), minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=7)
    return figure


EXPERIMENT = Experiment(
    "search", "Rank allocation",
    "time, states, proven gap and predicted error of `paper` and `joint` over the number of layers",
    minutes=1, run=run, draw=draw,
)  # fmt: skip
