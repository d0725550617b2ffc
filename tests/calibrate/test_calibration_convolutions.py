"""Rows of convolutions, which come some images at a time, against all patches at once."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from flexrank.calibrate import collect_moments, collect_rows, collector

POSITIONS = 12  # of an image of 7 x 9, by a kernel of 3 x 3, no padding and stride 2


class Masked(nn.Module):
    """One convolution, which takes a mask that it does not read."""

    def __init__(self, filters: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, filters, 3, stride=2, dtype=dtype)

    def forward(self, pixel_values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.conv(pixel_values)


def patches(images: Tensor) -> Tensor:
    """The rows (tokens, 27), by slices of the images."""
    return torch.stack([
        image[:, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3].reshape(-1)
        for image in images.double() for row in range(3) for column in range(4)
    ])  # fmt: skip


def batch_of(dtype: torch.dtype = torch.float64, count: int = 5) -> dict[str, Tensor]:
    """Images, and a mask with one entry for each position of each image, each image's another."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 7, 9, generator=generator, dtype=torch.float64).to(dtype)
    return {"pixel_values": images, "attention_mask": torch.rand(count, POSITIONS, generator=generator) < 0.6}


@pytest.mark.parametrize("rows", [1, 24, 30, 4096], ids=["one image", "two", "two and a bit", "all"])
@pytest.mark.parametrize("side", ["smaller", "input"])
@pytest.mark.parametrize("masked", [False, True])
def test_moments_are_those_of_all_patches_at_once(
    rows: int, side: Any, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "ROWS", rows)
    model, batch = Masked(8), batch_of()
    mask = batch["attention_mask"] if masked else torch.ones(5, POSITIONS, dtype=torch.bool)
    seen = patches(batch["pixel_values"])[mask.reshape(-1)]
    given = batch if masked else {"pixel_values": batch["pixel_values"]}
    moment = collect_moments(model, [given] * 2, {"conv": model.conv}, side=side)["conv"]
    products = seen if side == "input" else functional.linear(seen, model.conv.weight.detach().flatten(1))
    torch.testing.assert_close(moment.moment, 2 * products.T @ products, rtol=1e-12, atol=1e-11)
    assert moment.tokens == 2 * len(seen)
    assert moment.mean_square == pytest.approx(2 * float(seen.square().sum()) / 27, rel=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_multiplies_each_part_again(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "ROWS", 24)
    model, batch = Masked(8, torch.bfloat16), batch_of(torch.bfloat16)
    seen = patches(batch["pixel_values"])[batch["attention_mask"].reshape(-1)]
    if not masked:
        del batch["attention_mask"]
        seen = patches(batch["pixel_values"])
    moment = collect_moments(model, [batch], {"conv": model.conv})["conv"]
    products = seen @ model.conv.weight.detach().double().flatten(1).T
    torch.testing.assert_close(moment.moment, products.T @ products, rtol=1e-5, atol=1e-4)


def test_an_image_alone_and_a_batch_of_none_are_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "ROWS", 1)
    model = Masked(40).conv
    images = batch_of()["pixel_values"]
    moment = collect_moments(model, [images[0], images[:0], images[1:3]], {"": model})[""]
    seen = patches(images[:3])
    torch.testing.assert_close(moment.moment, seen.T @ seen, rtol=1e-12, atol=1e-11)
    assert moment.side == "input" and moment.tokens == 3 * POSITIONS


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [7, 1000])
def test_chosen_rows_are_spread_over_the_real_ones(masked: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "ROWS", 24)
    model, batch = Masked(8), batch_of()
    every = patches(batch["pixel_values"])
    if masked:
        every = every[batch["attention_mask"].reshape(-1)]
    else:
        del batch["attention_mask"]
    rows = collect_rows(model, [batch], {"conv": model.conv}, count=count)["conv"]
    places = [round(place - 0.5 + 1e-6) for place in torch.linspace(0, len(every) - 1, min(count, len(every))).tolist()]
    assert rows.dtype is torch.float32
    torch.testing.assert_close(rows, every[places].float(), rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that is made inside the block."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize("collect", [collect_moments, functools.partial(collect_rows, count=16)])
def test_memory_does_not_grow_with_the_images_of_a_batch(collect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is larger than what the layer returns, where all patches are three times as much."""
    monkeypatch.setattr(collector, "ROWS", 30)
    model, images = Masked(8).conv, batch_of(count=20)["pixel_values"]
    with Largest() as largest:
        collect(model, [images], {"": model})
    assert largest.numbers == model(images).numel() < 20 * POSITIONS * 27 / 3


def test_an_empty_batch_gives_no_rows() -> None:
    model, images = Masked(8, torch.float32), batch_of(count=2)["pixel_values"].float()
    whole = collect_rows(model, [images], {"conv": model.conv})["conv"]
    assert torch.equal(collect_rows(model, [images, images[:0]], {"conv": model.conv})["conv"], whole)
