"""Which profile a step trains, and at what rate, by hand."""

import copy
from collections import Counter

import datasets
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from trainings import SMALL, batches

from flexrank import processes
from flexrank.data import batches as data_batches
from flexrank.data.batches import digest_batch
from flexrank.distill import distill_
from flexrank.distill.schedule import Feed, RunningLosses, Schedule, drawn_weights
from flexrank.errors import FlexrankError
from tiny import build, nest

RATES = (60, 1e-2, 3)


def test_profiles_are_drawn_in_proportion_and_evenly() -> None:
    counts = Counter(Schedule([1, 2, 5], 0, *RATES).draw(step) for step in range(8000))
    for index, weight in enumerate([1, 2, 5]):
        assert counts[index] == pytest.approx(1000 * weight, rel=0.03)
    even = Schedule([1, 1, 1, 1], 3, *RATES)
    rounds = [tuple(even.draw(step) for step in range(start, start + 4)) for start in range(0, 80, 4)]
    assert all(sorted(one) == [0, 1, 2, 3] for one in rounds)
    assert len(set(rounds)) > 10  # of 24 orders: none is kept
    other = Schedule([1, 1, 1, 1], 4, *RATES)
    assert [other.draw(step) for step in range(80)] != [even.draw(step) for step in range(80)]
    counts = Counter(Schedule([0, 2, 1, 0], 0, *RATES).draw(step) for step in range(3000))
    assert counts == {1: pytest.approx(2000, rel=0.03), 2: pytest.approx(1000, rel=0.03)}


def test_the_rate_warms_up_and_falls_by_half_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, at the optimiser: steps of 2 to warm up and 4 to fall from .01 to 0."""
    rates, take = [], torch.optim.AdamW.step

    def record(optimizer: torch.optim.AdamW, *arguments: object) -> object:
        rates.append([group["lr"] for group in optimizer.param_groups])
        return take(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    teacher, settings = build("perceptron"), {"steps": 6, "learning_rate": 0.01}
    distill_(nest(build("perceptron")), teacher, batches("perceptron"), [SMALL], warmup_steps=2, **settings)
    half = 0.5**0.5
    wanted = [0.005, 0.01, 0.01, 0.005 * (1 + half), 0.005, 0.005 * (1 - half)]
    # matrices, vectors, and what each size has of its own
    assert rates == [[pytest.approx(rate), pytest.approx(rate), pytest.approx(4 * rate)] for rate in wanted]


def test_each_pass_gives_every_item_once_in_an_order_of_its_own() -> None:
    items = list(enumerate("abcdefghijkl"))
    feeds = [Feed([letter for _, letter in items], seed) for seed in (0, 1)]
    passes = [[feed.next() for _ in items] for feed in feeds for _ in range(3)]
    assert all(sorted(one) == items for one in passes)
    assert len(set(map(tuple, [items, *passes]))) == 7


def test_usual_losses_by_hand() -> None:
    running = RunningLosses()
    running.extend([4.0, 2.0], [1, 1])
    assert running.mean(0) is None and running.mean(1) == pytest.approx(3.8)
    running.add(1e-9, 0)
    assert running.mean(0) == pytest.approx(3.8e-4)  # a ten thousandth of the greatest
    # The profiles are the sizes 2 and 0; the size 1 has had no step.
    assert running.vector_scales([2, 0]) == [1.0, 1.0, pytest.approx(0.01)]
    running.add(0.95, 2)
    assert running.vector_scales([2, 0, 1]) == [1.0, 0.5, pytest.approx(0.01)]
    below = RunningLosses()
    below.extend([-1.0], [0])
    assert below.vector_scales([0, 1]) == [1.0, 1.0]


def test_the_largest_profile_below_the_full_model_is_drawn_twice_as_often() -> None:
    assert drawn_weights(None, "balanced", [False, False, False]) == [1, 1, 2]
    assert drawn_weights(None, "balanced", [False, False, True]) == [1, 2, 0]
    for given in (None, [3.0]):
        with pytest.raises(FlexrankError, match="the only size is the full model"):
            drawn_weights(given, "balanced", [True])
        assert drawn_weights(given, "paper", [True]) == (given or [1])
    assert drawn_weights([1.0, 2.0], "balanced", [False, True]) == [1, 0]
    assert drawn_weights(None, "paper", [False, False, True]) == [1, 1, 1]


def test_a_loader_restored_at_the_end_of_its_pass_goes_on() -> None:
    """As torchdata's: after `load_state_dict` the first pass gives what was left of the saved one, here nothing."""

    class Loader:
        at = 3

        def __iter__(self):
            start, self.at = self.at, 0
            return iter(["a", "b", "c"][start:])

        def state_dict(self) -> dict:
            return {"at": self.at}

        def load_state_dict(self, state: dict) -> None:
            self.at = state["at"]

    loader = Loader()
    feed = Feed(loader, 0)
    feed.restore({"count": 3, "loader": {"at": 3}})
    assert [feed.next()[1] for _ in range(4)] == ["a", "b", "c", "a"]
    with pytest.raises(FlexrankError, match="distillation got no batches"):
        Feed(iter(()), 0).next()


@pytest.mark.parametrize("taken", [3, 5, 7])  # within a pass of five batches, at its end, and in the next one
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_stream_of_datasets_begins_its_next_pass_at_its_start(is_loaded: bool, taken: int) -> None:
    def feed() -> Feed:
        rows = datasets.IterableDataset.from_generator(lambda: ({"x": number} for number in range(10)))
        return Feed(StatefulDataLoader(rows, batch_size=2) if is_loaded else rows.batch(2), 0)

    def firsts(one: Feed, count: int) -> list[int]:
        return [int(one.next()[1]["x"][0]) for _ in range(count)]

    first, resumed = feed(), feed()
    assert firsts(first, taken) == [0, 2, 4, 6, 8, 0, 2][:taken]
    resumed.restore(copy.deepcopy(first.state()))
    assert firsts(resumed, 11) == ([0, 2, 4, 6, 8] * 4)[taken : taken + 11]


def test_processes_compare_the_first_batch_of_a_start_and_then_one_of_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches differ in the middle of a tensor alone, which its text leaves out."""
    data, compared, answers = torch.zeros(9, 40, 40), list[str](), iter([True, True, False])
    data[:, 20, 20] = torch.arange(9)
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "same_everywhere", lambda value: compared.append(value) or next(answers))
    monkeypatch.setattr(data_batches, "COMPARED_EVERY", 3)
    feed = Feed(iter([{"x": one} for one in data]), 0)
    feed.restore({"count": 1, "loader": None})
    for _ in range(6):
        feed.next()
    with pytest.raises(FlexrankError, match="processes got other batches"):
        feed.next()
    assert compared == [digest_batch({"x": data[number]}) for number in (1, 4, 7)] and len(set(compared)) == 3
