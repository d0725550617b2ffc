"""Consolidation within less memory: states of 8 bits, weights in bfloat16, blocks that run again to go back."""

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from trainings import batches, error_at, weights_of

from flexrank.data.batches import call_model
from flexrank.distill import distill_, distillation_evaluator
from flexrank.distill.objectives import FeatureObjective, LogitObjective
from flexrank.distill.optimizer import make_optimizer, set_rate, states_of, update
from flexrank.distill.trained import trainable_parameters, training
from flexrank.errors import FlexrankError
from flexrank.files import digest_files, read_document, write_document
from flexrank.nn.switch import full_profile, nested_layers
from tiny import build, nest

SMALL = {"0": 60, "2": 40}


def wide() -> nn.Sequential:
    """Layers whose factors have 4,096 numbers and more: of fewer torchao keeps whole states."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 256))


def rows() -> list[torch.Tensor]:
    return [torch.randn(16, 128, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def consolidated(model: nn.Module, optimizer: str, steps: int = 40, **settings) -> nn.Module:
    profiles = [SMALL, full_profile(model)]
    settings = {"learning_rate": 3e-3, "autocast": torch.bfloat16, "optimizer": optimizer} | settings
    distill_(model, wide(), rows(), profiles, objective=FeatureObjective(), steps=steps, **settings)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_every_precision_learns_what_float32_learns(optimizer: str, dtype: torch.dtype) -> None:
    """Oracle: torch's AdamW in float32, to an eighth of what it wins."""
    evaluate = distillation_evaluator(wide(), rows(), FeatureObjective())
    before = error_at(nest(wide()), SMALL, evaluate)
    best = error_at(consolidated(nest(wide()), "adamw"), SMALL, evaluate)
    model = consolidated(nest(wide()).to(dtype), optimizer)
    assert {p.dtype for layer in nested_layers(model).values() for p in (layer.u, layer.v)} == {dtype}
    assert {p.dtype for layer in nested_layers(model).values() for p in layer.sizes.parameters()} == {torch.float32}
    assert before - error_at(model.float(), SMALL, evaluate) > 7 / 8 * (before - best)


def test_bytes_for_each_number() -> None:
    """By hand: 8 for float32 states, 4 in bfloat16, and in 8 bits 2 and a float32 for every 256, and two tables."""
    for name, dtype, wanted in (
        ("adamw", torch.float32, 8 * 4096),
        ("adamw", torch.bfloat16, 4 * 4096),
        ("adamw_8bit", torch.bfloat16, 2 * (4096 + 4096 // 256 * 4 + 256 * 4)),
    ):
        one = nn.Parameter(torch.ones(64, 64, dtype=dtype))
        optimizer = make_optimizer(nn.Module(), {"one": one}, 1e-3, name=name)
        one.grad = torch.ones_like(one)
        update(optimizer, 0)
        states = {key: value for key, value in states_of(optimizer, one).items() if key != "step"}
        assert sum(value.nbytes for value in states.values()) == wanted, name


def test_steps_below_the_precision_move_the_weights_in_the_mean() -> None:
    """By hand: where gradients are always 1, AdamW moves by its rate: 100 steps of 1e-4, where an ulp is 4e-3."""
    one = nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16))
    optimizer = make_optimizer(nn.Module(), {"one": one}, 1e-4)
    state = torch.get_rng_state()
    for number in range(100):
        one.grad = torch.ones_like(one)
        update(optimizer, number)
    assert float(one.detach().float().mean()) == pytest.approx(0.99, abs=2e-4)
    assert one.detach().float().std() > 1e-3  # each goes its own way
    assert torch.equal(torch.get_rng_state(), state)


def test_rates_of_both_kinds_of_optimiser_follow_the_schedule() -> None:
    model = consolidated(nest(wide()), "adamw", steps=1)
    for name in ("adamw", "adamw_8bit"):
        optimizer = make_optimizer(model, trainable_parameters(model), 1.0, name=name)
        set_rate(optimizer, 0.5)
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_eight_bits_resume_to_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    unbroken = consolidated(nest(wide()).to(dtype), "adamw_8bit", steps=9)

    class Stopping(FeatureObjective):
        calls = 0

        def loss(self, output, target, batch):
            Stopping.calls += 1
            if Stopping.calls == 7:
                raise KeyboardInterrupt
            return super().loss(output, target, batch)

        __repr__ = FeatureObjective.__repr__

    settings = {"learning_rate": 3e-3, "autocast": torch.bfloat16, "optimizer": "adamw_8bit", "steps": 9}
    settings |= {"checkpoint": tmp_path / "state", "checkpoint_every": 3}
    broken, resumed = nest(wide()).to(dtype), nest(wide()).to(dtype)
    with pytest.raises(KeyboardInterrupt):
        distill_(broken, wide(), rows(), [SMALL, full_profile(broken)], objective=Stopping(), **settings)
    saved = safetensors.torch.load_file(tmp_path / "state" / "state.safetensors")
    assert saved["0.u//exp_avg//codes"].dtype == torch.uint8
    teacher = wide()
    torch.manual_seed(7)  # what is drawn to round comes from the step alone
    distill_(resumed, teacher, rows(), [SMALL, full_profile(resumed)], objective=Stopping(), **settings)
    assert torch.equal(weights_of(resumed), weights_of(unbroken))
    with pytest.raises(FlexrankError, match="was written with optimizer=adamw_8bit, not adamw"):
        distill_(
            resumed,
            wide(),
            rows(),
            [SMALL, full_profile(resumed)],
            objective=Stopping(),
            **settings | {"optimizer": "adamw"},
        )


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "bert", "t5"])
def test_blocks_that_run_again_give_the_same_weights(name: str) -> None:
    """T5's decoder has a configuration of its own, which says whether it keeps keys and values."""
    objective = FeatureObjective() if name == "bert" else LogitObjective()
    trained = []
    for repeats in (False, True):
        model = nest(build(name))
        profiles = [{layer: max(1, rank // 2) for layer, rank in full_profile(model).items()}, full_profile(model)]
        settings = {"steps": 4, "learning_rate": 1e-2, "objective": objective, "gradient_checkpointing": repeats}
        distill_(model, build(name), batches(name), profiles, **settings)
        trained.append(weights_of(model))
    if name == "t5":  # without a cache its decoder sums in another order
        torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-4)
    else:
        assert torch.equal(*trained)
    assert not torch.equal(trained[0], weights_of(nest(build(name)))[: len(trained[0])])


def test_blocks_that_run_again_keep_what_they_read_alone() -> None:
    model, batch, kept = nest(build("llama_tied")), batches("llama_tied")[0], []
    trainable = trainable_parameters(model)
    for repeats in (False, True):
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with training(model, build("llama_tied"), trainable, repeats):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                call_model(model, batch)
        kept.append(sum(sizes))
    assert kept[1] < 0.25 * kept[0]
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(FlexrankError, match="Sequential has no stack"):
        distill_(
            nest(nn.Sequential(nn.Linear(128, 256))), wide(), rows(), [{"0": 3}], steps=1, gradient_checkpointing=True
        )


def changing_its_input(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(nn.functional.silu(x, inplace=True))


def drawing_random_numbers(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As of models that leave their dropout on, whatever their mode."""
    return nn.functional.dropout(layer(x), 0.5)


@pytest.mark.parametrize("function", [changing_its_input, drawing_random_numbers])
def test_a_block_runs_again_as_it_ran_before(function: Callable[..., torch.Tensor]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.layer, x)

    def stack() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.Sequential(Block(), Block()))

    trained, data = [], [torch.randn(4, 16) for _ in range(3)]
    for repeats in (False, True):
        model = nest(stack())
        profile = {layer: rank // 2 for layer, rank in full_profile(model).items()}
        torch.manual_seed(1)
        steps = 1 if function is drawing_random_numbers else 3
        distill_(model, stack(), data, [profile], steps=steps, learning_rate=1e-2, gradient_checkpointing=repeats)
        trained.append(weights_of(model))
    assert torch.equal(*trained)


def test_a_state_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    """As a version of torchao would leave it whose states have other parts: all checksums are right."""
    consolidated(nest(wide()), "adamw_8bit", steps=3, checkpoint=tmp_path / "state", checkpoint_every=3)
    file, document = tmp_path / "state" / "state.safetensors", tmp_path / "state" / "state.json"
    tensors = safetensors.torch.load_file(file)
    del tensors["0.u//exp_avg//scale"]
    safetensors.torch.save_file(tensors, file)
    content = read_document(document, "checkpoint", ())
    document.unlink()
    write_document(document, "checkpoint", content | {"files": digest_files(file.parent)})
    with pytest.raises(FlexrankError, match="'0.u//exp_avg//scale' is missing; another version of the optimiser"):
        consolidated(nest(wide()), "adamw_8bit", steps=3, checkpoint=tmp_path / "state", checkpoint_every=3)


def test_half_precision_and_other_optimisers_are_refused() -> None:
    with pytest.raises(FlexrankError, match="optimizer 'adamw8bit' is unknown; it is adamw or adamw_8bit"):
        consolidated(nest(wide()), "adamw8bit")
    model = copy.deepcopy(nest(wide())).half()
    with pytest.raises(FlexrankError, match=r"'0.u' is float16; consolidate weights in float32 or bfloat16"):
        distill_(model, wide(), rows(), [SMALL], steps=1, max_norm=math.inf)


def test_torchao_is_imported_without_a_word() -> None:
    code = "from flexrank.distill.optimizer import torchao_optimizers; print(torchao_optimizers().AdamW8bit.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("AdamW8bit\n", 0) and "Failed to load" not in done.stderr
    assert "deprecated" not in done.stderr, done.stderr
