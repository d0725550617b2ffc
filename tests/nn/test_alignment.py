"""Gauge alignment against U Vᵀ in float64; slack and its error against plain loops."""

import math

import pytest
import torch

from flexrank.nn.alignment import (
    alignment_error,
    choose_slack,
    gauge_align,
)


@pytest.mark.parametrize("slack", [0, 1, 3, 5])
@pytest.mark.parametrize(("m", "n"), [(12, 8), (8, 12)])
def test_aligned_factors_multiply_to_the_product(m: int, n: int, slack: int) -> None:
    u, v = torch.randn(m, 5, dtype=torch.float64), torch.randn(n, 5, dtype=torch.float64)
    u_hat, v_tilde = gauge_align(u, v, slack)
    aligned = 5 - slack
    identity = torch.cat([torch.eye(aligned), torch.zeros(aligned, slack)], 1).double()
    torch.testing.assert_close(torch.cat([identity, u_hat]) @ v_tilde.T, u @ v.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(u_hat[:, :aligned], u[aligned:] @ torch.linalg.pinv(u[:aligned]), rtol=1e-9, atol=1e-9)
    assert slack < 5 or (torch.equal(u_hat, u) and torch.equal(v_tilde, v))  # the plain factors, which are the measure
    if 0 < slack < 5:
        torch.testing.assert_close(u_hat[:, aligned:].norm(dim=0), v_tilde[:, aligned:].norm(dim=0))


def test_all_slacks_are_tried_from_one_factorisation(monkeypatch: pytest.MonkeyPatch) -> None:
    u, v, x = torch.randn(96, 60).double(), torch.randn(80, 60).double(), torch.randn(64, 80).double()
    shapes, qr = [], torch.linalg.qr
    monkeypatch.setattr("torch.linalg.qr", lambda matrix, *mode: shapes.append(matrix.shape) or qr(matrix, *mode))
    assert 0 < choose_slack(u, v, x, torch.bfloat16) < 60
    assert shapes == [(60, 60)]


@pytest.mark.parametrize(("rank", "step"), [(1, 1), (2, 1), (48, 1), (80, 1), (200, 3)])
def test_slack_is_the_least_within_the_bound(rank: int, step: int) -> None:
    u, v, x = torch.randn(256, rank).double(), torch.randn(256, rank).double(), torch.randn(64, 256).double()
    for dtype, floor in ((torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.float32, 2e-6)):
        bound = 2.5 * max(alignment_error(u, v, rank, x, dtype), floor / 3)
        slack = choose_slack(u, v, x, dtype)
        assert slack == rank or alignment_error(u, v, slack, x, dtype) <= bound
        assert slack == 0 or any(
            alignment_error(u, v, less, x, dtype) > bound for less in range(max(0, slack - step), slack)
        )
        if rank == 80 and dtype is torch.bfloat16:
            assert 0 < slack < rank and slack & (slack - 1)  # no power of two, where doubling stops
            assert alignment_error(u, v, 0, x, dtype) > 3 * alignment_error(u, v, rank, x, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_errors_are_those_of_each_input(dtype: torch.dtype) -> None:
    """One input a thousand times as long would hide all others' errors; one of next to nothing counts by the others."""
    u, v, x = torch.randn(64, 20).double(), torch.randn(48, 20).double(), torch.randn(30, 48).double()
    u[1] = u[0] * (1 + 1e-3)
    x[3] *= 1e-9
    plain, error = (alignment_error(u, v, slack, x, dtype) for slack in (20, 0))
    rounded, (u_hat, v_tilde) = x.to(dtype), gauge_align(u, v, 0)
    latent = rounded @ v_tilde.to(dtype)
    outputs = torch.cat([latent, latent @ u_hat.to(dtype).T], 1).double()
    exact = (rounded.double() @ v) @ u.T
    least = float(exact.norm(dim=1).median()) / 10
    squares = [float((a - b).norm() / max(float(b.norm()), least)) ** 2 for a, b in zip(outputs, exact, strict=True)]
    assert error == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=1e-6) and error > 10 * plain
    x[5] *= 1000
    assert alignment_error(u, v, 0, x, dtype) == pytest.approx(error, rel=0.3)
    assert alignment_error(u, v, 20, x, dtype) == pytest.approx(plain, rel=0.3)


def test_inputs_of_zeros_leave_the_error_of_the_others() -> None:
    """Most are zero, and one gives next to nothing: neither calls every form as bad as the aligned one."""
    u, v, x = torch.randn(64, 20).double(), torch.randn(48, 20).double(), torch.randn(30, 48).double()
    u[1] = u[0] * (1 + 1e-3)
    least = choose_slack(u, v, x, torch.bfloat16)
    null = torch.linalg.qr(v, mode="complete").Q[:, -1:].T  # V takes nothing of it, but for its rounding
    padded = torch.cat([x, null, torch.zeros(90, 48)])
    assert alignment_error(u, v, 20, padded, torch.bfloat16) < 0.02
    assert 0 < least and 0 < choose_slack(u, v, padded, torch.bfloat16)
    assert alignment_error(u, v, 0, torch.zeros(4, 48).double(), torch.bfloat16) == 0


def test_singular_leading_block_takes_slack() -> None:
    u, v = torch.randn(16, 6).double(), torch.randn(10, 6).double()
    u[1] = u[0]
    assert alignment_error(u, v, 0, torch.randn(8, 10).double(), torch.float32) > 1e-3
    slack = choose_slack(u, v, torch.randn(8, 10).double(), torch.float32)
    assert slack > 0
    assert alignment_error(u, v, slack, torch.randn(8, 10).double(), torch.float32) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_that_are_not_finite_in_the_dtype_choose_no_slack(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    u, v, x = torch.randn(96, 60).double(), torch.randn(80, 60).double(), torch.randn(64, 80).double()
    slack = choose_slack(u, v, x, dtype)
    for value in (1e39, math.inf, math.nan):
        assert choose_slack(u, v, torch.cat([x, torch.full((1, 80), value, dtype=torch.float64)]), dtype) == slack > 0
        assert (
            choose_slack(u, v, torch.full((2, 80), value, dtype=torch.float64), dtype) == 60
        )  # nothing tells: plain factors
