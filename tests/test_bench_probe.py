"""The bench's own code on a tiny model: its numbers are there, and its verdicts follow from them."""

import json
import math
from typing import Any

import pytest

from flexrank.benches import probe
from flexrank.findings.figures import save_figure
from tiny_models import batch_for, build


def test_the_bench_measures_what_it_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(probe, "REPEATS", 2)
    monkeypatch.setattr(probe, "LEVELS", 3)
    monkeypatch.setattr(probe.machine, "product_rate", lambda *_: 1e9)
    monkeypatch.setattr(probe.machine, "copy_rate", lambda: 1e9)
    result = probe.measure(build("llama_tied"), [batch_for("llama_tied")])
    json.dumps(result)
    found = result["data"]
    assert found["same"] and found["evaluations"] == 1 + 2 * 7 * 2 and found["blocks"] == 2
    assert all(math.isfinite(one) and one > 0 for one in (*found["ratios"], *found["parts"].values()))
    assert found["work"]["targets"] == 4 * batch_for("llama_tied")["input_ids"].numel() * 64
    save_figure(lambda: probe.draw(found), tmp_path / "probe")
    assert (tmp_path / "probe.png").is_file()


@pytest.mark.parametrize(("ratio", "same", "met"), [(1.7, True, True), (1.69, True, False), (2.0, False, False)])
def test_the_verdict_follows_from_the_ratio(ratio: float, same: bool, met: bool) -> None:
    found = {"ratios": [ratio], "same": same, "parts": {"loss": 1.0, "evaluation": 4.0}}
    (prefixes,) = probe._goals(found)
    assert prefixes["holds"] is met and prefixes["here"] == f"{ratio:.2f} times" and "25%" in prefixes["why"]
