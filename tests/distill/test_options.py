"""What reaches a step of the options of `distill_`: the seed, the embeddings, and the model's own settings."""

import copy
from typing import Any

import pytest
import torch
from trainings import SMALL, batches

from flexrank.distill import distill_, step
from flexrank.distill.objectives import FeatureObjective, LogitObjective
from flexrank.errors import FlexrankError
from flexrank.nn.switch import full_profile
from tiny import build, nest


def test_the_seed_orders_the_batches() -> None:
    """One profile and a rate of nothing: only the order of the batches can change the losses."""
    losses = []
    for seed in (1, 1, 2):
        model, settings = nest(build("perceptron")), {"steps": 6, "learning_rate": 1e-30, "seed": seed}
        losses.append(distill_(model, build("perceptron"), batches("perceptron"), [SMALL], **settings).losses)
    assert losses[0] == losses[1] != losses[2]
    assert sorted(losses[0]) == pytest.approx(sorted(losses[2]), rel=1e-5)


def test_each_step_rounds_by_draws_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = [], step.update

    def update(optimizer: torch.optim.Optimizer, seed: int) -> None:
        seen.append(seed)
        own(optimizer, seed)

    monkeypatch.setattr(step, "update", update)
    distill_(nest(build("perceptron")), build("perceptron"), batches("perceptron"), [SMALL], steps=4)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["llama_tied", "bert"])
@pytest.mark.parametrize("sizes", [1, 2])
def test_embeddings_are_trained_only_if_asked_for(name: str, sizes: int) -> None:
    for is_asked in (False, True):
        model = nest(build(name))
        half = {layer: max(1, rank // 2) for layer, rank in full_profile(model).items()}
        most = {layer: max(1, rank * 3 // 4) for layer, rank in full_profile(model).items()}
        embedding = model.get_input_embeddings()
        before = embedding.weight.detach().clone()
        settings: dict[str, Any] = {"steps": 2, "learning_rate": 1e-2, "train_embeddings": is_asked}
        distill_(model, build(name), batches(name), [half, most][:sizes], **settings)
        assert torch.equal(before, embedding.weight) != is_asked
        assert name == "bert" or model.lm_head.weight is embedding.weight


class Failing(FeatureObjective):
    def loss(self, output: Any, target: torch.Tensor, batch: Any) -> torch.Tensor:
        raise RuntimeError("as from a full disk")


def test_blocks_that_run_again_leave_the_models_cache_as_it_was() -> None:
    for setting in (True, False):
        model = nest(build("llama_tied"))
        model.config.use_cache = setting
        profile = {layer: max(1, rank // 2) for layer, rank in full_profile(model).items()}
        settings: dict[str, Any] = {"steps": 1, "gradient_checkpointing": True}
        distill_(model, build("llama_tied"), batches("llama_tied"), [profile], **settings)
        assert model.config.use_cache is setting
        again = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="as from a full disk"):
            distill_(again, build("llama_tied"), batches("llama_tied"), [profile], objective=Failing(), **settings)
        assert again.config.use_cache is setting


def test_a_teacher_in_training_mode_drops_nothing_and_stays_in_it() -> None:
    losses = []
    for is_training in (False, True):
        teacher = build("llama_tied").train(is_training)
        for block in teacher.model.layers:
            block.self_attn.attention_dropout = 0.5
        settings: dict[str, Any] = {"steps": 3, "learning_rate": 1e-30, "teacher_cache": 0}
        model = nest(build("llama_tied"))
        half = {layer: max(1, rank // 2) for layer, rank in full_profile(model).items()}
        losses.append(distill_(model, teacher, batches("llama_tied"), [half], **settings).losses)
        assert all(module.training == is_training for module in teacher.modules())
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("method", "paper"), ("max_norm", 2.0), ("autocast", torch.bfloat16), ("train_embeddings", True),
        ("objective", LogitObjective()), ("profiles", [{**SMALL, "0": 4}]), ("weight_decay", 0.1), ("accumulation", 2),
        ("seed", 1), ("warmup_steps", 1), ("steps", 4),
    ],
)  # fmt: skip
def test_a_checkpoint_is_of_one_setting(name: str, changed: Any, tmp_path: Any) -> None:
    settings: dict[str, Any] = {"profiles": [SMALL], "weights": [1], "steps": 2, "checkpoint": tmp_path / "state"}
    for own in (settings, settings):
        train(**own)  # the second has nothing left to do
    with pytest.raises(FlexrankError, match=f"was written with {name}="):
        train(**settings | {name: changed})


def train(profiles: Any, **settings: Any) -> None:
    distill_(nest(build("perceptron")), build("perceptron"), batches("perceptron"), profiles, **settings)
