"""Decomposition: DataSVD without whitening against a full SVD of whitened weights, layers of a block of Llama 3.2 1B.

Random weights and inputs whose variances fall: the time of a dense factorisation does not depend on values.
"""

import functools
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexrank.deployment.machine import interleave
from flexrank.nn.linalg import data_svd
from research.experiment import Experiment, Request
from research.result import Result, goal, measured, table


class Kind(NamedTuple):
    """Layers of one shape (m, n) in a block; whitening solves an eigenproblem for each of the `inputs` they read."""

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


def run(_: Request) -> Result:
    """Factorises a layer of each shape in both ways."""
    sizes = {kind.shape[1] for kind in KINDS}
    solve = {size: _solve_seconds(min(size, SOLVED)) * (size / min(size, SOLVED)) ** 3 for size in sizes}
    rows = [measure(kind, solve[kind.shape[1]]) for kind in KINDS]
    settings = {"repeats": REPEATS, "tokens": TOKENS, "largest eigenproblem solved": SOLVED}
    data = {"rows": rows, "solve": {str(size): seconds for size, seconds in solve.items()}}
    return measured(settings, [_table(rows)], [_goal(rows)], data)


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
        square = (outputs.T @ outputs).double()
        given: dict[str, Any] = {"output_moment": square, "mean_square": float(moment.trace()) / n}
    else:
        given = {"input_moment": moment}
    ours, whitened = interleave([lambda: data_svd(weight, **given), lambda: whiten(weight, moment)], REPEATS, 0)
    return {**kind._asdict(), "shape": list(kind.shape), "ours": ours, "whitened": whitened, "solve": solve}


def whiten(weight: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """What `linalg.whitened_svd` computes once Σ's roots are there: svd(W Σ^{1/2}), and Σ^{-1/2} Q.

    `root` stands for both, which costs the same.
    """
    left, singular, right = torch.linalg.svd(weight.double() @ root, full_matrices=False)
    scale = singular.sqrt()
    return left * scale, root @ (right.T * scale)


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


def _medians(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Seconds of one layer: ours, the whitened way's, and its share of Σ's eigenproblems."""
    solved = row["solve"] * row["inputs"] / row["number"]
    return statistics.median(row["ours"]), statistics.median(row["whitened"]), solved


def totals(rows: list[dict[str, Any]]) -> list[float]:
    """Seconds of the block, as `_medians` are of a layer."""
    return [sum(row["number"] * seconds for row, seconds in zip(rows, way, strict=True))
            for way in zip(*map(_medians, rows), strict=True)]  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    cells: list[list[Any]] = []
    whole = totals(rows)
    heads: list[list[Any]] = [[row["name"], "{} x {}".format(*row["shape"]), row["number"]] for row in rows]
    heads.append(["the block", None, sum(row["number"] for row in rows)])
    for head, (ours, whitened, solved) in zip(heads, [*map(_medians, rows), whole], strict=True):
        cells.append([*head, ours, whitened, solved, (whitened + solved) / ours])
    cells.append([f"{BLOCKS} blocks, multiplied", None, None, *(BLOCKS * seconds for seconds in whole), None])
    title = f"seconds of a layer; Σ's eigenproblem, once for each input, is extrapolated by the cube beyond {SOLVED}"
    columns = ["layers", "shape", "number", "DataSVD", "whitened SVD", "and Σ's eigenproblem", "times faster"]
    return table(title, columns, cells, digits=[0, 0, 2, 2, 2, 1])


def _goal(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ours, whitened, solved = totals(rows)
    widest = max(row["shape"][1] for row in rows)
    how = f"extrapolated from {SOLVED}" if widest > SOLVED else "timed once"
    why = (
        f"without any of Σ's eigenproblems the whitened way takes {whitened / ours:.1f} times ours; that of down's "
        f"input, {widest} wide, which DataSVD never forms, was {how}"
    )
    what, ratio = "decomposition of one block against a full SVD of its whitened weights", (whitened + solved) / ours
    return goal(what, f"{FASTER:g} times faster", f"{ratio:.1f} times", ratio >= FASTER, why)


EXPERIMENT = Experiment(
    "decompose", "Decomposition", "one block's DataSVD against a full SVD of whitened weights, layer by layer",
    minutes=4, run=run, tried=("Householder QR where Cholesky is accurate enough",),
)  # fmt: skip
