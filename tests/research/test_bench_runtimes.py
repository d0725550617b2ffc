"""The bench of other runtimes on a tiny encoder: bytes, errors and ranks by hand; its clock is replaced."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from flexrank.hf.models import load_by_architecture
from research.benches import runtimes
from research.experiment import Request

WORKLOADS = {"one": (1, 6), "several": (3, 9)}


def in_turn(runs: Sequence[Callable[[], torch.Tensor]], repeats: int, **_: Any) -> list[list[float]]:
    """Each run's rows take a second each, and half of one more for a size; so the ratio is known."""
    rows = [len(run()) for run in runs]
    return [[0.5 + rows[0]], [float(rows[1])]]


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    settings = {
        "BUDGETS": (1.0, 0.5), "WORKLOADS": WORKLOADS, "FORMATS": ("dense", "torch"), "interleave": in_turn,
        "load_model": lambda *_: tiny.build("bert"),
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setattr(runtimes, name, value)
    runtimes._batch.cache_clear()
    # Dynamo cannot trace the tests' checks of shapes; `test_compile` has it in a process without them.
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    value = dict(runtimes.run(Request(tmp_path)))
    runtimes._batch.cache_clear()
    return value


def test_each_runtime_has_its_times_bytes_and_errors(result: dict[str, Any], tmp_path: Path) -> None:
    data = result["data"]
    assert list(data) == ["torch.compile", "dense", "torch"]
    for name, one in data.items():
        assert one["times"] == {"one": [1.5], "several": [3.5 / 3]}, name
        assert all(error <= bound for error, bound in zip(one["error"], one["bound"], strict=True))
    assert data["dense"]["bytes"][0] == pytest.approx(data["dense"]["bytes"][1], rel=0.01)
    runtimes.write_sizes(tmp_path)
    for place, size in zip((tmp_path / "1", tmp_path / "0.5"), data["torch.compile"]["bytes"], strict=True):
        assert size == sum(file.stat().st_size for file in place.iterdir())
    found = {claim["what"]: (claim["here"], claim["holds"]) for claim in result["claims"]}
    wanted = ("1.17", False)  # 3.5 of 3, above .8
    assert found == {f"{name}: time of size 0.5 with a batch": wanted for name in ("torch.compile", "torch")}


def test_the_document_names_the_budgets_of_the_saved_results() -> None:
    root = Path(__file__).parents[2]
    _, *saved = json.loads((root / "results/runtimes/result.json").read_text())["settings"]["budgets"]
    first, last = ", ".join(f"{one:g}"[1:] for one in saved[:-1]), f"{saved[-1]:g}"[1:]
    assert f"saved for {first} and {last};" in (root / "docs/deployment.md").read_text(encoding="utf8")
    assert {*saved, runtimes.HALF} <= set(runtimes.BUDGETS)


def test_the_base_model_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "load_model", lambda *_: tiny.build("bert"))
    monkeypatch.setattr(runtimes, "BUDGETS", (1.0,))
    runtimes.write_sizes(tmp_path)
    base, batch = tiny.build("bert"), tiny.batch_for("bert")
    found, _ = load_by_architecture(tmp_path / "1")
    assert tiny.relative(tiny.outputs(found, batch), tiny.outputs(base, batch)) < 1e-5
