"""What the benches claim, held where it can be held quickly."""

from pathlib import Path

import pytest
import torch

from flexrank.benches import gar
from flexrank.benches.setting import assets_directory, finish, uniform_profile
from flexrank.costs import deployed_parameters
from flexrank.errors import FlexrankError
from flexrank.storage import read_json
from flexrank.surgery import nested_layers
from tiny_models import build, nest


@pytest.mark.slow
def test_bf16_alignment_holds_its_bound_on_every_layer_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """On activations that the slack was not chosen on; the paper's form is far outside."""
    monkeypatch.setattr(gar, "DEMO", Path("nowhere"))
    found = gar.measure_error(levels=4)
    assert len({row["layer"] for row in found["rows"]}) == 36
    assert found["worst_ours"] <= found["stated"] == 3
    assert found["worst_paper"] > 10


def test_uniform_profile_takes_each_layers_largest_rank_within_the_budget() -> None:
    model = nest(build("bert"))
    profile = uniform_profile(model, 0.5)
    for name, layer in nested_layers(model).items():
        m, n = layer.matrix_shape
        assert deployed_parameters((m, n), profile[name]) <= m * n / 2
        assert deployed_parameters((m, n), profile[name] + 1) > m * n / 2


def test_results_tell_the_machine_and_missing_assets_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish({"x": 1}, tmp_path / "result.json")
    assert read_json(tmp_path / "result.json")["machine"]["torch"] == torch.__version__
    monkeypatch.setenv("FLEXRANK_ASSETS", str(tmp_path))
    with pytest.raises(FlexrankError, match="stsb: missing; set FLEXRANK_ASSETS"):
        assets_directory("stsb")
