"""Decomposition: DataSVD without whitening against a full SVD of whitened weights, for a block of Llama 3.2 1B.

Weights are random, and inputs too, with falling variances: the time of a dense factorisation does not depend on values.
"""

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexrank.deployment.machine import interleave
from flexrank.nn.linalg import data_svd
from research.experiment import Experiment, Request
from research.result import Result, goal, measured, table

#: Layers of one shape (m, n) in a block: name, shape, number, and how many inputs they are the first to read. Whitening
#: solves an eigenproblem for each input; k and v read what q reads, and gate and up read the same tensor.
KINDS = (
    ("q, o", (2048, 2048), 2, 2),
    ("k, v", (512, 2048), 2, 0),
    ("gate, up", (8192, 2048), 2, 1),
    ("down", (2048, 8192), 1, 1),
)
REPEATS, TOKENS, FASTER = 2, 4096, 4.0


def run(_: Request) -> Result:
    """Factorises a layer of each shape in both ways."""
    rows = [measure(*kind) for kind in KINDS]
    return measured({"repeats": REPEATS, "tokens": TOKENS}, [_table(rows)], [_goal(rows)], {"rows": rows})


@torch.no_grad()
def measure(name: str, shape: tuple[int, int], number: int, inputs: int) -> dict[str, Any]:
    """Times both ways, in turn, on one layer of a kind.

    `medians` are the seconds of ours, of the whitened way, and of the layer's share of Σ's eigenproblems.
    """
    (m, n), solved = shape, _solve_seconds(shape[1]) * inputs / number
    torch.manual_seed(0)
    weight = torch.randn(m, n) / n**0.5
    rows = torch.randn(TOKENS, n) * torch.logspace(0, -2, n)[torch.randperm(n)]
    moment = (rows.T @ rows).double()
    if m < n and m * m * number < n * n and inputs:  # as calibration chooses for a layer that alone reads its input
        outputs = rows @ weight.T
        square = (outputs.T @ outputs).double()
        given: dict[str, Any] = {"output_moment": square, "mean_square": float(moment.trace()) / n}
    else:
        given = {"input_moment": moment}
    ours, whitened = interleave([lambda: data_svd(weight, **given), lambda: whiten(weight, moment)], REPEATS, 0)
    medians = [statistics.median(ours), statistics.median(whitened), solved]
    return {"name": name, "shape": shape, "number": number, "ours": ours, "whitened": whitened, "medians": medians}


def whiten(weight: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Computes svd(W Σ^{1/2}) and Σ^{-1/2} Q, as `whitened_svd` does from Σ's roots; here one root is both."""
    left, singular, right = torch.linalg.svd(weight.double() @ root, full_matrices=False)
    scale = singular.sqrt()
    return left * scale, root @ (right.T * scale)


@functools.cache
def _solve_seconds(size: int) -> float:
    """Returns the seconds of one eigenproblem of this size and of the two products that give Σ^{1/2} and Σ^{-1/2}."""
    torch.manual_seed(0)
    rows = torch.randn(size, size)
    moment = (rows.T @ rows).double()
    start = time.perf_counter()
    values, vectors = torch.linalg.eigh(moment)
    root = values.clamp(min=1e-9).sqrt()
    for scaled in (vectors * root, vectors / root):
        scaled @ vectors.T
    return time.perf_counter() - start


def totals(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the seconds of the block, in the order of `medians`."""
    return [sum(row["number"] * row["medians"][way] for row in rows) for way in range(3)]


def _table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    heads = [[row["name"], "{} x {}".format(*row["shape"]), row["number"]] for row in rows]
    heads.append(["the block", None, sum(row["number"] for row in rows)])
    cells = []
    for head, (ours, whitened, solved) in zip(heads, [*(row["medians"] for row in rows), totals(rows)], strict=True):
        cells.append([*head, ours, whitened, solved, (whitened + solved) / ours])
    columns = ["layers", "shape", "number", "DataSVD", "whitened SVD", "and Σ's eigenproblem", "times faster"]
    return table("seconds of a layer; Σ's eigenproblem once for each input", columns, cells, [0, 0, 2, 2, 2, 1])


def _goal(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ours, whitened, solved = totals(rows)
    what, ratio = "decomposition of one block against a full SVD of its whitened weights", (whitened + solved) / ours
    why = f"{whitened / ours:.1f} times where Σ's eigenproblems are not counted; DataSVD solves none of that size"
    return goal(what, f"{FASTER:g} times faster", f"{ratio:.1f} times", ratio >= FASTER, why)


EXPERIMENT = Experiment(
    "decompose", "Decomposition", "one block's DataSVD against a full SVD of whitened weights, layer by layer",
    minutes=4, run=run,
)  # fmt: skip
