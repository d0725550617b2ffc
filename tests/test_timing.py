"""The table of times, and what planning does with it: against times that are set by hand, and brute force."""

import dataclasses
import itertools
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from flexrank import timing
from flexrank.costs import aligned_parameters
from flexrank.deployment import deploy
from flexrank.errors import FlexrankError
from flexrank.layers import GaugeAlignedLinear, NestedLayer
from flexrank.planning import (
    LayerPlan,
    default_loads,
    fit_plans,
    fit_profile,
    forms_of_plans,
    is_within,
    plan_layer,
    plan_no_slower,
    plans_of_forms,
)
from flexrank.surgery import nested_layers
from flexrank.timing import SHARES, TOKENS, FormKey, TimeTable
from hand_tables import all_dense, by_hand, chain_of, small_model, total


def no_slower(plans: dict[str, LayerPlan], layers: dict[str, NestedLayer], table: TimeTable) -> dict[str, LayerPlan]:
    """At each of TOKENS, and dense layers at the rank that they have."""
    return plan_no_slower(plans, all_dense(layers), layers, table, default_loads(layers))


def test_times_are_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 1e-6)
    key = FormKey((24, 16), True)
    first = TimeTable(torch.float32, directory=tmp_path)
    found = first.seconds(key, 8, 1)
    assert len(found) == len(TOKENS) and all(seconds > 0 for seconds in found)
    monkeypatch.setattr(timing, "measure_forms", lambda *_: pytest.fail("measured again"))
    again = TimeTable(torch.float32, directory=tmp_path)
    assert again.seconds(key, 8, 1) == found
    assert again.seconds(key, 16, None) == first.seconds(key, 16, None)
    kept = json.loads(first.path.read_text())
    assert kept["machine"]["threads"] == torch.get_num_threads() and list(kept["layers"]) == ["24x16+bias"]
    other = TimeTable(torch.bfloat16, directory=tmp_path)
    assert other.path != first.path


def test_every_form_timed_has_the_parameters_it_is_timed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[GaugeAlignedLinear] = []
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 1e-6)
    monkeypatch.setattr(timing, "MOST_COPIES", 1)
    make = timing._random_layer

    def watched(*args: object) -> GaugeAlignedLinear:
        built.append(make(*args))  # type: ignore[arg-type]
        return built[-1]

    monkeypatch.setattr(timing, "_random_layer", watched)
    found = timing.measure_forms(FormKey((20, 40), False), torch.float32, torch.device("cpu"))
    ranks = [max(1, round(share * 20)) for share in SHARES]
    assert [layer.rank for layer in built] == [rank for rank in ranks for _ in range(2)] * len(TOKENS)
    assert all(layer.aligned == 0 for layer in built[::2])
    for layer, rank in zip(built[1 : 2 * len(ranks) : 2], ranks, strict=True):
        assert layer.aligned == min(rank - timing.timed_slack(rank), 19)
    assert [len(row) for row in found["dense"]] == [1] * len(TOKENS)
    assert all(len(row) == len(SHARES) for form in ("plain", "aligned") for row in found[form])


def test_times_between_ranks_slacks_and_tokens_are_interpolated(tmp_path: Path) -> None:
    model = small_model()
    table = by_hand(tmp_path, {"dense": 1.0, "plain": 1.0, "aligned": 1.0}, model)
    key = FormKey((16, 16), True)
    assert table.seconds(key, 9, None) == tuple(256.0 * tokens for tokens in TOKENS)
    ranks = [max(1, round(share * 16)) for share in SHARES]
    for rank in ranks:
        slack = timing.timed_slack(rank)
        if slack < rank:
            assert table.seconds(key, rank, slack)[0] == pytest.approx(aligned_parameters((16, 16), rank, slack))
            more = table.seconds(key, rank, slack + 1)[0]
            if slack + 1 < rank:
                assert more == pytest.approx(aligned_parameters((16, 16), rank, slack + 1))
    assert table.seconds_at(key, 9, None, 64) == pytest.approx(256 * 64)
    assert table.seconds_at(key, 9, None, 4 * TOKENS[-1]) == pytest.approx(256 * 4 * TOKENS[-1])


def test_cheap_forms_are_left_and_dear_ones_become_dense(tmp_path: Path) -> None:
    model = small_model()
    layers = nested_layers(model)
    plans = {name: plan_layer(layer, 4, slack=0) for name, layer in layers.items()}
    cheap = by_hand(tmp_path / "a", {"dense": 1.0, "plain": 1.0, "aligned": 1.0}, model)
    assert no_slower(plans, layers, cheap) == plans
    dear = by_hand(tmp_path / "b", {"dense": 1.0, "plain": 90.0, "aligned": 90.0}, model)
    assert all(plan.slack is None for plan in no_slower(plans, layers, dear).values())
    plain = by_hand(tmp_path / "c", {"dense": 1.0, "plain": 0.5, "aligned": 90.0}, model)
    found = no_slower(plans, layers, plain)
    assert any(plan.slack == plan.rank for plan in found.values())
    assert (total(found, layers, plain) <= total(all_dense(layers), layers, plain) * (1 + 1e-9)).all()


def test_plain_as_large_as_dense_is_no_choice(tmp_path: Path) -> None:
    """At half the rank of a square layer both have as many parameters; a quicker plain form there must not be taken."""
    model = small_model()
    layers = nested_layers(model)
    plans = {name: plan_layer(layer, min(8, layer.max_rank - 1), slack=0) for name, layer in layers.items()}
    for cost in (0.5, 1.0, 1.5):
        table = by_hand(tmp_path / str(cost), {"dense": 1.0, "plain": cost, "aligned": 90.0}, model)
        for times in table._times.values():
            times["plain"][0] = [99 * one for one in times["plain"][0]]  # slow at one token alone
        found = no_slower(plans, layers, table)
        assert (total(found, layers, table) <= total(all_dense(layers), layers, table) * (1 + 1e-9)).all()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    table = TimeTable(torch.float32, directory=tmp_path / "file")
    with caplog.at_level(logging.WARNING, "flexrank"):
        table._remember()
    assert "not remembered" in caplog.text and "FLEXRANK_CACHE" in caplog.text


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
    assert plans_of_forms(model, json.loads(json.dumps(forms_of_plans(plans))), slack=0) == plans
    more = plans_of_forms(model, forms_of_plans(plans), slack=2)
    assert {name: plan.slack for name, plan in more.items()} == {n: None if n in dense else 2 for n in plans}
    plain = {name: LayerPlan(3, 3, 3 * sum(layer.matrix_shape)) for name, layer in layers.items()}
    assert plans_of_forms(model, forms_of_plans(plain)) == plain
    assert is_within(model, chain, plans, 0.8) and not is_within(model, chain, plans, 0.1)


def test_ranks_alone_refuse_times(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(FlexrankError, match="deploy the plans of fit_plans"):
        fit_profile(model, chain_of(model), 0.5, times=TimeTable(torch.float32, directory=tmp_path))


def test_the_changes_are_near_the_fewest_parameters_of_brute_force(tmp_path: Path) -> None:
    """Random times; the greedy answer is feasible, and over all cases at most a quarter larger than the best."""
    model = small_model()
    layers = nested_layers(model)
    ratios = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        table = by_hand(tmp_path / str(seed), {"dense": 1.0, "plain": 1.0, "aligned": 1.0}, model)
        for times in table._times.values():
            for form in ("plain", "aligned"):
                times[form] = [[one * random.uniform(0.5, 3) for one in row] for row in times[form]]
        plans = {name: plan_layer(layer, 5, slack=0) for name, layer in layers.items()}
        limit = total(all_dense(layers), layers, table) * (1 + 1e-9)
        found = no_slower(plans, layers, table)
        assert (total(found, layers, table) <= limit).all()
        best = float("inf")
        forms = [
            (plan, LayerPlan(plan.rank, plan.rank, plan.rank * sum(layers[name].matrix_shape)), all_dense(layers)[name])
            for name, plan in plans.items()
        ]
        for choice in itertools.product(*forms):
            if (total(dict(zip(plans, choice, strict=True)), layers, table) <= limit).all():
                best = min(best, sum(plan.parameters for plan in choice))
        ratios.append(sum(plan.parameters for plan in found.values()) / best)
    assert min(ratios) >= 1 and sum(ratios) / len(ratios) < 1.25


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


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXRANK_CACHE", str(tmp_path / "mine"))
    assert TimeTable(torch.float32).path.parent == tmp_path / "mine" / "times"
    monkeypatch.delenv("FLEXRANK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert TimeTable(torch.float32).path.parent == tmp_path / "home" / "flexrank" / "times"
