"""Moments one block at a time against those of one pass."""

import copy
import functools
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from flexrank.calibrate import Moments, Placement, by_block, collect_moments, moments_by_block
from flexrank.calibrate.block_stream import States
from flexrank.distill.objectives import FeatureObjective
from flexrank.nn.linalg import plain_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import nest_, select_layers
from tiny import DECODER, TRANSFORMERS, batch_for, build


@pytest.mark.parametrize("name", [*TRANSFORMERS, "perceptron", "convnet", "tied_blocks"])
@pytest.mark.parametrize("fisher", [False, True])
def test_moments_by_block_are_those_of_one_pass(name: str, fisher: bool) -> None:
    """To the bit, though each part's layers are replaced before the next part is calibrated."""
    model, batch = build(name), batch_for(name)
    batches = [batch, {k: v.flip(0) for k, v in batch.items()} if isinstance(batch, dict) else batch + 1]
    loss = FeatureObjective().fisher_loss if fisher else None
    wanted = collect_moments(model, batches, select_layers(model), gradient_loss=loss)
    collected: Moments = {}
    count = 0
    for part in moments_by_block(model, batches, list(wanted), gradient_loss=loss):
        collected |= part
        count += 1
        if not fisher:  # gradients pass through the layers after
            for layer in part:
                nest_(model, layer, plain_svd(weight_matrix(model.get_submodule(layer)).detach()))
    assert collected.keys() == wanted.keys() and (count > 1) == (name in TRANSFORMERS)
    for layer, moment in wanted.items():
        assert (collected[layer].side, collected[layer].tokens) == (moment.side, moment.tokens)
        assert collected[layer].mean_square == moment.mean_square
        assert torch.equal(collected[layer].moment, moment.moment)
        if fisher:
            assert torch.equal(collected[layer].gradient_moment, moment.gradient_moment)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("fisher", [False, True])
def test_a_whole_block_may_stay_dense(block: int, fisher: bool) -> None:
    model, batch = LlamaForCausalLM(LlamaConfig(**DECODER | {"num_hidden_layers": 3})), batch_for("llama_untied")
    loss = FeatureObjective().fisher_loss if fisher else None
    layers = select_layers(model, exclude=[f"model.layers.{block}"])
    wanted = collect_moments(model, [batch] * 2, layers, gradient_loss=loss)
    found: Moments = {}
    for part in moments_by_block(model, [batch] * 2, list(layers), gradient_loss=loss):
        found |= part
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].moment, moment.moment) for name, moment in wanted.items())


def test_blocks_are_checked_on_one_row() -> None:
    """Two outputs are compared: of a whole batch they would be the most that calibration holds."""
    model, batch, outputs = build("llama_untied"), batch_for("llama_untied"), []
    model.lm_head.register_forward_hook(lambda *values: outputs.append(values[2].shape[:2]))
    rows, tokens = batch["input_ids"].shape
    list(moments_by_block(model, [batch] * 3, select_layers(model, exclude=["lm_head"])))
    assert rows > 1 and outputs == [(1, tokens)] * 2


def test_each_block_is_a_part_and_runs_once_for_each_batch() -> None:
    model, batch = build("llama_untied"), batch_for("llama_untied")
    runs = {"model.layers.0.mlp.down_proj": 0, "model.layers.1.mlp.down_proj": 0, "lm_head": 0}
    layers = list(select_layers(model))  # those with hooks are left out

    def count(name: str, *_: object) -> None:
        runs[name] += 1

    for name in runs:
        model.get_submodule(name).register_forward_hook(functools.partial(count, name))
    parts = [list(part) for part in moments_by_block(model, [batch] * 3, layers[:-1])]
    assert [{name.split(".")[2] for name in part} for part in parts] == [{"0"}, {"1"}]
    # What blocks return is seen from the first one; each finds its groups by one batch. The head ends two forwards
    # whose blocks pass hidden states on.
    assert list(runs.values()) == [1 + 1 + 3, 1 + 3, 2]
    outside = [list(part) for part in moments_by_block(model, [batch] * 3, layers)]
    assert outside == [*parts, ["lm_head"]]


def test_a_part_is_let_go_before_the_next_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("llama_untied"), batch_for("llama_untied")
    alive: list[weakref.ref[torch.Tensor]] = []
    own, calls = by_block.Collector, list[int]()

    def allocate(*args: Any) -> Any:
        assert all(moment() is None for moment in alive)
        calls.append(len(alive))
        return own(*args)

    monkeypatch.setattr(by_block, "Collector", allocate)
    for part in moments_by_block(model, [batch], list(select_layers(model))):
        alive += [weakref.ref(layer.moment) for layer in part.values()]
        del part
    assert calls == [0, 7, 14] and len(alive) == 15


class Looped(nn.Module):
    """A stack that is run twice: its layers are one part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


def test_a_stack_run_twice_is_one_part(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batches = Looped(), [torch.randn(5, 4), torch.randn(5, 4)]
    layers = select_layers(model)
    with caplog.at_level("INFO", "flexrank"):
        (collected,) = moments_by_block(model, batches, layers)
    assert "Looped is calibrated in one pass: its blocks do not run once and in order" in caplog.text
    for name, moment in collect_moments(model, batches, layers).items():
        assert torch.equal(collected[name].moment, moment.moment) and moment.tokens == 20


class Odd(nn.Module):
    """A stack that cannot run one block at a time, for one of several reasons."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.kind = nn.ModuleList(OddBlock(kind) for _ in range(3)), kind
        self.condition, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        if kind == "shared":
            self.blocks[2].layer = self.blocks[0].layer
        if kind == "layers":
            self.blocks = nn.ModuleList([OddBlock(kind), OddBlock(kind), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start, more = self.condition(x), None
        hidden = []
        x = x + 0  # what a block changes in place is not the batch
        for block in self.blocks:
            condition = start if self.kind == "condition" else more
            output = block(x, condition) if self.kind in ("pairs", "reads", "condition") else block(x)
            x, more = output if self.kind == "pairs" else (output, output * 2)
            x = x + 1 if self.kind == "between" else x
            hidden.append(x)
        return self.head(sum(hidden) if self.kind == "tail" else x)


class OddBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> object:
        if self.kind == "in place":
            return x.add_(self.layer(x).tanh())
        y = self.layer(x).tanh() + (0 if more is None else more)
        return (y, y.exp()) if self.kind == "pairs" else y


@pytest.mark.parametrize("fisher", [False, True])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("pairs", "its blocks return more than hidden states"),
        ("between", "something runs between its blocks"),
        ("reads", "its blocks read more of the blocks before than hidden states"),
        ("tail", "what follows its blocks reads more than the last one returns"),
        ("shared", "its blocks share modules"),
        ("layers", "a block is a layer itself"),
        ("condition", "its blocks read more than hidden states that depends on weights"),
        ("in place", ""),
        ("plain", ""),
    ],
)
def test_blocks_that_cannot_run_alone_have_one_pass(
    kind: str, why: str, fisher: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, batches = Odd(kind), [torch.randn(5, 4), torch.randn(5, 4)]
    layers, loss = select_layers(model), FeatureObjective().fisher_loss if fisher else None
    if kind == "in place" and fisher:
        return  # autograd refuses such a block
    why = "" if kind == "condition" and not fisher else why  # only gradients come back another way
    with caplog.at_level("INFO", "flexrank"):
        parts = list(moments_by_block(model, batches, layers, gradient_loss=loss))
    assert (f"Odd is calibrated in one pass: {why}" in caplog.text) == bool(why) and len(parts) == (1 if why else 4)
    collected = {name: moment for part in parts for name, moment in part.items()}
    for name, moment in collect_moments(model, batches, layers, gradient_loss=loss).items():
        torch.testing.assert_close(collected[name].moment, moment.moment, rtol=0, atol=0)
        if moment.gradient_moment is not None:
            torch.testing.assert_close(collected[name].gradient_moment, moment.gradient_moment, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("fisher", [False, True])
def test_hidden_states_beyond_the_room_come_back_from_a_file(fisher: bool) -> None:
    model, batch = build("bert"), batch_for("bert")
    loss = FeatureObjective().fisher_loss if fisher else None
    wanted = collect_moments(model, [batch] * 2, select_layers(model), gradient_loss=loss)
    parts = moments_by_block(model, [batch] * 2, list(wanted), gradient_loss=loss, state_bytes=5000)
    collected = {name: moment for part in parts for name, moment in part.items()}
    assert all(torch.equal(collected[name].moment, one.moment) for name, one in wanted.items())


def test_states_are_kept_to_the_bit_within_their_room() -> None:
    tensors = {
        "memory": torch.randn(20), "file": torch.randn(3, 5).bfloat16(), "other": torch.arange(30).reshape(5, 6).T,
    }  # fmt: skip
    with States(100) as states:
        for key, tensor in tensors.items():
            states[key] = tensor
        assert list(states._kept) == ["memory"]  # 80 bytes; 30 and 240 more exceed the room
        for key, tensor in tensors.items():
            assert torch.equal(states[key], tensor) and states[key].dtype is tensor.dtype
        for key, tensor in tensors.items():  # in the places that they have
            states[key] = tensor * 2
            assert torch.equal(states[key], tensor * 2)
        states["file"] = torch.randn(7)  # of another shape
        states["file"] = tensors["file"] * 2
        states["small"] = torch.randn(5)
        assert list(states._kept) == ["memory", "small"] and torch.equal(states["file"], tensors["file"] * 2)


def test_a_block_computes_where_it_is_placed_and_is_put_back() -> None:
    """A model in bfloat16 whose blocks compute in float32 has the moments of the model in float32."""
    model, batch = build("llama_tied").bfloat16(), batch_for("llama_tied")
    whole = copy.deepcopy(model).float()
    wanted = collect_moments(whole, [batch] * 2, select_layers(whole))
    before = {name: (id(value), value.dtype) for name, value in model.state_dict(keep_vars=True).items()}
    placement = Placement(model, dtype=torch.float32)
    seen: Moments = {}
    for part in moments_by_block(model, [batch] * 2, list(wanted), placement=placement):
        (number,) = {int(name.split(".")[2]) for name in part}
        blocks = [next(block.parameters()).dtype for block in model.model.layers]
        assert blocks == [torch.float32 if index == number else torch.bfloat16 for index in range(2)]
        assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.dtype is torch.float32
        seen |= part
    assert all(torch.equal(seen[name].moment, one.moment) for name, one in wanted.items())
    assert {name: (id(value), value.dtype) for name, value in model.state_dict(keep_vars=True).items()} == before


def test_a_placement_keeps_what_no_file_holds_and_puts_all_back() -> None:
    """Rotary frequencies stay in float32 in a model whose weights are in half precision, as transformers has them."""
    model = build("llama_tied")
    before = {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    with Placement(model, dtype=torch.bfloat16).placed(model):
        assert model.lm_head.weight is model.model.embed_tokens.weight and model.dtype is torch.bfloat16
        assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]} == before
