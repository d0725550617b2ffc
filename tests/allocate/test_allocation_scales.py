"""Joint allocation against brute force where one error is many times as large as those that a good profile has."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from scipy import optimize
from tables import EVERY_RANK, FOOTPRINT, allocate_ranks, brute_force, check_chain, random_table, weighted_error

from flexrank.allocate import joint
from flexrank.allocate.curves import read_curves
from flexrank.profiles import SensitivityTable
from research.measures import unconstrained_bounds

BUDGETS = [0.5, 0.7, 0.9]


def dwarfed(big: float, seed: int, zeros: bool = False) -> SensitivityTable:
    """Four layers; the first one's least rank has an error of `big`, all else of .01 to 10, or 0 in other layers."""
    random = np.random.default_rng(seed)
    names = [f"layer{layer}" for layer in range(4)]
    errors = {name: np.sort(random.random(4) * 10.0 ** random.uniform(-2, 1))[::-1] for name in names}
    errors |= {name: 0 * errors[name] for name in names[1:] if zeros}
    errors["layer0"][0] = big
    found = {name: (*map(float, own), 0.0) for name, own in errors.items()}
    return SensitivityTable(
        dict.fromkeys(names, (64, 64)), dict.fromkeys(names, (4, 9, 16, 24, 64)), found, 0.0, FOOTPRINT
    )


@pytest.mark.parametrize("big", [1e3, 1e8, 1e10, 1e22])
@pytest.mark.parametrize("seed", range(3))
def test_one_error_that_dwarfs_all_others_hides_none(big: float, seed: int) -> None:
    table = dwarfed(big, seed)
    bounds = unconstrained_bounds(table, BUDGETS, **EVERY_RANK)
    for budget, bound in zip(BUDGETS, bounds, strict=True):
        best, chain = brute_force(table, [budget], [1.0]), allocate_ranks(table, [budget], gap=1e-6)
        assert chain.requested[0].error == pytest.approx(best, rel=1e-5)
        assert best * (1 - 1e-2) <= bound <= best * (1 + 1e-5)
    chain = allocate_ranks(table, BUDGETS, gap=1e-6)
    check_chain(chain, table, BUDGETS)
    assert weighted_error(chain) == pytest.approx(brute_force(table, BUDGETS, [1.0] * 3), rel=1e-5)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1e-4, 1.0, 1e4), (1e4, 1.0, 1e-4)])
@pytest.mark.parametrize("negative", [0.0, 0.3])
def test_budgets_in_one_program_are_not_hidden_either(weights: tuple[float, ...], negative: float) -> None:
    """With errors below 0 too, as noisy probes have."""
    table = dwarfed(1e10, 7)
    lowered = {name: (*(error - negative for error in own[:-1]), 0.0) for name, own in table.errors.items()}
    table = dataclasses.replace(table, errors=lowered)
    caps = [int(budget * 4 * 64 * 64) for budget in BUDGETS]
    solution = joint._Program(read_curves(table), 1e-7, 60).solve(caps, weights)
    best = brute_force(table, BUDGETS, list(weights))
    assert solution.objective == pytest.approx(best, rel=1e-5)
    assert solution.bound <= best + 1e-5 * abs(best)


def test_a_bound_is_one_where_the_solver_stops_early() -> None:
    """At a gap of a half its profiles are worse than the optimum, which the bound never passes."""
    worse = 0
    for seed in range(20):
        table = random_table(4, 5, seed)
        curves, dense = read_curves(table), sum(m * n for m, n in table.shapes.values())
        least = sum(int(curve.parameters[0]) for curve in curves) / dense
        budget = least + (1 - least) * 0.4
        solution = joint._Program(curves, 0.5, 60).solve([int(budget * dense)], [1.0])
        best = brute_force(table, [budget], [1.0])
        assert solution.objective / 2.1 <= solution.bound <= best * (1 + 1e-6) <= solution.objective * (1 + 2e-6)
        worse += solution.objective > 1.01 * best
    assert worse


def test_a_profile_without_error_is_found_below_a_large_one() -> None:
    table = dwarfed(1e13, 0, zeros=True)
    assert brute_force(table, [0.5], [1.0]) == 0 == allocate_ranks(table, [0.5], gap=0).requested[0].error
    none = dataclasses.replace(table, errors=dict.fromkeys(table.errors, (0.0,) * 5))
    assert allocate_ranks(none, [0.5]).requested[0].error == allocate_ranks(none, [0.5]).gap == 0


@pytest.fixture
def objectives(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What the solver is given to minimise, in turn."""
    seen, solve = [], optimize.milp

    def milp(objective: np.ndarray, **options: Any) -> Any:
        seen.append(objective)
        return solve(objective, **options)

    monkeypatch.setattr(optimize, "milp", milp)
    return seen


@pytest.mark.parametrize("big", [1e3, 1e4, 1e6, 1e10, 1e22])
def test_no_number_that_the_solver_sees_dwarfs_what_it_finds(big: float, objectives: list[np.ndarray]) -> None:
    """Steps have up to 1e4, and those that the profile drops at least a twentieth of that together."""
    for seed in range(5):
        (entry,) = allocate_ranks(dwarfed(big, seed), [0.7]).requested
        levels = [(4, 9, 16, 24, 64).index(rank) for rank in entry.profile.values()]
        dropped = sum(steps[level:].sum() for steps, level in zip(objectives[-1].reshape(4, 4), levels, strict=True))
        assert all(np.abs(objective).max() < 1.01e4 for objective in objectives) and dropped > 500


def test_only_ratios_of_weights_matter(objectives: list[np.ndarray]) -> None:
    caps = [int(budget * 4 * 64 * 64) for budget in BUDGETS]
    for scale in (1.0, 1e5):
        joint._Program(read_curves(dwarfed(10, 3)), 1e-7, 60).solve(caps, [scale, 2 * scale, 3 * scale])
    first, second = objectives[: len(objectives) // 2], objectives[len(objectives) // 2 :]
    np.testing.assert_allclose(first, second, rtol=1e-12)


def test_noise_below_zero_has_the_scale_where_the_optimum_is_all_noise(objectives: list[np.ndarray]) -> None:
    """The best cut of `b` has 1e-9 beside -1, and that of `c`, of a larger rank, 5: less than either beside 1e10."""
    names, ranks = "abc", (20, 40, 64)
    errors = {"a": (-1.0, 0.0, 0.0), "b": (1e10, 1e-9, 0.0), "c": (1e10, 5.0, 0.0)}
    candidates = {"a": ranks, "b": ranks, "c": (20, 41, 64)}
    table = SensitivityTable(dict.fromkeys(names, (64, 64)), candidates, errors, 0.0, FOOTPRINT)
    chain = allocate_ranks(table, [0.8], gap=0, monotone_errors=False)
    assert brute_force(table, [0.8], [1.0]) == 1e-9 - 1 == pytest.approx(chain.requested[0].error, abs=1e-6)
    assert all(np.abs(objective).max() < 2.01e4 for objective in objectives)


def test_noise_alone_is_solved_to_its_own_scale() -> None:
    """All errors below 0: the least is found, and nothing is solved for ever."""
    table = random_table(3, 4, seed=2)
    table = dataclasses.replace(table, errors={name: tuple(-e for e in own) for name, own in table.errors.items()})
    chain = allocate_ranks(table, [0.9], gap=0, monotone_errors=False)
    assert chain.requested[0].error == pytest.approx(brute_force(table, [0.9], [1.0]), rel=1e-6)
