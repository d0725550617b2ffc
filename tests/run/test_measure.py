"""What `flexrank measure` says of a size, beside its times."""

from typing import Any

import pytest

import tiny
from flexrank.data.batches import call_model
from flexrank.run import measure
from flexrank.run.measure import Workload


def test_tied_tensors_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the parameters, in float32; the head is the embedding, and rotary frequencies are not stored."""
    for name, value in {"LEAST_SECONDS": 0.0, "REPEATS": 1, "_peak": lambda *_: None}.items():
        monkeypatch.setattr(measure, name, value)
    model, work = tiny.llama_tied(), Any
    workload = Workload("one", 1, lambda one: call_model(one, tiny.token_batch()))
    found = measure._measure(work, model, model, [workload])  # type: ignore[arg-type]
    assert found["bytes"] == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight and found["peak"] is None
