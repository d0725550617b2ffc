"""The bench of cascades on a tiny network: rows by a plain loop over the half that calibration did not see."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.data.halves import half_of
from research.benches import cascade as bench
from research.experiment import Request
from research.result import shown_rows
from research.studies import cifar
from tiny import build

SETTINGS = {"SMALL": (0.5,), "LOSSES": (0.1, 0.3), "CALIBRATION": 24, "BATCH": 8, "TEST": 300, "STEPS": 2}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in SETTINGS.items():
        monkeypatch.setattr(bench, name, value)
    return monkeypatch


def test_cascades_are_measured_on_the_other_half(tiny: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (300, 3, 8, 8), generator=generator, dtype=torch.uint8)
    classes = torch.randint(0, 6, (300,), generator=generator)
    made: list[tuple[Any, int]] = []
    real = bench.cascade

    def kept(small: Any, large: Any, batches: Any, loss: float) -> Any:
        made.append((real(small, large, batches, loss), sum(map(len, batches))))
        return made[-1][0]

    tiny.setattr(bench, "cascade", kept)
    data = bench.measure(build("convnet"), images[:64], images, classes)
    halves = [half_of(image) for image in images]
    held_out = torch.tensor([half == "reporting" for half in halves])
    x, right = cifar.RESNET_SCALING(images[held_out]), classes[held_out]
    assert [row["loss"] for row in data["rows"]] == [0.1, 0.3]
    for row, (both, calibrated) in zip(data["rows"], made, strict=True):
        assert calibrated == halves.count("tuning") and row["samples"] == len(x) == 300 - calibrated
        answers, wanted = (one(x).detach().argmax(1) for one in (both, both.large))
        assert row["differing"] == pytest.approx(float((answers != wanted).double().mean()))
        assert row["accuracy"] == pytest.approx(float((answers == right).double().mean()))
        assert row["alone"] == pytest.approx(float((both.small(x).argmax(1) == right).double().mean()))
        assert data["large"] == pytest.approx(float((wanted == right).double().mean()))
    assert data["rows"][0]["answered_by_small"] <= data["rows"][1]["answered_by_small"]


def test_the_verdict_follows_from_the_rows(tiny: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By hand: two of two differ with chances of .01 and .09 at losses of .1 and .3."""
    keys = {"samples": 2, "answered_by_small": 1.0, "operations_saved": 0.4, "alone": 0.7, "accuracy": 0.8}
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    rows = [{"small": 0.5, "loss": loss, "differing": 1.0, **keys} for loss in (0.1, 0.3)]
    tiny.setattr(bench, "assets_directory", lambda *names: tmp_path)
    tiny.setattr(cifar, "read_tensors", lambda path: (images, torch.zeros(4)))
    tiny.setattr(cifar, "load_resnet20", lambda path: build("convnet"))
    tiny.setattr(bench, "measure", lambda *_: {"large": 0.85, "rows": rows})
    (verdict,) = bench.run(Request(tmp_path / "first"))["claims"]
    assert verdict["here"] == "0 of 2" and verdict["holds"] is False and "a chance of 0.01," in verdict["why"]
    rows[0]["differing"] = 0.1
    result = bench.run(Request(tmp_path / "second"))
    assert result["claims"][0]["here"] == "1 of 2" and result["claims"][0]["holds"] is False
    rows[1]["differing"] = 0.0
    assert bench.run(Request(tmp_path / "third"))["claims"][0]["holds"] is True
    assert shown_rows(result["tables"][0])[1] == ["0.5", "0.30", "1.0000", "1.000", "0.400", "0.7000", "0.8000"]
