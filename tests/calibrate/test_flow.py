"""What a model's layers read while layers before them change."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.calibrate.block_stream import States
from flexrank.calibrate.flow import Flow
from flexrank.data.batches import call_model
from flexrank.nn.select import select_layers
from research.machine import random_llama
from tiny import DECODER, build, relative, token_batch


def read_by(model: nn.Module, batch: Any, name: str) -> list[Tensor]:
    """What a layer of a whole model reads, call by call."""
    calls: list[Tensor] = []
    with Hooks() as hooks, torch.no_grad():
        hooks.on_forward({name: model.get_submodule(name)}, lambda _, inputs, __: calls.append(inputs.clone()))
        call_model(model, batch)
    return calls


@pytest.mark.parametrize("state_bytes", [0, 2**30])
@torch.no_grad()
def test_a_flow_reads_what_whole_forwards_read_whichever_blocks_are_asked_for(state_bytes: int) -> None:
    """Oracle: whole forwards of four blocks; each layer changes once it was asked for, before the next is."""
    model = random_llama(**DECODER | {"num_hidden_layers": 4})
    one = token_batch()
    batches = [one, {name: value.flip(0) for name, value in one.items()}]
    with States(state_bytes) as states:
        flow = Flow(model, batches, list(select_layers(model)), states)
        for place, name in (
            (0, "mlp.up_proj"), (2, "self_attn.q_proj"), (2, "mlp.down_proj"), (3, "self_attn.o_proj"),
        ):  # fmt: skip
            layer = f"model.layers.{place}.{name}"
            for batch, calls in zip(batches, flow.inputs(layer), strict=True):
                (wanted,), (found,) = read_by(model, batch, layer), calls
                assert relative(found, wanted) < 1e-6
            model.get_submodule(layer).weight.mul_(2)


class Changing(nn.Module):
    """A layer that runs twice, and whose input is changed in place after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.ended = 0

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        out = self.layer(y) + self.layer(2 * x)
        y.mul_(0)
        out = self.last(out + y)
        self.ended += 1
        return out


@torch.no_grad()
def test_every_call_is_read_as_it_was_and_the_rest_of_a_forward_does_not_run() -> None:
    model, batches = Changing(), [torch.ones(2, 4), torch.full((2, 4), 3.0)]
    with States(0) as states:
        flow = Flow(model, batches, ["layer", "last"], states)
        for ended in (2, 2):  # only the first forward of each batch, which counts the calls of all layers
            calls = list(flow.inputs("layer"))
            assert [[float(call[0, 0]) for call in one] for one in calls] == [[2, 2], [4, 6]]
            assert model.ended == ended
        list(flow.inputs("last"))
    assert model.ended == 2


class Recurrent(nn.Module):
    """A layer that runs once for each row of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(4)
        for row in x:
            state = self.cell(state + row)
        return self.last(state)


@torch.no_grad()
def test_a_batch_has_all_its_calls_however_many_another_has() -> None:
    model, batches = Recurrent(), [torch.randn(rows, 4) for rows in (2, 5, 1, 5)]
    with States(0) as states:
        flow = Flow(model, batches, ["cell", "last"], states)
        for name in ("cell", "cell", "last", "last"):
            for batch, calls in zip(batches, flow.inputs(name), strict=True):
                wanted = read_by(model, batch, name)
                assert len(calls) == len(wanted) and all(map(torch.equal, calls, wanted))


@torch.no_grad()
def test_a_layer_outside_the_blocks_is_read_in_whole_forwards() -> None:
    model, batch = build("bert"), token_batch()
    name = "pooler.dense"
    with States(2**20) as states:
        ((found,),) = Flow(model, [batch], list(select_layers(model)), states).inputs(name)
    assert torch.equal(found, read_by(model, batch, name)[0])
