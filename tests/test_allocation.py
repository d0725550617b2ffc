"""Allocation against oracles: brute force over all nested tuples, and the printed algorithms word by word."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexrank.allocation import allocate_ranks, joint, paper, unconstrained_bounds
from flexrank.allocation.adjustment import repair, spend
from flexrank.allocation.curves import CostTable, LayerCurve, monotone, read_curves, refine, step_slopes, undominated
from flexrank.allocation.knapsack import solve_window
from flexrank.costs import deployed_parameters, relative_size
from flexrank.errors import FlexrankError
from flexrank.profiles import Footprint, ProfileChain, SensitivityTable

FOOTPRINT = Footprint(7, 28, 4)
SOLVER_TOLERANCE = 1e-6  # of HiGHS, of the errors' scale
run_often = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def random_table(layers: int, levels: int, seed: int, falling: bool = True, width: int = 24) -> SensitivityTable:
    random = np.random.default_rng(seed)
    shapes, ranks, errors = {}, {}, {}
    for layer in range(layers):
        m, n = (int(side) for side in random.integers(levels, width, size=2))
        probed = np.sort(random.choice(np.arange(1, min(m, n)), size=levels - 1, replace=False))
        values = random.lognormal(-2, 1.5, size=levels - 1)
        values = np.sort(values)[::-1] if falling else values - 0.1
        name = f"layer{layer}"
        shapes[name], ranks[name] = (m, n), (*probed.tolist(), min(m, n))
        errors[name] = (*values.tolist(), 0.0)
    return SensitivityTable(shapes, ranks, errors, 1.0, FOOTPRINT)


def transformer_table(layers: int, levels: int, seed: int) -> SensitivityTable:
    """Wider layers, so that every budget from .3 can be met."""
    random = np.random.default_rng(seed)
    shapes = {f"layer{i}": [(64, 64), (32, 64), (256, 64), (64, 256)][i % 4] for i in range(layers)}
    ranks, errors = {}, {}
    for name, shape in shapes.items():
        probed = np.round(np.linspace(0, 1, levels + 1)[1:] * min(shape)).astype(int)
        tail = np.sort(random.lognormal(-2, 2, size=levels - 1))[::-1]
        ranks[name], errors[name] = tuple(probed.tolist()), (*tail.tolist(), 0.0)
    return SensitivityTable(shapes, ranks, errors, 1.0, FOOTPRINT)


def least_budget(table: SensitivityTable) -> float:
    return relative_size(table.shapes, {name: ranks[0] for name, ranks in table.ranks.items()})


def spread_budgets(table: SensitivityTable, count: int) -> list[float]:
    least = least_budget(table)
    return [least + (1 - least) * (index + 0.5) / count for index in range(count)]


def weighted_error(chain: ProfileChain, weights=None) -> float:
    return sum(entry.error * (weights or {}).get(entry.requested, 1.0) for entry in chain.requested)


def brute_force(table: SensitivityTable, budgets: list[float], weights: list[float]) -> float:
    """Least weighted error over all tuples of nested profiles within the (rising) budgets."""
    names = list(table.shapes)
    profiles = []
    for levels in itertools.product(*(range(len(table.ranks[name])) for name in names)):
        ranks = {name: table.ranks[name][level] for name, level in zip(names, levels, strict=True)}
        error = sum(table.errors[name][level] for name, level in zip(names, levels, strict=True))
        cost = sum(deployed_parameters(table.shapes[name], ranks[name]) for name in names)
        profiles.append((levels, cost, error))
    dense = sum(m * n for m, n in table.shapes.values())
    best = {levels: 0.0 for levels, _, _ in profiles}  # least error of the smaller budgets, all within `levels`
    for budget, weight in zip(budgets, weights, strict=True):
        own = [(levels, best[levels] + weight * error) for levels, cost, error in profiles if cost <= budget * dense]
        best = {
            levels: min((v for low, v in own if all(map(int.__le__, low, levels))), default=math.inf) for levels in best
        }
    return min(best.values())


def check_chain(chain: ProfileChain, table: SensitivityTable, budgets) -> None:
    assert chain.budgets == tuple(sorted(budgets))
    full = {name: min(shape) for name, shape in table.shapes.items()}
    assert chain.entries[0].profile == {name: ranks[0] for name, ranks in table.ranks.items()}
    assert chain.entries[-1].profile == full and chain.entries[-1].error == 0
    assert chain.dense_parameters == chain.entries[-1].parameters
    for small, large in itertools.pairwise(chain.entries):
        assert small.profile.fits_in(large.profile) and small.parameters <= large.parameters
    for entry in chain.entries:
        costs = [deployed_parameters(table.shapes[name], rank) for name, rank in entry.profile.items()]
        assert entry.parameters == sum(costs)
    for entry in chain.requested:
        assert entry.parameters <= entry.requested * chain.dense_parameters


# ------------------------------------------------------------------------------------------------ joint


@run_often
@given(
    layers=st.integers(1, 3), levels=st.integers(2, 4), count=st.integers(1, 3), seed=st.integers(0, 10**6),
    falling=st.booleans(), weighted=st.booleans(),
)  # fmt: skip
def test_joint_equals_brute_force(layers, levels, count, seed, falling, weighted):
    table = random_table(layers, levels, seed, falling)
    budgets = spread_budgets(table, count)
    random = np.random.default_rng(seed)
    weights = random.uniform(0.1, 5, size=count).tolist() if weighted else [1.0] * count
    chain = allocate_ranks(table, budgets, weights=weights, gap=0, monotone_errors=False)
    if falling:
        check_chain(chain, table, budgets)
    best = brute_force(table, budgets, weights)
    found = weighted_error(chain, dict(zip(budgets, weights, strict=True)))
    assert found == pytest.approx(best, rel=SOLVER_TOLERANCE, abs=SOLVER_TOLERANCE)


@pytest.mark.parametrize("seed", range(30))
def test_whole_program_equals_brute_force(seed, monkeypatch):
    """The path that the budget-by-budget one usually spares."""
    quick = joint._solve_by_budget
    monkeypatch.setattr(joint, "_solve_by_budget", lambda *a: quick(*a)._replace(objective=1e9, bound=-1e9))
    table = random_table(3, 4, seed)
    budgets = spread_budgets(table, 3)
    chain = allocate_ranks(table, budgets, gap=0)
    check_chain(chain, table, budgets)
    assert weighted_error(chain) == pytest.approx(brute_force(table, budgets, [1.0] * 3), rel=1e-6)
    assert chain.gap < 1e-5


@pytest.mark.parametrize("seed", range(10))
def test_relaxation_serves_where_the_solver_has_no_time(seed, monkeypatch):
    quick = joint._solve_by_budget
    monkeypatch.setattr(joint, "_solve_by_budget", lambda *a: quick(*a)._replace(objective=1e9, bound=-1e9))
    table = transformer_table(24, 6, seed)
    budgets = [0.3, 0.5, 0.7, 0.9]
    chain = allocate_ranks(table, budgets, gap=1e-6, time_limit=1e-6)
    check_chain(chain, table, budgets)
    exact = sum(unconstrained_bounds(table, budgets))
    assert exact * (1 - 1e-6) <= weighted_error(chain) <= exact * 1.5
    assert weighted_error(chain) * (1 - chain.gap) <= exact * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(40))
def test_one_budget_equals_brute_force_and_its_bound_holds(seed):
    table = random_table(4, 4, seed)
    budget = spread_budgets(table, 3)[seed % 3]
    best = brute_force(table, [budget], [1.0])
    costs = CostTable(read_curves(table))
    cap = math.floor(budget * sum(m * n for m, n in table.shapes.values()))
    levels, bound = solve_window(costs, np.zeros_like(costs.top), costs.top, cap, 0.0, 60.0)
    assert costs.cost(levels) <= cap
    assert costs.error(levels) == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert bound <= best * (1 + 1e-9)
    assert bound == pytest.approx(best, rel=1e-5, abs=1e-8)


def test_errors_of_very_different_size_are_solved_alike():
    """A large budget's errors may be a millionth of the largest of the table."""
    table = random_table(4, 4, seed=5)
    table = dataclasses.replace(
        table, errors={name: tuple(e**6 for e in errors) for name, errors in table.errors.items()}
    )
    for budget in spread_budgets(table, 6):
        chain = allocate_ranks(table, [budget], gap=0)
        assert chain.requested[0].error == pytest.approx(brute_force(table, [budget], [1.0]), rel=1e-4, abs=1e-300)


@pytest.mark.slow
@pytest.mark.parametrize("falling", [True, False])
def test_joint_is_never_above_paper(falling):
    for seed in range(100):
        table = random_table(2 + seed % 7, 3 + seed % 4, seed, falling)
        budgets = spread_budgets(table, 4)
        ours = allocate_ranks(table, budgets, monotone_errors=False)
        theirs = allocate_ranks(table, budgets, method="paper")
        slack = ours.gap * abs(weighted_error(ours)) + SOLVER_TOLERANCE
        assert weighted_error(ours) <= weighted_error(theirs) + slack


def test_the_printed_chain_is_far_from_the_best_somewhere():
    """The weakness that `joint` mends: a greedy chain keeps what its first profiles forbid."""
    ratios = []
    for seed in range(20):
        table = random_table(4, 5, seed)
        budgets = spread_budgets(table, 4)
        theirs = weighted_error(allocate_ranks(table, budgets, method="paper"))
        ratios.append(theirs / weighted_error(allocate_ranks(table, budgets)))
    assert max(ratios) > 1.2 and np.mean(ratios) > 1.02


@pytest.mark.parametrize("layers", [12, 36])
def test_the_gap_is_proven_and_kept(layers):
    table = transformer_table(layers, 8, seed=layers)
    budgets = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    chain = allocate_ranks(table, budgets, gap=1e-3)
    check_chain(chain, table, budgets)
    assert 0 <= chain.gap <= 1e-3
    bounds = unconstrained_bounds(table, budgets)
    for entry, bound in zip(chain.requested, bounds, strict=True):
        assert bound * (1 - 1e-9) <= entry.error <= bound * 1.1


def test_weights_draw_the_optimum():
    found = []
    for heavy in (0, 1):
        errors = []
        for seed in range(20):
            table = random_table(3, 5, seed)
            budgets = spread_budgets(table, 2)
            weights = {budget: 1e3 if index == heavy else 1.0 for index, budget in enumerate(budgets)}
            errors.append([entry.error for entry in allocate_ranks(table, budgets, weights=weights).requested])
        found.append(np.array(errors))
    assert (found[0][:, 0] <= found[1][:, 0] + 1e-9).all() and (found[0][:, 0] < found[1][:, 0] - 1e-6).any()
    assert (found[1][:, 1] <= found[0][:, 1] + 1e-9).all() and (found[1][:, 1] < found[0][:, 1] - 1e-6).any()


def test_order_of_budgets_and_kind_of_weights_do_not_matter():
    table = random_table(4, 5, seed=1)
    low, mid, high = spread_budgets(table, 3)
    chain = allocate_ranks(table, [low, mid, high], weights=[1, 2, 3])
    assert allocate_ranks(table, (high, low, mid), weights=(3, 1, 2)) == chain
    assert allocate_ranks(table, np.array([mid, high, low]), weights={low: 1, mid: 2, high: 3}) == chain


def test_budget_one_is_the_full_model_even_where_a_smaller_one_probes_better():
    table = random_table(3, 4, seed=3, falling=False)
    for options in ({}, {"monotone_errors": False}, {"method": "paper"}):
        chain = allocate_ranks(table, [0.9, 1], **options)
        assert chain.requested[-1].profile == {name: min(shape) for name, shape in table.shapes.items()}
    assert allocate_ranks(table, [1.0]).gap == 0


def test_a_layer_probed_at_full_rank_alone():
    table = SensitivityTable(
        {"a": (4, 6), "b": (5, 5)}, {"a": (4,), "b": (1, 5)}, {"a": (0.0,), "b": (1.0, 0.0)}, 0.0, FOOTPRINT
    )
    for method in ("joint", "paper"):
        chain = allocate_ranks(table, [0.8, 1.0], method=method)
        assert [dict(entry.profile) for entry in chain.requested] == [{"a": 4, "b": 1}, {"a": 4, "b": 5}]
    only = SensitivityTable({"a": (4, 6)}, {"a": (4,)}, {"a": (0.0,)}, 0.0, FOOTPRINT)
    assert [len(allocate_ranks(only, [1.0], method=method).entries) for method in ("joint", "paper")] == [1, 1]


def test_two_budgets_with_one_answer_both_stand_in_the_chain():
    table = SensitivityTable({"a": (10, 10)}, {"a": (2, 10)}, {"a": (1.0, 0.0)}, 0.0, FOOTPRINT)
    for method in ("joint", "paper"):
        chain = allocate_ranks(table, [0.5, 0.7], method=method)
        assert chain.budgets == (0.5, 0.7) and chain.requested[0].profile == chain.requested[1].profile == {"a": 2}


def test_overrun_caps_are_repaired_and_spare_is_spent():
    table = random_table(5, 5, seed=11)
    costs = CostTable(read_curves(table))
    random = np.random.default_rng(0)
    for _ in range(50):
        caps = sorted(random.integers(costs.cost(np.zeros_like(costs.top)), costs.cost(costs.top), size=3).tolist())
        levels = np.sort(random.integers(0, 5, size=(3, 5)), axis=0)
        before = levels.copy()
        repair(costs, levels, caps)
        assert (levels <= before).all() and (np.diff(levels, axis=0) >= 0).all()
        assert all(costs.cost(row) <= cap for row, cap in zip(levels, caps, strict=True))
        lowered = levels.copy()
        spend(costs, levels, caps)
        assert (levels >= lowered).all() and (np.diff(levels, axis=0) >= 0).all()
        assert all(costs.cost(row) <= cap for row, cap in zip(levels, caps, strict=True))
        for budget, cap in enumerate(caps):  # no single raise is left that fits
            limit = levels[budget + 1] if budget < 2 else costs.top
            for layer in np.flatnonzero(levels[budget] < limit):
                raised = levels[budget].copy()
                raised[layer] += 1
                assert costs.cost(raised) > cap


def test_polish_brings_any_nested_start_near_the_front():
    table = transformer_table(16, 8, seed=1)
    budgets = [0.3, 0.5, 0.7, 0.9]
    costs = CostTable(read_curves(table))
    caps = [math.floor(budget * costs.cost(costs.top)) for budget in budgets]
    levels = np.zeros((4, 16), np.int64)
    joint.polish(costs, levels, caps, 1e-4, 60.0)
    assert (np.diff(levels, axis=0) >= 0).all()
    for row, cap, bound in zip(levels, caps, unconstrained_bounds(table, budgets), strict=True):
        assert costs.cost(row) <= cap and costs.error(row) <= 1.02 * bound


# ------------------------------------------------------------------------------------------------ chain


@pytest.mark.parametrize("options", [{}, {"candidates_per_layer": 16}])
def test_between_solved_profiles_single_steps_lie_close_to_the_front(options):
    table = transformer_table(16, 8, seed=2)
    chain = allocate_ranks(table, [0.3, 0.6], **options)
    check_chain(chain, table, [0.3, 0.6])
    for small, large in itertools.pairwise(chain.entries):
        raised = [name for name in small.profile if small.profile[name] < large.profile[name]]
        assert len(raised) == 1 and large.error <= small.error
    between = [0.35, 0.45, 0.55, 0.75, 0.85]
    bounds = unconstrained_bounds(table, between)
    for budget, bound in zip(between, bounds, strict=True):
        entry = chain.entry_at(budget)
        assert entry.parameters <= budget * chain.dense_parameters
        assert entry.error <= 1.25 * bound


def test_chain_at_answers_by_budget_parameters_bytes_and_error():
    table = transformer_table(8, 6, seed=4)
    chain = allocate_ranks(table, [0.3, 0.5, 0.8])
    solved = chain.requested[1]
    assert chain.at(0.5) == chain.at(max_params=7 + solved.parameters) == solved.profile
    assert chain.at(max_bytes=28 + 4 * solved.parameters) == chain.at(max_error=solved.error) == solved.profile


def test_json_round_trip_keeps_every_bit():
    table = transformer_table(6, 5, seed=6)
    for options in ({}, {"method": "paper", "savings": "ranks"}):
        chain = allocate_ranks(table, [0.3, 1 / 3, 0.8], **options)
        assert ProfileChain.from_json(json.loads(json.dumps(chain.to_json()))) == chain


# ------------------------------------------------------------------------------------------------ curves


def curve_of(errors, ranks=None, shape=(40, 60)) -> LayerCurve:
    ranks = np.array(ranks or [4 * (i + 1) for i in range(len(errors) - 1)] + [40])
    parameters = np.array([deployed_parameters(shape, int(rank)) for rank in ranks])
    return LayerCurve("a", ranks, parameters, np.array(errors, float))


def test_monotone_fit_by_hand_and_identity_on_falling_errors():
    assert monotone(curve_of([3.0, 1.0, 2.0, -1.0, 0.0])).errors.tolist() == [3.0, 1.5, 1.5, 0.0, 0.0]
    falling = [0.7 + 0.1, 0.3, 0.1, 0.0, 0.0]
    assert monotone(curve_of(falling)).errors.tolist() == falling


def test_undominated_keeps_strict_falls_and_full_rank():
    assert undominated(curve_of([3.0, 1.0, 1.0, 2.0, -1.0, 0.0])).errors.tolist() == [3.0, 1.0, -1.0, 0.0]


def test_noise_is_fitted_and_the_budget_is_still_spent():
    """One lucky probe far down: as measured, nothing larger looks worth its cost."""
    shape = (40, 60)
    table = SensitivityTable({"a": shape}, {"a": (4, 20, 30, 40)}, {"a": (-0.1, 0.4, 0.2, 0.0)}, 1.0, FOOTPRINT)
    measured = allocate_ranks(table, [0.95], monotone_errors=False)
    assert measured.requested[0].profile == {"a": 4}
    assert allocate_ranks(table, [0.95]).requested[0].profile == {"a": 30}


@run_often
@given(errors=st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=8), count=st.integers(2, 60))
def test_refined_curves_keep_probed_points_and_fall_between(errors, count):
    curve = curve_of([*sorted(errors, reverse=True), 0.0])
    fine = refine(curve, (40, 60), count)
    where = np.searchsorted(fine.ranks, curve.ranks)
    assert fine.ranks[where].tolist() == curve.ranks.tolist()
    assert fine.errors[where].tolist() == curve.errors.tolist()
    assert fine.parameters.tolist() == [deployed_parameters((40, 60), int(rank)) for rank in fine.ranks]
    assert (np.diff(fine.errors) <= 1e-12 * curve.errors[0]).all()
    assert fine.ranks[0] == curve.ranks[0] and len(fine.ranks) <= count + len(curve.ranks)


def test_interpolation_is_near_the_truth_on_an_exponential_and_even_in_cost():
    shape = (200, 300)
    ranks = [20 * (i + 1) for i in range(10)]
    curve = curve_of([*(5 * np.exp(-0.03 * np.array(ranks[:-1]))), 0.0], ranks, shape)
    fine = refine(curve, shape, 40)
    inside = fine.ranks <= 180
    np.testing.assert_allclose(fine.errors[inside], 5 * np.exp(-0.03 * fine.ranks[inside]), rtol=1e-9)
    widest = np.diff(fine.parameters).max()
    assert widest <= 1.3 * (fine.parameters[-1] - fine.parameters[0]) / 39


def test_interpolated_candidates_lower_the_predicted_error_and_meet_budgets_more_closely():
    table = transformer_table(8, 6, seed=8)
    budgets = [0.35, 0.55, 0.75]
    coarse, fine = (allocate_ranks(table, budgets, candidates_per_layer=count) for count in (None, 24))
    check_chain(fine, table, budgets)
    assert weighted_error(fine) <= weighted_error(coarse) * (1 + 1e-3)
    unspent = [sum(e.requested - chain.relative_size(e) for e in chain.requested) for chain in (coarse, fine)]
    assert unspent[1] < unspent[0]


def test_step_slopes_are_those_of_the_lower_hull():
    parameters, errors = np.array([0, 1, 2, 4]), np.array([10.0, 9.0, 4.0, 3.0])
    assert step_slopes(parameters, errors).tolist() == [3.0, 3.0, 0.5]  # 10 → 4 over two steps; then 1 over 2


# ------------------------------------------------------------------------------------------------ paper


def printed_algorithm(candidates):
    """Algorithms 2 and 3, word by word; candidates[l] = [(saving, error)]. Returns [(error, (saving, …))]."""
    front, backpointers = [(0, 0.0)], []
    for layer in candidates:
        expanded = []
        for i, (S, E) in enumerate(front):
            for s, e in layer:
                expanded.append((S + s, E + e, i, s))
            expanded.append((S, E, i, 0))
        least = {}
        for state in expanded:
            if state[0] not in least or state[1] < least[state[0]][1]:
                least[state[0]] = state
        front, pointers, best = [], [], math.inf
        for S, E, i, s in sorted(least.values(), reverse=True):
            if best > E:
                front.insert(0, (S, E))
                pointers.insert(0, (i, s))
                best = E
        backpointers.append(pointers)
    profiles = []
    for h, (_, E) in enumerate(front):
        d = [0] * len(candidates)
        for layer in range(len(candidates) - 1, -1, -1):
            h, d[layer] = backpointers[layer][h]
        profiles.append((E, tuple(d)))
    filtered, best = [], math.inf
    for E, d in sorted(profiles, key=lambda profile: sum(profile[1]), reverse=True):
        if best > E:
            filtered.insert(0, (E, d))
            best = E
    chain = []
    for E, d in filtered:
        if not chain or all(new >= old for new, old in zip(d, chain[-1][1], strict=True)):
            chain.append((E, d))
    return chain


def candidates_of(table: SensitivityTable, savings: str):
    for name, shape in table.shapes.items():
        cost = {rank: rank if savings == "ranks" else deployed_parameters(shape, rank) for rank in table.ranks[name]}
        full = cost[min(shape)]
        yield [(full - cost[r], e) for r, e in zip(table.ranks[name], table.errors[name], strict=True)][:-1]


@run_often
@given(layers=st.integers(1, 5), levels=st.integers(2, 6), seed=st.integers(0, 10**6), falling=st.booleans(),
       savings=st.sampled_from(["ranks", "parameters"]))  # fmt: skip
def test_paper_equals_the_printed_algorithm(layers, levels, seed, falling, savings):
    table = random_table(layers, levels, seed, falling)
    if seed % 2:  # whole errors tie often
        rounded = {name: tuple(float(round(4 * error)) for error in errors) for name, errors in table.errors.items()}
        table = dataclasses.replace(table, errors=rounded)
    candidates = list(candidates_of(table, savings))
    expected = printed_algorithm(candidates)
    columns = [[np.array(column) for column in zip(*layer, strict=True)] for layer in candidates]
    found = paper.select_nested([savings for savings, _ in columns], [errors for _, errors in columns])
    drops = [
        [np.append(s, 0)[c] for s, c in zip(next(zip(*columns, strict=True)), row, strict=True)]
        for row in found.choices.T
    ]
    assert [(error, tuple(drop)) for error, drop in zip(found.errors, drops, strict=True)] == expected
    chain = allocate_ranks(table, spread_budgets(table, 2), method="paper", savings=savings)
    in_chain = {tuple(entry.profile.values()) for entry in chain.entries}
    for _, drop in expected:
        options = [dict((s, r) for (s, _), r in zip([*layer, (0, 0)], table.ranks[name], strict=True))
                   for layer, name in zip(candidates, table.shapes, strict=True)]  # fmt: skip
        assert tuple(ranks[saving] for ranks, saving in zip(options, drop, strict=True)) in in_chain


@pytest.mark.parametrize("options", [{}, {"savings": "ranks"}, {"grid": 50}, {"monotone_errors": True}])
def test_paper_chain_answers_each_budget_with_its_best_profile(options):
    for seed in range(10):
        table = random_table(5, 5, seed)
        budgets = spread_budgets(table, 4)
        chain = allocate_ranks(table, budgets, method="paper", **options)
        check_chain(chain, table, budgets)
        assert chain.method.startswith("paper") and chain.gap is None
        for entry in chain.requested:
            within = [e.error for e in chain.entries if e.parameters <= entry.requested * chain.dense_parameters]
            assert entry.error == min(within)


def test_grid_bounds_the_states_and_its_stated_error_holds():
    table = transformer_table(10, 6, seed=9)
    dense = sum(m * n for m, n in table.shapes.values())
    curves = read_curves(table)
    savings = [curve.parameters[-1] - curve.parameters[:-1] for curve in curves]
    errors = [curve.errors[:-1] for curve in curves]
    grid = 64
    unit = math.ceil(dense / grid)
    fronts = []
    for size in (1, unit):
        front = paper.Front(np.zeros(1, np.int64), np.zeros(1))
        for layer_savings, layer_errors in zip(savings, errors, strict=True):
            kept = paper.keep_min_error_per_saving(paper.expand_layer(front, layer_savings // size, layer_errors))
            pruned = paper.pareto_prune(kept)
            front = paper.Front(pruned.savings, pruned.errors)
        fronts.append(front)
    exact, coarse = fronts
    assert len(coarse.savings) <= grid + 1 < len(exact.savings)
    for target in range(0, int(coarse.savings[-1])):
        found = coarse.errors[np.searchsorted(coarse.savings, target)]
        reach = target * unit + len(curves) * unit
        if reach <= exact.savings[-1]:
            assert found <= exact.errors[np.searchsorted(exact.savings, reach)] + 1e-12
    chain = allocate_ranks(table, [0.3, 0.6], method="paper", grid=grid)
    assert f"in units of {unit}" in chain.method


# ------------------------------------------------------------------------------------------------ wrong input


@pytest.mark.parametrize(
    ("budgets", "options", "message"),
    [
        ([], {}, "no budget is given"),
        ([0], {}, "budget 0 is out of range"),
        ([1.5], {}, "budget 1.5 is out of range"),
        ([math.nan], {}, "budget nan is out of range"),
        ([0.5, 0.7, 0.5], {}, "budget 0.5 is given twice"),
        ([0.001], {}, "budget 0.001 is too small; the least that the probed ranks allow is 0."),
        ([0.001], {"method": "paper"}, "is too small; the least"),
        ([0.5], {"method": "greedy"}, "method 'greedy' is unknown"),
        ([0.5], {"method": "paper", "savings": "bytes"}, "savings 'bytes' is unknown"),
        ([0.5], {"savings": "ranks"}, "belongs to method='paper'"),
        ([0.5], {"grid": 100}, "grid belongs to"),
        ([0.5], {"method": "paper", "grid": 1}, "grid 1 is out of range"),
        ([0.5], {"method": "paper", "candidates_per_layer": 9}, "belongs to method='joint'"),
        ([0.5], {"gap": 1}, "gap 1 is out of range"),
        ([0.5], {"time_limit": 0}, "time_limit 0 is out of range"),
        ([0.5], {"weights": [1, 2]}, "2 weights for 1 budgets"),
        ([0.5], {"weights": [0]}, "budget 0.5 has weight 0"),
        ([0.5], {"weights": {0.6: 1}}, "weights and budgets differ at budget 0.5"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(budgets, options, message):
    with pytest.raises(FlexrankError) as caught:
        allocate_ranks(transformer_table(4, 5, seed=0), budgets, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": {}}, "holds no layer"),
        ({"ranks": {"b": (1, 4)}}, "layer 'a' is in only one of shapes and ranks"),
        ({"ranks": {"a": (2, 1, 4)}}, "must rise"),
        ({"ranks": {"a": (1, 2, 3)}}, "to 4"),
        ({"errors": {"a": (1.0, 0.0)}}, "2 errors for 3 probed ranks"),
        ({"errors": {"a": (1.0, math.nan, 0.0)}}, "layer 'a' has error nan at rank 2"),
        ({"errors": {"a": (1.0, 0.5, 0.1)}}, "error 0.1 at full rank"),
    ],
)
def test_wrong_tables_are_told_in_one_line(change, message):
    table = SensitivityTable({"a": (4, 6)}, {"a": (1, 2, 4)}, {"a": (1.0, 0.5, 0.0)}, 1.0, FOOTPRINT)
    with pytest.raises(FlexrankError) as caught:
        allocate_ranks(dataclasses.replace(table, **change), [0.9])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_least_budget_that_is_told_can_be_met():
    table = transformer_table(4, 5, seed=0)
    with pytest.raises(FlexrankError) as caught:
        allocate_ranks(table, [0.01])
    least = float(str(caught.value).split()[-1])
    assert allocate_ranks(table, [least]).requested[0].profile == {n: r[0] for n, r in table.ranks.items()}
