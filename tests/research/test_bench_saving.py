"""The bench of the least saving on a tiny model: scores are those of the chain's own ranks."""

import json
from typing import Any

import pytest
import torch

from flexrank import allocate_ranks, distillation_evaluator, probe_sensitivity, use_profile
from flexrank.data.batches import call_model, output_tensor
from flexrank.distill.objectives import LogitObjective
from research.benches import language, saving, sts
from research.benches.quality import Subject
from research.experiment import Request
from tiny import batch_for, build

BATCH = batch_for("llama_tied")


def length(model: torch.nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"length": float(output_tensor(call_model(model, BATCH)).norm())}


def test_every_rule_and_budget_is_timed_and_scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    subject = Subject(build("llama_tied"), [BATCH] * 2, [BATCH], LogitObjective(), length)
    for name, value in {"SECONDS": 0.0, "RULES": (0.0, 0.25), "BUDGETS": (0.8, 0.5)}.items():
        monkeypatch.setattr(saving, name, value)
    monkeypatch.setattr(sts, "subject_of", lambda: (subject, None, []))
    monkeypatch.setattr(language, "subject_of", lambda texts: (subject, []))
    result = saving.run(Request(tmp_path))
    json.dumps(result)
    cells = result["data"]["pycode5m"]
    assert [(cell["least"], cell["budget"]) for cell in cells] == [(0.0, 0.8), (0.0, 0.5), (0.25, 0.8), (0.25, 0.5)]
    assert all(len(cell["ratios"]) == 2 and min(cell["ratios"]) > 0 for cell in cells)
    model = subject.decomposed("datasvd")
    evaluate = distillation_evaluator(subject.teacher, [BATCH], subject.objective)
    chain = allocate_ranks(probe_sensitivity(model, evaluate, min_saving=0.25), (0.8, 0.5), min_saving=0.25)
    with use_profile(model, chain.at(0.5)):
        assert cells[-1]["score"] == pytest.approx(length(model)["length"], rel=1e-4)
    assert [row[0] for row in result["tables"][0]["rows"]] == ["at least 0", "at least 0.25"]


@pytest.mark.parametrize(("ratio", "met"), [(1.05, True), (1.06, False)])
def test_the_verdict_is_of_the_default_rule(ratio: float, met: bool) -> None:
    cells = [{"least": least, "ratios": [0.5, slowest]} for least, slowest in ((0.0, 2.0), (0.25, ratio), (0.25, 0.9))]
    assert saving._goal("tiny", cells)["holds"] is met
