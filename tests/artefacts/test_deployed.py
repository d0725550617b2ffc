"""Artefacts of deployed modules, and batches in files: the same bits back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import tiny
from flexrank.artefacts.deployed import load_deployed, save_deployed
from flexrank.artefacts.elastic import load_elastic, save_elastic
from flexrank.artefacts.inspect import inspect_artefact
from flexrank.artefacts.tensors import read_batch, write_batch, write_tensors
from flexrank.deployment import deploy
from flexrank.distill.tensors import write_whole
from flexrank.errors import FlexrankError
from tiny import agree, deployed, outputs, same_state


def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("flexrank.artefacts.tensors.save_file", full)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    for write in (write_tensors, write_batch):
        with pytest.raises(FlexrankError, match=r"there: cannot be written \(No space left on device\)"):
            write(tmp_path / "there", {"a": torch.zeros(2)})
    with pytest.raises(FlexrankError, match=r"state.safetensors: cannot be written \(No space left on device\)"):
        write_whole(tmp_path, {"a": torch.zeros(2)})


def test_a_wrong_tokenizer_or_factory_is_refused_before_tensors_are_written(tmp_path, monkeypatch):
    model = tiny.elastic("perceptron")
    monkeypatch.setattr("flexrank.artefacts.tensors.save_file", lambda *_, **__: pytest.fail("tensors are written"))
    for given, message in ({"tokenizer": "tok"}, "tokenizer is 'tok'"), ({"factory": "nothing"}, "nothing"):
        with pytest.raises(FlexrankError, match=message):
            save_elastic(model, tiny.chain_of(model), tmp_path / "elastic", **given)
    assert list(tmp_path.iterdir()) == []


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
        torch.arange(24).view(1, 2, 4, 3).permute(0, 3, 1, 2),  # images whose channels were last
        (torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),),
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


def test_tensors_of_any_strides_are_written(tmp_path):
    """Two views of one storage, one of them transposed; and a checkpoint's weight whose channels are last."""
    matrix = torch.arange(6.0).view(2, 3)
    write_tensors(tmp_path / "tensors", {"a": matrix, "b": matrix.T})
    assert {name: one.tolist() for name, one in load_file(tmp_path / "tensors").items()} == {
        "a": [[0, 1, 2], [3, 4, 5]],
        "b": [[0, 3], [1, 4], [2, 5]],
    }
    weight = torch.randn(2, 3, 2, 2)
    write_whole(tmp_path, {"weight": weight.to(memory_format=torch.channels_last)})
    assert torch.equal(load_file(tmp_path / "state.safetensors")["weight"], weight)


def test_a_run_and_an_elastic_artefact_are_named(tmp_path: Path) -> None:
    model = tiny.elastic("perceptron")
    save_elastic(model, tiny.chain_of(model), tmp_path / "elastic")
    with pytest.raises(
        FlexrankError, match=f"{tmp_path}: a run; its artefacts are {tmp_path}/elastic and those in dep"
    ):
        inspect_artefact(tmp_path)
    with pytest.raises(FlexrankError, match="an elastic artefact; read a size of it with load_elastic"):
        load_deployed(tmp_path / "elastic")
    tiny.deployed("bert").save_pretrained(tmp_path / "saved")
    with pytest.raises(FlexrankError, match="saved: holds a transformers model; load it with its from_pretrained"):
        load_deployed(tmp_path / "saved")


class Kept(nn.Module):
    """Keeps a scale in a list too, and a buffer in the memory of a parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.randn(8))
        self.scales = [self.scale]
        self.table = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("before", self.table.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * self.scales[0] @ self.before + self.table.sum()


def saved_and_empty(kind: str, directory: Path) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """A model whose artefact of this kind is in the directory, and what fills a bare one from there."""
    model = tiny.nest(Kept())
    if kind == "elastic":
        save_elastic(model, tiny.chain_of(model), directory)
        return model, lambda bare: load_elastic(directory, model=bare)
    small = deploy(model, {"layer": 4})
    save_deployed(small, directory)
    return small, lambda bare: load_deployed(directory, model=bare)


@pytest.mark.parametrize("kind", ["elastic", "deployed"])
def test_tensors_that_a_model_keeps_elsewhere_too_are_filled(kind: str, tmp_path: Path) -> None:
    model, fill = saved_and_empty(kind, tmp_path / "saved")
    bare, x = Kept(seed=1), torch.randn(3, 12)
    fill(bare)
    assert torch.equal(bare(x), model(x))
    assert bare.scales[0] is bare.scale and type(bare.before) is torch.Tensor
    assert kind == "deployed" or bare.before.data_ptr() == bare.table.data_ptr()  # `deploy` copies both


@pytest.mark.parametrize("kind", ["elastic", "deployed"])
def test_an_architecture_that_is_refused_stays_as_it_was(kind: str, tmp_path: Path) -> None:
    _, fill = saved_and_empty(kind, tmp_path / "saved")
    other, x = Kept(seed=1), torch.randn(3, 12)
    other.further = nn.Linear(2, 2)
    expected = other(x)
    with pytest.raises(FlexrankError, match="tensor 'further.bias' of Kept is missing"):
        fill(other)
    assert torch.equal(other(x), expected) and type(other.layer) is nn.Linear
    with torch.device("meta"):
        nowhere = Kept()
    with pytest.raises(FlexrankError, match="parameter 'scale' is not in memory"):
        fill(nowhere)
