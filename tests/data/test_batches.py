"""What a batch may be, and what becomes of it on its way to a device."""

from typing import NamedTuple

import numpy
import pytest
import torch
from torch import nn

from flexrank.calibrate import collect_moments
from flexrank.data.batches import call_model, some_rows, to_device, token_mask
from flexrank.distill import distillation_evaluator
from flexrank.distill.schedule import Feed
from flexrank.errors import FlexrankError
from flexrank.nn.select import select_layers


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        {"x": torch.ones(2), "flag": True},
        (torch.ones(2), 3),
        [torch.ones(2), None],
        Pair(torch.ones(2), "left"),
    ],
)
def test_a_batch_keeps_its_kind_and_its_plain_values(batch) -> None:
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    values = [moved] if isinstance(moved, torch.Tensor) else list(moved.values() if isinstance(moved, dict) else moved)
    given = [batch] if isinstance(batch, torch.Tensor) else list(batch.values() if isinstance(batch, dict) else batch)
    assert values[0].device.type == "meta" and values[1:] == given[1:]


def test_some_rows_are_of_each_tensor_that_has_the_batchs_rows() -> None:
    x = torch.arange(12).view(4, 3)
    batch = {"x": x, "y": x[:, 0], "positions": torch.arange(3), "scale": torch.tensor(2.0), "flag": True}
    part = some_rows(batch, slice(1, 3))
    assert torch.equal(part["x"], x[1:3]) and torch.equal(part["y"], x[1:3, 0])
    assert all(part[key] is batch[key] for key in ("positions", "scale", "flag"))
    assert torch.equal(some_rows(x, slice(3, 4)), x[3:])
    assert torch.equal(some_rows(Pair(x, "left"), slice(0, 2)).x, x[:2])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(2)),
            r"Linear cannot be called with a batch: too many positional arguments; a",
        ),
        ({"x": torch.ones(2, 3)}, r"Linear cannot be called with a batch: missing a required argument: 'input'; a"),
        (
            {"input": torch.ones(2, 3), "labels": 1},
            r".* an unexpected keyword argument 'labels'; a .*no labels",
        ),
        (numpy.ones((2, 3)), r"a batch is a ndarray; it is a tensor for model\(x\), a tuple or list"),
        ("a text", "a batch is a str; it is a tensor"),
        ({"input_ids": torch.ones(3)}, r"input_ids has shape \(3,\); expected \(batch, tokens\)"),
    ],
)
def test_a_batch_that_the_model_does_not_take_is_one_line(batch, message: str) -> None:
    model = nn.Linear(3, 2)
    for call in (lambda: call_model(model, batch), lambda: distillation_evaluator(model, [batch])):
        with pytest.raises(FlexrankError, match=message):
            call()


def test_an_error_inside_a_forward_stays_as_it_is() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + "one"

    with pytest.raises(TypeError, match="unsupported operand"):
        call_model(Broken(), torch.ones(2))


@pytest.mark.parametrize("batches", [torch.ones(4, 3), {"x": torch.ones(4, 3)}, "texts"])
def test_one_batch_in_place_of_several_is_refused(batches) -> None:
    """Taken apart, it would be rows, keys or letters."""
    model = nn.Sequential(nn.Linear(3, 2))
    for call in (
        lambda: collect_moments(model, batches, select_layers(model)),
        lambda: distillation_evaluator(model, batches),
        lambda: Feed(batches, 0),
    ):
        with pytest.raises(FlexrankError, match=f"batches is a {type(batches).__name__}; it is a list of batches"):
            call()


def test_a_mask_that_does_not_tell_tokens_is_refused() -> None:
    assert token_mask((torch.ones(2),)) is None
    with pytest.raises(FlexrankError, match=r"attention_mask has shape \(1, 1, 2, 2\)"):
        token_mask({"attention_mask": torch.ones(1, 1, 2, 2)})
    added = {"attention_mask": torch.tensor([[0.0, 0.0, -1e9]])}
    with pytest.raises(FlexrankError, match="attention_mask holds values below 0.*; expected 1 for real tokens"):
        token_mask(added)
    assert token_mask({"attention_mask": torch.tensor([[1.0, 2.0, 0.0]])}).tolist() == [[True, True, False]]
