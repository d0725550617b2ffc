"""The comparison on tiny models: every method is scored as the library would score it alone, and only once."""

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank import (
    FlexrankError,
    allocate_ranks,
    collect_moments,
    decompose_,
    distillation_evaluator,
    probe_sensitivity,
)
from flexrank.data.batches import call_model, output_tensor
from flexrank.distill.objectives import LogitObjective
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from flexrank.run.config import parse_config
from research import runner
from research.baselines import RANK_METHODS, SIZE_METHODS, svd_llm
from research.baselines.method import Measures
from research.baselines.statistics import next_token_loss
from research.benches import compare, training_free, tuning
from research.benches.quality import Subject
from research.benches.training_free import ALLOCATIONS, METHODS, SIZE_METHOD_NAMES, Benchmark, DecomposedModel
from research.experiment import EVERY_RANK, Ledger, Request, find_experiment
from research.result import shown_rows
from tiny import batch_for, build
from tiny_runs import settings

BATCH, BUDGETS = batch_for("llama_tied"), (0.8, 0.5)


def size(model: torch.nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"nats": float(output_tensor(call_model(model, BATCH)).norm())}


def made() -> Benchmark:
    subject = Subject(build("llama_tied"), [BATCH] * 2, [BATCH], LogitObjective(), size)
    return Benchmark("tiny", "nats", 4, BUDGETS, 4, {"calibration": 2}, lambda seed: subject, next_token_loss)


def filled(shapes: Mapping[str, tuple[int, int]], budget: float) -> dict[str, int]:
    """Uniform ranks, and one more for the layers that are farthest below the budget while all are within it."""

    def cost(name: str, rank: int) -> int:
        return min(math.prod(shapes[name]), rank * (sum(shapes[name]) - rank))

    lacking, ranks = {}, {}
    for name, shape in shapes.items():
        ranks[name] = max(r for r in range(1, min(shape) + 1) if cost(name, r) <= budget * math.prod(shape))
        lacking[name] = budget * math.prod(shape) - cost(name, ranks[name])
    for name in sorted(lacking, key=lambda one: lacking[one], reverse=True):
        more = ranks | {name: ranks[name] + 1}
        if sum(cost(one, rank) for one, rank in more.items()) <= budget * sum(map(math.prod, shapes.values())):
            ranks = more
    return ranks


def test_a_method_is_scored_as_the_library_scores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: decomposition, probe, allocation and parameters by the library and by hand, for SVD-LLM and DataSVD."""
    one = made()
    for method in ("svd-llm", "datasvd"):
        decomposed = DecomposedModel(one, method, 0)
        probed = decomposed.probe()
        model = copy.deepcopy(one.subject(0).teacher)
        layers = select_layers(model)
        if method == "datasvd":
            decompose_(model, collect_moments(model, [BATCH] * 2, layers))
        else:
            svd_llm.SVD_LLM.decompose_(model, [BATCH] * 2, layers, next_token_loss)
        evaluate = distillation_evaluator(one.subject(0).teacher, [BATCH], LogitObjective())
        errors = probe_sensitivity(model, evaluate, 4, spacing="parameters", **EVERY_RANK)
        assert probed["table"]["errors"] == errors.to_json()["errors"]
        joint = allocate_ranks(errors, BUDGETS, **EVERY_RANK)
        paper = allocate_ranks(errors, BUDGETS, method="paper", savings="ranks")
        rows = {allocation: decomposed.measure_sizes(allocation, probed["table"])["rows"] for allocation in ALLOCATIONS}
        for place, budget in enumerate(BUDGETS):
            shapes = {name: tuple(layer.weight.shape) for name, layer in layers.items()}
            profiles = {"published": filled(shapes, budget), "paper": paper.at(budget), "joint": joint.at(budget)}
            for allocation, profile in profiles.items():
                row = rows[allocation][place]
                with use_profile(model, profile):
                    assert row["scores"] == size(model)
                kept = sum(min(m * n, profile[name] * (m + n - profile[name])) for name, (m, n) in shapes.items())
                dense = sum(m * n for m, n in shapes.values())
                whole = sum(parameter.numel() for parameter in one.subject(0).teacher.parameters())
                assert row["share"] == kept / dense <= budget
                assert row["parameters"] == whole - dense + kept


@pytest.mark.parametrize("method", ["asvd", "lems"])
def test_published_ranks_are_searched_on_the_samples_of_the_probe(method: str) -> None:
    """Oracle: the method's own search with the loss of each token and the distance by the library."""
    one = made()
    decomposed = DecomposedModel(one, method, 0)
    model, energies, _ = decomposed._decomposition

    def loss(model: torch.nn.Module) -> float:
        with torch.no_grad():
            logits = output_tensor(call_model(model, BATCH))
        real = BATCH["attention_mask"].bool() if "attention_mask" in BATCH else torch.ones_like(BATCH["input_ids"]) > 0
        ids = BATCH["input_ids"]
        counted = [
            torch.nn.functional.cross_entropy(logits[row, place], ids[row, place + 1])
            for row, place in (real[:, 1:] & real[:, :-1]).nonzero().tolist()
        ]
        return float(sum(counted)) / len(ids)

    distance = distillation_evaluator(one.subject(0).teacher, [BATCH], LogitObjective())
    measures = one.measures(0)
    assert measures.loss(model) == pytest.approx(loss(model), rel=1e-5)
    assert measures.distance(model) == distance(model)
    expected = RANK_METHODS[method].ranks(model, energies, BUDGETS, Measures(loss, distance))
    assert decomposed._profiles("published", decomposed.probe()["table"]) == expected
    assert len({rank for profile in expected for rank in profile.values()}) > 2


def test_a_task_without_labels_has_its_distance_for_a_loss() -> None:
    one = dataclasses.replace(made(), loss=LogitObjective().fisher_loss)
    model = DecomposedModel(one, "svd", 0)._decomposition[0]
    with use_profile(model, uniform_profile(model, 0.5)):
        assert one.measures(0).loss(model) == one.measures(0).distance(model) > 0


def test_sizes_that_are_no_prefixes_are_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    decomposed = DecomposedModel(made(), "svd", 0)
    table = decomposed.probe()["table"]
    assert all(decomposed.measure_sizes(allocation, table)["nested"] for allocation in ALLOCATIONS)
    profiles = decomposed._profiles("joint", table)
    monkeypatch.setattr(DecomposedModel, "_profiles", lambda *_: profiles[::-1])
    assert not decomposed.measure_sizes("joint", table)["nested"]


def fake(monkeypatch: pytest.MonkeyPatch, scores: dict[str, float]) -> list[str]:
    """In place of decompositions: scores by method, or by method and allocation, and what was asked for.

    Trials are of a benchmark on the tuning half, and score by method and settings.
    """
    asked: list[str] = []

    def benchmarks(request: Request) -> list[Benchmark]:
        return [dataclasses.replace(made(), facts={"half": request.half})]

    def score(one: Benchmark, method: str, settings: Any, allocation: str, default: float) -> float:
        names = (f"{method}, {tuning.format_settings(settings)}", f"{method}, {allocation}", method)
        if one.facts["half"] == "tuning":
            asked.append(f"trial of {method}")
            names = names[:1]
        return next((scores[name] for name in names if name in scores), default)

    def probe(self: Any) -> dict[str, Any]:
        asked.append(f"{self._method} {self._seed}")
        table = {"of": [self._method, self._seed]}
        return {"table": table, "decomposition_seconds": 1.0, "probe_seconds": 2.0, "peak_bytes": 5e6}

    def measure_sizes(self: Any, allocation: str, table: Any = None) -> dict[str, Any]:
        assert (table is None) == (self._benchmark.facts["half"] == "tuning")
        value = score(self._benchmark, self._method, self._settings, allocation, 9.0) + self._seed
        rows = [{"share": b, "parameters": int(1000 * b) + 500, "scores": {"nats": value + 1 - b}} for b in BUDGETS]
        return {"rows": rows, "nested": allocation != "published", "search_seconds": 4.0}

    def alone(
        one: Benchmark, method: str, seed: int, settings: Any, allocation: str = "published", table: Any = None
    ) -> dict[str, Any]:
        value = score(one, method, settings, allocation, 8.0) + seed
        if one.facts["half"] == "reporting":
            asked.append(f"{method} {seed}" + (f", {allocation}" if method == "pifa" else ""))
            start = {"pifa": "svd-llm", "refit": "fisher"}.get(method)
            assert table == (start and {"of": [start, seed]})
        rows = [{"share": b, "parameters": 1, "scores": {"nats": value}} for b in BUDGETS]
        last = [rows[-1]] if method in ("pifa", "refit") else [None]
        return {"rows": [*rows[:-1], *last], "nested": False, "seconds": 4.0, "peak_bytes": 6e6}

    def obstacle(_: Benchmark, method: str) -> str | None:
        return f"{method} is too odd" if method == "slicegpt" else None

    take_all = Ledger.take_all

    def sent(self: Ledger, units: Any, compute: Any, jobs: int) -> Any:  # as to other processes
        return take_all(self, pickle.loads(pickle.dumps(units)), pickle.loads(pickle.dumps(compute)), jobs)

    monkeypatch.setattr(Ledger, "take_all", sent)
    for module in (compare, training_free):
        monkeypatch.setattr(module, "benchmarks", benchmarks)
    for module in (compare, tuning):
        monkeypatch.setattr(module, "measure_size_method", alone)
        monkeypatch.setattr(module, "obstacle", obstacle)
    monkeypatch.setattr(DecomposedModel, "probe", probe)
    monkeypatch.setattr(DecomposedModel, "measure_sizes", measure_sizes)
    return asked


#: Four settings of each method with a free constant; then for all seeds those from which others start, and the rest.
TRIALS = [f"trial of {method}" for method in ("asvd", "svd-llm-v2", "lems", "pifa") for _ in range(4)]


def compared(*seeds: int) -> list[str]:
    alone = ["pifa {}, published", "pifa {}, paper", "pifa {}, joint", "a3 {}", "refit {}"]
    first, rest = (
        [f"{method} {{}}" for method in METHODS if (method in ("svd-llm", "fisher")) == is_start]
        for is_start in (True, False)
    )
    return [name.format(seed) for names in (first, rest, alone) for seed in seeds for name in names]


def test_tables_claims_and_the_ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = fake(monkeypatch, {"datasvd": 3.0, "fisher": 1.0, "drone, joint": 2.5, "pifa, joint": 7.0})
    result = compare.run(Request(tmp_path, seeds=2, jobs=0))
    json.dumps(result)
    assert asked == [*TRIALS, *compared(0, 1)]
    rows = {row[0]: row[1:] for row in shown_rows(result["tables"][0])}
    whole = sum(parameter.numel() for parameter in made().subject(0).teacher.parameters())
    dense = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48)  # two blocks: q, o; k, v; the feed-forward's three
    sizes = [f"{(whole - dense + budget * dense) / 1e6:.4f}" for budget in BUDGETS]
    assert rows["whole model at the budget, M parameters"] == ["–", *sizes, "–", "–"]
    assert rows["datasvd, published"] == ["no", "3.7000 ± 0.7071", "4.0000 ± 0.7071", "5 ± 0", "5"]
    assert rows["drone, joint"] == ["yes", "3.2000 ± 0.7071", "3.5000 ± 0.7071", "7 ± 0", "5"]
    assert rows["a3, published"] == ["no", "8.5000 ± 0.7071", "–", "4 ± 0", "6"]
    assert rows["pifa, published"] == ["no", "8.5000 ± 0.7071", "8.5000 ± 0.7071", "4 ± 0", "6"]
    assert rows["pifa, joint"] == ["no", "7.5000 ± 0.7071", "7.5000 ± 0.7071", "6 ± 0", "6"]  # SVD-LLM's probe too
    assert rows["slicegpt, published"] == ["–"] * 5
    assert result["tables"][0]["columns"][-2:] == ["seconds", "added MB"]
    assert result["tables"][0]["title"].endswith("held before; slicegpt does not apply (slicegpt is too odd)")
    assert rows["refit, joint"] == ["no", "8.5000 ± 0.7071", "8.5000 ± 0.7071", "6 ± 0", "6"]  # and fisher's probe
    assert len(rows) == 1 + 3 * (len(METHODS) + 1) + 3
    assert len(compare.draw(result["data"]).axes) == 1
    asked.clear()
    assert compare.run(Request(tmp_path, seeds=2, jobs=0)) == result and not asked
    compare.run(Request(tmp_path, seeds=3, jobs=0))
    assert asked == compared(2)


def test_claims_are_of_published_and_of_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, {"datasvd": 3.0, "fisher": 1.0, "drone, joint": 2.5, "pifa, paper": 1.1})
    claims = compare.run(Request(tmp_path, jobs=0))["claims"]
    own, any_ranks = (
        f"with joint ranks is behind no rival{ranks}, of 9 that apply"  # of ten SliceGPT does not; ours are no rivals
        for ranks in (" with its own ranks", ", be its ranks its own or flexrank's")
    )
    assert [one["what"] for one in claims] == [
        f"tiny: {method} {ranks}" for method in ("datasvd", "fisher", "refit") for ranks in (own, any_ranks)
    ]
    assert [one["holds"] for one in claims] == [True, False, True, False, True, False]
    assert claims[0]["here"] == claims[2]["here"] == "behind at none"
    # PIFA has 1.1 at both budgets, DataSVD 3.2 and 3.5, Fisher 1.2 and 1.5.
    assert claims[1]["here"] == "behind at 0.8 0.5; most at 0.5, by 2.4 nats to pifa, paper"
    assert claims[3]["here"] == "behind at 0.8 0.5; most at 0.5, by 0.4 nats to pifa, paper"


def test_a_rival_that_makes_models_alone_can_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, {"datasvd": 3.0, "a3": 2.7})
    published, all_ranks, *_ = compare.run(Request(tmp_path, jobs=0))["claims"]
    for claim in (published, all_ranks):
        assert not claim["holds"] and claim["here"] == "behind at 0.8; most at 0.8, by 0.5 nats to a3, published"


def test_models_made_alone_are_scored_and_counted() -> None:
    """Oracle: the methods themselves, and shares from the parameters of layers and all else, by hand."""
    one = made()
    teacher = one.subject(0).teacher
    layers = select_layers(teacher)
    dense = sum(layer.weight.numel() for layer in layers.values())
    others = sum(parameter.numel() for parameter in teacher.parameters()) - dense
    for method in SIZE_METHODS:
        result = training_free.measure_size_method(one, method, 0)
        assert not result["nested"] and result["seconds"] > 0 and result["peak_bytes"] >= 0
        for budget, row in zip(BUDGETS, result["rows"], strict=True):
            wanted = SIZE_METHODS[method].make(teacher, [BATCH] * 2, layers, next_token_loss, budget)
            assert wanted is not None and row["parameters"] == wanted.parameters
            assert row["share"] == (wanted.parameters - others) / dense <= budget
            assert row["scores"]["nats"] == pytest.approx(size(wanted.model)["nats"], rel=1e-5)
    small = dataclasses.replace(one, budgets=(0.5, 0.01))
    result = training_free.measure_size_method(small, "a3", 0)
    assert result["rows"][0] and result["rows"][1] is None
    encoder = Subject(build("bert"), [BATCH] * 2, [BATCH], LogitObjective(), size)
    other = dataclasses.replace(one, subject=lambda _: encoder)
    assert training_free.obstacle(one, "slicegpt") is None
    assert "bert is none of the decoders" in str(training_free.obstacle(other, "slicegpt"))


def test_a_tie_is_no_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, {"datasvd": 3.0, "fisher": 3.0, "drone": 3.0 - 4e-5, "refit": 3.0})
    assert all(claim["holds"] for claim in compare.run(Request(tmp_path, jobs=0))["claims"])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["language", "embedding"])
def test_any_configuration_is_compared_whole(
    task: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("svd", "fwsvd", "fisher") if task == "language" else ("fwsvd", "fisher")
    for module in (compare, training_free):
        monkeypatch.setattr(module, "METHODS", few)
    monkeypatch.setattr(compare, "SIZE_METHOD_NAMES", ("slicegpt", "a3"))
    monkeypatch.setattr(compare, "COLOURS", dict.fromkeys((*few, *SIZE_METHOD_NAMES), "#000000"))
    keys = settings(sources / task, sources / "text.txt", tmp_path / "unused", task)
    keys["data"] |= {"calibration": 8, "probe": 4, "evaluation": 8}
    config = parse_config(keys | {"probe": {"levels": 2}})
    request = Request(tmp_path / "work", seeds=1 if task == "language" else 2, config=config, jobs=0)
    monkeypatch.setattr(compare, "_claim", lambda *_: {})
    result = compare.run(request)
    (one,) = result["data"].values()
    if task == "embedding":
        first, second = (one["sized"]["fwsvd"]["joint"][seed]["rows"] for seed in (0, 1))
        assert first != second  # another calibration and probe
    assert one["dense"] == compare.run(request)["data"][config.name]["dense"]
    assert compare.draw(result["data"]).axes


def test_a_seed_draws_other_calibration_and_scores_on_the_same(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXRANK_ASSETS", str(assets))
    (one,) = training_free.benchmarks(Request(Path("unused"), model="stories260k"))
    first = one.subject(0)
    second = one.subject(1)
    drawn = [{tuple(row.tolist()) for b in s.calibration for row in b["input_ids"]} for s in (first, second)]
    assert len(drawn[0]) == len(drawn[1]) > 120 and len(drawn[0] & drawn[1]) < 30
    for subject in (first, second):
        probe = {tuple(row.tolist()) for b in subject.probe for row in b["input_ids"]}
        assert not probe & {tuple(row.tolist()) for b in subject.calibration for row in b["input_ids"]}
    assert first.score(first.teacher) == second.score(second.teacher)


def test_wrong_requests_are_one_line(tmp_path: Path, sources: Path) -> None:
    bench, options = find_experiment("compare"), runner.Options
    with pytest.raises(FlexrankError, match="--model is 'gpt5'; this bench has stories260k, pycode5m"):
        training_free.benchmarks(Request(tmp_path, model="gpt5"))
    with pytest.raises(FlexrankError, match="give --set with --config"):
        runner.request_of(bench, options(overrides=("seed=1",)))
    with pytest.raises(FlexrankError, match="not both"):
        runner.request_of(bench, options(model="pycode5m", config=Path("mine.yaml")))
    own = settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding")
    stdlib = {"source": "stdlib-docs", "calibration": 8, "batch_size": 8}
    config = parse_config(own | {"data": stdlib})
    with pytest.raises(FlexrankError, match="only of 'text' in memory seeds draw another calibration"):
        training_free.benchmarks(Request(tmp_path, seeds=2, config=config))
    config = parse_config(own | {"layers": {"include": ["encoder"]}})
    with pytest.raises(FlexrankError, match="layers.include is set"):
        training_free.benchmarks(Request(tmp_path, config=config))
