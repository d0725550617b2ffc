"""Moments one block at a time against those of one pass."""

import functools
import weakref

import pytest
import torch
from torch import nn

from flexrank import calibrate as calibration
from flexrank.calibrate import Moments, collect_moments, moments_by_block
from flexrank.distill.objectives import FeatureObjective
from flexrank.nn.linalg import plain_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import nest_, select_layers
from tiny import TRANSFORMERS, batch_for, build


@pytest.mark.parametrize("name", [*TRANSFORMERS, "perceptron", "convnet", "tied_blocks"])
@pytest.mark.parametrize("fisher", [False, True])
def test_moments_by_block_are_those_of_one_pass(name: str, fisher: bool) -> None:
    """To the bit, though each part's layers are replaced before the next part is calibrated."""
    model, batch = build(name), batch_for(name)
    batches = [batch, {k: v.flip(0) for k, v in batch.items()} if isinstance(batch, dict) else batch + 1]
    loss = FeatureObjective().fisher_loss if fisher else None
    wanted = collect_moments(model, batches, select_layers(model), gradient_loss=loss)
    collected: Moments = {}
    for part in moments_by_block(model, batches, list(wanted), gradient_loss=loss):
        collected |= part
        if not fisher:  # gradients pass through the layers after
            for layer in part:
                nest_(model, layer, plain_svd(weight_matrix(model.get_submodule(layer)).detach()))
    assert collected.keys() == wanted.keys()
    for layer, moment in wanted.items():
        assert (collected[layer].side, collected[layer].tokens) == (moment.side, moment.tokens)
        assert collected[layer].mean_square == moment.mean_square
        assert torch.equal(collected[layer].moment, moment.moment)
        if fisher:
            assert torch.equal(collected[layer].gradient_moment, moment.gradient_moment)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_each_block_has_a_part_and_later_ones_do_not_run() -> None:
    model, batch = build("llama_untied"), batch_for("llama_untied")
    runs = {"model.layers.0": 0, "model.layers.1": 0, "lm_head": 0}

    def count(name: str, *_: object) -> None:
        runs[name] += 1

    for name in runs:
        model.get_submodule(name).register_forward_hook(functools.partial(count, name))
    parts = [list(part) for part in moments_by_block(model, [batch] * 3, select_layers(model, exclude=["lm_head"]))]
    assert [{name.split(".")[2] for name in part} for part in parts] == [{"1"}, {"0"}]
    assert runs == {"model.layers.0": 1 + 3 + 3, "model.layers.1": 1 + 3, "lm_head": 1}  # the head once, to find groups
    outside = [list(part) for part in moments_by_block(model, [batch] * 3, select_layers(model))]
    assert outside == [["lm_head"], *parts]


def test_a_part_is_let_go_before_the_next_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("llama_untied"), batch_for("llama_untied")
    alive: list[weakref.ref[torch.Tensor]] = []
    own = calibration.Collector

    def allocate(*args: object) -> object:
        assert all(moment() is None for moment in alive)
        return own(*args)

    monkeypatch.setattr(calibration, "Collector", allocate)
    for part in moments_by_block(model, [batch], list(select_layers(model))):
        alive += [weakref.ref(layer.moment) for layer in part.values()]
        del part
    assert len(alive) == 15


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
    assert "Looped has no stack of blocks that run once and in order" in caplog.text
    for name, moment in collect_moments(model, batches, layers).items():
        assert torch.equal(collected[name].moment, moment.moment) and moment.tokens == 20
