"""The linear model's study: objectives against sums over every mask, gaps against brute force."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from research.experiment import Request
from research.runner import run_experiment
from research.studies import theory

K = theory.SIZE
SUBSETS = [subset for size in range(1, K + 1) for subset in itertools.combinations(range(K), size)]
PREFIXES = [tuple(range(rank)) for rank in range(1, K + 1)]


def random_factors(seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return tuple(generator.standard_normal((K, K)) for _ in range(3))  # type: ignore[return-value]


def mean_error(u: Any, v: Any, matrix: Any, subsets: list[tuple[int, ...]]) -> Any:
    """The mean of ‖U Π_S Vᵀ − M‖², one subset at a time."""
    return sum(((u[:, list(s)] @ v[:, list(s)].T - matrix) ** 2).sum() for s in subsets) / len(subsets)


@pytest.mark.parametrize("method, subsets", [("pts", [PREFIXES[-1]]), ("asl", SUBSETS), ("nsl", PREFIXES)])
def test_objectives_and_gradients_are_those_of_the_sum_over_masks(method: str, subsets: list[tuple[int, ...]]) -> None:
    u, v, matrix = random_factors()
    value, grad_u, grad_v = theory.OBJECTIVES[method](u, v, matrix)
    assert len(SUBSETS) == 1023
    assert value == pytest.approx(mean_error(u, v, matrix, subsets), rel=1e-12)
    leaves = [torch.tensor(a, requires_grad=True) for a in (u, v)]
    mean_error(*leaves, torch.tensor(matrix), subsets).backward()
    for mine, leaf in zip((grad_u, grad_v), leaves, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(mine, leaf.grad.numpy(), rtol=1e-10, atol=1e-10)


def test_targets_have_the_papers_spectrum_and_differ_by_seed() -> None:
    first, second = theory.draw_target(0), theory.draw_target(1)
    for target in (first, second):
        spectrum = np.linalg.svd(target.truncation(K), compute_uv=False)
        np.testing.assert_allclose(spectrum, [i**-1.2 for i in range(1, K + 1)], rtol=1e-12)
        np.testing.assert_allclose(target.left.T @ target.left, np.eye(K), atol=1e-12)
    assert np.abs(first.truncation(K) - second.truncation(K)).max() > 0.01
    errors = [((first.truncation(r) - first.truncation(K)) ** 2).sum() for r in range(1, K + 1)]
    np.testing.assert_allclose(theory.true_front(first.singular), errors, atol=1e-14)


def test_gaps_are_the_least_over_all_subsets_of_the_rank() -> None:
    u, v, _ = random_factors()
    target = theory.draw_target(5)
    of_rank = [[s for s in SUBSETS if len(s) == rank] for rank in range(1, K + 1)]
    wanted = [min(mean_error(u, v, target.truncation(len(s[0])), [one]) for one in s) for s in of_rank]
    np.testing.assert_allclose(theory.best_gaps(u, v, target), wanted, rtol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.2, 3.0])
def test_spectral_minimiser_solves_the_reduced_problem(decay: float) -> None:
    """Against a bounded minimiser of ¼ Σ (w − 2σ)² + (Σ w)² / 4k over w ≥ 0."""
    singular = np.arange(1, K + 1) ** -decay

    def phi(w: np.ndarray) -> float:
        return float((((w - 2 * singular) ** 2).sum() + w.sum() ** 2 / K) / 4)

    mean, values = theory.spectral_minimiser(singular)
    assert mean == pytest.approx(values.mean(), rel=1e-12)
    best: Any = minimize(phi, singular, bounds=[(0, None)] * K, options={"ftol": 1e-15, "gtol": 1e-10})
    np.testing.assert_allclose(values, best.x, atol=1e-5)
    assert phi(values) <= best.fun + 1e-14
    wanted = (1024 * phi(values) - (singular**2).sum()) / 1023
    assert theory.least_loss("asl", singular) == pytest.approx(wanted, abs=1e-14)


def test_bound_is_the_theorems_at_every_rank() -> None:
    singular, reached = np.arange(1, K + 1) ** -1.2, np.linspace(2, 0, K)
    mean = sum(reached) / K
    wanted = [(r * mean - sum(singular[:r])) ** 2 / K for r in range(1, K + 1)]
    np.testing.assert_allclose(theory.gap_bound(reached, singular), wanted, rtol=1e-12)


def test_balancing_gives_equal_lengths_and_changes_no_submodel() -> None:
    u, v, _ = random_factors()
    u_new, v_new = theory._balanced(np.stack([100 * u, v]).ravel()).reshape(2, K, K)
    np.testing.assert_allclose(np.linalg.norm(u_new, axis=0), np.linalg.norm(v_new, axis=0))
    np.testing.assert_allclose(theory.submodels(u_new, v_new), 100 * theory.submodels(u, v), atol=1e-9)


def test_no_objective_is_below_its_known_least_value_and_the_truncations_reach_nsls() -> None:
    target = theory.draw_target(2)
    root = np.sqrt(target.singular)
    u, v = target.left * root, target.right * root
    reached = theory.nested_objective(u, v, target.truncation(K))[0]
    assert reached == pytest.approx(theory.least_loss("nsl", target.singular), abs=1e-14)
    for seed, method in itertools.product(range(5), theory.OBJECTIVES):
        a, b, _ = random_factors(seed)
        value = theory.OBJECTIVES[method](u + 0.01 * a, v + 0.01 * b, target.truncation(K))[0]
        assert value > theory.least_loss(method, target.singular)


def test_the_whole_study_proves_its_claims_and_goes_on_from_finished_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = theory.EXPERIMENT
    result = run_experiment(study, Request(tmp_path / "work", seeds=2), tmp_path, "python -m research theory")
    assert [one["holds"] for one in result["claims"]] == [True, True, True, False, True, True]
    pts, asl, bound, nsl = zip(*(row[1:] for row in result["tables"][0]["rows"]), strict=True)
    norm = result["settings"]["squared_norm"]
    assert all(cell["n"] == 2 for cell in (*pts, *asl, *bound, *nsl))
    assert min(cell["mean"] for cell in pts[:-1]) > 1e-3 * norm > 1e-15 > pts[-1]["mean"]
    assert all(a["mean"] > b["mean"] for a, b in zip(asl, bound, strict=True))
    assert max(cell["mean"] for cell in nsl) < 1e-6 * norm
    u, v, *_ = theory.minimise("asl", theory.draw_target(0), 0)
    errors = mean_error(u, v, theory.draw_target(0).truncation(K), SUBSETS)
    assert errors == pytest.approx(np.mean(result["data"]["errors"]["asl"]), rel=1e-4)
    assert (tmp_path / "theory.png").stat().st_size > 10_000 and (tmp_path / "theory.svg").is_file()
    for axes, method in zip(theory.draw(result["data"]).axes, theory.OBJECTIVES, strict=True):
        (points,) = axes.collections
        assert len(points.get_offsets()) == 1023
        best, front = (np.asarray(line.get_ydata()) for line in axes.lines)
        assert (best >= front - 1e-5).all()
        assert (np.abs(best - front).max() < 1e-5) == (method == "nsl")
    monkeypatch.setattr(theory, "minimise", None)  # a finished seed is not measured again
    assert study.run(Request(tmp_path / "work", seeds=2))["tables"] == result["tables"]


def test_a_minimisation_that_falls_short_refutes_the_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STEPS", 3), ("ROUNDS", 2), ("STARTS", 1)):
        monkeypatch.setattr(theory, name, value)
    result = theory.run(Request(tmp_path, seeds=1))
    reached, nested = result["claims"][-1], result["claims"][-2]
    assert not reached["holds"] and reached["here"].startswith("0 of 3 minimisations")
    assert not nested["holds"]


def test_a_critical_point_above_the_minimum_is_followed_by_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is flat for the first start's factors, and the true one for any other."""
    target = theory.draw_target(0)
    first = np.random.default_rng([0, 1]).standard_normal(2 * K * K)[0] / K**0.5

    def trapped(u: np.ndarray, v: np.ndarray, matrix: np.ndarray) -> Any:
        return (1.0, 0 * u, 0 * v) if u[0, 0] == first else theory.full_objective(u, v, matrix)

    monkeypatch.setitem(theory.OBJECTIVES, "pts", trapped)
    *_, excess, rounds, starts = theory.minimise("pts", target, 0)
    assert (starts, rounds) == (2, 2) and excess <= theory.EXCESS
