"""Timings in turn by a clock set by hand, and facts of the machine."""

import json
import os

import pytest
import torch
from torch import nn

from flexrank.deployment import machine
from flexrank.deployment.machine import interleave, latency_ratio, machine_facts, median_ratio
from flexrank.errors import FlexrankError


class Clock:
    """Each call of `work` takes the next of these seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: list[float]):
        self.now, self._seconds = 0.0, iter(seconds)
        monkeypatch.setattr(machine.time, "perf_counter", lambda: self.now)

    def work(self) -> None:
        self.now += next(self._seconds)


def test_runs_are_timed_in_turn_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, [9.0, 9.0, 2.0, 1.0, 30.0, 1.0, 6.0, 2.0])
    own, others = interleave([clock.work, clock.work], repeats=3, warmup=1)
    assert (own, others) == ([2.0, 30.0, 6.0], [1.0, 1.0, 2.0])
    assert median_ratio(own, others) == 3.0


@pytest.mark.parametrize(("least", "rounds"), [(0.0, 1), (2.9, 1), (3.1, 2), (34.0, 2), (35.0, 3)])
def test_rounds_go_on_until_enough_time_is_measured(monkeypatch: pytest.MonkeyPatch, least: float, rounds: int) -> None:
    clock = Clock(monkeypatch, [2.0, 1.0, 30.0, 1.0, 8.0, 2.0])
    own, _ = interleave([clock.work, clock.work], repeats=1, warmup=0, least_seconds=least)
    assert len(own) == rounds


class Sleeper(nn.Module):
    """Passes by the clock; notes the mode it ran in."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock, self.modes = clock, set()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.add((self.training, torch.is_inference_mode_enabled()))
        self.clock.work()
        return x


def test_latency_is_the_median_over_the_base_models_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, [1.0] * 4 + [1.0, 2.0, 3.0, 2.0, 9.0, 3.0])
    small, base = Sleeper(clock), Sleeper(clock)
    assert latency_ratio(small, base, torch.zeros(1), repeats=3) == 1.5
    assert small.modes == base.modes == {(False, True)} and small.training
    small.clock = base.clock = Clock(monkeypatch, [1.0] * 4 + [1.0, 2.0, 2.0, 2.0])  # 3 s in the first round, 4 more
    assert latency_ratio(small, base, torch.zeros(1), repeats=1, least_seconds=4) == 0.75
    with pytest.raises(FlexrankError, match="latency compares one device"):
        latency_ratio(small, nn.Linear(1, 1, device="meta"), torch.zeros(1))


def test_the_machine_is_described_in_json() -> None:
    facts = machine_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["cores"], facts["threads"], facts["torch"]) == (
        os.cpu_count(), torch.get_num_threads(), torch.__version__,
    )  # fmt: skip
    assert facts["processor"] and ("gpu" in facts) == torch.cuda.is_available()
