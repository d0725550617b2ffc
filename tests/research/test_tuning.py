"""Trials of training-free rivals, and PIFA at flexrank's ranks: against the methods themselves and the library."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from test_compare import BATCH, BUDGETS, TRIALS, compared, fake, made, size

from flexrank import allocate_ranks, nested_layers, refit_
from flexrank.distill.objectives import LogitObjective
from flexrank.nn.select import select_layers
from flexrank.profiles import SensitivityTable
from research import measures
from research.baselines import RANK_METHODS, SIZE_METHODS, pifa
from research.baselines.statistics import next_token_loss
from research.benches import compare, training_free, tuning
from research.benches.quality import Subject
from research.benches.training_free import ALLOCATIONS, METHODS, SIZE_METHOD_NAMES, DecomposedModel, measure_size_method
from research.experiment import EVERY_RANK, Ledger, Request
from tiny import batch_for, build


def test_a_rival_is_compared_by_the_best_of_its_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The base has some nats: trials score from them on, and the setting of least distance has names of its own."""
    base = made().base_scores()["nats"]
    scores = {"asvd, alpha 0.5": base + 2, "asvd, alpha 0.25": base + 1, "asvd, alpha 0.75": base + 3}
    scores |= {"asvd, alpha 1": base + 3, "pifa, mix 0.75": base + 0.5}
    asked = fake(monkeypatch, scores)
    result = compare.run(Request(tmp_path, jobs=0))
    assert asked == [*TRIALS, *compared(0)]
    one = result["data"]["tiny"]
    assert list(one["trials"]) == ["asvd", "svd-llm-v2", "lems", "pifa"]
    assert [trial["settings"] for trial in one["trials"]["asvd"]] == [{"alpha": a} for a in (0.5, 0.25, 0.75, 1)]
    # By hand: each size adds 1 − budget to the distance, and both budgets that the trials ask for are there.
    expected = [(math.log(d + 0.2) + math.log(d + 0.5)) / 2 for d in (2, 1, 3, 3)]
    assert [trial["error"] for trial in one["trials"]["asvd"]] == pytest.approx(expected)
    assert one["sized"]["asvd"]["joint"][0]["rows"][0]["scores"]["nats"] == pytest.approx(base + 1.2)
    assert "; asvd has alpha 0.25, the best of its trials; pifa has mix 0.75, the" in result["tables"][0]["title"]
    units = set(json.loads(next(tmp_path.glob("*/units.json")).read_text())["units"])
    for unit in (
        "asvd, alpha 0.25, seed 0", "pifa, mix 0.75, seed 0, paper", "pifa, mix 0.75, seed 0, published",
        "a3, seed 0, published", "svd, seed 0", "fisher, seed 0", "slicegpt, seed 0, published",
        "lems, trial of gradient shrinkage 0.7, as coded 1",
    ):  # fmt: skip
        assert unit in units


@pytest.mark.slow
def test_trials_have_half_of_the_samples_and_the_nearest_budgets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: each method as it is compared, by the library, on what is left of the benchmark."""
    batches = [{name: value[:3] for name, value in batch_for("llama_tied").items()} for _ in range(2)]
    subject = Subject(build("llama_tied"), batches, batches[:1], LogitObjective(), size)
    one = dataclasses.replace(made(), budgets=(0.9, 0.75, 0.45, 0.3), subject=lambda seed: subject)
    monkeypatch.setattr(training_free, "benchmarks", lambda request: [one] if request.half == "tuning" else [])
    found = tuning.run_trials(
        Request(tmp_path, jobs=0), "tiny", Ledger(tmp_path, {}), ["svd", "svd-llm-v2", "asvd", "pifa"]
    )
    assert list(found) == ["svd-llm-v2", "asvd", "pifa"] and {len(some) for some in found.values()} == {4}
    few = [{name: value[:2] for name, value in batch.items()} for batch in batches]
    teacher, base = subject.teacher, size(subject.teacher)["nats"]
    layers = select_layers(teacher)

    def error(models: list[torch.nn.Module]) -> float:
        return sum(math.log(abs(size(model)["nats"] - base)) for model in models) / 2

    models = [pifa.make(teacher, few, layers, next_token_loss, budget, 0.5).model for budget in (0.75, 0.45)]
    assert found["pifa"][2] == {"settings": {"mix": 0.5}, "error": pytest.approx(error(models), rel=1e-4)}
    short = dataclasses.replace(subject, calibration=few, probe=few[:1])
    alike = dataclasses.replace(one, budgets=(0.75, 0.45), subject=lambda seed: short)
    decomposed = DecomposedModel(alike, "asvd", 0, {"alpha": 0.25})
    rows = decomposed.measure_sizes("published")["rows"]
    expected = sum(math.log(abs(row["scores"]["nats"] - base)) for row in rows) / 2
    assert found["asvd"][1]["error"] == pytest.approx(expected)
    assert len({trial["error"] for trial in found["asvd"]}) == 4


def test_equal_trials_leave_the_first() -> None:
    some = [{"settings": {"a": value}, "error": error} for value, error in ((1, 2.0), (2, 1.0), (3, 1.0), (4, 3.0))]
    assert tuning.best_settings(some) == {"a": 2}
    assert tuning.format_settings({"one_thing": 0.5, "other": True}) == "one thing 0.5, other 1"


@pytest.mark.slow
def test_pifa_takes_ranks_from_the_table_of_svd_llm() -> None:
    """Oracle: flexrank's ranks by the library, PIFA at each of them, and shares by hand."""
    one = made()
    teacher, table = one.subject(0).teacher, DecomposedModel(one, "svd-llm", 0).probe()["table"]
    errors, layers = SensitivityTable.from_json(table), select_layers(teacher)
    chains = {
        "joint": allocate_ranks(errors, BUDGETS, **EVERY_RANK),
        "paper": allocate_ranks(errors, BUDGETS, method="paper", savings="ranks"),
    }
    dense = sum(layer.weight.numel() for layer in layers.values())
    for allocation, chain in chains.items():
        result = measure_size_method(one, "pifa", 0, {"mix": 0.5}, allocation, table)
        assert not result["nested"]
        for budget, row in zip(BUDGETS, result["rows"], strict=True):
            ranks = chain.at(budget)
            model = pifa.make_at(teacher, [BATCH] * 2, layers, next_token_loss, ranks, 0.5).model
            assert row["scores"]["nats"] == pytest.approx(size(model)["nats"], rel=1e-5)
            costs = [min(math.prod(s), ranks[n] * (sum(s) - ranks[n])) for n, s in errors.shapes.items()]
            assert row["share"] == sum(costs) / dense <= budget
    published = measure_size_method(one, "pifa", 0, {}, "published", table)
    assert len({rank for rank in chains["joint"].at(0.5).values()}) > 2
    assert published["rows"] == measure_size_method(one, "pifa", 0)["rows"]
    assert [training_free.allocations_of(name) for name in ("pifa", "slicegpt", "a3", "svd", "fisher")] == [
        ALLOCATIONS, ("published",), ("published",), ALLOCATIONS, ALLOCATIONS,
    ]  # fmt: skip


def test_ours_fits_the_default_decomposition_at_the_ranks_of_its_table() -> None:
    """Oracle: the fit of that decomposition at ranks that are allocated here."""
    one = made()
    subject = one.subject(0)
    table = DecomposedModel(one, "fisher", 0).probe()["table"]
    result = training_free.measure_size_method(one, "refit", 0, allocation="joint", table=table)
    chain = allocate_ranks(SensitivityTable.from_json(table), BUDGETS, **EVERY_RANK)
    for budget, row in zip(BUDGETS, result["rows"], strict=True):
        model, ranks = subject.decomposed("fisher"), chain.at(budget)
        refit_(model, ranks, subject.teacher, subject.calibration)
        assert row["scores"]["nats"] == pytest.approx(size(model)["nats"], rel=1e-5)
        shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
        stored = sum(rank * (sum(shapes[name]) - rank) for name, rank in ranks.items())
        assert row["share"] == stored / sum(m * n for m, n in shapes.values()) <= budget


def test_trials_are_compared_at_the_same_sizes() -> None:
    """By hand, over a base of 1.6: ln .02, ln .2 and ln .05. A trial without the small size gains nothing by that."""
    rows = [[1.62, 1.80], [1.65, None], [1.61, 1.65]]
    trials = [[value and {"scores": {"nats": value}} for value in one] for one in rows]
    wanted = [(math.log(0.02) + math.log(0.2)) / 2, None, (math.log(0.01) + math.log(0.05)) / 2]
    assert tuning.trial_errors(1.6, "nats", trials) == [value and pytest.approx(value) for value in wanted]
    assert tuning.trial_errors(1.6, "nats", trials[1:2]) == [pytest.approx(math.log(0.05))]
    assert tuning.trial_errors(1.6, "nats", [[None, None]]) == [None]


def test_a_size_that_classifies_better_than_the_base_model_gains_nothing_by_that() -> None:
    """By hand, over a base of .86: ln .005 for .87 and for .858, ln .04 for .82."""
    trials = [[{"scores": {"accuracy": value}}] for value in (0.87, 0.858, 0.82)]
    wanted = [pytest.approx(math.log(value)) for value in (0.005, 0.005, 0.04)]
    assert tuning.trial_errors(0.86, "accuracy", trials) == wanted


def test_other_measures_have_a_least_distance_on_either_side() -> None:
    distances = [measures.distance("nats", score, 1.5) for score in (1.4, 1.50003, 1.5004)]
    assert distances == pytest.approx([0.1, 1e-4, 4e-4])


def test_a_method_that_does_not_apply_has_no_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training_free, "benchmarks", lambda _: [made()])
    monkeypatch.setattr(tuning, "obstacle", lambda *_: "too odd")
    assert tuning.run_trials(Request(tmp_path, jobs=0), "tiny", Ledger(tmp_path, {}), ["pifa", "fisher"]) == {}


def test_every_method_has_a_name_a_source_and_a_colour() -> None:
    assert list(compare.COLOURS) == [*METHODS, *SIZE_METHOD_NAMES]
    assert len(set(compare.COLOURS.values())) == len(compare.COLOURS)
    assert list(compare.MARKERS) == list(SIZE_METHOD_NAMES)
    assert all(name == method.name and method.source for name, method in (RANK_METHODS | SIZE_METHODS).items())


@pytest.mark.parametrize("method", ["asvd", "lems"])
def test_a_budget_below_all_of_a_search_has_no_row(method: str) -> None:
    one = DecomposedModel(dataclasses.replace(made(), budgets=(0.5, 0.02)), method, 0).measure_sizes("published")
    assert one["rows"][0]["share"] <= 0.5 and one["rows"][1] is None and one["nested"]
