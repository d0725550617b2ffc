"""What the benches claim, held where it can be held quickly."""

from pathlib import Path

import pytest
import torch

from flexrank.benches import gar
from flexrank.benches.setting import finish
from flexrank.storage import read_json


@pytest.mark.slow
def test_bf16_alignment_holds_its_bound_on_every_layer_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """On activations that the slack was not chosen on; the paper's form is far outside."""
    monkeypatch.setattr(gar, "DEMO", Path("nowhere"))
    found = gar.measure_error(levels=4)
    assert len({row["layer"] for row in found["rows"]}) == 36
    assert found["worst_ours"] <= found["stated"] == 3
    assert found["worst_paper"] > 10


def test_results_tell_the_machine(tmp_path: Path) -> None:
    finish({"x": 1}, tmp_path / "result.json")
    assert read_json(tmp_path / "result.json")["machine"]["torch"] == torch.__version__
