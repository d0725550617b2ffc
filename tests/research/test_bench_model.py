"""`bench model` on a tiny run: every budget in every situation, a fresh process's peak, and verdicts that follow."""

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
from flexrank.deployment.timing import TOKENS, FormKey, TimeTable
from torch import nn

from flexrank import deployment
from flexrank.deployment import fitting
from flexrank.nn.gauge_aligned import GaugeAlignedLinear
from flexrank.run import deploying
from research.benches import model
from research.benches.driver import measure
from tiny_runs import rerun, verify_here


@pytest.mark.slow
def test_every_budget_is_measured_in_every_situation(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "REPEATS", 1)
    monkeypatch.setattr(model, "SECONDS", 0.0)
    monkeypatch.setattr(model, "NEW_TOKENS", 3)
    monkeypatch.setattr(model, "PROMPT", 4)
    monkeypatch.setattr(model, "in_fresh_process", lambda function, *args: function(*args))
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    result = measure(model.BENCH, run, tmp_path / "out")
    ratios, sizes, asked = result["tables"]
    assert [row[0] for row in ratios["rows"]] == ["base", "0.8", "0.5"]
    assert ratios["columns"][1:] == ["1 text of 32 tokens", "4 texts of 32 tokens", "3 tokens generated"]
    assert all(ratio == 1 for ratio in ratios["rows"][0][1:])
    assert all(ratio > 0 for row in ratios["rows"] for ratio in row[1:])
    megabytes = [row[1] for row in sizes["rows"]]
    assert megabytes[0] > megabytes[1] > megabytes[2] > 0
    assert all(cell is not None for row in sizes["rows"] for cell in row)
    worst = max(ratio for row in ratios["rows"][1:] for ratio in row[1:])
    assert result["claims"][0]["holds"] == (worst <= model.OVER_BASE)
    assert f"worst {worst:.2f}" in result["claims"][0]["here"]
    assert [row[0] for row in asked["rows"]] == [
        f"{share:g}, {way}" for share in model.ASKED for way in ("as deployed", "smallest forms")
    ]
    assert (tmp_path / "out" / "model.svg").stat().st_size > 500


def test_what_has_just_been_consolidated_is_measured_in_a_fresh_process(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copied / "elastic")
    monkeypatch.setattr(model, "in_fresh_process", lambda function, *args: {"function": function, "args": args})
    assert model.run(copied) == {"function": model.run, "args": (copied,)}
    assert (copied / "elastic" / "elastic.safetensors").is_file()


def test_a_run_with_measured_forms_deploys_what_the_times_say(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where one shape is slow in other forms it is dense; where all are, the smallest stand, and it is said."""
    slow: set[tuple[int, int]] = {(56, 32)}

    def dense_seconds(key: FormKey) -> float:
        return 1e-9 * key.shape[0] * key.shape[1]

    def seconds(self: TimeTable, key: FormKey, rank: int, slack: int | None) -> tuple[float, ...]:
        low_rank = 3.0 if key.shape in slow else 0.4 if slack == rank else 0.5
        return (dense_seconds(key) * (1.0 if slack is None else low_rank),) * len(TOKENS)

    def ratio(small: nn.Module, *_: object, **__: object) -> float:
        """By the same table, of a model that is nothing but its layers."""
        found = [one for one in small.modules() if isinstance(one, GaugeAlignedLinear)]
        keys = [FormKey(one.matrix_shape, False) for one in found]
        dense = 1e-9 * 2 * 4 * (32 * 32 + 32 * 56)
        return 1 + sum(dense_seconds(key) * (2.0 if key.shape in slow else -0.5) for key in keys) / dense

    monkeypatch.setattr(deployment, "_run_verification", verify_here)
    monkeypatch.setattr(TimeTable, "measure", lambda self, keys: None)
    monkeypatch.setattr(TimeTable, "seconds", seconds)
    monkeypatch.setattr(deploying, "latency_ratio", ratio)
    monkeypatch.setattr(deploying, "seconds_of_forward", lambda *_: 1e-9 * 2 * 4 * (32 * 32 + 32 * 56))
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    before = json.loads((run / "deployed.json").read_text())
    assert not [name for name in _dense_layers(run / "deployed" / "0.50") if "gate_proj" in name or "up_proj" in name]
    executed = rerun(run, "deployment.forms=measured")
    assert "deploy" in executed and "distill" not in executed
    assert [name for name in _dense_layers(run / "deployed" / "0.50") if "gate_proj" in name or "up_proj" in name]
    ranks = json.loads((run / "evaluation.json").read_text())["rows"][-1]
    assert ranks["params_model"] == json.loads((run / "deployed.json").read_text())[0]["params_model"]

    with monkeypatch.context() as patch:
        patch.setattr(deploying, "_no_slower", lambda *_: pytest.fail("chosen again"))
        (run / "evaluation.json").unlink()
        assert rerun(run, "deployment.forms=measured") == ("evaluate", "report")  # by the forms that were kept
    again = json.loads((run / "evaluation.json").read_text())["rows"][-1]
    assert {**again, "latency_ratio": None} == {**ranks, "latency_ratio": None}

    assert _joining_layers(run / "deployed" / "0.50")
    slow.clear()
    monkeypatch.setattr(fitting, "LEAST_SIZE", 0.1)  # this run's chain has few entries
    rerun(run, "deployment.forms=quickest")
    assert not _joining_layers(run / "deployed" / "0.50")
    sizes = json.loads((run / "evaluation.json").read_text())["rows"]
    assert all(row["relative_size"] <= row["budget"] for row in sizes if row["budget"] < 1)
    keys = json.loads((run / deploying.FORMS).read_text())
    slow.add((56, 32))
    rerun(run, "deployment.forms=measured")
    assert _joining_layers(run / "deployed" / "0.50")
    assert json.loads((run / deploying.FORMS).read_text()) == keys

    monkeypatch.setattr(deploying, "latency_ratio", lambda *_, **__: 1.5)
    (run / deploying.FORMS).unlink()
    slow |= {(m, n) for m in (16, 32, 56, 64) for n in (16, 32, 56, 64)}
    with caplog.at_level(logging.WARNING, "flexrank"):
        rerun(run, "deployment.forms=measured", "deployment.budgets=[0.5, 0.45]")
    assert "no size near is fast enough" in caplog.text
    assert json.loads((run / "deployed.json").read_text())[0]["params_model"] == before[0]["params_model"]


def _dense_layers(export: Path) -> set[str]:
    layers = json.loads((export / "flexrank.json").read_text())["layers"]
    return {name for name, spec in layers.items() if spec["form"] == "dense"}


def _joining_layers(export: Path) -> set[str]:
    """Of low rank, and not plain where plain would be smaller than dense."""
    layers = json.loads((export / "flexrank.json").read_text())["layers"]
    aligned = {name: spec for name, spec in layers.items() if spec.get("aligned")}
    return {n for n, spec in aligned.items() if spec["rank"] * sum(spec["shape"]) < math.prod(spec["shape"])}


def test_latencies_out_of_reach_are_counted() -> None:
    def row(asked: float, ratio: float | None, way: str = "as deployed") -> dict[str, object]:
        return {
            "asked": asked,
            "way": way,
            "ratio": ratio,
            "size": 0.5,
            "quality": {} if ratio is None else {"mrr": 1.0},
        }

    (kept,) = model._asked_goals([row(0.8, 0.82), row(0.5, 0.5), row(0.8, 9.0, "smallest forms")])
    assert kept["holds"] and kept["here"] == "worst 1.02; 2 of 2 within"
    (missed,) = model._asked_goals([row(0.8, 0.9), row(0.5, None)])
    assert missed["holds"] is False and missed["here"] == "worst 1.12; 0 of 1 within; 1 out of reach"
    (none,) = model._asked_goals([row(0.5, None)])
    assert none["holds"] is None and none["here"] == "none; 1 out of reach"
    shown = model._asked_table([row(0.8, 0.9), row(0.5, None)])["rows"]
    assert shown == [["0.8, as deployed", 0.9, 0.5, 1.0], ["0.5, as deployed", None, 0.5, None]]


@pytest.mark.parametrize(("each", "rounds"), [(0.5, 9), (0.01, 100)])
def test_short_forwards_are_timed_more_often(each: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "interleave", lambda runs, repeats: [[each] * repeats for _ in runs])
    assert model._rounds([lambda: None, lambda: None]) == rounds
