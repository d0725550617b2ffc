"""A cascade: thresholds by brute force, its guarantee by simulation, and which rows the large size sees."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexrank.deployment.cascade import Cascade, cascade
from flexrank.errors import FlexrankError
from flexrank.nn.switch import full_profile, set_profile
from tiny import batch_for, build, elastic, nest, outputs


class Table(nn.Module):
    """Looks a sample's logits up, and remembers the samples that it has seen."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits, self.seen, self.calls = logits, [], 0

    def forward(self, samples: Tensor) -> Tensor:
        self.seen += samples.tolist()
        self.calls += 1
        return self.logits[samples]


def tables(margins: Tensor, differ: Tensor) -> tuple[Table, Table]:
    """A small model of these margins, of which the large one contradicts the answers that `differ`."""
    small = torch.stack([margins, torch.zeros_like(margins)], 1)
    return Table(small), Table(torch.where(differ[:, None], small.flip(1), small))


def at_most(count: int, samples: int, rate: float) -> float:
    """The probability of at most `count` events among the samples."""
    return sum(math.comb(samples, k) * rate**k * (1 - rate) ** (samples - k) for k in range(count + 1))


@pytest.mark.parametrize("seed", range(20))
def test_the_threshold_is_the_least_that_may_be(seed: int) -> None:
    """Oracle: all thresholds, each with the sum of binomial probabilities; margins have ties."""
    generator = torch.Generator().manual_seed(seed)
    margins = torch.randint(1, 30, (80,), generator=generator) / 8
    differ = torch.rand(80, generator=generator) < 0.5 * (-margins).exp()
    loss, level = (0.05, 0.9) if seed % 2 else (0.12, 0.95)
    allowed = [
        threshold
        for threshold in sorted({-math.inf, *margins.tolist()})
        if at_most(int(((margins > threshold) & differ).sum()), 80, loss) <= 1 - level
    ]
    small, large = tables(margins, differ)
    found = cascade(small, large, torch.arange(80).split(32), loss, confidence_level=level)
    answered = margins > min(allowed)
    assert torch.equal(margins > found.threshold, answered)
    assert found.report is not None and found.report.samples == 80
    assert found.report.answered_by_small == pytest.approx(float(answered.float().mean()))
    assert found.report.differing == pytest.approx(float((answered & differ).float().mean()))
    assert math.isnan(found.report.operations_saved)  # a table has none
    assert repr(found.measure([torch.arange(80)])) == repr(found.report)


def test_thresholds_by_hand() -> None:
    """Of 61 samples two may differ at a loss of .1: the third largest margin of a wrong answer is the threshold."""
    margins = torch.arange(1.0, 62.0)
    differ = torch.isin(margins, torch.tensor([5.0, 20.0, 40.0, 50.0]))
    small, large = tables(margins, differ)
    assert at_most(2, 61, 0.1) < 0.05 < at_most(3, 61, 0.1)
    assert cascade(small, large, [torch.arange(61)], 0.1).threshold == 20.0
    small, large = tables(margins, torch.zeros(61, dtype=torch.bool))
    assert cascade(small, large, [torch.arange(61)], 0.1).threshold == -math.inf
    with pytest.raises(FlexrankError, match="61 samples are too few to prove a loss of 0.01; give at least 299"):
        cascade(small, large, [torch.arange(61)], 0.01)
    assert 0.99**299 <= 0.05 < 0.99**298


def test_the_stated_loss_holds_as_often_as_stated() -> None:
    """Margins are uniform and answers differ with probability (1 − margin) / 2: beyond t the loss is (1 − t)² / 4."""
    generator, failures, draws = torch.Generator().manual_seed(0), 0, 300
    for _ in range(draws):
        margins = torch.rand(200, generator=generator)
        differ = torch.rand(200, generator=generator) < (1 - margins) / 2
        small, large = tables(margins, differ)
        threshold = max(0.0, cascade(small, large, [torch.arange(200)], 0.1, confidence_level=0.8).threshold)
        failures += (1 - threshold) ** 2 / 4 > 0.1
    assert 0.1 < failures / draws < 0.2 + 2 * math.sqrt(0.2 * 0.8 / draws)


def test_the_large_size_sees_uncertain_rows_alone() -> None:
    margins = torch.tensor([3.0, 1.0, 2.0, 0.5])
    small, large = tables(margins, torch.tensor([True, True, True, True]))
    model = Cascade(small, large, threshold=1.0)
    answers = model(torch.tensor([0, 1, 2, 3]))
    assert large.seen == [1, 3] and answers.argmax(1).tolist() == [0, 1, 0, 1]
    assert torch.equal(answers[[1, 3]], large.logits[[1, 3]]) and torch.equal(answers[[0, 2]], small.logits[[0, 2]])
    model(torch.tensor([0, 2]))
    assert large.seen == [1, 3] and large.calls == 1  # not called for nothing
    small.logits[0] = math.nan
    assert torch.equal(model(torch.tensor([0])), large.logits[:1])


def test_two_dtypes_keep_the_large_sizes_answers() -> None:
    """2.001 and 2.002 are one number in bfloat16: rounded, the first of them would be the answer."""
    small, large = tables(torch.tensor([3.0, 1.0]), torch.tensor([False, False]))
    small.logits = small.logits.bfloat16()
    large.logits = torch.tensor([[0.0, 0.0], [2.001, 2.002]])
    answers = Cascade(small, large, threshold=1.0)(torch.tensor([0, 1]))
    assert torch.equal(answers[1], large.logits[1]) and answers.argmax(1).tolist() == [0, 1]
    assert answers.dtype == torch.float32


@pytest.mark.parametrize("name", ["vit", "convnet"])
@torch.no_grad()
def test_batches_are_divided_by_row(name: str) -> None:
    """Oracle: both models on the whole batch; named inputs and a positional one."""
    small, large, batch = elastic(name), build(name, seed=1), batch_for(name)
    set_profile(small, dict.fromkeys(full_profile(small), 1))
    low, high = outputs(small, batch), outputs(large, batch)
    top = low.topk(2).values
    margins = top[:, 0] - top[:, 1]
    model = Cascade(small, large, threshold=float(margins.median()))
    assert 0 < int((margins <= margins.median()).sum()) < len(margins)
    wanted = torch.where((margins <= margins.median())[:, None], high, low)
    torch.testing.assert_close(outputs(model, batch), wanted)


def test_named_and_positional_inputs_may_be_mixed() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, factor: float, *, other: Tensor) -> Tensor:
            return factor * (x + other)

    x = torch.tensor([[5.0, 0.0], [0.5, 0.0], [0.1, 0.0]])
    answers = Cascade(Sum(), Sum(), threshold=1.0)(x, 2.0, other=torch.zeros(3, 2))
    assert torch.equal(answers, 2 * x)


def test_operations_are_counted() -> None:
    """By hand: 2 · 4 · 3 of 2 · (4 · 8 + 8 · 3) multiply-adds; half of the samples are answered by the small one."""
    small, large = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    x = torch.randn(10, 4)
    logits = small(x).detach().topk(2).values
    middle = float((logits[:, 0] - logits[:, 1]).sort().values[4])
    report = Cascade(small, large, middle).measure([x[:6], x[6:]])
    assert report.samples == 10 and report.answered_by_small == 0.5
    assert report.operations_saved == pytest.approx(0.5 - 12 / 56)


def test_operations_of_all_batches_count() -> None:
    """An elastic layer of 32 × 32 at rank 24 takes its factors for one row, and their product for 200."""
    small, large = nest(nn.Sequential(nn.Linear(32, 32))), nn.Linear(32, 32)
    set_profile(small, {"0": 24})
    batches = [torch.randn(200, 32), torch.randn(1, 32)]
    total = 2 * (32 * 24 * 32 + 200 * 32 * 32) + 2 * 24 * (32 + 32)
    for order in (batches, batches[::-1]):
        report = Cascade(small, large, math.inf).measure(order)
        assert report.operations_saved == pytest.approx(-total / (2 * 201 * 32 * 32))


def test_calibration_drops_nothing_and_leaves_modes_as_they_were() -> None:
    large = nn.Linear(4, 3)
    small = nn.Sequential(large, nn.Dropout(0.9)).train()
    large.eval()
    found = cascade(small, large, [torch.randn(40, 4)], 0.5)
    assert found.threshold == -math.inf and found.report is not None and found.report.differing == 0
    assert small.training and small[1].training and not large.training


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.tensor([2.0]), torch.full((1, 3), 2.0)])
def test_rows_are_those_of_the_logits_whatever_comes_first(scale: Tensor) -> None:
    """Oracle: the large model on all rows; a tensor that all rows share stays whole."""

    class Scaled(nn.Linear):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return super().forward(x) * scale

    small, large, x = Scaled(4, 3), Scaled(4, 3), torch.randn(5, 4)
    with torch.no_grad():
        margins = small(scale, x).topk(2).values
    order = (margins[:, 0] - margins[:, 1]).argsort(descending=True)
    threshold = float((margins[:, 0] - margins[:, 1])[order[2]])
    expected = torch.empty(5, 3)
    expected[order] = torch.where((torch.arange(5) < 2)[:, None], small(scale, x)[order], large(scale, x)[order])
    torch.testing.assert_close(Cascade(small, large, threshold)(scale=scale, x=x), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": 0.0}, "loss is 0.0; it is a probability between 0 and 1"),
        ({"loss": 0.1, "confidence_level": 1.0}, "confidence_level is 1.0; it is a probability"),
        ({"loss": "a"}, "loss is 'a'; it is a probability"),
        ({"loss": 0.1, "batches": torch.randn(3, 4)}, "batches is a Tensor; it is a list of batches"),
        ({"loss": 0.1, "batches": []}, "there are no batches"),
        ({"loss": 0.1, "batches": [torch.full((3, 4), math.nan)]}, "batch 1: logits are not finite"),
        ({"loss": 0.1, "large": nn.Linear(4, 5)}, r"batch 1: the logits are \(3, 3\) and \(3, 5\)"),
        ({"loss": 0.1, "small": nn.Linear(4, 1)}, r"an output has shape \(3, 1\); a cascade needs logits"),
        ({"loss": 0.1, "batches": [torch.randn(1, 3, 4)]}, r"an output has shape \(1, 3, 3\)"),
    ],
)
def test_wrong_inputs_are_named(options: dict[str, Any], message: str) -> None:
    given = {"small": nn.Linear(4, 3), "large": nn.Linear(4, 3), "batches": [torch.randn(3, 4)]} | options
    with pytest.raises(FlexrankError, match=message):
        cascade(**given)
