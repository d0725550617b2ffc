"""Artefacts of earlier versions load as they were written; those of later formats are refused in one line.

`format_1` is what the code of 2026-11-23 wrote for `tiny.perceptron`, before an artefact named its files of tensors and
their dtypes: an elastic model, its size of half the parameters deployed, and the outputs of both in that version.
"""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file

from flexrank.artefacts.deployed import load_deployed
from flexrank.artefacts.elastic import load_elastic
from flexrank.artefacts.inspect import inspect_artefact
from flexrank.errors import FlexrankError
from flexrank.nn.switch import use_profile
from tiny import agree, outputs

OLD = Path(__file__).parent / "format_1"
READERS = {"elastic/elastic.json": load_elastic, "deployed/flexrank.json": load_deployed}


@pytest.fixture
def expected() -> dict[str, torch.Tensor]:
    return load_file(OLD / "outputs.safetensors")


def test_an_elastic_model_of_an_earlier_version_has_its_outputs_at_every_size(expected):
    model, chain = load_elastic(OLD / "elastic")
    assert "dtypes" not in json.loads((OLD / "elastic/elastic.json").read_text())
    for budget in chain.budgets:
        small, _ = load_elastic(OLD / "elastic", budget)
        with use_profile(model, chain.at(budget)):
            assert agree(outputs(model, expected["inputs"]), expected[f"elastic {budget}"])
        assert agree(outputs(small, expected["inputs"]), expected[f"elastic {budget}"])


def test_a_deployed_model_of_an_earlier_version_has_its_outputs(expected):
    small = load_deployed(OLD / "deployed")
    assert agree(outputs(small, expected["inputs"]), expected["deployed"])


def test_artefacts_of_an_earlier_version_are_inspected():
    assert [inspect_artefact(OLD / name)["kind"] for name in ("elastic", "deployed")] == ["elastic", "deployed"]


@pytest.mark.parametrize("file", READERS)
def test_a_later_format_is_refused_in_one_line(file, tmp_path):
    """Before its checksum or keys are looked at: a later format may have others."""
    path = copytree(OLD, tmp_path / "old") / file
    path.write_text(json.dumps({"kind": path.parent.name, "format": 4}))
    with pytest.raises(FlexrankError) as refused:
        READERS[file](path.parent)
    readable = "this version of flexrank reads formats up to 3: load it with the version that wrote it, or upgrade"
    assert str(refused.value) == f"{path}: has format 4; {readable}"
