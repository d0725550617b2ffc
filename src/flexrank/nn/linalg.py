"""DataSVD with and without whitening, plain SVD, and Gram sums: tensors in, tensors out.

Computation and results are in float64 whatever the input's dtype, except the products in a Gram sum (`add_gram`), which
may be in float32: the caller casts once, at the end.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flexrank.errors import FlexrankError

#: Ridge added to a second moment, relative to its mean diagonal. It orders directions that the data never visited by
#: their weight energy. It is far above float64's rounding of the moment (1e-16), and near float32's (1e-7).
RIDGE = 1e-6
#: The same in a fit to what a compressed model reads, where only few rows may be known; 1e-3 to 1e-2 do equally well.
REFIT_RIDGE = 1e-3
#: Added to the unit diagonal of a scaled system, whose rows may be linearly dependent.
JITTER = 1e-10
#: Rows per strip of a Gram matrix; a strip is computed from the diagonal rightwards: 5/8 of the matrix for four strips.
STRIP = 512
#: Rows per product: never more are summed in less than float64.
ROWS = 4096
#: Condition number (1-norm) up to which a tall matrix is orthogonalised by Cholesky, to 1e-6; above it by Householder
#: QR, which is four times as slow.
CONDITION = 1e5


class Factors(NamedTuple):
    """k ordered rank-one components of a matrix in float64: with all of them, `weight == u.T @ v`.

    `energies` are in descending order: energies[i] is what component i adds to the weighted squared output.
    """

    u: Float[Tensor, "k m"]
    v: Float[Tensor, "k n"]
    energies: Float[Tensor, " k"]


def plain_svd(weight: Float[Tensor, "m n"]) -> Factors:
    """Singular value decomposition of the weight alone, the data-free baseline; the weight must be finite."""
    _require_finite("weight", weight)
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    return _balanced(left, right.T * values, values**2)


def data_svd(
    weight: Float[Tensor, "m n"],
    *,
    input_moment: Float[Tensor, "n n"] | None = None,
    output_moment: Float[Tensor, "m m"] | None = None,
    mean_square: float | None = None,
    gradient_moment: Float[Tensor, "m m"] | None = None,
) -> Factors:
    """DataSVD without whitening: the rank-r prefix minimises E‖(W − W_r)x‖² for every r (FlexRank, eq. 3).

    The optimum is W_r = P_r P_rᵀ W, with P the eigenvectors of C = W Σ Wᵀ; Σ may be singular, because neither its
    inverse nor its root is taken. For m > n, W = QR and R Σ Rᵀ replaces C, so min(m, n) dimensions suffice. Raises
    FlexrankError for values that are not finite, or if the moments given do not suffice.

    Args:
        weight: W.
        input_moment: Σ = Σ_t x_t x_tᵀ, at any scale.
        output_moment: C = W Σ Wᵀ, in place of Σ; only for m <= n.
        mean_square: tr(Σ)/n at the same scale; needed with `output_moment`, for the ridge.
        gradient_moment: G, of the loss's gradient at the output, made definite by `half_shrunk`: with G = L Lᵀ,
            the prefix minimises E‖Lᵀ(W − W_r)x‖².
    """
    _require_finite("weight", weight)
    given, weight = weight, weight.double()
    upper = None if gradient_moment is None else torch.linalg.cholesky(gradient_moment.double()).mT
    weighted = weight if upper is None else upper @ weight
    compressed, lift = _compress(weighted) if weight.shape[0] > weight.shape[1] else (weighted, None)
    if input_moment is not None:
        gram = compressed @ ridged(input_moment) @ compressed.T
    elif output_moment is not None and mean_square is not None and lift is None:
        _require_finite("output moment", output_moment)
        # If the weight is float32, so are the products: exact enough for a ridge of a millionth.
        gram = output_moment.double() + _ridge(mean_square) * gram_of(given.T)
        gram = gram if upper is None else upper @ gram @ upper.mT
    else:
        raise FlexrankError("data_svd needs input_moment, or output_moment with mean_square where m <= n")
    energies, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    energies, vectors = energies.flip(0).clamp(min=0), vectors.flip(1)
    left = vectors if lift is None else lift(vectors)
    left = left if upper is None else torch.linalg.solve_triangular(upper, left, upper=True)
    return _balanced(left, compressed.T @ vectors, energies)


def whitened_svd(weight: Float[Tensor, "m n"], input_moment: Float[Tensor, "n n"]) -> Factors:
    """The paper's DataSVD: svd(W Σ^{1/2}) = P Λ Qᵀ, U = P Λ^{1/2}, V = Σ^{-1/2} Q Λ^{1/2} (FlexRank, appendix C.1).

    Σ gets the ridge of `data_svd`; the paper states none, and inverts a matrix that is often singular. Raises
    FlexrankError for a moment of zeros, or a value that is not finite.
    """
    weight = weight.double()
    _require_finite("weight", weight)
    if not bool(input_moment.any()):
        raise FlexrankError("the second moment is zero and cannot be whitened; use method 'datasvd'")
    root, inverse_root = _roots(input_moment)
    left, singular, right = torch.linalg.svd(weight @ root, full_matrices=False)
    scale = singular.sqrt()
    return Factors((left * scale).T, (inverse_root @ (right.T * scale)).T, singular**2)


def refit(
    u: Float[Tensor, "k m"],
    v: Float[Tensor, "k n"],
    rank: int,
    inputs: Float[Tensor, "n n"],
    targets: Float[Tensor, "n n"],
) -> Factors:
    """Factors of this rank whose product with x is nearest to W t, over pairs of rows x and t, with W = uᵀ v.

    First comes the best left factor for the first rows of `v`, by least squares, then the best right factor for that.
    The latter minimises the length of the error in the components of W, each in units of its own u: where W is
    decomposed by DataSVD that is the error's own length, and where outputs are weighted it is nearly the weighted one.
    Directions without data keep W: both moments have a ridge of `REFIT_RIDGE` times the mean square of x, or of a
    millionth of the largest, above what float32 loses. Energies are not known and are zero.

    Args:
        u, v: all components of W, which may be linearly dependent.
        rank: that of the result.
        inputs: Σ x xᵀ, which may be singular.
        targets: Σ t xᵀ.
    """
    for what, moment in ("inputs' moment", inputs), ("targets' moment", targets):
        _require_finite(what, moment)
    u, v = u.double(), v.double()
    squares = inputs.diagonal().double()
    least = max(REFIT_RIDGE * float(squares.mean()), RIDGE * float(squares.max()))
    inputs, targets = (moment.to(torch.float64, copy=True) for moment in (inputs, targets))
    for moment in (inputs, targets):
        moment.diagonal().add_(least if least > 0 else 1.0)
    wanted, first = v @ targets, v[:rank]
    left = _solve(first @ inputs @ first.T, first @ wanted.T).T  # (k, r): components times these are the new ones
    weighted = left * u.square().sum(dim=1, keepdim=True)
    whole = torch.cholesky_solve(wanted.T, torch.linalg.cholesky(inputs)).T
    right = _solve(weighted.T @ left, weighted.T @ whole)
    return _balanced(u.T @ left, right.T, torch.zeros(rank, dtype=v.dtype, device=v.device))


def _solve(gram: Float[Tensor, "r r"], right: Float[Tensor, "r c"]) -> Float[Tensor, "r c"]:
    """gram⁻¹ right for a Gram matrix of rows of any lengths, which may be zero or linearly dependent."""
    scale = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny).rsqrt()
    scaled = gram * scale * scale[:, None]
    scaled.diagonal().add_(JITTER)
    return scale[:, None] * torch.cholesky_solve(scale[:, None] * right, torch.linalg.cholesky(scaled))


def half_shrunk(moment: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """(M / mean(diag M) + 1) / 2 in float64; the identity for a moment of zeros.

    The moment of a loss's gradients comes from few samples, and is valid only near the base model: its mean with the
    identity, which weights all outputs alike, beats either (docs/log.md). KFAC-SVD (Thoma et al., 2026) shrinks it too.
    """
    _require_finite("gradients' moment", moment)
    mean = float(moment.trace()) / len(moment)
    shrunk = moment.to(torch.float64, copy=True).div_(2 * mean) if mean > 0 else torch.zeros_like(moment).double()
    shrunk.diagonal().add_(0.5 if mean > 0 else 1.0)
    return shrunk


def ridged(moment: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The finite moment in float64, plus `RIDGE` times its mean diagonal; the identity for a moment of zeros."""
    _require_finite("second moment", moment)
    moment = moment.to(torch.float64, copy=True)
    moment.diagonal().add_(_ridge(float(moment.trace()) / len(moment)))
    return moment


def gram_of(rows: Float[Tensor, "t n"]) -> Float[Tensor, "n n"]:
    """rowsᵀ rows in float64; see `add_gram`."""
    gram = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    add_gram(gram, rows)
    mirror(gram)
    return gram


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Inside the block products use the tensors' own dtype: no autocast, and no TF32 or bfloat16 for float32."""
    root: Any = torch.backends
    backends = root.cuda.matmul, root.mkldnn.matmul, root.cudnn.conv, root.mkldnn.conv
    before = [backend.fp32_precision for backend in backends]  # torch's older function raises where these were set
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def add_gram(moment: Float[Tensor, "n n"], rows: Float[Tensor, "t n"]) -> None:
    """Adds rowsᵀ rows in place to the diagonal and upper blocks of a float64 `moment`; `mirror` completes it.

    Products of at most `ROWS` rows each are computed in float32 or better, and added in float64.
    """
    for part in rows.split(ROWS):
        part = part if part.dtype in (torch.float32, torch.float64) else part.float()
        for start in range(0, part.shape[1], STRIP):
            moment[start : start + STRIP, start:] += part[:, start : start + STRIP].T @ part[:, start:]


def mirror(moment: Float[Tensor, "n n"]) -> None:
    """Copies the blocks above the diagonal, transposed, to those below it, in place."""
    for end in range(STRIP, len(moment), STRIP):
        moment[end:, end - STRIP : end] = moment[end - STRIP : end, end:].T


def column_lengths(columns: Tensor) -> Tensor:
    """The columns' lengths, with a floor relative to the largest, so columns of zeros have finite ratios too."""
    lengths = columns.norm(dim=0)
    largest = lengths.max() if lengths.numel() else lengths.sum()
    return lengths.clamp(min=max(1e-12 * float(largest), 1e-150))


def _compress(tall: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """R (n, n) of a tall W = Q R, and a function that maps P (n, k) to Q P. By Cholesky RᵀR = WᵀW, Q P = W R⁻¹ P."""
    factor, failed = torch.linalg.cholesky_ex(gram_of(tall))
    triangle = factor.mT
    if not bool(failed) and bool(factor.diagonal().min() * CONDITION > factor.diagonal().max()):
        inverse = torch.linalg.solve_triangular(triangle, torch.eye(len(factor)).to(factor), upper=True)
        norms = [torch.linalg.matrix_norm(one, 1) for one in (triangle, inverse)]
        if bool(norms[0] * norms[1] <= CONDITION):
            return triangle, lambda vectors: tall @ (inverse @ vectors)
    basis, triangle = torch.linalg.qr(tall)
    return triangle, lambda vectors: basis @ vectors


def _balanced(left: Tensor, right: Tensor, energies: Tensor) -> Factors:
    """Factors by component, scaled to pairs of equal length, so one learning rate suits both."""
    scale = (column_lengths(right) / column_lengths(left)).sqrt()
    return Factors((left * scale).T.contiguous(), (right / scale).T.contiguous(), energies)


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """M^{1/2} and M^{-1/2} of the ridged moment; the ridge bounds the norm of the latter."""
    values, vectors = torch.linalg.eigh(ridged(moment))
    root = values.clamp(min=values[-1] * 1e-15).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _ridge(mean_square: float) -> float:
    return RIDGE * mean_square if mean_square > 0 else 1.0


def _require_finite(what: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise FlexrankError(f"the {what} holds values that are not finite; check weights and batches")
