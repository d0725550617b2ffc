"""The bench of calibration at a tiny size: its numbers are there, and its verdicts follow from them."""

import json
import statistics
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flexrank.calibrate import collect_moments, find_groups
from flexrank.data.batches import call_model
from flexrank.nn import linalg
from flexrank.nn.select import select_layers
from research.benches import calibrate
from research.experiment import Request

SIZES = {
    "hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 20,
}  # fmt: skip


def test_the_bench_measures_what_it_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, value in {"SIZES": SIZES, "SHAPE": (2, 8), "REPEATS": 2, "MEASURED": 2}.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate, "in_fresh_process", lambda function, *args: function(*args))
    result = calibrate.run(Request(tmp_path))
    json.dumps(result)
    for one in result["data"]["rates"].values():
        assert one["product_rate"] == 2 * 16 * 16**2 / statistics.median(one["seconds"]["product"])
        ratios = [a / b for a, b in zip(one["seconds"]["product"], one["seconds"]["moments"], strict=True)]
        assert one["share"] == pytest.approx(one["operations"] / (2 * 16 * 16**2) * statistics.median(ratios))
    peaks = result["data"]["peaks"]
    assert peaks["all at once"]["moments"] == 2 * peaks["by block"]["moments"] > 0


@pytest.mark.parametrize(("share", "above", "met"), [(0.7, 100 * 2**20, True), (0.69, 101 * 2**20, False)])
def test_verdicts_follow_from_the_numbers(share: float, above: int, met: bool) -> None:
    peaks = {"by block": {"above": above, "moments": 100 * 2**20}, "all at once": {"above": 300, "moments": 300}}
    assert [one["holds"] for one in calibrate._goals({"float32": {"share": share}}, peaks)] == [met, met]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_are_those_that_torch_counts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linalg, calibrate):
        monkeypatch.setattr(module, "STRIP", 8)
    monkeypatch.setattr(calibrate, "SIZES", SIZES)
    model, (batch,) = calibrate.build_model(SIZES, 1, dtype), calibrate.build_batches((2, 8), 1)
    layers = select_layers(model, exclude=["lm_head"])
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        model(**batch)
    with FlopCounterMode(display=False) as counter:
        moments = collect_moments(model, [batch], layers)
    done = calibrate.count_operations(moments, layers, find_groups(lambda: call_model(model, batch), layers), 16, dtype)
    assert counter.get_total_flops() - 2 * forward.get_total_flops() == done
