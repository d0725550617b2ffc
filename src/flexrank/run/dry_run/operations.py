"""How many operations each stage takes: floating-point multiplications and additions, so two for each product.

Counted are the products of layers with a matrix (factorised or dense, lm_head too), attention's own, the moments and
the factorisations. Norms, activations, softmaxes, the loss and the optimiser are not.
"""

import itertools
import math
from collections.abc import Mapping

import torch

from flexrank.nn.switch import last_within, uniform_profile
from flexrank.probe import MATRIX_BYTES
from flexrank.profiles.costs import Shape, rank_levels
from flexrank.run.config import RunConfig
from flexrank.run.dry_run.memory import reads_output
from flexrank.run.dry_run.subject import Subject


def count_operations(subject: Subject, config: RunConfig) -> dict[str, int]:
    """Operations of each stage; see the functions."""
    return {
        "calibration": calibration(subject, config),
        "decomposition": decomposition(subject, config.decomposition.method),
        "probe": probe(subject, config),
        "consolidation": consolidation(subject, config),
    }


def calibration(subject: Subject, config: RunConfig) -> int:
    """N samples forward, their first batch once more to find shared inputs, and 2·T·d² for each moment of size d.

    `fisher` adds a backward pass down to each layer's output, 2·T·m·n for each layer after the first group, and the
    gradients' moments, 2·T·m².
    """
    samples, method = config.data.calibration, config.decomposition.method
    first = min(config.data.batch_size, samples)
    products = sum(_moment_products(subject, group, method) for group in subject.groups)
    if method == "fisher":
        products += 2 * subject.attention + sum(
            2 * call.rows * m * (n * (name not in subject.groups[0]) + m * (name in subject.shapes))
            for name, (m, n) in subject.matrices.items()
            for call in subject.calls[name]
        )
    return forward(subject, samples + first) + samples * products


def decomposition(subject: Subject, method: str) -> int:
    """The leading terms of each layer's factorisation, in float64; see `factorisation`."""
    readers = {name for group in subject.groups if reads_output(subject, group, method) for name in group}
    return sum(factorisation(shape, method, name in readers) for name, shape in subject.shapes.items())


def factorisation(shape: Shape, method: str, from_output: bool = False) -> int:
    """Operations of `linalg`'s function for a layer, by the leading terms of Golub and Van Loan (4th edition).

    Symmetric eigenproblem with vectors 9d³; thin SVD of l × k 14·l·k² + 8k³; Cholesky n³/3; a triangle against n
    columns n³; a product 2·a·b·c. A tall matrix is taken for well conditioned; a moment counts as a whole product.

    Args:
        shape: (m, n).
        method: of the decomposition.
        from_output: whether the moment is that of the output (m × m).
    """
    m, n = shape
    k, longer = min(shape), max(shape)
    svd = 14 * longer * k**2 + 8 * k**3
    if method == "svd":
        return svd
    if method == "paper":  # Σ's eigenproblem, its two roots, W Σ^{1/2}, the SVD, and Σ^{-1/2} Q
        return 9 * n**3 + 4 * n**3 + 2 * m * n**2 + svd + 2 * n**2 * k
    total = 9 * k**3  # the Gram's eigenproblem
    if m > n:  # WᵀW, its triangle R and R⁻¹, R Σ Rᵀ, W R⁻¹ P, and V = Rᵀ P
        total += 2 * m * n**2 + n**3 // 3 + n**3 + 4 * n**3 + 2 * n**3 + 2 * m * n**2 + 2 * n**3
    else:  # W Wᵀ for the ridge, or W Σ Wᵀ, and V = Wᵀ P
        total += 2 * m**2 * n + (0 if from_output else 2 * m * n**2) + 2 * n * m * k
    if method == "fisher":  # G's eigenproblem and roots, G^{1/2} W, G^{-1/2} P, and on the output side the Gram twice
        total += 13 * m**3 + 2 * m**2 * n + 2 * m**2 * k + (4 * m**3 if from_output else 0)
    return total


def probe(subject: Subject, config: RunConfig) -> int:
    """The teacher once, and L·(K−1)+1 evaluations of the elastic model at full rank, over the probe's samples.

    Full layers multiply by their matrices, which take 2·k·m·n each to make, up to `MATRIX_BYTES` (a GPU with less
    memory free keeps fewer, and multiplies more); a probed one takes `elastic_forward`. At most: where the model is a
    stack of blocks those before the probed one are replayed, about half of the work.
    """
    samples, batch = config.data.probe, min(config.data.batch_size, config.data.probe)
    itemsize, full = subject.teacher.dtype.itemsize, {name: min(shape) for name, shape in subject.shapes.items()}
    kept = last_within({name: itemsize * math.prod(shape) for name, shape in subject.shapes.items()}, MATRIX_BYTES)
    factored = {name: rank for name, rank in full.items() if name not in kept}
    total = evaluations(subject, config) * forward(subject, batch, factored)
    for name, ranks in candidates(subject, config).items():
        shape = subject.shapes[name]
        for call, rank in itertools.product(subject.calls[name], ranks[:-1]):
            rows = batch * call.rows
            whole = 2 * rows * math.prod(shape) if name in kept else elastic_forward(shape, full[name], rows)
            total += elastic_forward(shape, rank, rows) - whole
    made = sum(2 * full[name] * math.prod(subject.shapes[name]) for name in kept)
    return forward(subject, samples) + made + total * samples // batch


def evaluations(subject: Subject, config: RunConfig) -> int:
    """Evaluations that the probe takes: one for each rank below the full one, and the baseline."""
    return 1 + sum(map(len, candidates(subject, config).values())) - len(subject.shapes)


def candidates(subject: Subject, config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Ranks of each layer among which allocation chooses; fewer than K where so small a layer has no more."""
    levels, spacing = config.probe.levels, config.probe.spacing
    return {name: rank_levels(shape, levels, spacing) for name, shape in subject.shapes.items()}


def consolidation(subject: Subject, config: RunConfig) -> int:
    """Steps × batches × (teacher forward + student forward and backward, a mean over the budgets by their weights).

    A budget's ranks are those of its uniform profile. The teacher's kept outputs, which save forwards, are left out.
    """
    settings, budgets = config.distillation, config.allocation.budgets
    weights = settings.weights or [1.0] * len(budgets)
    student = 0.0
    for budget, weight in zip(budgets, weights, strict=True):
        ranks = uniform_profile(subject.student, budget)
        passes = forward(subject, settings.batch_size, ranks) + backward(subject, settings.batch_size, ranks)
        student += passes * weight / sum(weights)
    return round((forward(subject, settings.batch_size) + student) * settings.accumulation * settings.steps)


def forward(subject: Subject, samples: int, ranks: Mapping[str, int] | None = None) -> int:
    """One forward pass of a batch: 2·T·m·n for a dense layer, `elastic_forward` for one in `ranks`, and attention."""
    total = samples * subject.attention
    for name, shape in subject.matrices.items():
        rank = (ranks or {}).get(name)
        for call in subject.calls[name]:
            rows = samples * call.rows
            total += 2 * rows * shape[0] * shape[1] if rank is None else elastic_forward(shape, rank, rows)
    return total


def backward(subject: Subject, samples: int, ranks: Mapping[str, int]) -> int:
    """The backward pass of consolidation, as if each layer's output reached the loss.

    A dense layer takes 2·T·m·n for its weight, where that is trained, and as much for its input, where something
    before it is; attention takes twice its forward.
    """
    total = 2 * samples * subject.attention
    for name, (m, n) in subject.matrices.items():
        weight = subject.teacher.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        for call in subject.calls[name]:
            rows = samples * call.rows
            if name in ranks:
                total += elastic_backward((m, n), ranks[name], rows, call.is_inner)
            else:
                total += 2 * rows * m * n * (weight.requires_grad + call.is_inner)
    return total


def elastic_forward(shape: Shape, rank: int, rows: int) -> int:
    """2·min(T·r·(m+n), (T+r)·m·n): `NestedLayer` takes the cheaper route, factored or materialised."""
    m, n = shape
    return 2 * min(rows * rank * (m + n), (rows + rank) * m * n)


def elastic_backward(shape: Shape, rank: int, rows: int, is_inner: bool = True) -> int:
    """Twice the forward; less the product for the input, 2·T·r·n or 2·T·m·n, where nothing before is trained."""
    m, n = shape
    is_factored = rows * rank * (m + n) <= (rows + rank) * m * n
    return 2 * elastic_forward(shape, rank, rows) - (0 if is_inner else 2 * rows * n * (rank if is_factored else m))


def _moment_products(subject: Subject, group: tuple[str, ...], method: str) -> int:
    """2·T·m² for each layer's output, or 2·T·n² once for the input that the group shares."""
    if not reads_output(subject, group, method):
        group = group[:1]
        return sum(2 * call.rows * subject.shapes[name][1] ** 2 for name in group for call in subject.calls[name])
    return sum(2 * call.rows * subject.shapes[name][0] ** 2 for name in group for call in subject.calls[name])
