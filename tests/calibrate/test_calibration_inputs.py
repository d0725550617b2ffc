"""What calibration is given: layers, losses, masks of models that have time first, and files of moments."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import tiny
from flexrank.calibrate import collect_moments, collect_rows, load_moments, moments_by_block, save_moments
from flexrank.decompose import decompose_
from flexrank.distill.objectives import LogitObjective
from flexrank.errors import FlexrankError
from flexrank.nn.select import select_layers


class TimeFirst(nn.Module):
    """Reads (B, T, 6) and computes on (T, B, 6), as Longformer, FSMT and torch's recurrent layers do."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, out)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("out", [4, 9])  # whose output has the moment, or whose input
def test_padding_of_models_that_have_time_first_does_not_count(out: int) -> None:
    torch.manual_seed(0)
    model, x = TimeFirst(out), torch.randn(3, 5, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    batch, layers = {"x": x, "attention_mask": mask}, {"layer": model.layer}
    weight = torch.randn(3, 5, out)
    entry = collect_moments(model, [batch], layers, gradient_loss=lambda y, _: (y * weight).sum())["layer"]
    real = x[mask.bool()].double()
    rows = real if out > 6 else real @ model.layer.weight.detach().double().T
    torch.testing.assert_close(entry.moment, rows.T @ rows, rtol=1e-5, atol=1e-5)
    gradients = weight[mask.bool()].double()
    torch.testing.assert_close(entry.gradient_moment, gradients.T @ gradients, rtol=1e-5, atol=1e-5)
    kept = collect_rows(model, iter([batch]), layers)["layer"]
    assert entry.tokens == len(kept) == 9
    assert {tuple(row) for row in kept.tolist()} == {tuple(row) for row in x[mask.bool()].tolist()}


class Standardised(nn.Conv2d):
    """A convolution whose forward is its own."""


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(4, 8, 3, groups=2), "convolution with 2 groups"),
        (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), r"convolution with padding .*, mode 'reflect'"),
        (nn.Conv2d(4, 8, 3, padding="same"), "convolution with padding 'same'"),
        (Standardised(4, 8, 3), "Standardised is a Conv2d of its own kind"),
        (nn.LayerNorm(8), "LayerNorm has no matrix"),
        (nn.Embedding(8, 4), "embedding"),
        (tiny.nest(nn.Sequential(nn.Linear(8, 4)))[0], "elastic already"),  # type: ignore[index]
    ],
)
def test_layers_that_cannot_be_factorised_are_named(layer: nn.Module, reason: str) -> None:
    model, message = nn.Sequential(layer), f"layer '0' cannot be factorised: {reason}.*; select_layers finds"
    with pytest.raises(FlexrankError, match=message):
        decompose_(model, ["0"], method="svd")
    with pytest.raises(FlexrankError, match=message):
        collect_moments(model, [torch.zeros(2, 8, dtype=torch.long)], {"0": layer})
    assert model[0] is layer


class Frozen(nn.Module):
    """A backbone that runs without gradients, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.backbone(x)
        return self.head(hidden)


def test_a_layer_without_gradients_is_named() -> None:
    model, batch = Frozen(), torch.randn(5, 6)

    def loss(output: Tensor, _: Any) -> Tensor:
        return output.square().sum()

    with pytest.raises(FlexrankError, match="layer 'backbone' runs without gradients; exclude it"):
        collect_moments(model, [batch], select_layers(model), gradient_loss=loss)
    assert collect_moments(model, [batch], {"head": model.head}, gradient_loss=loss)["head"].tokens == 5


def test_an_objective_in_place_of_its_loss_is_named() -> None:
    model, right = tiny.build("perceptron"), "it is a function, such as an objective's fisher_loss"
    with pytest.raises(FlexrankError, match=f"gradient_loss is LogitObjective.*; {right}"):
        collect_moments(model, [tiny.batch_for("perceptron")], select_layers(model), gradient_loss=LogitObjective())


@pytest.mark.parametrize("wrong", [lambda y, _: y, lambda y, _: y.detach().sum(), lambda y, _: 1.0, lambda *_: None])
def test_a_loss_that_is_no_scalar_with_a_gradient_is_refused(wrong: Any) -> None:
    model = tiny.build("perceptron")
    with pytest.raises(FlexrankError, match="gradient_loss must return a scalar tensor with a gradient"):
        collect_moments(model, [tiny.batch_for("perceptron")], select_layers(model), gradient_loss=wrong)


def test_wrong_sides_counts_and_batches_are_named() -> None:
    model, batch = tiny.build("perceptron"), tiny.batch_for("perceptron")
    layers = select_layers(model)
    with pytest.raises(FlexrankError, match="side 'output' is unknown; it is smaller or input"):
        collect_moments(model, [batch], layers, side="output")  # type: ignore[arg-type]
    for count in (0, -1, 2.5):
        with pytest.raises(FlexrankError, match=f"count is {count}; it is a whole number of rows from 1 up"):
            collect_rows(model, [batch], layers, count)
    with pytest.raises(FlexrankError, match="batches is a Tensor"):
        collect_rows(model, batch, layers)
    with pytest.raises(FlexrankError, match="batches is a Tensor"):
        next(moments_by_block(model, batch, layers))


def test_another_file_than_moments_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "junk").write_bytes(b"junk")
    save_file({"a": torch.zeros(2)}, tmp_path / "other")
    for name, problem in (
        ("none", "cannot be read as moments: "),
        ("junk", "cannot be read as moments: "),
        ("other", "not a file that save_moments wrote"),
    ):
        with pytest.raises(FlexrankError, match=f"{name}: {problem}") as caught:
            load_moments(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_moments_on_a_full_disk_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(FlexrankError, match=r"moments: cannot be written \(I/O error: No space left on device\)"):
        save_moments({}, tmp_path / "moments")
    assert not list(tmp_path.iterdir())
