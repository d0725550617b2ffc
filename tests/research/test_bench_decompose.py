"""The bench of decomposition at a tiny size: its numbers are there, and its verdict follows from them."""

import json
from typing import Any

import pytest
import torch

from flexrank.nn.linalg import ridged, whitened_svd
from research.benches import decompose
from research.benches.decompose import Kind
from research.experiment import Request

KINDS = (Kind("q, o", (12, 12), 2, 2), Kind("up", (30, 12), 2, 1), Kind("down", (12, 30), 1, 1))


def test_the_bench_measures_what_it_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, value in {"KINDS": KINDS, "SOLVED": 20, "TOKENS": 40}.items():
        monkeypatch.setattr(decompose, name, value)
    result = decompose.run(Request(tmp_path))
    json.dumps(result)
    assert result["data"]["solve"]["30"] == pytest.approx(decompose._solve_seconds(20) * 1.5**3)
    for row in result["data"]["rows"]:
        assert len(row["ours"]) == len(row["whitened"]) == decompose.REPEATS
        assert min(*row["ours"], *row["whitened"]) > 0


@pytest.mark.parametrize(("whitened", "met"), [(3.0, True), (2.9, False)])
def test_the_verdict_follows_from_the_seconds(whitened: float, met: bool) -> None:
    """Two layers of one input: 2·3 + 2 against 2·1."""
    row = {"name": "q", "number": 2, "inputs": 1, "solve": 2.0, "ours": [1.0], "whitened": [whitened], "shape": [4, 4]}
    assert decompose.totals([row]) == [2.0, 2 * whitened, 2.0]
    layer, block, blocks = decompose._table([row])["rows"]
    assert layer[3:] == [1.0, whitened, 1.0, whitened + 1] and block[3:] == [2.0, 2 * whitened, 2.0, whitened + 1]
    assert blocks[3:] == [32.0, 32 * whitened, 32.0, None]
    assert decompose._goal([row])["holds"] is met


def test_the_rival_is_the_whitened_procedure() -> None:
    """With Σ^{1/2} = Σ^{-1/2} = 1 its factors are those of `whitened_svd`."""
    weight, moment = torch.randn(5, 7), torch.eye(7).double()
    left, right = decompose.whiten(weight, moment)
    factors = whitened_svd(weight, moment)
    assert torch.allclose(ridged(moment), moment, atol=1e-5)
    torch.testing.assert_close(left @ right.T, factors.u.T @ factors.v, rtol=1e-5, atol=1e-5)
