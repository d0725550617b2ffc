"""Tensors in, tensors out: DataSVD in three forms, and gauge alignment with slack.

Every function works in float64 whatever comes in, and returns float64: the caller casts once, at the end.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flexrank.errors import FlexrankError

#: Ridge added to a second moment, relative to its mean diagonal: it orders the directions that the data never
#: visited by weight energy, and is far above float64's rounding of the moment (1e-16) and near float32's (1e-7).
RIDGE = 1e-6

#: Largest relative output error of an aligned layer in a dtype, as a multiple of the plain factors' own error there,
#: with the floor below which nobody looks. Three is what we state; the slack is chosen for 2.5 on a sample of
#: activations, so that three holds on those it did not see (of 324 layers and ranks the worst is 2.6).
STATED_MULTIPLE = 3.0
ERROR_MULTIPLE = 2.5
ERROR_FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 0.0, torch.float16: 0.0}
#: Slack is found to this part of the rank; each column costs r parameters of the layer's r·(m+n−r+slack).
SLACK_STEPS = 64


#: A Gram matrix is symmetric: strip by strip of so many of its rows, only what is right of the diagonal is computed.
#: That is 5/8 of the full product for four strips, and a strip is added while it is in the cache. On one core (AVX-512,
#: 2048 rows of 2048, float32) 0.094 s in place of 0.134 s for the full product alone; strips of 128 0.122, 1024 0.112.
STRIP = 512
#: Rows of which one product is taken: no more are summed in less than float64.
ROWS = 4096
#: Condition (1-norm) up to which a tall matrix is orthogonalised by Cholesky, orthonormal then to the condition's
#: square times float64's rounding, 1e-6; beyond, by Householder's QR, which takes four times as long.
CONDITION = 1e5


class Factors(NamedTuple):
    """Ordered rank-one components of a matrix, component-major: `weight == u.T @ v` when all k are kept.

    Attributes:
        u: (k, m) float64; row i is the output direction of component i.
        v: (k, n) float64; row i is its input direction, scaled to the same length as u's.
        energies: (k,) float64, falling: what component i adds to the weighted squared output.
    """

    u: Float[Tensor, "k m"]
    v: Float[Tensor, "k n"]
    energies: Float[Tensor, " k"]


def leading_count(energies: Float[Tensor, " k"], share: float) -> int:
    """How many leading components hold at least this share of the energy; 0 of a layer that has none.

    Args:
        energies: (k,), falling, not negative.
        share: within 0 … 1.
    """
    held = energies.cumsum(0)
    return int((held < share * held[-1]).sum()) + 1 if held[-1] > 0 else 0


def plain_svd(weight: Float[Tensor, "m n"]) -> Factors:
    """Singular value decomposition of the weight alone, the data-free baseline.

    Raises:
        FlexrankError: the weight is not finite.
    """
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

    The optimum is W_r = P_r P_rᵀ W with P the eigenvectors of C = W Σ Wᵀ, so no inverse and no square root of Σ is
    taken, and a singular Σ is no special case. Works on min(m, n) dimensions: for m > n through W = QR and R Σ Rᵀ,
    where Wᵀ P is Rᵀ P′.
    With `gradient_moment` G the error is weighted on the output side too: E‖G^{1/2}(W − W_r)x‖².

    Args:
        weight: W, (m, n).
        input_moment: Σ = Σ_t x_t x_tᵀ, any scale.
        output_moment: C = W Σ Wᵀ, in place of Σ; only for m <= n.
        mean_square: tr(Σ)/n, at the same scale; needed with `output_moment` for the ridge.
        gradient_moment: G, the second moment of the loss's gradient at the output (the `fisher` option).

    Raises:
        FlexrankError: a moment or the weight is not finite, or the moments do not suffice.
    """
    _require_finite("weight", weight)
    given, weight = weight, weight.double()
    root, inverse_root = _roots(gradient_moment)
    weighted = weight if root is None else root @ weight
    compressed, lift = _compress(weighted) if weight.shape[0] > weight.shape[1] else (weighted, None)
    if input_moment is not None:
        gram = compressed @ ridged(input_moment) @ compressed.T
    elif output_moment is not None and mean_square is not None and lift is None:
        _require_finite("output moment", output_moment)
        # The ridge is a millionth: float32 products, where the weight is float32, are far below what it decides.
        gram = output_moment.double() + _ridge(mean_square) * gram_of(given.T)
        gram = gram if root is None else root @ gram @ root
    else:
        raise FlexrankError("data_svd needs input_moment, or output_moment with mean_square where m <= n")
    energies, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    energies, vectors = energies.flip(0).clamp(min=0), vectors.flip(1)
    left = vectors if lift is None else lift(vectors)
    right = compressed.T @ vectors
    return _balanced(left if inverse_root is None else inverse_root @ left, right, energies)


def whitened_svd(weight: Float[Tensor, "m n"], input_moment: Float[Tensor, "n n"]) -> Factors:
    """The paper's DataSVD: svd(W Σ^{1/2}) = P Λ Qᵀ, U = P Λ^{1/2}, V = Σ^{-1/2} Q Λ^{1/2} (FlexRank, appendix C.1).

    Σ gets the same ridge as `data_svd`'s; the paper prints none, and inverts a matrix that is often singular.

    Raises:
        FlexrankError: a non-finite input, or a moment of zeros, which no whitening can invert.
    """
    weight = weight.double()
    _require_finite("weight", weight)
    if not bool(input_moment.any()):
        raise FlexrankError("the second moment is zero and cannot be whitened; use method 'datasvd'")
    values, vectors = torch.linalg.eigh(ridged(input_moment))
    root = values.clamp(min=values[-1] * 1e-15).sqrt()
    left, singular, right = torch.linalg.svd(weight @ ((vectors * root) @ vectors.T), full_matrices=False)
    inverse_root = (vectors / root) @ vectors.T
    scale = singular.sqrt()
    return Factors((left * scale).T, (inverse_root @ (right.T * scale)).T, singular**2)


def gram_of(rows: Float[Tensor, "t n"]) -> Float[Tensor, "n n"]:
    """rowsᵀ rows in float64; see `add_gram`."""
    gram = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    add_gram(gram, rows)
    mirror(gram)
    return gram


def add_gram(moment: Float[Tensor, "n n"], rows: Float[Tensor, "t n"]) -> None:
    """Adds rowsᵀ rows to what of `moment` is right of the diagonal, by strips of `STRIP`; `mirror` completes it.

    Args:
        moment: float64, changed in place; below the diagonal's blocks it is left as it is.
        rows: products are taken in float32 or better, of at most `ROWS` rows each, and added in float64.
    """
    for part in rows.split(ROWS):
        part = part if part.dtype in (torch.float32, torch.float64) else part.float()
        for start in range(0, part.shape[1], STRIP):
            moment[start : start + STRIP, start:] += part[:, start : start + STRIP].T @ part[:, start:]


def mirror(moment: Float[Tensor, "n n"]) -> None:
    """Copies what is right of the diagonal's blocks to below them, in place."""
    for start in range(0, len(moment), STRIP):
        end = start + STRIP
        moment[end:, start:end] = moment[start:end, end:].T


def _compress(tall: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """R (n, n) of a tall W = Q R, and what takes P (n, k) to Q P.

    RᵀR = WᵀW by Cholesky, and Q P = W R⁻¹ P: (Q P)(Rᵀ P)ᵀ is W whatever R is, so only Q's columns depend on how well
    W is conditioned. See `CONDITION`.
    """
    factor, failed = torch.linalg.cholesky_ex(gram_of(tall))
    triangle = factor.mT
    if not bool(failed) and bool(factor.diagonal().min() * CONDITION > factor.diagonal().max()):
        inverse = torch.linalg.solve_triangular(triangle, torch.eye(len(factor)).to(factor), upper=True)
        norms = [torch.linalg.matrix_norm(one, 1) for one in (triangle, inverse)]
        if bool(norms[0] * norms[1] <= CONDITION):
            return triangle, lambda vectors: tall @ (inverse @ vectors)
    basis, triangle = torch.linalg.qr(tall)
    return triangle, lambda vectors: basis @ vectors


def ridged(moment: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The moment in float64 plus `RIDGE` times its mean diagonal (the identity where it is all zeros).

    Raises:
        FlexrankError: the moment is not finite.
    """
    _require_finite("second moment", moment)
    moment = moment.double()
    size = moment.shape[0]
    return moment + _ridge(float(moment.trace()) / size) * torch.eye(size, dtype=moment.dtype, device=moment.device)


def gauge_align(
    u: Float[Tensor, "m r"], v: Float[Tensor, "n r"], slack: int
) -> tuple[Float[Tensor, "rest r"], Float[Tensor, "n r"]]:
    """Gauge-aligned factors: the first g = r − slack outputs become latents themselves (FlexRank, eq. 7, is slack 0).

    With U_{1:g}ᵀ = Q [R; 0], the gauge G = [Q₁R⁻ᵀ | Q₂] gives U_{1:g} G = [I_g | 0], and G⁻¹ = [U_{1:g}; Q₂ᵀ], so no
    inverse stands in Ṽ: its first g columns are those of (U_{1:g} Vᵀ)ᵀ. Slack keeps R well conditioned. The columns
    left over are scaled so that their two factors have equal length.

    Returns:
        û (m−g, r) and ṽ (n, r) in float64; non-finite where U_{1:g} is singular, which more slack mends.
    """
    u, v = u.double(), v.double()
    rank = u.shape[1]
    aligned = rank - slack
    if aligned == 0:
        return u, v
    q, triangle = torch.linalg.qr(u[:aligned].T, mode="complete")
    solved = torch.linalg.solve_triangular(triangle[:aligned], q[:, :aligned].T, upper=True)
    u_aligned = u[aligned:] @ solved.T
    u_left, v_left = u[aligned:] @ q[:, aligned:], v @ q[:, aligned:]
    scale = (_lengths(v_left) / _lengths(u_left)).sqrt()
    u_hat = torch.cat([u_aligned, u_left * scale], 1)
    return u_hat, torch.cat([v @ u[:aligned].T, v_left / scale], 1)


def alignment_error(
    u: Float[Tensor, "m r"], v: Float[Tensor, "n r"], slack: int, inputs: Float[Tensor, "t n"], dtype: torch.dtype
) -> float:
    """Relative output error ‖y − y*‖/‖y*‖ of the aligned form stored and run in `dtype`, y* in float64.

    Of each input by itself, then their root mean square: in many transformers a few tokens have outputs forty times as
    long as all others, and over all inputs at once only those would count. An output shorter than a tenth of the median
    one that is not zero counts as if it had that length. The inputs are rounded to `dtype` first, so that only the
    form's own error counts. Infinite where it overflows.
    """
    return _AlignmentProbe(u, v, inputs, dtype).error(slack)


def choose_slack(
    u: Float[Tensor, "m r"], v: Float[Tensor, "n r"], inputs: Float[Tensor, "t n"], dtype: torch.dtype
) -> int:
    """The least slack whose measured error is within the dtype's bound, to r / `SLACK_STEPS`; r, plain U Vᵀ, at worst.

    Found by doubling, then by halving: the error falls as slack grows, but for rounding.

    The bound is `ERROR_MULTIPLE` times the plain factors' own error in that dtype, or, if larger, the same part of
    `ERROR_FLOOR`: what is stated is to hold on other inputs too.
    """
    rank = u.shape[1]
    probe = _AlignmentProbe(u, v, inputs, dtype)
    floor = ERROR_FLOOR.get(dtype, 0.0) / STATED_MULTIPLE
    bound = ERROR_MULTIPLE * max(probe.error(rank), floor)
    failed, slack = -1, 0
    while slack < rank and probe.error(slack) > bound:
        failed, slack = slack, min(rank, max(1, 2 * slack))
    while slack - failed > max(1, rank // SLACK_STEPS):
        middle = (failed + slack) // 2
        if probe.error(middle) <= bound:
            slack = middle
        else:
            failed = middle
    return slack


class _AlignmentProbe:
    """One layer's factors, sample inputs and exact outputs, against which any slack is measured."""

    def __init__(self, u: Tensor, v: Tensor, inputs: Tensor, dtype: torch.dtype):
        self._u, self._v, self._dtype = u.double(), v.double(), dtype
        self._inputs = inputs.to(dtype)
        self._exact = (self._inputs.double() @ self._v) @ self._u.T
        lengths = self._exact.norm(dim=1)
        usual = lengths[lengths > 0].median() if bool(lengths.any()) else lengths.new_tensor(0.0)
        self._lengths = lengths.clamp(min=max(float(usual) / 10, 1e-300))

    def error(self, slack: int) -> float:
        u_hat, v_tilde = gauge_align(self._u, self._v, slack)
        latent = self._inputs @ v_tilde.to(self._dtype)
        output = torch.cat([latent[:, : self._u.shape[1] - slack], latent @ u_hat.to(self._dtype).T], 1)
        errors = (output.double() - self._exact).norm(dim=1) / self._lengths
        error = float(errors.square().mean().sqrt())
        return error if error == error else float("inf")


def _balanced(left: Tensor, right: Tensor, energies: Tensor) -> Factors:
    """Component-major factors whose pairs have equal length, so that one learning rate suits both."""
    scale = (_lengths(right) / _lengths(left)).sqrt()
    return Factors((left * scale).T.contiguous(), (right / scale).T.contiguous(), energies)


def _lengths(columns: Tensor) -> Tensor:
    """Column lengths, floored relative to the largest so that their ratios stay finite for columns of zeros."""
    lengths = columns.norm(dim=0)
    largest = lengths.max() if lengths.numel() else lengths.sum()
    return lengths.clamp(min=max(1e-12 * float(largest), 1e-150))


def _roots(moment: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """G^{1/2} and G^{-1/2} of the ridged moment; the ridge bounds the second's norm."""
    if moment is None:
        return None, None
    values, vectors = torch.linalg.eigh(ridged(moment))
    root = values.clamp(min=values[-1] * 1e-15).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _ridge(mean_square: float) -> float:
    return RIDGE * mean_square if mean_square > 0 else 1.0


def _require_finite(what: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise FlexrankError(f"the {what} holds values that are not finite")
