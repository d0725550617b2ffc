"""The bench of decomposition at a tiny size: its numbers are there, and its verdict follows from them."""

import json
import statistics
from typing import Any

import pytest
import torch

from flexrank.nn.linalg import ridged, whitened_svd
from research.benches import decompose
from research.experiment import Request

KINDS = (("q, o", (12, 12), 2, 2), ("up", (30, 12), 2, 1), ("down", (12, 30), 1, 1))


def test_the_bench_measures_what_it_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, value in {"KINDS": KINDS, "TOKENS": 40}.items():
        monkeypatch.setattr(decompose, name, value)
    result = decompose.run(Request(tmp_path))
    json.dumps(result)
    for row, (_, (_, n), number, inputs) in zip(result["data"]["rows"], KINDS, strict=True):
        assert len(row["ours"]) == len(row["whitened"]) == decompose.REPEATS
        solved = decompose._solve_seconds(n) * inputs / number
        assert row["medians"] == [statistics.median(row["ours"]), statistics.median(row["whitened"]), solved]
        assert min(row["medians"]) > 0


@pytest.mark.parametrize(("whitened", "met"), [(3.0, True), (2.9, False)])
def test_the_verdict_follows_from_the_seconds(whitened: float, met: bool) -> None:
    """Two layers of one input: 2·3 + 2 against 2·1."""
    row = {"name": "q", "number": 2, "shape": [4, 4], "medians": [1.0, whitened, 1.0]}
    assert decompose.totals([row]) == [2.0, 2 * whitened, 2.0]
    layer, block = decompose._table([row])["rows"]
    assert layer[3:] == [1.0, whitened, 1.0, whitened + 1] and block[3:] == [2.0, 2 * whitened, 2.0, whitened + 1]
    assert decompose._goal([row])["holds"] is met


def test_the_rival_is_the_whitened_procedure() -> None:
    """With Σ^{1/2} = Σ^{-1/2} = 1 its factors are those of `whitened_svd`."""
    weight, moment = torch.randn(5, 7), torch.eye(7).double()
    left, right = decompose.whiten(weight, moment)
    factors = whitened_svd(weight, moment)
    assert torch.allclose(ridged(moment), moment, atol=1e-5)
    torch.testing.assert_close(left @ right.T, factors.u.T @ factors.v, rtol=1e-5, atol=1e-5)
