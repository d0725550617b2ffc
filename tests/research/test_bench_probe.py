"""The bench of the probe on tiny models: its numbers are there, and its verdicts follow from them."""

import json
from typing import Any

import pytest

from flexrank.distill.objectives import FeatureObjective, LogitObjective
from research.benches import probe
from research.experiment import Request
from tiny import batch_for, build


def test_the_bench_measures_what_it_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(probe, "LEVELS", 3)
    for place, name, objective in (
        ("_language", "llama_tied", LogitObjective()),
        ("_sentences", "bert", FeatureObjective()),
    ):
        row = probe.measure(name, build(name), [batch_for(name)], objective)
        monkeypatch.setattr(probe, place, lambda row=row: row)
    result = probe.run(Request(tmp_path))
    json.dumps(result)
    llama, bert = result["data"]["subjects"]
    assert llama["same"] and llama["evaluations"] == 1 + 2 * 7 * 2
    assert bert["same"] and bert["name"] == "bert" and min(llama["ratios"]["whole"]) > 0
    assert len(result["claims"]) == 4


@pytest.mark.parametrize(("ratio", "same", "met"), [(1.7, True, True), (1.69, True, False), (2.0, False, False)])
def test_the_verdict_follows_from_the_ratio(ratio: float, same: bool, met: bool) -> None:
    ratios = {"whole": [2.5], "whole, matrices kept": [ratio]}
    whole, prefixes = probe._goals([{"name": "tiny", "ratios": ratios, "same": same}])
    assert whole["holds"] is same and whole["here"] == "2.50 times"
    assert prefixes["holds"] is met and prefixes["here"] == f"{ratio:.2f} times"
    assert ("DIFFER" in prefixes["why"]) is not same
