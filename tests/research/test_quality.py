"""The benches of quality and of the least saving on a tiny model: every method is scored as it would be alone."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank import (
    ProfileChain,
    allocate_ranks,
    collect_moments,
    decompose_,
    distillation_evaluator,
    probe_sensitivity,
)
from flexrank.data.batches import call_model, output_tensor
from flexrank.data.halves import half_of
from flexrank.distill.objectives import LogitObjective
from flexrank.nn.select import select_layers
from flexrank.nn.switch import uniform_profile, use_profile
from flexrank.run.config import load_config
from research.benches import language, quality, saving, sts, tasks
from research.benches.quality import Subject, quality_table
from research.experiment import EVERY_RANK, Request
from research.measures import stories
from research.studies import vision
from tiny import batch_for, build

BATCH = batch_for("llama_tied")


def size(model: torch.nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"length": float(output_tensor(call_model(model, BATCH)).norm())}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(build("llama_tied"), [BATCH] * 2, [BATCH], LogitObjective(), size)


@pytest.mark.parametrize("method", ["svd", "datasvd"])
def test_every_method_is_scored_at_every_budget(method: Any, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the method's own probe and chains, by the library."""
    monkeypatch.setattr(quality, "BUDGETS", (0.8, 0.5))
    results, model, joint = subject.measure_untrained(("svd", "datasvd"), 4)
    kinds = ["uniform", "uniform", "paper", "joint", "paper", "joint"]
    assert [name.split(", ")[1] for name in results] == kinds
    alone = copy.deepcopy(subject.teacher)
    decompose_(alone, collect_moments(alone, subject.calibration, select_layers(alone)), method=method)
    evaluate = distillation_evaluator(subject.teacher, [BATCH], subject.objective)
    errors = probe_sensitivity(alone, evaluate, 4, spacing="parameters", **EVERY_RANK)
    own = allocate_ranks(errors, (0.8, 0.5), **EVERY_RANK)
    assert (joint == own) is (method == "datasvd")
    paper = allocate_ranks(errors, (0.8, 0.5), method="paper", savings="ranks")
    for place, budget in enumerate((0.8, 0.5)):
        profiles = {"uniform": uniform_profile(alone, budget), "paper": paper.at(budget), "joint": own.at(budget)}
        for way, profile in profiles.items():
            with use_profile(alone, profile):
                assert results[f"{method}, {way}"][place] == pytest.approx(size(alone))
    with use_profile(model, joint.at(0.5)):
        assert results["datasvd, joint"][1] == size(model)


def test_seeds_are_trained_apart_and_only_once(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: a training that multiplies what the model gives, at every size, by a known number."""
    monkeypatch.setattr(quality, "BUDGETS", (0.8, 0.5))
    trained = []

    @torch.no_grad()
    def train(model: Any, profiles: Any, seed: int, path: Path) -> None:
        path.mkdir(parents=True)  # as a checkpoint would be
        trained.append((seed, size(model), profiles))
        model.model.norm.weight *= 1 + seed

    facts, request = {"methods": ("svd", "datasvd"), "levels": 4}, Request(tmp_path, seeds=2)
    data = quality.compare(subject, facts, {"steps": 1}, request, train)
    assert [seed for seed, *_ in trained] == [0, 1] and not list(tmp_path.rglob("training-*"))
    assert trained[0][1] == trained[1][1] == pytest.approx(size(subject.teacher), rel=1e-4)  # of full rank, untrained
    assert trained[0][2] == trained[1][2]
    assert data["dense"] == size(subject.teacher)
    *_, joint, row = quality_table("", data["results"], "length")["rows"]
    assert [cell["n"] for cell in joint[1:]] == [1, 1] and joint[0] == "datasvd, joint"
    model, untrained = subject.decomposed("datasvd"), joint[2]["mean"]
    with use_profile(model, trained[0][2].at(0.5)):  # what is trained is DataSVD's
        assert untrained == pytest.approx(size(model)["length"])
    assert row[2] == {"mean": pytest.approx(1.5 * untrained), "sd": pytest.approx(untrained * 0.5**0.5), "n": 2}
    monkeypatch.setattr(Subject, "measure_untrained", None)  # it is kept, for other trainings too
    again = quality.compare(subject, facts, {"steps": 1}, Request(tmp_path, seeds=3), train)
    assert [seed for seed, *_ in trained] == [0, 1, 2]
    assert again["results"]["consolidated"][:2] == data["results"]["consolidated"]
    quality.compare(subject, facts, {"steps": 2}, request, train)
    assert [seed for seed, *_ in trained] == [0, 1, 2, 0, 1]


def test_the_full_form_trains_sizes_alone(subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: a training that multiplies what the model gives by how many sizes it is given."""
    monkeypatch.setattr(quality, "BUDGETS", (0.8, 0.5))
    monkeypatch.setattr(quality, "SEPARATE_BUDGETS", (0.5,))
    given = []

    @torch.no_grad()
    def train(model: Any, profiles: Any, seed: int, path: Path) -> None:
        path.mkdir(parents=True)
        given.append(profiles)
        model.model.norm.weight *= 2 + len(profiles.requested if isinstance(profiles, ProfileChain) else profiles)

    request = Request(tmp_path, seeds=1, full=True)
    results = quality.compare(subject, {"methods": ("svd", "datasvd"), "levels": 4}, {}, request, train)["results"]
    chain, alone = given
    assert alone == [chain.at(0.5)]
    joint, together, single = (results[name][0] for name in list(results)[-3:])
    assert together[1]["length"] == pytest.approx(4 * joint[1]["length"])
    assert single == [None, {"length": pytest.approx(3 * joint[1]["length"])}]
    assert quality_table("", results, "length")["rows"][-1][1] is None


def test_verdicts_are_of_every_size_and_the_worst_seed() -> None:
    """By hand: .8 falls by .01 of a seed, .5 rises; one seed misses the goal at .5."""
    names = {budget: None for budget in quality.BUDGETS} | {0.8: (0.98, 0.97, 0.99), 0.5: (0.90, 0.95, 0.93)}
    rows = list(zip(*(values or (1.0,) * 3 for values in names.values()), strict=True))
    before, *after = [[{"cosine": value} for value in row] for row in rows]
    results = {"fisher, joint": [before], "consolidated": after}
    worse, reached = quality.verdicts("it", results, "cosine", {0.5: 0.94}, is_loss=False)
    assert (worse["here"], worse["holds"]) == ("0.8 by 0.01", False)
    assert (reached["goal"], reached["here"]) == ("at least 0.5 0.9400", "0.5 0.9400 (0.9300 to 0.9500)")
    assert not reached["holds"]
    assert quality.verdicts("it", results, "cosine", {0.5: 0.93}, is_loss=False)[1]["holds"]
    falling, bounded = quality.verdicts("it", results, "cosine", {0.8: 0.98}, is_loss=True)
    assert falling["here"] == "0.8 by 0.01, 0.5 by 0.05" and not bounded["holds"]
    results["consolidated"] = [before]
    assert [one["holds"] for one in quality.verdicts("it", results, "cosine", {}, is_loss=True)] == [True]


def test_every_rule_and_budget_is_timed_and_scored(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"SECONDS": 0.0, "RULES": (0.0, 0.25), "BUDGETS": (0.8, 0.5)}.items():
        monkeypatch.setattr(saving, name, value)
    monkeypatch.setattr(sts, "subject_of", lambda: (subject, []))
    monkeypatch.setattr(language, "subject_of", lambda texts: (subject, []))
    result = saving.run(Request(tmp_path))
    json.dumps(result)
    cells = result["data"]["pycode5m"]
    assert [(cell["least"], cell["budget"]) for cell in cells] == [(0.0, 0.8), (0.0, 0.5), (0.25, 0.8), (0.25, 0.5)]
    assert all(len(cell["ratios"]) == 2 and min(cell["ratios"]) > 0 for cell in cells)
    model = subject.decomposed("datasvd")
    evaluate = distillation_evaluator(subject.teacher, [BATCH], subject.objective)
    chain = allocate_ranks(probe_sensitivity(model, evaluate, min_saving=0.25), (0.8, 0.5), min_saving=0.25)
    with use_profile(model, chain.at(0.5)):
        assert cells[-1]["score"] == pytest.approx(size(model)["length"], rel=1e-4)
    first, second = result["tables"][1]["rows"]
    assert [first[0], second[0]] == ["at least 0", "at least 0.25"] and second[2].endswith(f" {cells[-1]['score']:.4f}")
    monkeypatch.setattr(saving, "probe_sensitivity", lambda *_, **__: pytest.fail("probed before"))
    again = saving.run(Request(tmp_path))["data"]["pycode5m"]
    assert [cell["score"] for cell in again] == [cell["score"] for cell in cells]


@pytest.mark.parametrize(("ratio", "met"), [(1.05, True), (1.06, False)])
def test_the_verdict_is_of_the_default_rule(ratio: float, met: bool) -> None:
    cells = [{"least": least, "ratios": [0.5, slowest]} for least, slowest in ((0.0, 2.0), (0.25, ratio), (0.25, 0.9))]
    assert saving._goal("tiny", cells)["holds"] is met


def test_no_sentence_that_is_scored_is_trained_on(assets: Path) -> None:
    train, held_out = (sts.read_pairs(assets / "stsb" / f"sts-{part}.csv") for part in ("train", "dev"))
    scored = {sentence for pair in held_out for sentence in pair[:2]}
    known = {sentence for pair in train for sentence in pair[:2]}
    sentences = sts.unseen_sentences(train, held_out)
    assert len(sentences) == len(set(sentences)) and set(sentences) == known - scored
    assert len(known & {pair[0] for pair in held_out}) > 100  # which would have been trained on and scored


def test_sentences_are_scored_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pairs of sentences, and three of a query and its document, where document 0 is nearer to query 1 than 1."""
    angles = {"first": [0.0, 0.2, 1.0, 2.0], "second": [0.15, 0.6, 1.0, 3.0]}
    angles |= {"queries": [0.0, 0.2, 1.0], "documents": [0.15, 0.6, 1.0]}
    units = {name: torch.tensor([[math.cos(a), math.sin(a)] for a in values]) for name, values in angles.items()}
    monkeypatch.setattr(sts, "embed", lambda _, batches: units[batches])
    wanted = torch.tensor([[1.0, 0.0]] * 4)
    scored = "first", "second", ("queries", "documents"), [4.0, 4.5, 5.0, 1.0], wanted
    found = sts._score(*scored, torch.nn.Identity())
    assert found["cosine"] == pytest.approx(sum(map(math.cos, angles["first"])) / 4, rel=1e-6)
    assert found["spearman"] == pytest.approx(0.8)  # distances .15 .4 0 1, so cosines rank 3 2 4 1; scores 2 3 4 1
    assert found["docstring mrr"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    shown = tasks.shown_measures({**found, "a, acc": 0.5, "a, acc, error": 0.1}, "cosine", 4)
    assert shown == {"cosine": 4, "spearman": 3, "docstring mrr": 3, "a, acc": 3}


def test_fewer_pairs_are_of_all_sources() -> None:
    pairs = [("a", "b", float(number)) for number in range(10)]
    assert [score for *_, score in sts._evenly(pairs, 3)] == [0, 3, 6, 9]
    assert sts._evenly(pairs, None) == sts._evenly(pairs, 20) == pairs


def test_held_out_stories_are_told_apart(assets: Path) -> None:
    """All but one part, where many run together."""
    text = (assets / "text" / "tinystories_val.txt").read_text()
    parts = stories(assets / "text" / "tinystories_val.txt")
    assert len(parts) == text.count("\n\nOnce upon a time") > 700 and max(map(len, parts)) < 6000
    assert all(part.startswith("Once upon a time") for part in parts[1:])
    rest = text
    for part in parts:
        rest = rest.replace(part, "", 1)
    assert len(rest.strip()) == 82_644 and rest.strip() in text


def test_parts_far_longer_than_a_story_are_left_out(tmp_path: Path) -> None:
    """Of 16, 16, 160, 161 and 16 characters those of more than ten times 16."""
    parts = ["Once upon a time".ljust(count, "x") for count in (16, 16, 160, 161, 16)]
    (file := tmp_path / "some.txt").write_text("\n\n".join(parts))
    assert stories(file) == [*parts[:3], parts[4]]
    file.write_text("no story\n\nat all")
    assert stories(file) == ["no story\n\nat all"]


@pytest.mark.assets
def test_each_half_of_the_texts_is_scored_alone(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: which half a block is in, one by one."""
    monkeypatch.setenv("FLEXRANK_ASSETS", str(assets))
    seen: list[list[bool]] = []

    def note(_: Any, batches: Any) -> float:
        rows = torch.cat([batch["input_ids"] for batch in batches])
        seen.append([half_of(row) == "tuning" for row in rows])
        return 0.0

    monkeypatch.setattr(language, "nats_per_token", note)
    for half in ("tuning", "reporting"):
        subject, _ = language.subject_of(language.STORIES, half)
        subject.score(subject.teacher)
    assert len(seen[0]) == len(seen[1]) == language.EVALUATION and all(seen[0]) and not any(seen[1])


def test_the_page_of_consolidation_has_the_steps_and_rates_in_use() -> None:
    page = Path("docs/concepts/consolidation.md").read_text(encoding="utf8")
    rows = re.findall(r"^\| (.+) \| .* M \| ([\d,]+) \| (\S+) \|$", page, re.MULTILINE)
    demo = load_config(Path("examples/minilm.yaml")).distillation
    wanted = {
        "all-MiniLM-L6-v2 (demo, docstrings)": (demo.steps, demo.learning_rate),
        "all-MiniLM-L6-v2 (STS, sentences)": (sts.TRAINING["steps"], sts.TRAINING["learning_rate"]),
        "vision transformer, width 128": (vision.QUICK["steps"], vision.NETWORKS["vit"]),
        "ResNet-20": (vision.QUICK["steps"], vision.NETWORKS["resnet20"]),
    } | {name: (one["steps"], one["learning_rate"]) for name, one in language.CONSOLIDATION.items()}
    assert {name: (int(steps.replace(",", "")), float(rate)) for name, steps, rate in rows} == wanted
