"""Times of models, and what is predicted of them: against times that are set by hand."""

import copy
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexrank.deployment import deploy, latency
from flexrank.deployment.fitting import Fit, fit_plans
from flexrank.deployment.latency import correct_load, observe_load, time_chain
from flexrank.deployment.planning import LayerPlan, form_key
from flexrank.deployment.timing import Load
from flexrank.errors import FlexrankError
from flexrank.nn.surgery import nested_layers
from flexrank.profiles import ProfileChain
from flexrank.run import deploying
from hand_tables import by_hand, chain_of, small_model


class Sleeper(nn.Module):
    """Sleeps for a given time, and notes the mode it was called in."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.modes = seconds, set()

    def forward(self, values: Tensor) -> Tensor:
        time.sleep(self.seconds)
        self.modes.add((self.training, torch.is_inference_mode_enabled()))
        return values


def test_latency_is_the_ratio_of_two_forwards() -> None:
    slow, fast = Sleeper(0.006), Sleeper(0.002)
    # sleeping lasts at least as long as asked; a busy machine only brings the two nearer
    assert 1 < latency.latency_ratio(slow, fast, torch.ones(1), repeats=9) < 5
    assert slow.modes == fast.modes == {(False, True)}
    assert slow.training


def test_latency_is_measured_for_as_long_as_asked() -> None:
    calls: list[int] = []
    model = nn.Identity()
    model.register_forward_hook(lambda *_: calls.append(1))
    latency.latency_ratio(model, Sleeper(0.002), torch.ones(1), repeats=1)
    assert len(calls) == 4  # three to warm up
    latency.latency_ratio(model, Sleeper(0.002), torch.ones(1), repeats=1, least_seconds=0.01)
    assert 5 < len(calls) - 4 <= 8  # 2 ms or more each, the last one past ten


def test_a_timed_chain_answers_by_latency(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    model = small_model()
    chain = chain_of(model)
    table = by_hand(tmp_path, {"dense": 1e-6, "plain": 1e-6, "aligned": 1e-6}, model)
    with pytest.raises(FlexrankError, match="not timed"):
        chain.at(max_latency_ms=5)
    timed = time_chain(model, base, torch.randn(32, 12), chain, table)
    found = [entry.milliseconds for entry in timed.entries]
    assert all(ms is not None for ms in found) and found == sorted(found)
    # The layers' own part is 32 tokens of their parameters' microseconds.
    inside = 32e-3 * (timed.entries[-1].parameters - timed.entries[0].parameters)
    assert found[-1] - found[0] == pytest.approx(inside, rel=0.3)
    middle = timed.entries[6]
    assert timed.at(max_latency_ms=middle.milliseconds) == middle.profile
    assert ProfileChain.from_json(timed.to_json()) == chain
    with pytest.raises(FlexrankError, match="max_latency_ms=1e-09 is too small"):
        timed.at(max_latency_ms=1e-9)
    plans = fit_plans(model, timed, max_latency_ms=middle.milliseconds, slack=0)
    assert {name: plan.rank for name, plan in plans.items()} == dict(middle.profile)


def test_the_forms_chosen_are_within_the_latency(tmp_path: Path) -> None:
    """Where the smallest forms would be slow with one row, those chosen for that are slower with many."""
    model = small_model()
    base, batch, chain, layers = copy.deepcopy(model), torch.randn(32, 12), chain_of(model), nested_layers(model)
    table = by_hand(tmp_path, {"dense": 1e-6, "plain": 1.2e-6, "aligned": 1e-6}, model)
    for times in table._times.values():
        times["aligned"][0] = [2 * one for one in times["aligned"][0]]
    one, many = (Load({name: [rows] for name in layers}) for rows in (1, 32))
    timed = time_chain(model, base, batch, chain, table)
    limit = timed.milliseconds(timed.entries[8])
    rest = timed.milliseconds(timed.entries[-1]) - 1e3 * sum(
        many.seconds(table, name, form_key(layer), 1, None) for name, layer in layers.items()
    )
    plans = fit_plans(model, timed, max_latency_ms=limit, slack=0, times=table, loads=[one, many])
    inside = sum(many.seconds(table, n, form_key(layers[n]), plan.rank, plan.slack) for n, plan in plans.items())
    assert rest + 1e3 * inside <= limit * (1 + 1e-9)
    assert any(plan.slack in (None, plan.rank) for plan in plans.values())


def test_a_load_is_what_a_forward_sends_through_the_layers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)

        def forward(self, values: Tensor) -> Tensor:
            return self.second(self.first(self.first(values)).mean(1))

    load = observe_load(Twice(), torch.randn(3, 5, 4), ["first", "second", "unused"])
    assert load == Load({"first": [15, 15], "second": [3]}) and str(load) == "3, 15 rows a layer"


def test_a_correction_explains_what_was_measured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    model, batch = small_model(), torch.randn(32, 12)
    layers = nested_layers(model)
    table = by_hand(tmp_path, {"dense": 1e-6, "plain": 1e-6, "aligned": 1e-6}, model)
    small = deploy(model, {name: 3 for name in layers}, slack=1)
    load = observe_load(base, batch, layers)
    dense = sum(load.seconds(table, name, form_key(layer), 3, None) for name, layer in layers.items())
    for ratio in (0.95, 1.05):
        corrected = correct_load(load, small, ratio, 0.05, table)
        inside = sum(corrected.seconds(table, name, form_key(layer), 3, 1) for name, layer in layers.items())
        assert 0.5 < corrected.correction < 3 and 1 + (inside - dense) / 0.05 == pytest.approx(ratio)
    assert correct_load(load, small, 9.0, 0.05, table).correction == 3
    assert correct_load(load, base, 9.0, 0.05, table) == load  # nothing of low rank in it


@pytest.mark.parametrize(
    ("ratios", "limit", "chosen"),
    [
        ([[(0.97, 0.97), (0.97, 0.97)]], None, 0),
        ([[(0.98, 0.9), (1.01, 0.9)], [(0.99, 0.9), (1.0, 0.9)]], None, 1),
        ([[(1.1, 0.9)], [(1.0, 0.9), (1.1, 0.9)], [(1.1, 0.9)], [(1.1, 0.9)]], None, 0),
        ([[(1.2, 1.0)], [(1.0, 0.9), (1.0, 0.9)]], None, 1),
        ([[(1.01, 0.9)], [(1.004, 0.9), (1.0, 0.9)]], None, 1),
        ([[(1.2, 1.1)], [(1.1, 1.3)], [(1.9, 1.0)], [(1.3, 1.05)]], None, 2),  # the last situation matters most
        ([[(1.1, 0.9)], [(1.1, 0.8)], [(1.1, 0.7)], [(1.2, 0.7)]], None, 0),  # of sizes alike the largest
        ([[(0.9, 0.9)], [(0.9, 0.7), (0.9, 0.7)]], 720.0, 1),  # no slower than the base, but than was asked
        ([[(0.9, 0.5), (0.9, 0.5)], [(0.9, 0.7), (0.9, 0.7)]], 720.0, 1),  # much of the latency unused
        ([[(0.9, 0.5)] * 2, [(0.9, 0.75)], [(0.9, 0.6)] * 2, [(0.9, 0.55)] * 2], 720.0, 2),  # the third is the largest
    ],
    ids=[
        "at once",
        "not twice",
        "none is twice",
        "the second",
        "by a hundredth",
        "none",
        "the first situation never",
        "a limit",
        "unused",
        "the largest within",
    ],
)
def test_sizes_are_built_until_one_is_fast_enough(
    ratios: list[list[tuple[float, float]]],
    limit: float | None,
    chosen: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    work: Any = SimpleNamespace(times=object(), deployed_base=None)
    given, corrections = itertools.chain.from_iterable(itertools.chain.from_iterable(ratios)), []

    def timed(*_: object, least_seconds: float) -> float:
        assert least_seconds == deploying.PATIENCE
        return next(given)

    monkeypatch.setattr(deploying, "latency_ratio", timed)
    monkeypatch.setattr(deploying, "seconds_of_forward", lambda *_: 1.0)
    monkeypatch.setattr(deploying, "deploy_plans", lambda *_: (None, None))
    steps = iter([1.5, 1.1, 1.2, 1.1, 2.0, 1.1])
    asked: list[float] = []

    def correct(load: Load, _: Any, ratio: float, *__: Any) -> Load:
        asked.append(ratio)
        return Load(load.rows, next(steps))

    monkeypatch.setattr(deploying, "correct_load", correct)
    ranks = (5, 4, 3, 2) if limit is None else (2, 5, 4, 3)
    plans = [{"layer": LayerPlan(rank, 0, 10 * rank)} for rank in ranks]
    made = iter(plans[1:])

    def refit(loads: list[Load]) -> Any:
        corrections.append(loads[0].correction)
        return Fit(next(made))

    situations: Any = [(Load({"layer": [rows]}), None) for rows in (1, 8)]
    with caplog.at_level("WARNING", "flexrank"):
        found = deploying._no_slower(work, None, plans[0], situations, refit, limit)
    assert next(given, None) is None  # each was measured, and twice where it would do
    slower = [[max(one) for one in zip(*pairs, strict=True)] for pairs in ratios]
    margin = deploying.MARGIN if limit is None else deploying.AIM
    assert asked == [one + margin for pair in slower[:-1] for one in pair]
    # each of the two situations is corrected; towards a latency freely, else only ever more
    free, rising = [1.5, 1.2, 2.0], [1.5, 1.5, 2.0]
    assert found == plans[chosen] and corrections == (rising if limit is None else free)[: len(ratios) - 1]
    assert ("no size near is fast enough" in caplog.text) is (round(max(slower[chosen]), 2) > 1)
