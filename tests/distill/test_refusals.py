"""Wrong settings are refused in one line, and a call that fails leaves the model as it was."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainings import SMALL, batches, weights_of
from transformers.modeling_outputs import SequenceClassifierOutput

from flexrank.distill import distill_, distillation_evaluator
from flexrank.distill.objectives import FeatureObjective, LogitObjective, default_objective
from flexrank.errors import FlexrankError
from flexrank.nn.switch import full_profile, nested_layers
from tiny import build, nest


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_norm": None}, r"max_norm is None; it must be a number above 0"),
        ({"learning_rate": "1e-4"}, r"learning_rate is '1e-4'; it must be a number above 0"),
        ({"warmup_steps": 0.5}, r"warmup_steps is 0.5; it must be a whole number from 0 up"),
        ({"steps": True}, r"steps is True; it must be a whole number from 1 up"),
        ({"learning_rate": True}, r"learning_rate is True; it must be a number above 0"),
        ({"checkpoint": 5}, r"checkpoint is 5; it is None or the path of a directory"),
        ({"seed": "a"}, r"seed is 'a'; it must be a whole number from 0 up"),
        ({"steps": 2.5}, r"steps is 2.5; it must be a whole number from 1 up"),
        ({"objective": nn.MSELoss()}, r"objective is MSELoss\(\); it is an object with the methods target and loss"),
        ({"objective": LogitObjective}, r"objective is <class .*; it is an object with the methods target and loss"),
        ({"max_norm": -1.0}, r"max_norm is -1.0; it must be a number above 0"),
        ({"learning_rate": math.nan}, r"learning_rate is nan; it must be a number above 0"),
        ({"learning_rate": 0.0}, r"learning_rate is 0.0; it must be a number above 0"),
        ({"weight_decay": -0.1}, r"weight_decay is -0.1; it must be a number from 0 up"),
        ({"warmup_steps": -5}, r"warmup_steps is -5; it must be a whole number from 0 up"),
        ({"autocast": torch.float16}, r"autocast is torch.float16; it is None or torch.bfloat16"),
        ({"autocast": "bfloat16"}, r"autocast is 'bfloat16'; it is None or torch.bfloat16"),
        ({"optimizer": "adamm"}, r"optimizer 'adamm' is unknown"),
    ],
)
def test_wrong_settings_are_refused_and_leave_the_model_as_it_was(settings: dict[str, Any], match: str) -> None:
    model = nest(build("perceptron"))
    profiles = [SMALL, full_profile(model)]
    with pytest.raises(FlexrankError, match=match):
        distill_(model, build("perceptron"), batches("perceptron"), profiles, **{"steps": 1} | settings)
    assert all(layer.sizes is None and layer.dense is None for layer in nested_layers(model).values())


def test_a_model_of_inference_mode_is_refused() -> None:
    """Gradients pass through its norm, though that is not trained."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(12, 10), nn.LayerNorm(10), nn.Linear(10, 6))
    teacher = nn.Sequential(nn.Linear(12, 10), nn.LayerNorm(10), nn.Linear(10, 6))
    wanted = "parameter '1.weight' is of torch.inference_mode; load or copy the model outside of it"
    with pytest.raises(FlexrankError, match=wanted):
        distill_(nest(model), teacher, batches("perceptron"), [{"0": 4, "2": 3}], steps=1)


class Odd(FeatureObjective):
    """An objective with a target that is no tensor, or a loss for each row."""

    def __init__(self, has_target: bool):
        self.has_target = has_target

    def target(self, output: Any, batch: Any) -> Any:
        return output.detach() if self.has_target else None

    def loss(self, output: Any, target: Any, batch: Any) -> torch.Tensor:
        return (output - target).square().sum(-1)


@pytest.mark.parametrize(
    ("has_target", "message"),
    [(False, "target of Odd returned a NoneType; it must be a tensor"),
     (True, r"loss of Odd returned \(\d+,\); it must be a scalar tensor")],
)  # fmt: skip
def test_an_objective_of_another_form_is_refused(has_target: bool, message: str) -> None:
    teacher, model = build("perceptron"), nest(build("perceptron"))
    with pytest.raises(FlexrankError, match=message):
        distill_(model, teacher, batches("perceptron"), [SMALL], steps=1, objective=Odd(has_target))
    with pytest.raises(FlexrankError, match=message):
        distillation_evaluator(teacher, batches("perceptron"), Odd(has_target))(model)
    with pytest.raises(FlexrankError, match="it is an object with the methods target and loss"):
        distillation_evaluator(teacher, batches("perceptron"), nn.MSELoss())


def test_a_call_that_takes_no_step_leaves_the_model_to_be_probed(tmp_path: Path) -> None:
    teacher, model = build("perceptron"), nest(build("perceptron"))
    profiles = [SMALL, full_profile(model)]
    (tmp_path / "file").write_text("")
    for given, checkpoint in ([], None), (batches("perceptron"), tmp_path), (batches("perceptron"), tmp_path / "file"):
        with pytest.raises(FlexrankError, match="got no batches|holds no checkpoint; choose another directory, or"):
            distill_(model, teacher, given, profiles, steps=1, checkpoint=checkpoint)
        assert all(layer.sizes is None and layer.dense is None for layer in nested_layers(model).values())
    (tmp_path / "empty" / ".empty.killed00.aside").mkdir(parents=True)  # what a killed save leaves inside a mount
    distill_(model, teacher, batches("perceptron"), profiles, steps=1, checkpoint=tmp_path / "empty")
    vectors = {name: layer.sizes for name, layer in nested_layers(model).items()}
    with pytest.raises(FlexrankError, match="was written with steps=1, not 2"):
        distill_(model, teacher, batches("perceptron"), profiles, steps=2, checkpoint=tmp_path / "empty")
    assert all(layer.sizes is vectors[name] and layer.dense is not None for name, layer in nested_layers(model).items())


def test_what_was_trained_until_a_call_failed_stays() -> None:
    def stop(step: Any) -> None:
        if step.number == 1:
            raise RuntimeError("enough")

    model = nest(build("perceptron"))
    with pytest.raises(RuntimeError, match="enough"):
        distill_(model, build("perceptron"), batches("perceptron"), [SMALL], steps=3, on_step=stop)
    other = nest(build("perceptron"))
    distill_(other, build("perceptron"), batches("perceptron"), [SMALL], steps=3)
    assert all(layer.sizes is not None for layer in nested_layers(model).values())
    assert len(weights_of(model)) == len(weights_of(other)) and not torch.equal(weights_of(model), weights_of(other))


def test_a_single_logit_is_no_distribution() -> None:
    """Of a model that scores or estimates; its divergence would always be 0."""
    output = SequenceClassifierOutput(logits=torch.randn(4, 1))
    assert default_objective(output) == FeatureObjective()
    with pytest.raises(FlexrankError, match="a single logit, which is no distribution; give objective=FeatureObj"):
        LogitObjective().target(output, {})
    assert FeatureObjective().target(output, {}).shape == (4, 1)


def test_logits_of_other_rows_than_the_mask_are_refused_where_it_leaves_some_out() -> None:
    """As of a model that puts tokens of its own before the text."""
    logits, mask = torch.randn(2, 6, 3), torch.ones(2, 5, dtype=torch.long)
    batch = {"input_ids": mask, "attention_mask": mask}
    assert LogitObjective().target(logits, batch).shape == (12, 3)
    mask[0, 4] = 0
    with pytest.raises(FlexrankError, match=r"logits have shape \(2, 6, 3\) and the mask of real tokens \(2, 5\)"):
        LogitObjective().target(logits, batch)
