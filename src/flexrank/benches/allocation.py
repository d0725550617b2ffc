"""Rank allocation compared: the printed algorithm and the joint program, on synthetic sensitivities."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flexrank.allocation import allocate_ranks, unconstrained_bounds
from flexrank.benches.setting import finish
from flexrank.profiles import Footprint, ProfileChain, SensitivityTable

BUDGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LAYERS = (12, 48, 112)
LEVELS = 10
WIDTH = 512
# One block of a Llama-like model: q, k, v, o, gate, up, down, in widths.
BLOCK = ((1, 1), (0.25, 1), (0.25, 1), (1, 1), (4, 1), (4, 1), (1, 4))
# All see the same errors, the monotone fit, for only then is an excess over the joint optimum the method's own.
METHODS: dict[str, dict[str, Any]] = {
    "paper, ranks": {"method": "paper", "savings": "ranks", "monotone_errors": True},
    "paper, parameters": {"method": "paper", "monotone_errors": True},
    "paper, grid 4096": {"method": "paper", "grid": 4096, "monotone_errors": True},
    "joint": {},
    "joint, 32 candidates": {"candidates_per_layer": 32},
}


def run(json_path: Path | None = None) -> dict[str, Any]:
    """Prints the comparison, and writes it to `json_path`.

    An error ratio is a budget's predicted error over a proven lower bound of any profile's, nested or not, at the
    probed ranks; interpolated candidates may come below 1.
    """
    rows = []
    for layers in LAYERS:
        table = synthetic_table(layers)
        bounds = unconstrained_bounds(table, BUDGETS)
        for name, options in METHODS.items():
            start = time.perf_counter()
            chain = allocate_ranks(table, BUDGETS, **options)
            rows.append(_row(layers, name, chain, bounds, time.perf_counter() - start))
    result = {"budgets": list(BUDGETS), "levels": LEVELS, "rows": rows}
    _print(rows)
    return finish(result, json_path)


def synthetic_table(layers: int, levels: int = LEVELS, seed: int = 0) -> SensitivityTable:
    """Tails of power-law spectra at log-normal sizes, 10 % noise, over the layers of Llama-like blocks."""
    random = np.random.default_rng(seed)
    shapes, ranks, errors = {}, {}, {}
    for index in range(layers):
        name = f"layer{index}"
        shape = (int(BLOCK[index % 7][0] * WIDTH), int(BLOCK[index % 7][1] * WIDTH))
        full = min(shape)
        probed = np.unique(np.round(np.linspace(0, 1, levels + 1)[1:] * full).astype(int))
        spectrum = np.arange(1, full + 1) ** -random.uniform(0.5, 2.0)
        tail = 1 - np.cumsum(spectrum)[probed - 1] / spectrum.sum()
        noise = np.exp(0.1 * random.standard_normal(len(probed)))
        values = random.lognormal(-3, 1.2) * tail * noise
        shapes[name], ranks[name] = shape, tuple(probed.tolist())
        errors[name] = (*values[:-1].tolist(), 0.0)
    return SensitivityTable(shapes, ranks, errors, 1.0, Footprint(0, 0, 4))


def _row(layers: int, name: str, chain: ProfileChain, bounds: tuple[float, ...], seconds: float) -> dict[str, Any]:
    errors = [entry.error for entry in chain.requested]
    return {
        "layers": layers,
        "method": name,
        "chain_method": chain.method,  # tells the states of the dynamic program
        "seconds": seconds,
        "entries": len(chain.entries),
        "gap": chain.gap,
        "error_sum": sum(errors),
        "error_ratios": [error / bound for error, bound in zip(errors, bounds, strict=True)],
        "sum_ratio": sum(errors) / sum(bounds),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    shown = Table(
        "layers", "method", "seconds", "entries", "gap", "sum", *map(str, BUDGETS), title="Error over the front"
    )
    for row in rows:
        gap = "" if row["gap"] is None else f"{row['gap']:.1e}"
        ratios = [f"{ratio:.3f}" for ratio in (row["sum_ratio"], *row["error_ratios"])]
        shown.add_row(
            str(row["layers"]), row["chain_method"], f"{row['seconds']:.2f}", str(row["entries"]), gap, *ratios
        )
    Console(width=180, stderr=True).print(shown)
