"""Which size is within limits and no slower than the base: against times that are set by hand."""

import copy
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flexrank.deployment import deploy, planning
from flexrank.deployment.fitting import Limits, default_loads, fit, fit_plans, fit_profile, is_within
from flexrank.deployment.latency import time_chain
from flexrank.deployment.planning import LayerPlan, Planner, form_key, forms_of_plans
from flexrank.deployment.timing import Load, TimeTable
from flexrank.errors import FlexrankError
from flexrank.nn.surgery import nested_layers
from flexrank.profiles import ProfileChain
from hand_tables import all_dense, by_hand, chain_of, small_model, total


def test_a_load_that_no_size_meets_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    chain, layers = chain_of(model), nested_layers(model)
    table = by_hand(tmp_path, {"dense": 1.0, "plain": 2.5, "aligned": 2.5}, model)
    for times in table._times.values():
        for form in ("plain", "aligned"):
            times[form][0] = [90 * one for one in times[form][0]]  # one token alone is hopeless
    with caplog.at_level(logging.WARNING, "flexrank"):
        plans = fit_plans(model, chain, 0.5, slack=0, times=table)
    assert len(caplog.records) == 1 and "as fast as the base at 1 rows a layer" in caplog.text
    limit = total(all_dense(layers), layers, table) * (1 + 1e-9)
    assert (total(plans, layers, table) <= limit)[1:].all()
    smallest = fit_plans(model, chain, 0.5, slack=0)
    assert (total(smallest, layers, table) > limit)[1:].any()  # so that something was chosen


def test_the_rows_given_choose_the_forms(tmp_path: Path) -> None:
    """What is slow at one token alone is taken where one token never comes."""
    model = small_model()
    chain = chain_of(model)
    table = by_hand(tmp_path, {"dense": 1.0, "plain": 0.9, "aligned": 0.9}, model)
    for times in table._times.values():
        times["aligned"][0] = [90 * one for one in times["aligned"][0]]
    many = default_loads(nested_layers(model))[1:]
    smallest = fit_plans(model, chain, 0.5, slack=0)
    assert fit_plans(model, chain, 0.5, slack=0, times=table, loads=many) == smallest
    assert fit_plans(model, chain, 0.5, slack=0, times=table) != smallest
    slowed = [dataclasses.replace(load, correction=3.0) for load in many]
    assert fit_plans(model, chain, 0.5, slack=0, times=table, loads=slowed) != smallest


def test_a_dense_layer_has_full_rank_and_forms_are_kept_without_slack(tmp_path: Path) -> None:
    model = small_model()
    chain, layers = chain_of(model), nested_layers(model)
    table = by_hand(tmp_path, {"dense": 1.0, "plain": 1.9, "aligned": 1.9}, model)
    plans = fit_plans(model, chain, 0.8, slack=0, times=table)
    dense = {name: plan.rank for name, plan in plans.items() if plan.slack is None}
    assert dense == {name: layers[name].max_rank for name in dense} and 0 < len(dense) < len(layers)
    small = deploy(model, plans)
    for name in dense:
        assert torch.allclose(small.get_submodule(name).weight, layers[name].u.T @ layers[name].v, atol=1e-6)
    assert Planner(model, slack=0).of_forms(json.loads(json.dumps(forms_of_plans(plans)))) == plans
    more = Planner(model, slack=2).of_forms(forms_of_plans(plans))
    assert {name: plan.slack for name, plan in more.items()} == {n: None if n in dense else 2 for n in plans}
    plain = {name: LayerPlan(3, 3, 3 * sum(layer.matrix_shape)) for name, layer in layers.items()}
    assert Planner(model).of_forms(forms_of_plans(plain)) == plain
    within = [is_within(Planner(model), chain, Limits(budget), plans) for budget in (0.8, 0.1)]
    assert within == [True, False]


def test_ranks_alone_refuse_times(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(FlexrankError, match="deploy the plans of fit_plans"):
        fit_profile(model, chain_of(model), 0.5, times=TimeTable(torch.float32, directory=tmp_path))


def test_a_size_near_the_limit_is_found_that_is_as_fast_as_the_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model()
    chain, layers = chain_of(model), nested_layers(model)
    slow_at_high_ranks = by_hand(tmp_path / "a", {"dense": 1.0, "plain": 1.3, "aligned": 1.3}, model)
    limit = total(all_dense(layers), layers, slow_at_high_ranks) * (1 + 1e-9)
    for budget in (0.9, 0.8, 0.5):
        caplog.clear()
        plans = fit_plans(model, chain, budget, slack=0, times=slow_at_high_ranks)
        assert sum(plan.parameters for plan in plans.values()) <= budget * chain.dense_parameters
        if not caplog.records:
            assert (total(plans, layers, slow_at_high_ranks) <= limit).all()
        deploy(model, plans)
    assert not caplog.records  # the least budget has one
    caplog.clear()
    hopeless = by_hand(tmp_path / "b", {"dense": 1.0, "plain": 90.0, "aligned": 90.0}, model)
    with caplog.at_level(logging.WARNING, "flexrank"):
        plans = fit_plans(model, chain, 0.5, slack=0, times=hopeless)
    assert plans == fit_plans(model, chain, 0.5, slack=0)
    assert "as fast as the base" in caplog.text


def test_a_planner_chooses_a_layers_slack_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, planned = small_model(), []
    chain = chain_of(model)
    plan_layer = planning.plan_layer
    monkeypatch.setattr(
        planning, "plan_layer", lambda *given, **how: planned.append(given) or plan_layer(*given, **how)
    )
    planner = Planner(model, slack=1)
    hopeless = by_hand(tmp_path, {"dense": 1.0, "plain": 90.0, "aligned": 90.0}, model)
    first = fit(planner, chain, Limits(0.5), hopeless)
    assert planned and len(planned) == len({(id(layer), rank) for layer, rank in planned})
    count = len(planned)
    with caplog.at_level(logging.WARNING, "flexrank"):
        assert fit(planner, chain, Limits(0.5), hopeless) == first
    assert len(planned) == count and not caplog.records
    assert first.slow == default_loads(planner.layers)  # every load is slow: told, and left to the caller to warn of
    assert first.plans == fit_plans(model, chain, 0.5, slack=1) == fit(planner, chain, Limits(0.5)).plans


def test_limits_tell_what_was_asked() -> None:
    assert str(Limits(0.5, max_bytes=10)) == "budget=0.5, max_bytes=10"
    planner = Planner(small_model(), slack=0)
    with pytest.raises(FlexrankError, match="needs a budget"):
        fit(planner, chain_of(planner.model), Limits())


def random_table(place: Path, model: nn.Module, seed: int) -> TimeTable:
    """Forms cost from half to three times their parameters, another factor at each rank and number of tokens."""
    table, random = by_hand(place, {"dense": 1e-6, "plain": 1e-6, "aligned": 1e-6}, model), np.random.default_rng(seed)
    for times in table._times.values():
        for form in ("plain", "aligned"):
            times[form] = [[one * random.uniform(0.5, 3) for one in row] for row in times[form]]
    return table


@pytest.mark.parametrize("seed", range(6))
def test_quickest_forms_are_those_of_brute_force(seed: int, tmp_path: Path) -> None:
    model = small_model()
    planner, table, chain = Planner(model, slack=1), random_table(tmp_path, model, seed), chain_of(model)
    load = Load(dict.fromkeys(planner.layers, (16,)))
    for entry in chain.entries:
        plans = planner.quickest(entry, table, load)
        for name, layer in planner.layers.items():
            rank, (m, n), key = entry.profile[name], layer.matrix_shape, form_key(layer)
            slacks = [slack for slack in (1, rank) if rank * (m + n - rank + slack) < m * n]
            took = load.seconds(table, name, key, plans[name].rank, plans[name].slack)
            assert took == min(load.seconds(table, name, key, rank, slack) for slack in (*slacks, None))


@pytest.mark.parametrize("seed", range(6))
def test_a_latency_takes_the_largest_size_whose_quickest_forms_are_within(seed: int, tmp_path: Path) -> None:
    model = small_model()
    layers, table, chain = nested_layers(model), random_table(tmp_path, model, seed), chain_of(model)
    load = Load(dict.fromkeys(layers, (16,)))
    timed = time_chain(model, copy.deepcopy(model), torch.randn(16, 12), chain, table, is_quickest=True)
    planner = Planner(model, slack=1)

    def inside(plans: dict[str, LayerPlan]) -> float:
        return sum(load.seconds(table, n, form_key(layers[n]), plan.rank, plan.slack) for n, plan in plans.items())

    full, checked = inside({name: planner.dense(name) for name in layers}), 0
    for share in (0.6, 0.75, 0.9):
        limit = timed.milliseconds(timed.entries[-1]) - 1e3 * (1 - share) * full
        fitting = [e for e in chain.entries if inside(planner.quickest(e, table, load)) <= share * full * (1 + 1e-9)]
        if fitting:
            plans = fit_plans(model, timed, max_latency_ms=limit, slack=1, times=table, loads=[load])
            assert plans == planner.quickest(fitting[-1], table, load)
            checked += 1
    assert checked


def test_quickest_forms_keep_to_a_budget(tmp_path: Path) -> None:
    model = small_model()
    table, chain = by_hand(tmp_path, {"dense": 9.0, "plain": 0.1, "aligned": 1.0}, model), chain_of(model)
    planner = Planner(model, slack=1)
    smallest, quickest = (fit(planner, chain, Limits(0.6), table, is_quickest=quick).plans for quick in (False, True))
    for plans in (smallest, quickest):
        assert sum(plan.parameters for plan in plans.values()) <= 0.6 * chain.dense_parameters
    assert all(plan.slack == 1 for plan in smallest.values())
    assert all(plan.slack == plan.rank for plan in quickest.values())
    assert sum(plan.rank for plan in quickest.values()) < sum(plan.rank for plan in smallest.values())


def test_a_chain_timed_in_the_quickest_forms_is_planned_in_them(tmp_path: Path) -> None:
    model = small_model()
    table, chain = by_hand(tmp_path, {"dense": 1e-6, "plain": 0.3e-6, "aligned": 1e-6}, model), chain_of(model)
    load = Load(dict.fromkeys(nested_layers(model), (16,)))
    base, batch = copy.deepcopy(model), torch.randn(16, 12)
    timed = time_chain(model, base, batch, chain, table, is_quickest=True)
    limit = timed.milliseconds(timed.entries[4])
    assert all(plan.slack == plan.rank for plan in _fitted(model, timed, limit, times=table, loads=[load]).values())
    for given in ({}, {"times": table}, {"loads": [load]}):
        with pytest.raises(FlexrankError, match="timed in the quickest forms, which times and loads choose"):
            _fitted(model, timed, limit, **given)
    assert not ProfileChain.from_json(timed.to_json()).is_quickest and timed.to_json() == chain.to_json()
    plainly = time_chain(model, base, batch, chain, table)
    found = _fitted(model, plainly, plainly.milliseconds(plainly.entries[4]), times=table, loads=[load])
    assert all(plan.slack == 1 for plan in found.values())


def _fitted(model: nn.Module, chain: ProfileChain, limit: float, **given: Any) -> dict[str, LayerPlan]:
    return fit_plans(model, chain, max_latency_ms=limit, slack=1, **given)


def test_a_chain_cut_short_of_the_whole_model_keeps_to_the_latency(tmp_path: Path) -> None:
    """Where the largest size is not dense, its own prediction must be of the quickest forms too."""
    model = small_model()
    table = by_hand(tmp_path, {"dense": 1e-6, "plain": 0.3e-6, "aligned": 1e-6}, model)
    for times in table._times.values():
        times["plain"][0] = [9 * one for one in times["plain"][0]]  # slow with one row: forms change for that load
    layers, whole = nested_layers(model), chain_of(model)
    chain = dataclasses.replace(whole, entries=whole.entries[:5])
    one, many = (Load(dict.fromkeys(layers, (rows,))) for rows in (1, 16))
    timed = time_chain(model, copy.deepcopy(model), torch.randn(16, 12), chain, table, is_quickest=True)

    def milliseconds(plans: dict[str, LayerPlan]) -> float:
        found = (many.seconds(table, n, form_key(layers[n]), plan.rank, plan.slack) for n, plan in plans.items())
        return 1e3 * sum(found)

    quickest = Planner(model, slack=1).quickest(chain.entries[-1], table, many)
    rest = timed.milliseconds(timed.entries[-1]) - milliseconds(quickest)
    limit = 3 * timed.milliseconds(timed.entries[-1])
    plans = _fitted(model, timed, limit, times=table, loads=[one, many])
    assert plans != quickest
    assert rest + milliseconds(plans) <= limit * (1 + 1e-9)


def test_quickest_forms_that_are_too_large_are_given_up_and_told(tmp_path: Path) -> None:
    """Where dense is the quickest everywhere, a budget is met by the smallest forms."""
    model = small_model()
    table, chain = by_hand(tmp_path, {"dense": 0.1, "plain": 1.0, "aligned": 0.3}, model), chain_of(model)
    planner = Planner(model, slack=1)
    found = fit(planner, chain, Limits(0.5), table, is_quickest=True)
    assert not found.is_quickest
    assert sum(plan.parameters for plan in found.plans.values()) <= 0.5 * chain.dense_parameters
    assert fit(planner, chain, Limits(1.0), table, is_quickest=True).is_quickest
