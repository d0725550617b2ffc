"""The front of submodels trained alone, at a size that takes seconds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers, use_profile
from flexrank.profiles import Footprint, SensitivityTable
from flexrank.profiles.costs import deployed_parameters, rank_levels
from research.experiment import Ledger, Request
from research.studies import front, mnist


def test_the_elastic_networks_profiles_are_of_the_grid() -> None:
    table = SensitivityTable({"a": (9, 9)}, {"a": (1, 3, 9)}, {"a": (0.5, 0.2, 0.0)}, 0.0, Footprint(0, 0, 4))
    kept = front.at_levels(table, (0, 2))
    assert kept.ranks == {"a": (1, 9)} and kept.errors == {"a": (0.5, 0.0)}


def test_the_gap_is_the_choice_of_profiles_times_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: two submodels of .5, of which the elastic network has the worse, and the full one."""
    monkeypatch.setattr(front, "BUDGETS", (0.5, 1.0))
    ends: dict[str, Any] = {"before": [[0.9, 0.3], [0.2, 0.1]], "after": [[0.6, 0.2], [0.1, 0.1]]}
    rows = front.compare({
        "grid": [[0.5, 1, 2], [0.5, 2, 1], [1.0, 9, 9]],
        "alone": {
            "random": [[0.8, 0.1], [0.4, 0.1], [0.5, 0.1]],
            "DataSVD": [[0.2, 0.1], [0.1, 0.4], [0.05, 0.1]],
        },
        "elastic": {"shares": [0.5, 1.0], "ranks": [[1, 2], [9, 9]], **ends},
    })  # fmt: skip
    assert rows["front from random: divergence"] == [0.4, 0.4]  # the full one is worse than a smaller
    assert rows["front from DataSVD: test error"] == [0.1, 0.1]
    assert rows["untrained: divergence"] == [0.9, 0.2] and rows["elastic network: test error"] == [0.2, 0.1]
    assert rows[f"{front.CHOSEN} / front from DataSVD"] == [2.0, 1.0]
    assert rows["elastic network / front from DataSVD"] == [pytest.approx(6), 2]
    recovers, beats = front._claims([rows])
    assert not recovers["holds"] and recovers["here"] == "4.00 times the front's; worst at 0.5, 6.00"
    assert recovers["why"] == "its profiles trained alone are 1.50 times the front's"
    assert not beats["holds"] and "better in 1 of 2 cases" in beats["here"]
    assert beats["why"] == "at worst 1.50 times it"


def test_no_budget_is_below_the_least_submodel_of_either_grid() -> None:
    """Else its front is empty, and the study ends in a division by it."""
    shapes = [(10, 25), (16, 160), (32, 64), (10, 32)]
    least = sum(deployed_parameters(shape, rank_levels(shape, mnist.LEVELS, "ranks")[0]) for shape in shapes)
    assert front.COARSE[0] == 0 and least <= front.BUDGETS[0] * sum(m * n for m, n in shapes)


def test_the_study_runs_whole_on_few_images_and_goes_on_from_its_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,))
    monkeypatch.setattr(mnist, "load_images", lambda split, *half: (images, labels))
    for name, value in {"CALIBRATION": 64, "PROBE": 64, "ELASTIC_STEPS": 20, "COARSE": (0, 9), "CHUNK": 5}.items():
        monkeypatch.setattr(front, name, value)
    monkeypatch.setattr(front, "STEPS", {"random": 3, "DataSVD": 20})
    first = front.run(Request(work=tmp_path, seeds=1))
    assert first["settings"]["submodels"] == 16
    rows = {row[0]: row[1:] for row in first["tables"][0]["rows"]}
    random, aligned = (rows[f"front from {origin}: divergence"] for origin in ("random", "DataSVD"))
    assert aligned[-1]["mean"] < random[-1]["mean"]
    falling = [cell["mean"] for cell in aligned]
    assert falling == sorted(falling, reverse=True)
    choices = rows["the elastic network's profiles, each trained alone / front from DataSVD"]
    assert all(cell["mean"] >= 1 for cell in choices)
    assert len(front.draw(first["data"]).axes) == 1
    monkeypatch.setattr(front, "train_stacked_", None)  # every unit is finished: nothing is trained again
    assert front.run(Request(work=tmp_path, seeds=1))["tables"] == first["tables"]


def test_a_submodel_that_training_makes_worse_counts_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training leaves random weights, all from DataSVD count as DataSVD's prefixes."""
    images, labels = torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,))
    monkeypatch.setattr(mnist, "load_images", lambda split, *half: (images, labels))
    monkeypatch.setattr(front, "CALIBRATION", 64)
    monkeypatch.setattr(front, "train_stacked_", lambda stacked, *_, **__: stacked.randomise_(1))
    seed = front._Seed(0, (0, 9), Ledger(tmp_path, {}), "reporting")
    found, scratch = seed.trained_alone("DataSVD"), seed.trained_alone("random")
    for ranks, one, other in zip(seed.grid, found, scratch, strict=True):
        profile = dict(zip(nested_layers(seed.datasvd), ranks, strict=True))
        with torch.no_grad(), use_profile(seed.datasvd, profile):
            wanted = mnist.divergence(seed.datasvd(images)[None], seed.test_targets)[0]
        assert one[0] == pytest.approx(min(float(wanted), other[0]), rel=1e-4, abs=1e-6)


def test_submodels_begin_at_datasvd_and_the_elastic_network_is_weighted_by_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,))
    monkeypatch.setattr(mnist, "load_images", lambda split, *half: (images, labels))
    monkeypatch.setattr(front, "CALIBRATION", 64)
    losses, begun, collect = [], [], front.collect_moments

    def spy(*args: Any, gradient_loss: Any) -> Any:
        losses.append(gradient_loss)
        return collect(*args, gradient_loss=gradient_loss)

    class Stopped(Exception):
        pass

    def stacked(model: Any, ranks: Any) -> Any:
        begun.append(model)
        raise Stopped

    monkeypatch.setattr(front, "collect_moments", spy)
    monkeypatch.setattr(front, "StackedNetwork", stacked)
    seed = front._Seed(0, (0, 9), Ledger(tmp_path, {}), "reporting")
    assert losses == [None, front.OBJECTIVE.fisher_loss]
    with pytest.raises(Stopped):
        seed.trained_alone("DataSVD")
    # Plain DataSVD leaves what the calibration's activations keep most of; gradients weigh it otherwise.
    first, other = (next(iter(nested_layers(one).values())) for one in (begun[0], seed.elastic))
    weight = next(iter(select_layers(seed.network).values())).weight.flatten(1)
    assert not torch.allclose(first.u, other.u)
    for layer in (first, other):
        torch.testing.assert_close(layer.u.T @ layer.v, weight, atol=1e-4, rtol=1e-4)
    assert begun[0] is seed.datasvd
