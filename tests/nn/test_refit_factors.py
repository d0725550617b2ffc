"""The fit of a decomposed matrix to other inputs, against least squares over explicit rows."""

import pytest
import torch
from torch import Tensor

from flexrank.errors import FlexrankError
from flexrank.nn.linalg import data_svd, half_shrunk, plain_svd, refit

SHAPES = ((6, 9), (9, 6), (7, 7))


def data(m: int, n: int, rows: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix W, rows x with a strong common part, and rows t near x."""
    draw = torch.Generator().manual_seed(m + n)
    weight, x, t = (torch.randn(*shape, generator=draw).double() for shape in ((m, n), (rows, n), (rows, n)))
    x = x @ torch.randn(n, n, generator=draw).double()
    return weight, x, x + 0.5 * t


def with_ridge(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and one more for each direction, the same in both, as long as the ridge asks for."""
    extra = (1e-3 * x.square().sum() / x.shape[1]).sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.cat([x, extra]), torch.cat([t, extra])


def left_for(v: Tensor, weight: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """The (m, r) that is best for v, by least squares over the rows."""
    rows, wanted = with_ridge(x, t)
    return torch.linalg.lstsq(rows @ v.T, wanted @ weight.T).solution.T


def best_map(weight: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """The (m, n) without a limit of rank that is best for the rows."""
    rows, wanted = with_ridge(x, t)
    return torch.linalg.lstsq(rows, wanted @ weight.T).solution.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_left_factor_is_best_for_the_old_right_one_and_the_right_one_for_it(
    shape: tuple[int, int], rank: int
) -> None:
    """Where components are orthogonal, errors of all outputs count alike: the right factor is a projection of those."""
    weight, x, t = data(*shape)
    old = data_svd(weight, input_moment=x.T @ x)
    new = refit(old.u, old.v, rank, x.T @ x, t.T @ x)
    left = left_for(old.v[:rank], weight, x, t)
    right = torch.linalg.pinv(left) @ best_map(weight, x, t)
    torch.testing.assert_close(new.u.T @ new.v, left @ right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(new.u.norm(dim=1), new.v.norm(dim=1))


def test_the_right_factor_weighs_errors_by_the_components_own_lengths() -> None:
    """With weighted outputs components are oblique: they are orthogonal in the metric in which their directions are."""
    weight, x, t = data(6, 9)
    draw = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1.0, 7.0)
    old = data_svd(weight, input_moment=x.T @ x, gradient_moment=half_shrunk(draw.T @ draw))
    new = refit(old.u, old.v, 2, x.T @ x, t.T @ x)
    directions = old.u / old.u.norm(dim=1, keepdim=True)
    metric = torch.linalg.inv(directions.T @ directions)
    left = left_for(old.v[:2], weight, x, t)
    right = torch.linalg.solve(left.T @ metric @ left, left.T @ metric @ best_map(weight, x, t))
    torch.testing.assert_close(new.u.T @ new.v, left @ right, rtol=1e-6, atol=1e-6)
    plain = left @ torch.linalg.pinv(left) @ best_map(weight, x, t)
    assert (new.u.T @ new.v - plain).norm() > 1e-3 * plain.norm()


def test_a_matrix_keeps_its_prefix_where_inputs_are_the_base_models() -> None:
    weight, x, _ = data(6, 9)
    old = data_svd(weight, input_moment=x.T @ x + 1e-3 * x.square().sum() / 9 * torch.eye(9))
    new = refit(old.u, old.v, 3, x.T @ x, x.T @ x)
    torch.testing.assert_close(new.u.T @ new.v, old.u[:3].T @ old.v[:3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_directions_without_data_keep_the_matrix(rows: int) -> None:
    """At full rank nothing limits the fit: rows get what they are fitted to, and all directions beside them keep W."""
    weight, x, t = (part.double() for part in data(6, 9, rows=4))
    x, t = x[:rows], t[:rows]
    old = plain_svd(weight)
    new = refit(old.u, old.v, 6, x.T @ x, t.T @ x)
    matrix = new.u.T @ new.v
    beside = torch.eye(9, dtype=x.dtype) - torch.linalg.pinv(x) @ x if rows else torch.eye(9, dtype=x.dtype)
    torch.testing.assert_close(matrix @ beside, weight @ beside, rtol=1e-6, atol=1e-6)
    if rows:
        assert (x @ matrix.T - t @ weight.T).norm() < 0.05 * (x @ weight.T - t @ weight.T).norm()


def test_components_of_zero_and_twice_the_same_leave_values_finite() -> None:
    """A matrix of rank 2 has components of length zero, whose systems are singular; fitted, it is of rank 2 again."""
    weight, x, t = data(6, 9)
    left, right = weight[:, :2].clone(), weight[:2].clone()
    old = plain_svd(left @ right)
    u, v = torch.cat([old.u[:2], old.u[:1] * 0, old.u[1:2]]), torch.cat([old.v[:2], old.v[:1] * 0, old.v[1:2] * 0])
    new = refit(u, v, 4, x.T @ x, t.T @ x)
    assert bool(torch.isfinite(new.u).all()) and bool(torch.isfinite(new.v).all())
    expected = left_for(old.v[:2], left @ right, x, t)
    expected = expected @ torch.linalg.pinv(expected) @ best_map(left @ right, x, t)
    torch.testing.assert_close(new.u.T @ new.v, expected, rtol=1e-5, atol=1e-5)
    zero = refit(u * 0, v * 0, 3, x.T @ x, t.T @ x)
    assert bool((zero.u.T @ zero.v == 0).all())


@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_values_that_are_not_finite_are_named(what: str) -> None:
    old = plain_svd(torch.eye(3).double())
    moments = {name: torch.eye(3).double() * (torch.nan if name == what else 1) for name in ("inputs", "targets")}
    with pytest.raises(FlexrankError, match=f"the {what}' moment holds values that are not finite"):
        refit(old.u, old.v, 1, *moments.values())


def test_a_moment_that_float32_left_indefinite_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs that are the same and far larger than the rest, as language models have, in a very wide layer.

    The mean square is then so much less than the largest that `REFIT_RIDGE` alone is below what float32 loses.
    """
    monkeypatch.setattr("flexrank.nn.linalg.REFIT_RIDGE", 1e-9)
    weight = data(6, 9)[0]
    old = plain_svd(weight)
    inputs = torch.eye(9).double()
    inputs[:2, :2] = 1e6
    inputs[0, 1] = inputs[1, 0] = 1e6 * (1 + 1e-7)
    assert torch.linalg.eigvalsh(inputs)[0] < 0
    new = refit(old.u, old.v, 6, inputs, inputs)
    torch.testing.assert_close(new.u.T @ new.v, weight, rtol=1e-5, atol=1e-5)
