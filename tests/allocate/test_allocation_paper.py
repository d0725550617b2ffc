"""The printed algorithms against a transcription of them, word by word."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import allocate_ranks, check_chain, random_table, run_often, spread_budgets, transformer_table

from flexrank.allocate import paper
from flexrank.allocate.curves import read_curves
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import deployed_parameters


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
        front = paper.START
        for layer_savings, layer_errors in zip(savings, errors, strict=True):
            kept = paper.keep_min_error_per_saving(paper.expand_layer(front, layer_savings // size, layer_errors))
            pruned = paper.pareto_prune(kept)
            front = pruned
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
