"""DataSVD against the dense optimum and the whitened procedure; Gram sums against the product."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexrank.errors import FlexrankError
from flexrank.nn import linalg
from flexrank.nn.linalg import data_svd, half_shrunk, plain_svd, whitened_svd

SHAPES = [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1), (2, 40)]


def problem(m: int, n: int, tokens: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and correlated activations (tokens, n)."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return (
        torch.randn(m, n, generator=generator, dtype=torch.float64),
        torch.randn(tokens, n, generator=generator, dtype=torch.float64) @ mix,
    )


def output_error(weight: torch.Tensor, x: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> float:
    return float(((weight - u.T @ v) @ x.T).norm())


def optimum(weight: torch.Tensor, x: torch.Tensor, rank: int) -> float:
    """The least ‖(W − A)Xᵀ‖ over matrices A of this rank: Eckart–Young on the outputs, which A = P Pᵀ W attains."""
    return float(torch.linalg.svdvals(weight @ x.T)[rank:].norm())


def test_a_moment_is_half_shrunk() -> None:
    moment = torch.tensor([[3.0, 1.0], [1.0, 1.0]])
    torch.testing.assert_close(half_shrunk(moment), torch.tensor([[1.25, 0.25], [0.25, 0.75]]).double())
    torch.testing.assert_close(half_shrunk(1e30 * moment), half_shrunk(moment))
    assert float(moment[0, 0]) == 3.0
    assert torch.equal(half_shrunk(torch.zeros(3, 3)), torch.eye(3).double())
    with pytest.raises(FlexrankError, match="gradients' moment holds values that are not finite"):
        half_shrunk(torch.full((1, 1), torch.nan))


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_every_prefix_is_the_optimum(m: int, n: int) -> None:
    weight, x = problem(m, n)
    factors = data_svd(weight, input_moment=x.T @ x)
    scale = float((weight @ x.T).norm())
    for rank in range(1, min(m, n) + 1):
        error = output_error(weight, x, factors.u[:rank], factors.v[:rank])
        assert error <= optimum(weight, x, rank) + 1e-6 * scale


@pytest.mark.parametrize(("m", "n"), [(6, 9), (9, 6), (7, 7)])
def test_without_whitening_equals_the_whitened_paper(m: int, n: int) -> None:
    weight, x = problem(m, n)
    ours, paper = data_svd(weight, input_moment=x.T @ x), whitened_svd(weight, x.T @ x)
    torch.testing.assert_close(ours.energies, paper.energies, rtol=1e-6, atol=1e-6 * float(paper.energies[0]))
    for rank in range(1, min(m, n) + 1):
        a = ours.u[:rank].T @ ours.v[:rank]
        b = paper.u[:rank].T @ paper.v[:rank]
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7 * float(weight.norm()))


@pytest.mark.parametrize(("m", "n"), [(6, 9), (7, 7), (2, 40)])
def test_output_moment_gives_the_input_moments_result(m: int, n: int) -> None:
    weight, x = problem(m, n)
    second = x.T @ x
    a = data_svd(weight, input_moment=second)
    b = data_svd(weight, output_moment=weight @ second @ weight.T, mean_square=float(second.trace()) / n)
    torch.testing.assert_close(a.energies, b.energies, rtol=1e-10, atol=1e-10 * float(a.energies[0]))
    torch.testing.assert_close(a.u[:1].T @ a.v[:1], b.u[:1].T @ b.v[:1])


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 8),
    n=st.integers(1, 8),
    tokens=st.integers(0, 6),
    dead_rows=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_full_rank_is_exact_whatever_the_moment(
    m: int, n: int, tokens: int, dead_rows: int, dtype: torch.dtype
) -> None:
    """Singular moments (fewer tokens than inputs, none at all), zero rows, rank one, m < n, m > n, bf16 weights."""
    weight, x = problem(m, n, tokens)
    weight[:dead_rows] = 0
    weight = weight.to(dtype)
    for factors in (data_svd(weight, input_moment=x.T @ x), plain_svd(weight)):
        assert torch.isfinite(factors.u).all() and torch.isfinite(factors.v).all()
        assert bool((factors.energies.diff() <= 0).all())
        error = (factors.u.T @ factors.v - weight.double()).norm()
        assert float(error) <= 1e-12 * max(1.0, float(weight.double().norm()))


def test_unseen_directions_are_ordered_by_weight_energy() -> None:
    weight = torch.diag(torch.tensor([1.0, 5.0, 3.0, 2.0]))
    moment = torch.zeros(4, 4)
    moment[0, 0] = 1.0
    order = data_svd(weight, input_moment=moment).v.abs().argmax(1)
    assert order.tolist() == [0, 1, 2, 3]


def test_components_have_factors_of_equal_length() -> None:
    weight, x = problem(9, 6)
    factors = data_svd(weight, input_moment=x.T @ x)
    torch.testing.assert_close(factors.u.norm(dim=1), factors.v.norm(dim=1))


@pytest.mark.parametrize(("m", "n"), [(6, 9), (9, 6)])
def test_fisher_minimises_the_weighted_error(m: int, n: int) -> None:
    """Oracle: with A = G^{1/2} W Σ^{1/2}, the least weighted error at rank r is the tail of A's singular values."""
    weight, x = problem(m, n)
    gradients = problem(3, m, seed=3)[1]
    gradient_moment, second = gradients.T @ gradients, x.T @ x
    factors = data_svd(weight, input_moment=second, gradient_moment=gradient_moment)
    root = torch.linalg.cholesky(gradient_moment).T
    best = torch.linalg.svdvals(root @ weight @ x.T)
    for rank in range(1, min(m, n) + 1):
        rest = weight - factors.u[:rank].T @ factors.v[:rank]
        assert float((root @ rest @ x.T).norm()) <= float(best[rank:].norm()) + 1e-5 * float(best.norm())


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("seen", [0, 1, 3])
def test_few_gradients_weigh_outputs_too(m: int, n: int, seen: int) -> None:
    """Of fewer samples than outputs, or none: oracle by eigenvectors, the optimum of each rank under Ḡ^{1/2}."""
    weight, x = problem(m, n)
    gradients, second = problem(3, m, tokens=seen, seed=3)[1], x.T @ x
    shrunk = half_shrunk(gradients.T @ gradients)
    values, vectors = torch.linalg.eigh(shrunk)
    assert float(values[0]) > 0.499
    root = (vectors * values.sqrt()) @ vectors.T
    found = [data_svd(weight, input_moment=second, gradient_moment=shrunk)]
    if m <= n:
        of_output = {"output_moment": weight @ second @ weight.T, "mean_square": float(second.trace()) / n}
        found.append(data_svd(weight, gradient_moment=shrunk, **of_output))
    singular = torch.linalg.svdvals(root @ weight @ x.T)
    energies = singular[: min(m, n)] ** 2
    for factors in found:
        torch.testing.assert_close(factors.energies, energies, rtol=1e-5, atol=1e-5 * float(energies[0]))
        for rank in range(1, min(m, n) + 1):
            rest = weight - factors.u[:rank].T @ factors.v[:rank]
            assert float((root @ rest @ x.T).norm()) <= float(singular[rank:].norm()) + 1e-5 * float(singular.norm())
    if not seen:
        plain = data_svd(weight, input_moment=second)
        torch.testing.assert_close(found[0].u.T @ found[0].v, plain.u.T @ plain.v)
        torch.testing.assert_close(found[0].energies, plain.energies)


def test_a_moment_of_few_gradients_in_float32_is_definite_when_shrunk() -> None:
    """The worst of a large one: rank one, rounded to float32, whose eigenvalues may be below 0."""
    gradient = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0)) * 1e3
    assert float(torch.linalg.eigvalsh(half_shrunk(gradient.T @ gradient))[0]) > 0.499


def test_wrong_inputs_are_named() -> None:
    weight, x = problem(6, 9)
    with pytest.raises(FlexrankError, match="weight holds values that are not finite"):
        data_svd(weight * float("nan"), input_moment=x.T @ x)
    with pytest.raises(FlexrankError, match="second moment holds values"):
        data_svd(weight, input_moment=x.T @ x * float("inf"))
    with pytest.raises(FlexrankError, match="cannot be whitened"):
        whitened_svd(weight, torch.zeros(9, 9))
    with pytest.raises(FlexrankError, match="needs input_moment"):
        data_svd(weight.T, output_moment=torch.eye(9), mean_square=1.0)


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e7, float("inf")])
def test_a_tall_matrix_is_factorised_at_any_condition(condition: float) -> None:
    """By Cholesky or Householder: W at full rank to rounding, left vectors orthonormal within what is stated."""
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(40, 12, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))
    values = torch.logspace(0, -np.log10(condition), 12, dtype=torch.float64) if condition < float("inf") else None
    weight = (left * (torch.cat([torch.ones(8), torch.zeros(4)]).double() if values is None else values)) @ right.T
    x = torch.randn(50, 12, dtype=torch.float64)
    factors = data_svd(weight, input_moment=x.T @ x)
    torch.testing.assert_close(factors.u.T @ factors.v, weight, rtol=0, atol=1e-12)
    wanted = torch.linalg.svdvals(weight @ x.T) ** 2
    torch.testing.assert_close(factors.energies, wanted[:12], rtol=1e-5, atol=1e-5 * float(wanted[0]))
    unit = factors.u / factors.u.norm(dim=1, keepdim=True)  # of the weakest components too
    torch.testing.assert_close(unit @ unit.T, torch.eye(len(unit)).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gram_by_strips_is_the_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "STRIP", 4)
    monkeypatch.setattr(linalg, "ROWS", 5)
    rows = torch.randn(17, 11).to(dtype)
    gram, wanted = linalg.gram_of(rows), rows.double().T @ rows.double()
    bound = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(gram, wanted, rtol=bound, atol=bound)
    assert torch.equal(gram.tril(-4), gram.triu(4).T)
