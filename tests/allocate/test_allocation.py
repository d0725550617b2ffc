"""Joint allocation against brute force over all nested tuples; the chain; wrong input."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocation_tables import (
    FOOTPRINT,
    SOLVER_TOLERANCE,
    brute_force,
    check_chain,
    every_profile,
    random_table,
    run_often,
    spread_budgets,
    transformer_table,
    weighted_error,
)
from flexrank.allocate import allocate_ranks, joint, knapsack, unconstrained_bounds
from flexrank.allocate.adjustment import repair, spend
from flexrank.allocate.curves import CostTable, read_curves
from flexrank.allocate.knapsack import solve_window
from flexrank.errors import FlexrankError
from flexrank.profiles import ProfileChain, SensitivityTable


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
    quick = joint.solve_by_budget
    monkeypatch.setattr(joint, "solve_by_budget", lambda *a: quick(*a)._replace(objective=1e9, bound=-1e9))
    table = random_table(3, 4, seed)
    budgets = spread_budgets(table, 3)
    chain = allocate_ranks(table, budgets, gap=0)
    check_chain(chain, table, budgets)
    assert weighted_error(chain) == pytest.approx(brute_force(table, budgets, [1.0] * 3), rel=1e-6)
    assert chain.gap < 1e-5


@pytest.mark.parametrize("seed", range(10))
def test_relaxation_serves_where_the_solver_has_no_time(seed, monkeypatch):
    quick = joint.solve_by_budget
    monkeypatch.setattr(joint, "solve_by_budget", lambda *a: quick(*a)._replace(objective=1e9, bound=-1e9))
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
    levels, bound, relaxed, excess, rounding = solve_window(costs, np.zeros_like(costs.top), costs.top, cap)
    assert costs.cost(levels) <= cap
    assert costs.error(levels) == pytest.approx(best, rel=1e-12)
    assert relaxed <= bound <= best * (1 + 1e-12)
    assert bound == pytest.approx(best, rel=1e-12)
    for other in every_profile(costs):
        if costs.cost(other) <= cap:
            least = relaxed + excess[np.arange(4), other].sum()
            assert least <= costs.error(other) + rounding


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("states", [1, 3, 10])
def test_a_search_that_outgrows_its_states_says_so_in_its_bound(seed, states, monkeypatch):
    monkeypatch.setattr(knapsack, "STATES", states)
    table = random_table(5, 5, seed)
    costs = CostTable(read_curves(table))
    for budget in spread_budgets(table, 4):
        cap = math.floor(budget * costs.cost(costs.top))
        best = min(costs.error(row) for row in every_profile(costs) if costs.cost(row) <= cap)
        found = solve_window(costs, np.zeros_like(costs.top), costs.top, cap)
        assert costs.cost(found.levels) <= cap
        assert found.relaxed <= found.bound <= best * (1 + 1e-12) <= costs.error(found.levels) * (1 + 2e-12)


@pytest.mark.parametrize("seed", range(20))
def test_a_window_is_kept_and_best_in_itself(seed):
    """As `polish` asks for it: between two profiles, one of whose layers may have no choice left."""
    table = random_table(4, 5, seed)
    costs = CostTable(read_curves(table))
    random = np.random.default_rng(seed)
    low, high = np.sort(random.integers(0, 5, size=(2, 4)), axis=0)
    cap = int(random.integers(costs.cost(low), costs.cost(high) + 1))
    found = solve_window(costs, low, high, cap)
    inside = [row for row in every_profile(costs, low, high) if costs.cost(row) <= cap]
    assert (low <= found.levels).all() and (found.levels <= high).all() and costs.cost(found.levels) <= cap
    assert costs.error(found.levels) == pytest.approx(min(map(costs.error, inside)), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_what_the_program_leaves_out_is_in_no_nested_solution_as_good(seed):
    table = random_table(2, 4, seed)
    budgets, weights = spread_budgets(table, 2), [1.0, 3.0]
    costs = CostTable(read_curves(table))
    caps = [math.floor(budget * costs.cost(costs.top)) for budget in budgets]
    alone = [solve_window(costs, np.zeros_like(costs.top), costs.top, cap) for cap in caps]
    quick = joint.solve_by_budget(costs, alone, caps, weights, 0.0)
    best = brute_force(table, budgets, weights)
    assert quick.bound <= best * (1 + 1e-12) <= quick.objective * (1 + 2e-12)
    kept = joint.still_possible(alone, weights, quick)
    layers = np.arange(2)
    for small, large in itertools.product(every_profile(costs), repeat=2):
        fits = costs.cost(small) <= caps[0] and costs.cost(large) <= caps[1] and (small <= large).all()
        if fits and costs.error(small) + 3 * costs.error(large) <= quick.objective:
            assert kept[0, layers, small].all() and kept[1, layers, large].all()


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
    """200 instances; both ways of counting savings, with the probed errors as they are and with those of the fit."""
    for seed in range(100):
        table = random_table(2 + seed % 7, 3 + seed % 4, seed, falling)
        budgets, fit = spread_budgets(table, 4), bool(seed % 2)
        ours = allocate_ranks(table, budgets, monotone_errors=fit)
        slack = ours.gap * abs(weighted_error(ours)) + SOLVER_TOLERANCE
        for savings in ("parameters", "ranks"):
            theirs = allocate_ranks(table, budgets, method="paper", savings=savings, monotone_errors=fit)
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


@pytest.mark.parametrize("seed", range(8))
def test_polish_leaves_each_budget_best_between_its_neighbours(seed):
    table = random_table(4, 5, seed)
    costs = CostTable(read_curves(table))
    caps = [math.floor(budget * costs.cost(costs.top)) for budget in spread_budgets(table, 3)]
    levels = np.zeros((3, 4), np.int64)
    alone = [solve_window(costs, np.zeros_like(costs.top), costs.top, cap) for cap in caps]
    joint.polish(costs, levels, caps, alone, 0.0)
    ends = [np.zeros_like(costs.top), *levels, costs.top]
    for low, row, high, cap in zip(ends, ends[1:], ends[2:], caps, strict=False):
        best = min(costs.error(other) for other in every_profile(costs, low, high) if costs.cost(other) <= cap)
        assert (low <= row).all() and (row <= high).all() and costs.cost(row) <= cap
        assert costs.error(row) <= best * (1 + 1e-6)


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
