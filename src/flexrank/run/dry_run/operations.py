"""Floating-point operations of each stage: multiplications and additions, so two for each multiply-add.

The products of layers with a matrix and of attention, the moments and the factorisations are counted; norms,
activations, softmaxes, the loss and AdamW are not.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from flexrank.distill.schedule import drawn_weights
from flexrank.nn.blocks import block_stack
from flexrank.nn.switch import last_within
from flexrank.probe import MATRIX_BYTES
from flexrank.profiles.costs import Shape, full_ranks
from flexrank.run.candidates import candidate_ranks, rank_constraints
from flexrank.run.config import RunConfig
from flexrank.run.dry_run.architecture import Architecture, Call, trains_only_factors
from flexrank.run.dry_run.moments import layers_by_output, moment_widths


def calibration(architecture: Architecture, config: RunConfig) -> int:
    """Forward passes of all samples, another one of the first batch, and 2·T·d² for each moment of width d.

    Gradients add a forward pass, a backward pass with 2·T·m·n for each layer after the first group, and their moments,
    2·T·m².
    """
    samples, calls = config.data.calibration, architecture.calls
    widths = moment_widths(architecture, config)
    products = sum(2 * call.rows * width**2 for name, width in widths.items() for call in calls[name])
    passes = 2 if config.keeps_gradient_moments else 1
    if config.keeps_gradient_moments:
        products += 2 * architecture.attention
        for name, (m, n), call in _calls(architecture):
            width = n * (name not in architecture.groups[0]) + m * (name in architecture.shapes)
            products += 2 * call.rows * m * width
    return forward(architecture, passes * samples + min(config.data.batch_size, samples)) + samples * products


def decomposition(architecture: Architecture, config: RunConfig) -> int:
    """The leading terms of each layer's factorisation, in float64."""
    return sum(layer_decompositions(architecture, config).values())


def layer_decompositions(architecture: Architecture, config: RunConfig) -> dict[str, int]:
    """`factorisation` of each layer."""
    outputs, method = layers_by_output(architecture, config), config.decomposition.method
    return {name: factorisation(shape, method, name in outputs) for name, shape in architecture.shapes.items()}


def factorisation(shape: Shape, method: str, from_output: bool = False) -> int:
    """Operations of `linalg`'s function for a layer, by the leading terms of Golub and Van Loan (4th edition).

    A symmetric eigenproblem with vectors takes 9d³; a thin SVD of l × k 14·l·k² + 8k³; Cholesky n³/3; a triangular
    solve for k columns n²·k; a product 2·a·b·c. A tall matrix is assumed to be well conditioned. A moment, that of the
    output (m × m) if `from_output`, counts as a whole product.
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
    if method == "fisher":  # G = L Lᵀ, Lᵀ W, L⁻ᵀ P, and on the output side the Gram twice
        total += m**3 // 3 + 2 * m**2 * n + m**2 * k + (4 * m**3 if from_output else 0)
    return total


def probe(architecture: Architecture, config: RunConfig) -> int:
    """One pass of the teacher, and all evaluations of the elastic model, over the probe's samples.

    Layers at full rank multiply by their matrices, which take 2·k·m·n each to form, up to `MATRIX_BYTES`. A probe takes
    at most this: in a stack of blocks those before the probed one are replayed, which saves about half.
    """
    if config.probe.method == "curvature":
        return 0
    samples, batch, shapes = config.data.probe, min(config.data.batch_size, config.data.probe), architecture.shapes
    full, itemsize = full_ranks(shapes), architecture.teacher.dtype.itemsize
    kept = last_within({name: itemsize * math.prod(shape) for name, shape in shapes.items()}, MATRIX_BYTES)
    factored = {name: rank for name, rank in full.items() if name not in kept}
    total = evaluations(architecture, config) * forward(architecture, batch, factored)
    for name, ranks in candidate_ranks(config, shapes).items():
        for call, rank in itertools.product(architecture.calls[name], ranks[:-1]):
            rows, shape = batch * call.rows, shapes[name]
            whole = 2 * rows * math.prod(shape) if name in kept else elastic_forward(shape, full[name], rows)
            total += elastic_forward(shape, rank, rows) - whole
    made = sum(2 * full[name] * math.prod(shapes[name]) for name in kept)
    return forward(architecture, samples) + made + total * samples // batch


def evaluations(architecture: Architecture, config: RunConfig) -> int:
    """Evaluations that the probe takes: one for each rank below the full one, and one at full rank; 0 by curvature."""
    if config.probe.method == "curvature":
        return 0
    return 1 + sum(len(ranks) - 1 for ranks in candidate_ranks(config, architecture.shapes).values())


def consolidation(architecture: Architecture, config: RunConfig) -> int:
    """Steps × batches × (teacher forward + student forward and backward), each budget at its own ranks and weight.

    Gradient checkpointing adds a forward pass of the blocks, and each step mixes components. The teacher's forward
    passes count even where its kept outputs save them.
    """
    settings, student = config.distillation, 0.0
    for ranks, share in drawn_profiles(architecture, config):
        passes = forward(architecture, settings.batch_size, ranks) + backward(architecture, settings.batch_size, ranks)
        if settings.gradient_checkpointing:
            passes += repeated(architecture, settings.batch_size, ranks)
        student += passes * share
    batches = (forward(architecture, settings.batch_size) + student) * settings.accumulation
    return round((batches + mixing(architecture, config)) * settings.steps)


def mixing(architecture: Architecture, config: RunConfig) -> float:
    """The mixing of components after a step: 6·r·(k - r)·(m + n) for rank r of k trained components, on average."""
    if not trains_only_factors(config):
        return 0.0
    profiles, shapes = drawn_profiles(architecture, config), architecture.shapes
    most = {name: max((ranks.get(name, 0) for ranks, _ in profiles), default=0) for name in shapes}
    return sum(
        share * 6 * rank * (most[name] - rank) * sum(shapes[name])
        for ranks, share in profiles
        for name, rank in ranks.items()
    )


def drawn_profiles(architecture: Architecture, config: RunConfig) -> list[tuple[dict[str, int], float]]:
    """For each budget of consolidation, the ranks of the layers that compute by factors, and its share of steps.

    If sizes share only factors, a layer at full rank computes by its matrix, which is not trained. Without steps,
    nothing is drawn.
    """
    settings, budgets = config.distillation, config.allocation.budgets
    if not settings.steps:
        return []
    given = settings.weights and settings.weights[::-1]
    weights = drawn_weights(given, settings.method, [budget == 1 for budget in reversed(budgets)])[::-1]
    profiles = []
    for budget, weight in zip(budgets, weights, strict=True):
        ranks = dict(architecture.profile(budget, rank_constraints(config)["slack_share"]))
        if trains_only_factors(config):
            ranks = {name: rank for name, rank in ranks.items() if rank < min(architecture.shapes[name])}
        profiles.append((ranks, weight / sum(weights)))
    return profiles


def forward(architecture: Architecture, samples: int, ranks: Mapping[str, int] = {}) -> int:
    """One forward pass of a batch: 2·T·m·n for a dense layer, `elastic_forward` for one in `ranks`, and attention."""
    total = samples * architecture.attention
    for name, (m, n), call in _calls(architecture):
        rows = samples * call.rows
        total += elastic_forward((m, n), ranks[name], rows) if name in ranks else 2 * rows * m * n
    return total


def backward(architecture: Architecture, samples: int, ranks: Mapping[str, int]) -> int:
    """The backward pass of consolidation, as if each layer's output reached the loss.

    A dense layer takes 2·T·m·n for a trained weight, and as much for an input that depends on anything trained. A
    factorised layer that is not in `ranks` computes by a matrix that is not trained, from an input with trained gains.
    """
    total = 2 * samples * architecture.attention
    for name, (m, n), call in _calls(architecture):
        rows, weight = samples * call.rows, architecture.teacher.get_submodule(name).weight
        if name in ranks:
            total += elastic_backward((m, n), ranks[name], rows, call.needs_gradient)
        elif name in architecture.shapes:
            total += 2 * rows * m * n
        else:
            total += 2 * rows * m * n * (weight.requires_grad + call.needs_gradient)
    return total


def repeated(architecture: Architecture, samples: int, ranks: Mapping[str, int]) -> int:
    """What gradient checkpointing runs again: a batch's forward pass through the stack's blocks alone."""
    blocks = tuple(f"{name}." for name, _ in block_stack(architecture.student, architecture.shapes))
    calls = {name: calls for name, calls in architecture.calls.items() if name.startswith(blocks)}
    return forward(dataclasses.replace(architecture, calls=calls), samples, ranks)


def _calls(architecture: Architecture) -> Iterator[tuple[str, Shape, Call]]:
    return ((name, architecture.matrices[name], call) for name, calls in architecture.calls.items() for call in calls)


def elastic_forward(shape: Shape, rank: int, rows: int) -> int:
    """2·min(T·r·(m+n), (T+r)·m·n): `NestedLayer` takes the cheaper route, factored or materialised."""
    m, n = shape
    return 2 * min(rows * rank * (m + n), (rows + rank) * m * n)


def elastic_backward(shape: Shape, rank: int, rows: int, needs_gradient: bool = True) -> int:
    """Twice the forward pass, less the product for an input that needs no gradient: 2·T·r·n or 2·T·m·n."""
    m, n = shape
    is_factored = rows * rank * (m + n) <= (rows + rank) * m * n
    spared = 0 if needs_gradient else 2 * rows * n * (rank if is_factored else m)
    return 2 * elastic_forward(shape, rank, rows) - spared
