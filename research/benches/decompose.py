"""Decomposition: DataSVD without whitening against a full SVD of whitened weights, layers of a block of Llama 3.2 1B.

Random weights and inputs whose variances fall: the time of a dense factorisation does not depend on values.
"""

import functools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexrank.nn.linalg import data_svd
from research.benches import machine
from research.benches.bench import Bench
from research.findings import Result, goal, table


class Kind(NamedTuple):
    """Layers of one shape in a block.

    Attributes:
        name: of them.
        shape: (m, n).
        number: how many of the block's layers.
        inputs: how many tensors they read: whitening's eigenproblem is solved once for each.
    """

    name: str
    shape: tuple[int, int]
    number: int
    inputs: int


#: k and v read what q reads; gate and up read one tensor.
KINDS = (
    Kind("q, o", (2048, 2048), 2, 2),
    Kind("k, v", (512, 2048), 2, 0),
    Kind("gate, up", (8192, 2048), 2, 1),
    Kind("down", (2048, 8192), 1, 1),
)
#: The largest Σ whose eigenproblem is solved here; a larger one's time is this one's times the cube of their ratio.
SOLVED, BLOCKS = 8192, 16
REPEATS, TOKENS, FASTER = 2, 4096, 4.0


def run(_: Path | None = None) -> Result:
    """Factorises a layer of each shape in both ways."""
    solve = {size: _solve_seconds(min(size, SOLVED)) * (size / min(size, SOLVED)) ** 3 for size in _sizes()}
    rows = [measure(kind, solve[kind.shape[1]]) for kind in KINDS]
    rate = machine.product_rate(2048, 2048, 2048, torch.float64)
    data = {"rows": rows, "rate": rate, "solve": {str(size): seconds for size, seconds in solve.items()}}
    return {
        "settings": {"repeats": REPEATS, "tokens": TOKENS, "largest eigenproblem solved": SOLVED},
        "tables": [_table(rows), _roofline(rows, rate)],
        "claims": _goals(rows),
        "data": data,
    }


@torch.no_grad()
def measure(kind: Kind, solve: float) -> dict[str, Any]:
    """Seconds of both ways, in turn, for one layer; `solve` are those of Σ's eigenproblem."""
    m, n = kind.shape
    torch.manual_seed(0)
    weight = torch.randn(m, n) / n**0.5
    inputs = torch.randn(TOKENS, n) * torch.logspace(0, -2, n)[torch.randperm(n)]
    moment = (inputs.T @ inputs).double()
    if m < n and m * m * kind.number < n * n and kind.inputs:  # as calibration chooses where a layer reads alone
        outputs = inputs @ weight.T
        mean = float(moment.trace()) / n
        given: dict[str, Any] = {"output_moment": (outputs.T @ outputs).double(), "mean_square": mean}
    else:
        given = {"input_moment": moment}
    ours, whitened = machine.interleave([lambda: data_svd(weight, **given), lambda: whiten(weight, moment)], REPEATS, 0)
    return {
        **kind._asdict(), "shape": list(kind.shape), "ours": ours, "whitened": whitened, "solve": solve,
        "operations": operations(kind.shape, "output_moment" in given),
    }  # fmt: skip


def whiten(weight: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """What `linalg.whitened_svd` computes once Σ's roots are there: svd(W Σ^{1/2}), and Σ^{-1/2} Q.

    `root` stands for both, which costs the same.
    """
    left, singular, right = torch.linalg.svd(weight.double() @ root, full_matrices=False)
    scale = singular.sqrt()
    return left * scale, root @ (right.T * scale)


def operations(shape: tuple[int, int], from_output: bool) -> float:
    """Operations of `data_svd`: 9 k³ for the eigenproblem and its vectors, and the products."""
    m, n = shape
    k = min(shape)
    strips = 5 / 8  # of a product with itself, at four strips
    total = 9 * k**3
    if m > n:  # WᵀW, R's inverse, R Σ Rᵀ, R⁻¹ P, W R⁻¹ P and Rᵀ P
        return total + 2 * m * n**2 * (strips + 1) + n**3 + 4 * n**3 + 2 * n**3 + 2 * n**3
    moment = 2 * m**2 * n * strips if from_output else 2 * m * n**2 + 2 * m**2 * n
    return total + moment + 2 * m * n * k  # and Wᵀ P


@functools.cache
def _solve_seconds(size: int) -> float:
    """Seconds of one eigenproblem of this size and of the two products that give Σ^{1/2} and Σ^{-1/2}."""
    torch.manual_seed(0)
    rows = torch.randn(size, size)
    moment = (rows.T @ rows).double()
    start = time.perf_counter()
    values, vectors = torch.linalg.eigh(moment)
    root = values.clamp(min=1e-9).sqrt()
    for scaled in (vectors * root, vectors / root):
        scaled @ vectors.T
    return time.perf_counter() - start


def _sizes() -> set[int]:
    return {kind.shape[1] for kind in KINDS}


def _medians(row: Mapping[str, Any]) -> tuple[float, float]:
    return statistics.median(row["ours"]), statistics.median(row["whitened"])


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    cells = []
    for row in rows:
        ours, whitened = _medians(row)
        shared = row["solve"] * row["inputs"] / row["number"]
        shape = "{} x {}".format(*row["shape"])
        cells.append([row["name"], shape, row["number"], ours, whitened, shared, (whitened + shared) / ours])
    ours, rival, svd = totals(rows)
    cells.append(["the block", None, sum(row["number"] for row in rows), ours, svd, rival - svd, rival / ours])
    cells.append(
        [f"{BLOCKS} blocks, multiplied", None, None, BLOCKS * ours, BLOCKS * svd, BLOCKS * (rival - svd), None]
    )
    title = f"seconds of a layer; Σ's eigenproblem, once an input, is the cube's beyond {SOLVED}"
    columns = ["layers", "shape", "number", "DataSVD", "whitened SVD", "and Σ's eigenproblem", "times faster"]
    return table(title, columns, cells, digits=[0, 0, 2, 2, 2, 1])


def totals(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Seconds of the block: ours, the whitened way's, and those of the latter without Σ's eigenproblems."""
    ours = sum(row["number"] * _medians(row)[0] for row in rows)
    svd = sum(row["number"] * _medians(row)[1] for row in rows)
    return ours, svd + sum(row["inputs"] * row["solve"] for row in rows), svd


def _roofline(rows: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    cells = []
    for row in rows:
        m, n = row["shape"]
        ours = statistics.median(row["ours"])
        moved = 8 * (3 * m * n + 6 * min(m, n) ** 2 + min(m, n) * (m + n))
        least = row["operations"] / rate
        cells.append([row["name"], row["operations"] / 1e9, moved / 1e9, rate / 1e9, least, least / ours])
    title = "roofline of DataSVD, float64 products; the eigenproblem, half of it no matrix product, counted as 9 k³"
    columns = ["layers", "GFLOP", "GB at least", "GFLOP/s here", "least seconds", "reached"]
    return table(title, columns, cells, digits=[0, 2, 0, 2, 2])


def _goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ours, rival, svd = totals(rows)
    widest = max(_sizes())
    how = f"extrapolated from {SOLVED}" if widest > SOLVED else "timed once"
    why = (
        f"without any of Σ's eigenproblems the whitened way takes {svd / ours:.1f} times ours; that of down's input, "
        f"{widest} wide, which DataSVD never forms, was {how}"
    )
    what = "decomposition of one block against a full SVD of its whitened weights"
    ratio = rival / ours
    return [goal(what, f"{FASTER:g} times faster", f"{ratio:.1f} times", ratio >= FASTER, why)]


def draw(data: Mapping[str, Any]) -> Any:
    """How many times faster, by shape."""
    from matplotlib.figure import Figure

    from research.findings.figures import NEUTRAL, OTHER, OURS

    figure = Figure(figsize=(5, 2.6), layout="constrained")
    axes = figure.subplots()
    names = [row["name"] for row in data["rows"]]
    svd = [_medians(row)[1] / _medians(row)[0] for row in data["rows"]]
    solve = [row["solve"] * row["inputs"] / row["number"] / _medians(row)[0] for row in data["rows"]]
    whole = [first + second for first, second in zip(svd, solve, strict=True)]
    places = range(len(names))  # side by side: lengths on a logarithmic axis do not add up
    axes.bar([place - 0.2 for place in places], svd, 0.38, color=OURS, label="its products and SVD alone")
    axes.bar([place + 0.2 for place in places], whole, 0.38, color=OTHER, label="with Σ's eigenproblem")
    axes.axhline(FASTER, color=NEUTRAL, linestyle="--", label="goal, of the whole block")
    axes.set_xticks(list(places), names)
    axes.set(ylabel="whitened SVD / DataSVD", yscale="log", ylim=(1, None))
    axes.legend(frameon=False)
    return figure


BENCH = Bench(
    name="decompose",
    title="Decomposition",
    measures="one block's DataSVD against a full SVD of whitened weights, layer by layer",
    minutes=4,
    run=run,
    draw=draw,
    tried=("Householder QR where Cholesky is accurate enough",),
)
