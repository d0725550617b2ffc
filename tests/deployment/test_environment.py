"""The folder of models and data is found, or what is missing there is named; the machine is told."""

import json
import os
from pathlib import Path

import pytest
import torch

from flexrank.deployment.environment import DEFAULT_ASSETS, assets_directory, machine_facts
from flexrank.errors import FlexrankError


def test_assets_are_found_and_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXRANK_ASSETS", str(tmp_path))
    with pytest.raises(FlexrankError, match="stsb: missing; set FLEXRANK_ASSETS"):
        assets_directory("stsb")
    (tmp_path / "stsb").mkdir()
    assert assets_directory("stsb") == tmp_path
    for value in (None, ""):
        monkeypatch.delenv("FLEXRANK_ASSETS") if value is None else monkeypatch.setenv("FLEXRANK_ASSETS", value)
        assert assets_directory() == DEFAULT_ASSETS


def test_the_machine_is_told_in_json() -> None:
    found = machine_facts()
    assert json.loads(json.dumps(found)) == found
    assert (found["cores"], found["threads"], found["torch"]) == (
        os.cpu_count(), torch.get_num_threads(), torch.__version__,
    )  # fmt: skip
    assert found["processor"] and ("gpu" in found) == torch.cuda.is_available()
