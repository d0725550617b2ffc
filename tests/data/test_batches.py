"""What a batch may be, and what becomes of it on its way to a device."""

from typing import NamedTuple

import pytest
import torch

from flexrank.data.batches import some_rows, to_device, token_mask
from flexrank.errors import FlexrankError


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


def test_a_mask_that_does_not_tell_tokens_is_refused() -> None:
    assert token_mask((torch.ones(2),)) is None
    with pytest.raises(FlexrankError, match=r"attention_mask has shape \(1, 1, 2, 2\)"):
        token_mask({"attention_mask": torch.ones(1, 1, 2, 2)})
