"""Joint allocation against brute force over all nested tuples; the chain; wrong input."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from tables import (
    EVERY_RANK,
    FOOTPRINT,
    SOLVER_TOLERANCE,
    allocate_ranks,
    brute_force,
    check_chain,
    random_table,
    run_often,
    spread_budgets,
    transformer_table,
    weighted_error,
)

from flexrank.allocate import joint
from flexrank.errors import FlexrankError
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import aligned_parameters
from research.measures import unconstrained_bounds


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
    error = weighted_error(chain, dict(zip(budgets, weights, strict=True)))
    assert error == pytest.approx(best, rel=SOLVER_TOLERANCE, abs=SOLVER_TOLERANCE)


@pytest.mark.parametrize("seed", range(30))
def test_all_budgets_in_one_program_equal_brute_force(seed, monkeypatch):
    """The path that solving budget by budget usually spares: here that one proves nothing. One budget weighs most."""
    solve, calls = joint._Program.solve, []

    def loose_alone(program, caps, weights, least=None):
        calls.append(len(caps))
        solution = solve(program, caps, weights, least)
        return solution._replace(bound=-1e9) if len(caps) == 1 else solution

    monkeypatch.setattr(joint._Program, "solve", loose_alone)
    table = random_table(3, 4, seed)
    budgets = spread_budgets(table, 3)
    weights = {budget: 1e3 if index == seed % 4 else 1.0 for index, budget in enumerate(budgets)}
    chain = allocate_ranks(table, budgets, weights=weights, gap=0)
    check_chain(chain, table, budgets)
    assert calls[-1] == 3
    best = brute_force(table, budgets, list(weights.values()))
    assert weighted_error(chain, weights) == pytest.approx(best, rel=1e-6)
    assert chain.gap < 1e-5


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_of_a_budget_alone_is_its_optimum(seed):
    table = random_table(4, 4, seed)
    budgets = spread_budgets(table, 3)
    for budget, bound in zip(budgets, unconstrained_bounds(table, budgets, **EVERY_RANK), strict=True):
        best = brute_force(table, [budget], [1.0])
        assert best * (1 - 1e-4) - 1e-9 <= bound <= best * (1 + 1e-9)


def test_steps_of_millions_of_parameters_never_overrun_a_budget():
    """Where the solver's tolerance is more than a parameter: costs are counted in rounded-up units."""
    shape = (14336, 4096)
    for seed in range(2):
        table = random_table(4, 6, seed)
        big = dataclasses.replace(
            table,
            shapes=dict.fromkeys(table.shapes, shape),
            ranks={name: (301, 702, 1203, 1904, 2805, 4096) for name in table.shapes},
        )
        budgets = [0.2, 0.4, 0.7]
        chain = allocate_ranks(big, budgets)
        check_chain(chain, big, budgets)
        best = brute_force(big, budgets, [1.0] * 3)
        assert best * (1 - 1e-9) <= weighted_error(chain) <= best * 1.002


def test_a_budget_just_below_a_rank_takes_the_rank_below():
    """Where a unit is hundreds of parameters, a cap that ends within it admits nothing above the cap."""
    shape = (14336, 4096)
    table = SensitivityTable({"layer": shape}, {"layer": (1001, 2003, 4096)}, {"layer": (2, 1, 0)}, 1.0, FOOTPRINT)
    for spare, rank in ((-2, 1001), (10_000, 2003)):
        budget = (2003 * (14336 + 4096 - 2003) + spare) / math.prod(shape)
        assert allocate_ranks(table, [budget]).requested[0].profile == {"layer": rank}


def test_no_time_is_an_error_that_says_so():
    with pytest.raises(FlexrankError, match="no allocation within 1e-06 s"):
        allocate_ranks(transformer_table(24, 6, 0), [0.3, 0.5, 0.7, 0.9], gap=1e-6, time_limit=1e-6)


def test_a_solution_without_its_proof_is_a_warning(caplog, monkeypatch):
    """HiGHS ran out of time with a profile in hand: the chain has it, and the log says so."""
    solve = optimize.milp

    def out_of_time(*arguments, **options):
        result = solve(*arguments, **options)
        result.status = 1
        return result

    monkeypatch.setattr(optimize, "milp", out_of_time)
    with caplog.at_level("WARNING", "flexrank"):
        allocate_ranks(random_table(2, 3, 0), [0.7], time_limit=3)
    assert "no proof of the gap within 3 s; give a larger time_limit" in caplog.text


@pytest.mark.parametrize("min_saving", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("slack_share", [0.0, 0.1])
def test_a_layer_is_dense_or_saves_enough(min_saving, slack_share):
    table = transformer_table(12, 10, seed=3)
    chain = allocate_ranks(table, [0.4, 0.6, 0.8, 0.95], min_saving=min_saving, slack_share=slack_share)
    for entry in chain.entries:
        cost = 0
        for name, rank in entry.profile.items():
            m, n = table.shapes[name]
            slack = math.ceil(slack_share * rank)
            own = m * n if rank == min(m, n) else aligned_parameters((m, n), rank, slack)
            assert own == m * n or own <= (1 - min_saving) * m * n
            cost += own
        assert entry.parameters == cost
        assert entry.requested is None or cost <= entry.requested * chain.dense_parameters


def test_the_paper_counts_no_slack_and_leaves_no_rank_out():
    table = transformer_table(6, 6, seed=5)
    assert allocate_ranks(table, [0.5], method="paper", min_saving=0.25, slack_share=0.1) == allocate_ranks(
        table, [0.5], method="paper"
    )


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
    """40 instances; both ways of counting savings, with the probed errors as they are and with those of the fit."""
    for seed in range(20):
        table = random_table(2 + seed % 7, 3 + seed % 4, seed, falling)
        budgets, fit = spread_budgets(table, 4), bool(seed % 2)
        ours = allocate_ranks(table, budgets, monotone_errors=fit)
        slack = ours.gap * abs(weighted_error(ours)) + SOLVER_TOLERANCE
        for savings in ("parameters", "ranks"):
            theirs = allocate_ranks(table, budgets, method="paper", savings=savings, monotone_errors=fit)
            assert weighted_error(ours) <= weighted_error(theirs) + slack


@pytest.mark.parametrize("layers", [12, 36])
def test_the_gap_is_proven_and_kept(layers):
    table = transformer_table(layers, 8, seed=layers)
    budgets = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    chain = allocate_ranks(table, budgets, gap=1e-3)
    check_chain(chain, table, budgets)
    assert 0 <= chain.gap <= 1e-3
    bounds = unconstrained_bounds(table, budgets, **EVERY_RANK)
    for entry, bound in zip(chain.requested, bounds, strict=True):
        assert bound * (1 - 1e-9) <= entry.error <= bound * 1.1


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


def test_a_layer_that_the_next_budget_leaves_full_becomes_so_in_one_step():
    """Between two budgets: components that no budget has are never trained. Below the first they are its prefix."""
    table = random_table(6, 6, 3)
    chain = allocate_ranks(table, spread_budgets(table, 3))
    first, *_, last = (chain.entries.index(entry) for entry in chain.requested)
    seen = 0
    for name, ranks in table.ranks.items():
        reached = {chain.entries[at].profile[name] for at in range(first, last + 1)}
        trained = {entry.profile[name] for entry in chain.requested}
        if ranks[-1] in trained and trained != {ranks[-1]}:
            below = max(trained - {ranks[-1]})
            assert not {rank for rank in reached if below < rank < ranks[-1]}
            seen += ranks.index(below) < len(ranks) - 2
    assert seen


def test_between_solved_profiles_single_steps_are_close_to_the_front():
    table = transformer_table(16, 8, seed=2)
    chain = allocate_ranks(table, [0.3, 0.6])
    check_chain(chain, table, [0.3, 0.6])
    for small, large in itertools.pairwise(chain.entries):
        raised = [name for name in small.profile if small.profile[name] < large.profile[name]]
        assert len(raised) == 1 and large.error <= small.error
    between = [0.35, 0.45, 0.55, 0.75, 0.85]
    bounds = unconstrained_bounds(table, between, **EVERY_RANK)
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


@pytest.mark.parametrize(
    ("budgets", "options", "message"),
    [
        ([], {}, "no budget is given"),
        (0.5, {}, "budgets is 0.5; it is a list of numbers, such as [0.5]"),
        (None, {}, "budgets is None; it is a list of numbers"),
        (["0.5"], {}, "budgets is ['0.5']; it is a list of numbers"),
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
        ([0.5], {"min_saving": 1}, "min_saving 1 is out of range"),
        ([0.5], {"slack_share": -0.1}, "slack_share -0.1 is out of range"),
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


def test_a_table_that_is_none_is_told_in_one_line():
    with pytest.raises(FlexrankError, match="the sensitivity table is a dict; it is what probe_sensitivity or"):
        allocate_ranks({"a": 1}, [0.5])


def test_the_least_budget_that_is_told_can_be_met():
    table = transformer_table(4, 5, seed=0)
    with pytest.raises(FlexrankError) as caught:
        allocate_ranks(table, [0.01])
    least = float(str(caught.value).split()[-1])
    assert allocate_ranks(table, [least]).requested[0].profile == {n: r[0] for n, r in table.ranks.items()}


@pytest.mark.parametrize("above", [0, 1, 100, 1000])
def test_a_budget_that_hardly_holds_the_least_profile_gives_it(above):
    """Costs are counted in units of thousands of parameters here, and a step from the least rank is millions."""
    names, ranks = "abcde", (33, 1057, 4096)
    table = SensitivityTable(
        {name: (4096, 4096) for name in names},
        {name: ranks for name in names},
        {name: (2.0, 1.0 + place, 0.0) for place, name in enumerate(names)},
        0.0,
        FOOTPRINT,
    )
    least = sum(aligned_parameters((4096, 4096), 33) for _ in names)
    chain = allocate_ranks(table, [(least + above) / (5 * 4096**2)], monotone_errors=False)
    assert chain.requested[0].profile == dict.fromkeys(names, 33)
