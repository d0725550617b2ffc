"""The table of times, and what planning does with it: against times that are set by hand, and brute force."""

import itertools
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from flexrank.deployment import timing
from flexrank.deployment.fitting import default_loads
from flexrank.deployment.planning import LayerPlan, plan_layer, plan_no_slower
from flexrank.deployment.timing import SHARES, TOKENS, FormKey, TimeTable
from flexrank.nn.layers import GaugeAlignedLinear, NestedLayer
from flexrank.nn.surgery import nested_layers
from flexrank.profiles.costs import aligned_parameters
from hand_tables import all_dense, by_hand, small_model, total


def no_slower(plans: dict[str, LayerPlan], layers: dict[str, NestedLayer], table: TimeTable) -> dict[str, LayerPlan]:
    """At each of TOKENS, and dense layers at the rank that they have."""
    return plan_no_slower(plans, all_dense(layers), layers, table, default_loads(layers))


def test_times_are_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "SWEEPS", 1)
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
    monkeypatch.setattr(timing, "SWEEPS", 1)
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
        assert layer.aligned == min(rank - timing.timed_slack((20, 40), rank, torch.float32), 19)
    assert [len(row) for row in found["dense"]] == [1] * len(TOKENS)
    assert all(len(row) == len(SHARES) for form in ("plain", "aligned") for row in found[form])


def test_a_busy_moment_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sweeps, one in which everything of low rank took nine times as long."""
    sweeps = iter([1.0, 9.0, 1.0])

    def ranks(_: FormKey, tokens: int, *__: object) -> list[tuple[float, ...]]:
        busy = next(sweeps) if tokens == TOKENS[0] else 1.0
        return [(1e-9 * tokens, 0.4 * busy, 0.6 * busy)] * len(SHARES)

    monkeypatch.setattr(timing, "_measure_ranks", ranks)
    found = timing.measure_forms(FormKey((8, 8), False), torch.float32, torch.device("cpu"))
    np.testing.assert_allclose(found["dense"], [[1e-9 * tokens] for tokens in TOKENS])
    np.testing.assert_allclose(found["plain"], [[0.4e-9 * tokens] * len(SHARES) for tokens in TOKENS])
    np.testing.assert_allclose(found["aligned"], [[0.6e-9 * tokens] * len(SHARES) for tokens in TOKENS])


def test_what_would_take_long_counts_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ranks(_: FormKey, tokens: int, *__: object) -> list[tuple[float, ...]]:
        asked.append(tokens)
        return [(1e-4 * tokens, 0.5, 0.7)] * len(SHARES)

    monkeypatch.setattr(timing, "_measure_ranks", ranks)
    monkeypatch.setattr(timing, "SWEEPS", 1)
    found = timing.measure_forms(FormKey((8, 8), False), torch.float32, torch.device("cpu"))
    assert asked == list(TOKENS[:-1])  # 2048 would take .2 s
    np.testing.assert_allclose(found["dense"], [[1e-4 * tokens] for tokens in TOKENS])
    np.testing.assert_allclose(found["aligned"], [[0.7e-4 * tokens] * len(SHARES) for tokens in TOKENS])


def test_times_between_ranks_slacks_and_tokens_are_interpolated(tmp_path: Path) -> None:
    model = small_model()
    table = by_hand(tmp_path, {"dense": 1.0, "plain": 1.0, "aligned": 1.0}, model)
    key = FormKey((16, 16), True)
    assert table.seconds(key, 9, None) == tuple(256.0 * tokens for tokens in TOKENS)
    ranks = [max(1, round(share * 16)) for share in SHARES]
    for rank in ranks:
        slack = timing.timed_slack((16, 16), rank, torch.float32)
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


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXRANK_CACHE", str(tmp_path / "mine"))
    assert TimeTable(torch.float32).path.parent == tmp_path / "mine" / "times"
    monkeypatch.delenv("FLEXRANK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert TimeTable(torch.float32).path.parent == tmp_path / "home" / "flexrank" / "times"


def test_what_runs_between_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def take(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.seconds_of(lambda: take(2), 3) == timing.seconds_of(lambda: take(2), 3, lambda: take(50)) == 2
