"""The ablation of consolidation: each variant is the library's own training without one part."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank import allocate_ranks, distill_, use_profile
from flexrank.distill.objectives import LogitObjective
from flexrank.distill.step import Step
from flexrank.hf.models import hidden_states
from flexrank.nn.elastic import SizeVectors
from flexrank.profiles import SensitivityTable
from flexrank.run.config import parse_config
from research.benches import ablation, training_benchmarks
from research.experiment import EVERY_RANK, Request, find_experiment
from research.result import shown_rows
from tiny_runs import settings

BUDGETS = (0.8, 0.5)


@pytest.fixture
def request_(sources: Path, tmp_path: Path) -> Request:
    keys = settings(sources / "language", sources / "text.txt", tmp_path / "unused")
    keys["data"] |= {"calibration": 16, "probe": 8}
    keys |= {"probe": {"levels": 3}, "allocation": {"budgets": list(BUDGETS)}}
    keys["distillation"] |= {"steps": 16, "learning_rate": 3e-3, "autocast": "off"}
    return Request(tmp_path, config=parse_config(keys), jobs=0)


def test_a_variant_is_the_library_without_one_part(request_: Request) -> None:
    """Oracles: `distill_` with other options, or with what the part multiplies by set to nothing."""
    (benchmark,) = training_benchmarks.training_benchmarks(request_)
    table = ablation.sensitivity_unit(request_, benchmark.name, 0)
    subject, batches = benchmark.subject_and_batches(0, "reporting")
    before = subject.decomposed("fisher")
    chain = allocate_ranks(SensitivityTable.from_json(table), BUDGETS, **EVERY_RANK)

    def scored(model: torch.nn.Module) -> list[dict[str, Any]]:
        rows = []
        for budget in BUDGETS:
            with use_profile(model, chain.at(budget)):
                rows.append({"scores": subject.score(model)})
        return rows

    def trained(objective: LogitObjective = benchmark.objective, **options: Any) -> list[dict[str, Any]]:
        model = copy.deepcopy(before)
        with hidden_states(model, subject.teacher):
            distill_(
                model, subject.teacher, batches, chain, objective=objective, steps=16, learning_rate=3e-3,
                **options,
            )  # fmt: skip
        return scored(model)

    outputs = LogitObjective()
    wanted = {
        ablation.BEFORE: scored(before),
        ablation.DEFAULT: trained(),
        "largest size drawn twice as often": trained(weights=[1.0, 1.0]),
        "hidden states followed": trained(outputs),
        "all of them (eq. 6)": trained(outputs, method="paper"),
    }
    found = {
        variant: ablation.variant_unit(request_, benchmark.name, variant, 0, table)
        for variant in (ablation.DEFAULT, ablation.BEFORE, *ablation.PARTS)
    }
    assert {variant: found[variant] for variant in wanted} == wanted
    assert len({json.dumps(rows) for rows in found.values()}) == len(found)


def test_parts_that_no_option_leaves_out(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what each loss is divided by, and how far the vectors of the sizes move."""
    (benchmark,) = training_benchmarks.training_benchmarks(request_)
    table = ablation.sensitivity_unit(request_, benchmark.name, 0)
    means, models, take = list[float | None](), list[torch.nn.Module](), Step.take

    def taken(step: Step, items: Any, number: int, mean: float | None) -> float:
        means.append(mean)
        models[:] = [step.model]
        return take(step, items, number, mean)

    monkeypatch.setattr(Step, "take", taken)

    def ends(variant: str) -> tuple[set[float | None], float]:
        means.clear()
        ablation.variant_unit(request_, benchmark.name, variant, 0, table)
        vectors = [
            one for module in models[0].modules() if isinstance(module, SizeVectors) for one in module.parameters()
        ]
        return set(means), max(
            float((one.detach() - one.detach().round()).abs().max()) for one in vectors
        )  # they begin at 1 and 0

    whole, moved = ends(ablation.DEFAULT)
    assert len(whole) > 5 and moved > 1e-3
    whole, moved = ends("losses balanced")
    assert whole == {1.0} and moved > 1e-3
    whole, moved = ends("vectors of each size's own")
    assert len(whole) > 5 and moved == 0.0


def test_tables_and_claims_by_hand(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model scores 1; sizes are 1 and 2 away by the defaults, and 2 and 4 without a part, or as far."""
    asked = []

    def scored(request: Request, name: str, variant: str, seed: int, table: Any) -> list[dict[str, Any]]:
        asked.append((variant, seed))
        factor = {"losses balanced": 2.0, "hidden states followed": 1.0 - 0.5 * seed}.get(variant, 1.0)
        return [{"scores": {"nats_per_token": 1 + factor * distance}} for distance in (1.0, 2.0)]

    monkeypatch.setattr(ablation, "variant_unit", scored)
    monkeypatch.setattr(ablation, "sensitivity_unit", lambda *_: {})
    monkeypatch.setattr(ablation, "_base_score", lambda *_: 1.0)
    request = Request(request_.work, config=request_.config, seeds=2, jobs=0)
    result = ablation.run(request)
    assert json.loads(json.dumps(result)) == result
    (table,) = result["tables"]
    rows = {row[0]: row[1:] for row in shown_rows(table)}
    assert rows["by the defaults"] == ["2.00000 ± 0.00000", "3.00000 ± 0.00000"]
    assert rows["without: losses balanced"] == ["3.00000 ± 0.00000", "5.00000 ± 0.00000"]
    verdicts = {one["what"].split(": ")[1].split(":")[0]: (one["here"], one["holds"]) for one in result["claims"]}
    assert verdicts["losses balanced"] == (f"{math.log(2):+.3f} ({math.log(2):+.3f} to {math.log(2):+.3f})", True)
    assert verdicts["hidden states followed"][1] is False and verdicts["all of them (eq. 6)"][1] is False
    assert len(asked) == 2 * len(rows)
    lines = {line.get_label(): list(line.get_ydata()) for line in ablation.draw(result["data"]).axes[0].lines}
    assert lines["without: losses balanced"] == [2, 2] and lines["without: hidden states followed"] == [0.75, 0.75]
    asked.clear()
    assert ablation.run(request) == result and not asked


def test_models_of_images_have_no_hidden_states_to_follow(tmp_path: Path) -> None:
    request = Request(tmp_path)
    found = {name: ablation._has_hidden(training_benchmarks.own_benchmark(name, request)) for name in ablation.RATES}
    assert found == {"stories260k": True, "pycode5m": True, "all-MiniLM-L6-v2": True, "resnet20": False}
    assert find_experiment("ablation").kind == "comparison"
