"""Comparisons scored by tasks of lm-eval, held against a plain loop over log-likelihoods."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from test_compare import filled

from flexrank import FlexrankError, decompose_, use_profile
from flexrank.hf.quantizer import DeployedConfig
from flexrank.nn.select import select_layers
from flexrank.nn.switch import layer_shapes
from flexrank.run.config import parse_config
from questions import answers, write_tasks
from research import runner
from research.benches import compare, training_benchmarks, training_free
from research.benches.tasks import format_base_score
from research.experiment import Request, find_experiment
from research.result import shown_rows
from tiny_runs import settings

pytest.importorskip("lm_eval")


@pytest.fixture
def request_(sources: Path, tmp_path: Path) -> Request:
    (place := tmp_path / "tasks").mkdir()
    write_tasks(place, "words")
    keys = settings(sources / "language", sources / "text.txt", tmp_path / "unused")
    keys["data"] |= {"calibration": 16, "probe": 8}
    keys["distillation"] |= {"steps": 8}
    config = parse_config(keys | {"probe": {"levels": 3}, "allocation": {"budgets": [0.8, 0.5]}})
    return Request(tmp_path / "work", config=config, tasks=("words",), include_path=place)


def test_each_task_has_a_table_of_all_methods(
    request_: Request, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the base model and plain SVD at uniform ranks by the library, asked by a plain loop."""
    for module in (compare, training_free):
        monkeypatch.setattr(module, "METHODS", ("svd",))
    monkeypatch.setattr(compare, "SIZE_METHOD_NAMES", ())
    monkeypatch.setattr(compare, "_claim", lambda *_: {})
    nats, words = compare.run(request_)["tables"]
    model = transformers.AutoModelForCausalLM.from_pretrained(sources / "language")
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "language")
    base = answers(model, tokenizer)["acc_norm"]
    assert ": nats_per_token by budget (base " in nats["title"]
    assert f": words, acc_norm by budget (base {base:.3f} ± " in words["title"]
    assert f", chance {(3 / 2 + 1 / 3 + 1 / 4) / 5:.3f}: not above it)" in words["title"]  # three have two options
    assert [row[0] for row in words["rows"]] == [row[0] for row in nats["rows"]]
    decompose_(model, list(select_layers(model)), method="svd")
    expected = []
    for budget in (0.8, 0.5):
        with use_profile(model, filled(layer_shapes(model), budget)):
            expected.append(f"{answers(model, tokenizer)['acc_norm']:.3f}")
    (plain,) = (row for row in shown_rows(words) if row[0] == "svd, published")
    assert plain[2:4] == expected


def test_what_is_reported_is_asked_and_trials_are_not(request_: Request, sources: Path) -> None:
    (benchmark,) = training_benchmarks.training_benchmarks(request_)
    assert benchmark.facts["tasks"]["settings"]["words"]["num_fewshot"] == 0
    (subject, _), (tried, _) = (benchmark.subject_and_batches(0, half) for half in ("reporting", "tuning"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "language")
    scores = subject.score(subject.teacher)
    assert scores["words, acc_norm"] == answers(subject.teacher, tokenizer)["acc_norm"]
    assert scores.keys() - tried.score(tried.teacher).keys() == {
        "words, acc_norm", "words, acc_norm, error", "words, acc_norm, chance",
    }  # fmt: skip


@pytest.mark.parametrize(("score", "words"), [(0.46, "above it"), (0.44, "not above it")])
def test_above_chance_is_by_more_than_two_standard_errors(score: float, words: str) -> None:
    base = {"a, acc": score, "a, acc, error": 0.1, "a, acc, chance": 0.25}
    assert format_base_score(base, "a, acc", 2) == f"base {score} ± 0.10, chance 0.25: {words}"
    assert format_base_score({"nats": 1.5}, "nats", 3) == "base 1.500"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("compare", {"tasks": "piqa", "model": "pycode5m"}, "--tasks is of a comparison with --config"),
        ("sts", {"tasks": "piqa"}, "bench 'sts' scores no tasks of lm-eval"),
        ("compare", {"include_path": Path("tasks")}, "--include-path needs --tasks"),
        ("compare", {"tasks": " ,", "config": Path("a.yaml")}, "--tasks names no task"),
    ],
)
def test_wrong_options_are_one_line(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(FlexrankError, match=words):
        runner.request_of(find_experiment(name), runner.Options(**options))


def test_encoders_have_no_tasks(sources: Path, tmp_path: Path) -> None:
    config = parse_config(settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding"))
    with pytest.raises(FlexrankError, match="--tasks needs a configuration of task language; tiny is of embedding"):
        training_free.benchmarks(Request(tmp_path, config=config, tasks=("words",)))


def test_an_elastic_model_goes_to_lm_eval_itself(sources: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    model = transformers.AutoModelForCausalLM.from_pretrained(sources / "language")
    decompose_(model, list(select_layers(model)), method="svd")
    lm = HFLM(pretrained=model, tokenizer=transformers.AutoTokenizer.from_pretrained(sources / "language"))
    assert lm.model is model and "is_elastic" not in DeployedConfig({}).to_dict()


def test_results_by_tasks_have_a_place_and_a_command_of_their_own(request_: Request, tmp_path: Path) -> None:
    bench = find_experiment("compare")
    options = runner.Options(config=Path("mine.yaml"), tasks="piqa", include_path=Path("tasks"))
    assert runner._label(bench, request_, options) == "compare-tiny-tasks"
    words = "python -m research compare --config mine.yaml --tasks piqa --include-path tasks"
    assert runner._command(bench, options) == words
