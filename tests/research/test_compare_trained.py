"""The comparison of trained rivals: which settings are taken, what is said of the results, and parts of their own."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.errors import DivergedError, FlexrankError
from flexrank.run.config import parse_config
from research import runner
from research.baselines.method import NotApplicable
from research.baselines.trained import TRAINED_METHODS
from research.baselines.trained.task import TrainingTask
from research.benches import compare_trained, training_benchmarks, tuning
from research.benches.compare_trained import method_unit, run, sensitivity_unit
from research.benches.rates import next_rates
from research.experiment import Ledger, Request, find_experiment
from research.result import shown_rows
from tiny_runs import settings

BUDGETS = (0.8, 0.5)


class FakeBenchmark:
    name, measure, digits, budgets, steps, facts = "tiny", "nats", 3, BUDGETS, 40, {"calibration": 2}
    levels, default_rate = 3, 0.1

    def subject_and_batches(self, seed: int, half: str) -> tuple[None, None]:
        return None, None


def fake(
    monkeypatch: pytest.MonkeyPatch, scores: dict[str, float], best: tuple[float, float] = (1.0, 1.0)
) -> list[tuple[Any, ...]]:
    """In place of training: nats by method, more by a thousandth of a size's distance from its best rate.

    Returns what was asked for.
    """
    asked: list[tuple[Any, ...]] = []

    def trained(request: Request, name: str, method: str, rates: Any, seed: int, half: str, *rest: Any) -> Any:
        asked.append((method, rates, seed, half, *rest[:2]))
        nats = scores.get(method, 5.0) + seed
        errors = [nats + abs(rate - own) / 1000 + 1 - b for rate, own, b in zip(rates, best, BUDGETS, strict=True)]
        rows: list[Any] = [
            {"parameters": int(100 * b), "share": b, "scores": {"nats": error}}
            for b, error in zip(BUDGETS, errors, strict=True)
        ]
        if method == "layerskip":
            rows[1] = None
        return {"rows": rows, "seconds": 2.0, "peak_bytes": 3_000_000}

    monkeypatch.setattr(compare_trained, "training_benchmarks", lambda request: [FakeBenchmark()])
    monkeypatch.setattr(compare_trained, "method_unit", trained)
    monkeypatch.setattr(
        compare_trained,
        "sensitivity_unit",
        lambda request, name, seed: {"tables": {}, "seconds": {"fisher": 7.0, "datasvd": 9.0}},
    )
    monkeypatch.setattr(compare_trained, "base_parameters", lambda subject: {"layers": 10**7, "others": 5 * 10**6})
    monkeypatch.setattr(compare_trained, "_base_scores", lambda benchmark, half: {"nats": 1.0})
    return asked


def test_the_best_of_the_rates_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The nearest to 1 is best: of methods with smaller rates alone six more are tried, each twice the largest.

    For sizes with all the steps, half and twice the best are tried too, and more while the largest is the best.
    """
    asked = fake(monkeypatch, {})
    result = run(Request(tmp_path, seeds=2, jobs=0))
    json.dumps(result)
    assert all(one[1] == one[1][:1] * 2 for one in asked)
    separate = [name for name, method in TRAINED_METHODS.items() if not method.is_one_artefact]
    small = [name for name, method in TRAINED_METHODS.items() if "learning_rate" in method.trials[0]]
    trials, finals = ([one for one in asked if one[3] == half] for half in ("tuning", "reporting"))
    assert len(small) == 4 and {one[2:5] for one in trials} == {(0, "tuning", 0.5)}
    for method, is_alone in itertools.product(TRAINED_METHODS, (False, True)):
        tried, chosen = (
            [one[1][0] for one in some if (one[0], one[5]) == (method, is_alone)] for some in (trials, finals)
        )
        if not is_alone:
            assert sorted(tried) == [tried[0] * 2**power for power in range(10 if method in small else 4)]
            best = min(tried, key=lambda one: abs(one - 1.0))
        elif TRAINED_METHODS[method].is_one_artefact:
            assert not tried and not chosen
            continue
        else:
            assert tried[:3] == [0.5 * best, best, 2 * best]
        assert chosen == [min(tried, key=lambda one: abs(one - 1.0))] * 2
    assert [one[2:] for one in finals[:2]] == [(0, "reporting", 1.0, False), (1, "reporting", 1.0, False)]
    assert set(result["data"]["tiny"]["trials"]) == {*TRAINED_METHODS, *(f"{one}, at its best" for one in separate)}
    asked.clear()
    assert run(Request(tmp_path, seeds=2, jobs=0)) == result and not asked
    run(Request(tmp_path, seeds=3, jobs=0))
    assert {one[2:4] for one in asked} == {(2, "reporting")} and len(asked) == len(TRAINED_METHODS) + len(separate)


def test_a_size_that_is_trained_by_itself_has_its_own_best_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The larger size is best at .3, the smaller one at 5; all have four trials around .25 to 2, or smaller ones.

    One rate for both would be .5. With all steps, half of these rates and their doubles are tried, and are worse.
    """
    asked = fake(monkeypatch, {}, (0.3, 5.0))
    result = run(Request(tmp_path, seeds=1, jobs=0))
    finals = {(one[0], one[5]): one[1] for one in asked if one[3] == "reporting"}
    assert finals["independent", False] == (0.25, 4.0) and finals["flexrank", False] == (0.5, 0.5)
    tried = [one[1] for one in asked if one[3] == "tuning" and one[0] == "independent" and not one[5]]
    assert tried == [(0.25,) * 2, (0.5,) * 2, (1.0,) * 2, (2.0,) * 2, (0.125,) * 2, (4.0,) * 2, (8.0,) * 2]
    alone = [one[1] for one in asked if one[3] == "tuning" and one[0] == "independent" and one[5]]
    assert alone == [(0.125, 2.0), (0.25, 4.0), (0.5, 8.0)] and finals["independent", True] == (0.25, 4.0)
    units = json.loads(next(tmp_path.glob("*/units.json")).read_text())["units"]
    assert "independent, equal tokens, at 0.25 4, seed 0" in units and "flexrank, equal tokens, at 0.5, seed 0" in units
    errors = [0.2 + 5.0 + 0.05 / 1000, 0.5 + 5.0 + 4.75 / 1000]
    kept = result["data"]["tiny"]["trials"]["independent"][0]
    assert kept["rates"] == (0.25, 0.25) and kept["errors"] == pytest.approx(errors)
    assert kept["error"] == pytest.approx(sum(math.log(error - 1) for error in errors) / 2)


def test_a_best_rate_at_an_edge_asks_for_the_next() -> None:
    def following(*errors: float | None) -> list[Any]:
        pairs = zip((0.5, 1.0, 2.0, 4.0), errors, strict=True)
        return next_rates([{"rates": (rate, rate), "error": error} for rate, error in pairs], by_size=False)

    assert following(-2.0, -1.0, 0.0, 1.0) == [(0.25, 0.25)]
    assert following(None, -1.0, 0.0, -1.5) == [(8.0, 8.0)]
    assert following(0.0, -1.0, 0.0, 1.0) == following(None, None, None, None) == []


def test_sizes_of_their_own_ask_for_rates_at_both_edges() -> None:
    """A size that no trial has goes by the error of all sizes."""

    def following(*errors: tuple[float | None, float | None]) -> list[Any]:
        pairs = zip((1.0, 2.0, 4.0), errors, strict=True)
        tried = [{"rates": (r, r), "errors": both, "error": float(r == 2.0)} for r, both in pairs]
        return next_rates(tried, by_size=True)

    assert following((3.0, 9.0), (4.0, 8.0), (5.0, 7.0)) == [(0.5, 0.5), (8.0, 8.0)]
    assert following((3.0, 3.0), (2.0, 2.5), (3.0, 2.7)) == []
    assert following((9.0, None), (8.0, None), (8.5, None)) == [(0.5, 0.5)]  # the least error of all is at the first


def test_sizes_at_one_rate_are_made_together() -> None:
    """By hand: three rates in turn for four budgets; at the first of them training diverges."""
    calls: list[Any] = []

    def sizes(task: Any, settings: Any) -> Any:
        calls.append((task.budgets, dict(settings)))
        yield task.budgets[0]
        if len(task.budgets) > 1:
            raise DivergedError("the loss is nan at step 3")

    method = dataclasses.replace(TRAINED_METHODS["independent"], sizes=sizes)
    fields = dict.fromkeys((field.name for field in dataclasses.fields(TrainingTask)), None)
    task = TrainingTask(**fields | {"budgets": [0.9, 0.8, 0.5, 0.2]})  # type: ignore[arg-type]
    rates = {0.9: 0.5, 0.8: 0.5, 0.5: 1.0, 0.2: 0.5}
    assert list(method.sizes_at(task, rates)) == [0.9, None, 0.5, 0.2]
    assert calls == [([0.9, 0.8], {"times_usual": 0.5}), ([0.5], {"times_usual": 1.0}), ([0.2], {"times_usual": 0.5})]


def test_tables_and_claims_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, {"flexrank": 2.0, "acip": 1.9, "layerskip": 1.5, "independent": 2.5})
    result = run(Request(tmp_path, seeds=1, jobs=0))
    equal, *_ = result["tables"]
    rows = {row[0]: row[1:] for row in shown_rows(equal)}
    assert rows["flexrank"] == ["yes", "2.200", "2.500", "2", "3", "7"] and rows["independent"][0] == "no"
    assert rows["flexrank, printed"][-1] == "9" and rows["acip"][-1] == "–"
    assert rows["layerskip"][2] == "–"
    among, alone = result["claims"]
    assert (
        not among["holds"]
        and among["here"] == "behind at 0.8 0.5; most at 0.8, by 0.5 nats to layerskip, of 4 that apply"
    )
    assert alone["holds"] and alone["here"] == "behind at none, of 4 that apply"
    assert compare_trained.draw(result["data"]).axes


def test_a_size_of_its_own_has_all_the_steps_at_its_best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = fake(monkeypatch, {})
    result = run(Request(tmp_path, seeds=1, jobs=0))
    alone = {one[0] for one in asked if one[5]}
    assert alone == {name for name, one in TRAINED_METHODS.items() if not one.is_one_artefact}
    assert [one["title"].split(" (")[0] for one in result["tables"]] == [
        "tiny, equal tokens", "tiny, equal training time", "tiny, at its best",
    ]  # fmt: skip


def test_at_equal_time_a_slow_method_has_fewer_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All take 2 seconds but ACIP, which takes 8: it trains again, with a quarter of the steps."""
    asked, trained = fake(monkeypatch, {}), compare_trained.method_unit

    def unit(request: Request, name: str, method: str, *rest: Any) -> Any:
        return trained(request, name, method, *rest) | ({"seconds": 8.0 * rest[3]} if method == "acip" else {})

    monkeypatch.setattr(compare_trained, "method_unit", unit)
    result = run(Request(tmp_path, seeds=2, jobs=0))
    again = [one for one in asked if one[4] == 0.25]
    assert [(one[0], *one[2:]) for one in again] == [("acip", seed, "reporting", 0.25, False) for seed in (0, 1)]
    tokens, time, _ = ({row[0]: row[1:] for row in shown_rows(one)} for one in result["tables"])
    assert (tokens["acip"][-3], time["acip"][-3]) == ("8 ± 0", "2 ± 0")
    assert {name: row for name, row in tokens.items() if name != "acip"} == {
        name: row for name, row in time.items() if name != "acip"
    }


def test_a_method_that_does_not_apply_has_no_numbers_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, {})
    trained = compare_trained.method_unit

    def unit(request: Request, name: str, method: str, *rest: Any) -> Any:
        if method == "acip":
            return {"rows": [None, None], "obstacle": "layer 'a' is a convolution"}
        done = trained(request, name, method, *rest)
        if method == "matformer" and rest[0][0] == 1.0:
            done["rows"] = [None, None]  # no size is so small at the rate that would be the best
        return done

    monkeypatch.setattr(compare_trained, "method_unit", unit)
    result = run(Request(tmp_path, seeds=2, jobs=0))
    equal, *_ = result["tables"]
    rows = {row[0]: row[1:] for row in shown_rows(equal)}
    assert (
        rows["acip"] == ["yes", "–", "–", "–", "–", "–"]
        and "acip does not apply (layer 'a' is a conv" in equal["title"]
    )
    assert rows["matformer"][1] != "–"
    assert "of 3 that apply" in result["claims"][0]["here"]
    assert rows["flexrank"][-2] == "3" and compare_trained.draw(result["data"]).axes


@pytest.mark.parametrize("error", [NotApplicable("no stack of blocks"), DivergedError("the loss is nan at step 3")])
def test_obstacles_and_rates_that_diverge_are_what_a_part_returns(
    error: FlexrankError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it has made before it diverges is kept."""
    steps = list[int]()

    class Blank(FakeBenchmark):
        def subject_and_batches(self, seed: int, half: str) -> Any:
            return types.SimpleNamespace(score=lambda _: {"nats": 1.0}), []

        def training_task(self, *given: Any) -> Any:
            steps.append(given[-1])
            empty = dict.fromkeys((field.name for field in dataclasses.fields(TrainingTask)), None)
            return TrainingTask(
                **empty | {"layers": {"a": (2, 3)}, "teacher": torch.nn.Linear(3, 2), "budgets": BUDGETS}
            )

    def sizes(task: Any, _: Any) -> Any:
        yield torch.nn.Linear(3, 2), 8
        raise error

    method = dataclasses.replace(TRAINED_METHODS["matformer"], sizes=sizes)
    monkeypatch.setattr(training_benchmarks, "training_benchmarks", lambda request: [Blank()])
    monkeypatch.setitem(TRAINED_METHODS, "matformer", method)
    unit = method_unit(Request(tmp_path), "tiny", "matformer", (1.0, 1.0), 0, "reporting", 1.0, False, {"tables": {}})
    if isinstance(error, NotApplicable):
        assert unit == {"rows": [None, None], "obstacle": "no stack of blocks"}
    else:
        assert unit["rows"][0]["scores"] == {"nats": 1.0} and unit["rows"][1] is None and "obstacle" not in unit
    method_unit(Request(tmp_path), "tiny", "matformer", (1.0, 1.0), 0, "reporting", 0.01, False, {"tables": {}})
    assert steps[-1] == 2  # each factor's adapter has one


def test_parts_run_in_processes_of_their_own_and_are_kept(tmp_path: Path) -> None:
    """What the processes call needs no import of ours, so that they start at once."""
    ledger = Ledger(tmp_path, {"a": 1})
    found = ledger.take_all({f"unit {n}": () for n in range(3)}, os.getpid, 2)
    assert len({*found.values(), os.getpid()}) == 4
    again = {f"unit {n}": (n,) for n in range(3)}
    assert Ledger(tmp_path, {"a": 1}).take_all(again, divmod, 1) == found  # which would fail
    with pytest.raises(ZeroDivisionError):
        Ledger(tmp_path, {"a": 2}).take_all({str(n): (n, 3 - n) for n in range(5)}, divmod, 1)
    assert Ledger(tmp_path, {"a": 2}).take("2", divmod, 1, 0) == [2, 0]  # what was finished before is there


def test_an_error_ends_the_parts_that_still_run(tmp_path: Path) -> None:
    """Another one runs and would take ten minutes, and the last one does not begin."""
    start = time.perf_counter()
    with pytest.raises(TypeError):
        Ledger(tmp_path, {}).take_all({"long": (600,), "wrong": ("a",), "next": (600,)}, time.sleep, 2)
    assert time.perf_counter() - start < 60 and not multiprocessing.active_children()
    with pytest.raises(FlexrankError, match="a part's process ended with status 7, perhaps out of memory"):
        Ledger(tmp_path, {}).take_all({"killed": (7,)}, os._exit, 1)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["language", "embedding"])
def test_any_configuration_is_trained_on(task: str, sources: Path, tmp_path: Path) -> None:
    keys = settings(sources / task, sources / "text.txt", tmp_path / "unused", task)
    keys["allocation"] = {"budgets": [0.8, 0.5]}
    keys["distillation"] |= {"steps": 8}
    config = parse_config(keys | {"probe": {"levels": 3}})
    request = Request(tmp_path, config=config, jobs=0)
    (benchmark,) = training_benchmarks.training_benchmarks(request)
    sensitivity = sensitivity_unit(request, benchmark.name, 0)
    method = "independent"
    unit = method_unit(request, benchmark.name, method, (1.0, 1.0), 0, "reporting", 0.25, False, sensitivity)
    assert [row["share"] <= budget for row, budget in zip(unit["rows"], (0.8, 0.5), strict=True)] == [True, True]
    assert unit["peak_bytes"] > 1e8 and unit["seconds"] > 0
    counts, own = list[int](), TRAINED_METHODS[method]

    def sizes(task: Any, chosen: Any) -> Any:
        counts.append(task.steps_per_size)
        return own.sizes(task, chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRAINED_METHODS, method, dataclasses.replace(own, sizes=sizes))
        patch.setattr(tuning, "BUDGETS", (0.5,))
        for half, budgets in (("tuning", 1), ("reporting", 2)):  # a size with all the steps; its trials have one budget
            parts = method_unit(request, benchmark.name, method, (1.0, 1.0), 0, half, 0.5, True, sensitivity)
            assert len(parts["rows"]) == budgets and counts[-1] == benchmark.steps // 2
    (first, _), (second, _) = (benchmark.subject_and_batches(0, half) for half in ("tuning", "reporting"))
    assert first.score(first.teacher) != second.score(second.teacher) or task == "embedding"


def test_wrong_requests_are_one_line(tmp_path: Path, sources: Path) -> None:
    with pytest.raises(FlexrankError, match="--model is 'gpt5'; this bench has stories260k"):
        training_benchmarks.training_benchmarks(Request(tmp_path, model="gpt5"))
    with pytest.raises(FlexrankError, match="--jobs is 0; it must be at least 1"):
        runner.request_of(find_experiment("compare-trained"), runner.Options(jobs=0))
    with pytest.raises(FlexrankError, match="runs its parts one after the other"):
        runner.request_of(find_experiment("sts"), runner.Options(jobs=2))
    keys = settings(sources / "language", sources / "text.txt", tmp_path, "language")
    for section, key, value, match in (
        ("layers", "include", ["self_attn"], "layers.include is set"),
        ("data", "half", "tuning", "data.half is tuning"),
        ("distillation", "steps", 3, "distillation.steps is 3, for 2 budgets below 1; .*, for at least 4 steps each"),
    ):
        config = parse_config(keys | {section: {**keys.get(section, {}), key: value}})
        with pytest.raises(FlexrankError, match=match):
            training_benchmarks.training_benchmarks(Request(tmp_path, config=config))
