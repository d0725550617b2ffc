"""Artefacts of deployed modules, and batches in files: the same bits back."""

import pytest
import torch
from torch import nn

import tiny
from flexrank.artefacts.deployed import load_deployed, save_deployed
from flexrank.artefacts.tensors import read_batch, write_batch
from flexrank.errors import FlexrankError
from tiny import agree, deployed, outputs, same_state


@pytest.mark.parametrize("name", list(tiny.PLAIN))
@pytest.mark.parametrize("index", [0, 3])
def test_a_deployed_module_comes_back_to_the_same_bits(name, index, tmp_path):
    small, batch = deployed(name, index), tiny.batch_for(name)
    save_deployed(small, tmp_path / "small", factory=f"tiny:{name}")
    for model in (None, tiny.PLAIN[name]()):
        again = load_deployed(tmp_path / "small", model=model)
        assert same_state(again, small) and agree(outputs(again, batch), outputs(small, batch))


def test_a_state_of_other_shapes_is_named(tmp_path):
    save_deployed(deployed("tied_blocks"), tmp_path / "small")
    other = tiny.tied_blocks()
    other.first[1] = nn.BatchNorm1d(21)
    with pytest.raises(FlexrankError, match=r"'first.1.\w+' has shape \(20,\); the model needs \(21,\)"):
        load_deployed(tmp_path / "small", model=other)


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(3.0),
        (torch.arange(3), None, 2.5, torch.ones(2, dtype=torch.bfloat16)),
        {"input_ids": torch.arange(4), "use_cache": False, "other": [1, 2]},
    ],
)
def test_a_batch_comes_back_as_it_was(batch, tmp_path):
    write_batch(tmp_path / "inputs", batch)
    again = read_batch(tmp_path / "inputs", torch.device("cpu"))
    if isinstance(batch, torch.Tensor):
        assert torch.equal(again, batch)
        return
    assert type(again) is type(batch)
    given, read = ((x.values() if isinstance(x, dict) else x) for x in (batch, again))
    for wanted, value in zip(given, read, strict=True):
        assert torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted
    with pytest.raises(FlexrankError, match="not all tensors or plain values"):
        write_batch(tmp_path / "inputs", (object(),))
