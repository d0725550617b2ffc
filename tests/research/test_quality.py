"""What the benches of quality share, on a tiny model: every method is scored as it would be alone."""

from pathlib import Path

import pytest
import torch

from flexrank.calibrate import collect_moments
from flexrank.data.batches import call_model, output_tensor
from flexrank.decompose import decompose_
from flexrank.distill.objectives import LogitObjective
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from research.benches import quality, sts
from research.benches.quality import Subject, by_measure, consolidate_
from tiny import batch_for, build

BATCH = batch_for("llama_tied")


def size(model: torch.nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"length": float(output_tensor(call_model(model, BATCH)).norm())}


def test_every_method_is_scored_at_every_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "BUDGETS", (0.8, 0.5))
    subject = Subject(build("llama_tied"), [BATCH], [BATCH], LogitObjective(), size)
    results, model, table, joint = subject.without_training(("svd", "datasvd"), 4)
    assert list(results) == ["svd, uniform", "datasvd, uniform", "datasvd, paper", "datasvd, joint"]
    alone = build("llama_tied")
    decompose_(alone, collect_moments(alone, [BATCH], select_layers(alone)))
    for budget in (0.8, 0.5):
        with use_profile(alone, uniform_profile(alone, budget)):
            assert results["datasvd, uniform"]["length"][budget] == pytest.approx(size(alone)["length"])
        with use_profile(alone, joint.at(budget)):
            assert results["datasvd, joint"]["length"][budget] == pytest.approx(size(alone)["length"])
    assert all(len(ranks) <= 4 for ranks in table.ranks.values())
    options = {"objective": LogitObjective(), "steps": 2, "learning_rate": 1e-3, "warmup_steps": 1}
    assert consolidate_(model, subject.teacher, [BATCH], joint, **options) > 0
    assert subject.scores(model, joint.at)["length"] != results["datasvd, joint"]["length"]


def test_scores_are_turned_to_measures_first() -> None:
    assert by_measure({0.8: {"a": 1.0, "b": 2.0}, 0.5: {"a": 3.0, "b": 4.0}}) == {
        "a": {0.8: 1.0, 0.5: 3.0}, "b": {0.8: 2.0, 0.5: 4.0},
    }  # fmt: skip


def test_pairs_are_read_with_their_scores(tmp_path: Path) -> None:
    file = tmp_path / "sts.csv"
    file.write_text("main\tMSR\t2012\t0001\t2.5\tA cat.\tA dog.\nbroken\tline\n")
    assert sts._read_pairs(file) == [("A cat.", "A dog.", 2.5)]
