"""The figures of ranking preservation, held against plain loops."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flexrank.calibrate import collect_moments
from flexrank.decompose import decompose_
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers, use_profile
from flexrank.profiles import Footprint, SensitivityTable
from flexrank.profiles.costs import rank_levels
from research.experiment import Request
from research.studies import mnist, ranking

_DRAWN = torch.Generator().manual_seed(0)
IMAGES = torch.randn(40, 1, 28, 28, generator=_DRAWN)
LABELS = torch.randint(0, 10, (40,), generator=_DRAWN)


def test_joint_losses_are_those_of_every_submodel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "LEVELS", 2)
    model = mnist.build_network("narrow", 0).eval()
    decompose_(model, collect_moments(model, [IMAGES], select_layers(model)))
    with torch.no_grad():
        teacher = model(IMAGES)
    judges = [ranking.Judge(loss, IMAGES, teacher, LABELS) for loss in ranking.LOSSES]
    losses = ranking.joint_losses(model, IMAGES, judges)
    layers = nested_layers(model)
    levels = [rank_levels(layer.matrix_shape, 2, "ranks") for layer in layers.values()]
    for place in itertools.product(range(2), repeat=4):
        profile = {name: levels[at][level] for at, (name, level) in enumerate(zip(layers, place, strict=True))}
        with use_profile(model, profile), torch.no_grad():
            logits = model(IMAGES)
        assert losses[0][place] == pytest.approx(float(divergence(logits, teacher)), rel=1e-3, abs=1e-6)
        assert losses[1][place] == pytest.approx(float(nn.functional.cross_entropy(logits, LABELS)), rel=1e-4)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    probability = teacher.double().softmax(-1)
    return (probability * (probability.log() - student.double().softmax(-1).log())).sum(-1).mean()


def test_violation_rate_counts_opposite_pairs() -> None:
    random = np.random.default_rng(0)
    predicted, actual = random.normal(size=60), random.normal(size=60)
    predicted[3] = predicted[4]  # a tie is no violation
    pairs = list(itertools.combinations(range(60), 2))
    opposite = sum((predicted[i] - predicted[j]) * (actual[i] - actual[j]) < 0 for i, j in pairs)
    assert ranking.violation_rate(predicted, actual) == pytest.approx(opposite / len(pairs))
    assert ranking.violation_rate(actual, actual) == 0 and ranking.violation_rate(-actual, actual) == 1


def test_budget_regrets_compare_the_choice_with_the_best() -> None:
    predicted, actual = np.array([1.0, 2.0, 0.5, 3.0]), np.array([4.0, 2.0, 6.0, 1.0])
    savings = np.array([1, 1, 2, 2])
    assert ranking.budget_regrets(predicted, actual, savings) == [1.0, 5.0]
    assert ranking.budget_regrets(actual, actual, savings) == [0.0, 0.0]
    assert ranking.budget_regrets(predicted, actual, np.array([1, 1, 2, 3])) == [1.0]  # no choice at 2 and 3


def test_additive_predictions_and_savings_are_sums_over_layers() -> None:
    table = SensitivityTable(
        {"a": (4, 6), "b": (5, 3)}, {"a": (2, 4), "b": (1, 2, 3)}, {"a": (0.5, 0.0), "b": (0.9, 0.2, 0.0)}, 1.0,
        Footprint(0, 0, 4),
    )  # fmt: skip
    assert ranking.additive(table).tolist() == [[1.4, 0.7, 0.5], [0.9, 0.2, 0.0]]
    assert ranking.total_savings(table).tolist() == [4, 3, 2, 2, 1, 0]


def test_the_study_runs_whole_on_few_images(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "LEVELS", 3)
    monkeypatch.setattr(mnist, "load_images", lambda split: (IMAGES.repeat(8, 1, 1, 1), LABELS.repeat(8)))
    for name, value in {"NETWORKS": ("narrow",), "CALIBRATION": 64, "PROBE": 64}.items():
        monkeypatch.setattr(ranking, name, value)
    result = ranking.run(Request(work=tmp_path, seeds=2))
    rhos, nus = ([row[at] for row in result["tables"][0]["rows"][:2]] for at in (1, 2))
    # A claim holds where it does of both losses.
    lowest, highest = min(one["mean"] for one in rhos), max(one["mean"] for one in nus)
    assert [one["holds"] for one in result["claims"][:2]] == [lowest >= 0.98, highest <= 4]
    assert 0.5 < rhos[0]["mean"] <= 1 and rhos[0]["n"] == 2
    assert len(ranking.draw(result["data"]).axes) == 3
