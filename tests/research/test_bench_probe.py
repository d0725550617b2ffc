"""The bench's own code on tiny models: its numbers are there, and its verdicts follow from them."""

import json
import math
from typing import Any

import pytest

from flexrank.distill.objectives import FeatureObjective, LogitObjective
from research.benches import probe
from research.experiment import Request
from research.figures import save_figure
from tiny import batch_for, build


def test_the_bench_measures_what_it_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(probe, "REPEATS", 2)
    monkeypatch.setattr(probe, "LEVELS", 3)
    objectives = {"llama_tied": LogitObjective(), "bert": FeatureObjective()}
    subjects = [probe.Subject(name, build(name), [batch_for(name)], one) for name, one in objectives.items()]
    monkeypatch.setattr(probe, "_language", lambda: subjects[0])
    monkeypatch.setattr(probe, "_sentences", lambda: subjects[1])
    result = probe.run(Request(tmp_path))
    json.dumps(result)
    found, other = result["data"]["subjects"]
    assert found["same"] and found["evaluations"] == 1 + 2 * 7 * 2 and found["blocks"] == 2
    assert other["same"] and other["name"] == "bert"
    assert all(math.isfinite(one) and one > 0 for one in (*found["ratios"]["whole"], *found["parts"].values()))
    assert len(result["claims"]) == 4
    save_figure(probe.draw, result["data"], tmp_path / "probe")
    assert (tmp_path / "probe.png").is_file()


@pytest.mark.parametrize(("ratio", "same", "met"), [(1.7, True, True), (1.69, True, False), (2.0, False, False)])
def test_the_verdict_follows_from_the_ratio(ratio: float, same: bool, met: bool) -> None:
    ratios = {"whole": [2.5], "whole, matrices kept": [ratio]}
    found = {"name": "tiny", "ratios": ratios, "same": same, "parts": {"loss": 1.0, "evaluation": 4.0}}
    whole, prefixes = probe._goals([found])
    assert whole["holds"] is same and whole["here"] == "2.50 times"
    assert prefixes["holds"] is met and prefixes["here"] == f"{ratio:.2f} times" and "25%" in prefixes["why"]
