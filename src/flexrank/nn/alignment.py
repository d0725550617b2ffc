"""Gauge alignment with slack: aligned factors, their error in a dtype, and the least slack within a bound."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from flexrank.nn.linalg import column_lengths, full_precision

#: The stated bound: an aligned layer's relative output error in a dtype is at most three times that of the plain
#: factors in it, or at most the floor. Slack is chosen for 2.5 times on sample activations, so three holds on
#: others (the worst of 324 layers and ranks is 2.6).
STATED_MULTIPLE = 3.0
ERROR_MULTIPLE = 2.5
ERROR_FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 0.0, torch.float16: 0.0}
#: Slack is chosen to within the rank over this number; each unit costs r parameters of the layer's r·(m+n−r+slack).
SLACK_STEPS = 64


def gauge_align(
    u: Float[Tensor, "m r"], v: Float[Tensor, "n r"], slack: int
) -> tuple[Float[Tensor, "rest r"], Float[Tensor, "n r"]]:
    """û (m−g, r) and ṽ (n, r) in float64, for which the first g = r − slack outputs are latents themselves.

    The columns of the slack are scaled so their two factors have equal length. û is not finite if U_{1:g} is
    singular; slack keeps it well conditioned (FlexRank, eq. 7, has slack 0).
    """
    return _Gauge(u, v).at(slack)


class _Gauge:
    """The aligned factors of one layer at every slack, from one factorisation.

    With U_{1:r}ᵀ = Q Lᵀ, U_{1:g} = L_{1:g,1:g} Q₁ᵀ for each g, where Q₁ is the first g columns of Q and Q₂ the others.
    The gauge G = [Q₁ L_{1:g,1:g}⁻¹ | Q₂] gives U_{1:g} G = [I_g | 0], and G⁻¹ = [U_{1:g}; Q₂ᵀ]: Ṽ needs no inverse.
    So Û takes UQ and one triangular solve, and Ṽ consists of columns of V U_{1:r}ᵀ and of VQ.
    """

    def __init__(self, u: Float[Tensor, "m r"], v: Float[Tensor, "n r"]):
        self._plain = u.double(), v.double()
        u, v = self._plain
        q, triangle = torch.linalg.qr(u[: u.shape[1]].T)
        self._u = torch.cat([triangle.T, u[u.shape[1] :] @ q])  # U Q
        self._v, self._v_aligned = v @ q, v @ u[: u.shape[1]].T

    def at(self, slack: int) -> tuple[Float[Tensor, "rest r"], Float[Tensor, "n r"]]:
        """û and ṽ as in `gauge_align`; the plain factors if nothing is aligned."""
        aligned = self._u.shape[1] - slack
        if aligned == 0:
            return self._plain
        head, rest = self._u[:aligned, :aligned], self._u[aligned:]
        u_aligned = torch.linalg.solve_triangular(head, rest[:, :aligned], upper=False, left=False)
        u_left, v_left = rest[:, aligned:], self._v[:, aligned:]
        scale = (column_lengths(v_left) / column_lengths(u_left)).sqrt()
        u_hat = torch.cat([u_aligned, u_left * scale], 1)
        return u_hat, torch.cat([self._v_aligned[:, :aligned], v_left / scale], 1)


def alignment_error(
    u: Float[Tensor, "m r"], v: Float[Tensor, "n r"], slack: int, inputs: Float[Tensor, "t n"], dtype: torch.dtype
) -> float:
    """Root mean square over inputs of ‖y − y*‖/‖y*‖: y from the form stored and run in `dtype`, y* in float64.

    The error is taken per input because a few tokens of a transformer have outputs forty times as long as all others.
    ‖y*‖ counts as at least a tenth of the median length of outputs that are not zero. Inputs are rounded to `dtype`
    first, so only the form's own error counts. The error is infinite if the form overflows.
    """
    return _AlignmentProbe(u, v, inputs, dtype).error(slack)


def choose_slack(
    u: Float[Tensor, "m r"], v: Float[Tensor, "n r"], inputs: Float[Tensor, "t n"], dtype: torch.dtype
) -> int:
    """The least slack whose error is within the bound, to within r / `SLACK_STEPS`; at most r, which is plain U Vᵀ.

    The bound is `ERROR_MULTIPLE` times the plain factors' own error, or `ERROR_MULTIPLE` / `STATED_MULTIPLE` times
    `ERROR_FLOOR` if that is larger. The search doubles the slack, then bisects: apart from rounding, the error falls as
    slack grows.
    """
    least = int(u.shape[0] == u.shape[1])  # without it all outputs would be aligned, which is the dense matrix
    with full_precision(u.device):  # a size is the same whatever the caller has set
        return _least_slack(u.shape[1], least, _AlignmentProbe(u, v, inputs, dtype))


def _least_slack(rank: int, least: int, probe: "_AlignmentProbe") -> int:
    bound = ERROR_MULTIPLE * max(probe.error(rank), ERROR_FLOOR.get(probe.dtype, 0.0) / STATED_MULTIPLE)
    if bound == math.inf:  # no finite input is left, or even the plain factors overflow
        return rank
    failed, slack = least - 1, least
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
    """One layer's factors, sample inputs and exact outputs, against which the error of any slack is measured."""

    def __init__(self, u: Tensor, v: Tensor, inputs: Tensor, dtype: torch.dtype):
        self._gauge, self._rank, self.dtype = _Gauge(u, v), u.shape[1], dtype
        rounded = inputs.to(dtype)
        self._inputs = rounded[rounded.isfinite().all(1)]  # others say nothing about the form's error
        self._exact = (self._inputs.double() @ v.double()) @ u.double().T
        lengths = self._exact.norm(dim=1)
        median = float(lengths[lengths > 0].median()) if bool(lengths.any()) else 0.0
        self._lengths = lengths.clamp(min=max(median / 10, 1e-300))

    def error(self, slack: int) -> float:
        u_hat, v_tilde = self._gauge.at(slack)
        latent = self._inputs @ v_tilde.to(self.dtype)
        output = torch.cat([latent[:, : self._rank - slack], latent @ u_hat.to(self.dtype).T], 1)
        errors = (output.double() - self._exact).norm(dim=1) / self._lengths
        error = float(errors.square().mean().sqrt())
        return error if error == error else float("inf")
