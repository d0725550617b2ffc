"""`flexrank evaluate --tasks --perplexity`, held against plain loops over log-likelihoods of the exported models."""

import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from scipy import stats

from flexrank.artefacts.elastic import load_elastic
from flexrank.deployment import deploy
from flexrank.errors import FlexrankError
from flexrank.run.benchmarks import _outermost
from flexrank.run.config import load_config
from flexrank.run.harness import load_tasks, score, settings_of
from flexrank.run.samples import load_samples
from questions import QUESTIONS, answers, write_tasks
from tiny_runs import TEXT, invoke, settings, summary_of

pytest.importorskip("lm_eval")

AUTO: Any = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files: questions, a group of them, and data that is not there."""
    place = tmp_path_factory.mktemp("tasks")
    write_tasks(place, "long_words", questions=[("the quick", [" brown fox" * 40, " dog"], 0)])
    task = write_tasks(place, "words", "more_words")
    group = {"group": "all_words", "task": ["words", "more_words"], "aggregate_metric_list": [{"metric": "acc"}]}
    (place / "group.yaml").write_text(yaml.safe_dump(group))
    task["dataset_kwargs"] = {"data_files": {"test": str(place / "nowhere.jsonl")}}
    (place / "lost.yaml").write_text(yaml.safe_dump({"task": "lost_words", **task}))
    return place


@pytest.fixture
def only_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves lm-eval's own thousands of tasks out, which take seconds to list."""
    import lm_eval.tasks

    own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_path, **_: own(include_path=include_path))


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, text: str, window: int) -> float:
    ids = [tokenizer.bos_token_id, *tokenizer(text.strip())["input_ids"]]
    losses = []
    for start in range(0, len(ids) // window * window, window):
        row = torch.tensor(ids[start : start + window])
        losses += torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="none").tolist()
    return math.exp(sum(losses) / len(losses))


def size_of(run: Path, budget: float) -> Any:
    model, chain = load_elastic(run / "elastic")
    return deploy(model, chain.at(budget), slack=0)


def test_every_size_scores_what_a_plain_loop_scores(copied: Path, sources: Path, tasks: Path) -> None:
    text, budgets = copied / "text.txt", [0.8, 0.62, 0.5]  # one of them is not the run's
    text.write_text("\n".join(TEXT.splitlines()[:30]))
    arguments = ["--tasks", "words", "--include-path", tasks, "--perplexity", text, "--window", 48]
    result = invoke("evaluate", copied, *arguments, "--budgets", ".5,.8,.62", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == {"directory": str(copied), **json.loads((copied / "benchmarks.json").read_text())}
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "language")
    base = transformers.AutoModelForCausalLM.from_pretrained(sources / "language")
    models = [base, *(size_of(copied, budget) for budget in budgets)]
    assert [row["budget"] for row in found["rows"]] == [None, *budgets]
    parameters = [row["params_model"] for row in found["rows"]]
    summary = summary_of(copied)
    known = [row["params_model"] for row in (summary["base"], *summary["rows"])]
    assert parameters[:2] + parameters[3:] == known and parameters[1] > parameters[2] > parameters[3]
    qualities = [row["quality"]["nats_per_token"] for row in found["rows"]]
    own = [row["quality"]["nats_per_token"] for row in (summary["base"], *summary["rows"])]
    assert qualities[:2] + qualities[3:] == pytest.approx(own, rel=1e-6)
    measure_quality = load_samples(load_config(copied), tokenizer).quality_function(base)
    assert qualities[2] == pytest.approx(measure_quality(models[2])["nats_per_token"], rel=1e-4)  # at .62
    for row, model in zip(found["rows"], models, strict=True):
        scores = {metric: one["value"] for metric, one in row["tasks"]["words"].items()}
        assert scores == pytest.approx(answers(model, tokenizer))
        assert row["perplexity"] == pytest.approx(perplexity(model, tokenizer, text.read_text(), 48), rel=1e-4)
        share = scores["acc"]
        spread = math.sqrt(share * (1 - share) / (len(QUESTIONS) - 1))
        assert row["tasks"]["words"]["acc"]["stderr"] == pytest.approx(spread)
    count = len(tokenizer(text.read_text().strip())["input_ids"]) + 1
    assert found["text"] == {
        "path": str(text), "window": 48, "predicted_tokens": count // 48 * 47, "tokenizer": str(sources / "language"),
    }  # fmt: skip
    assert found["chance"] == {"words": pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 2 + 1 / 2) / 5)}
    assert found["settings"]["words"]["num_fewshot"] == 0 and found["limit"] is None


def test_the_table_has_the_base_model_first_and_chance_last(copied: Path, tasks: Path) -> None:
    result = invoke("evaluate", copied, "--tasks", "words", "--include-path", tasks, "--limit", 3, "--num-fewshot", 1)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[1] == ["budget", "params", "layers", "nats_per_token", "words", "acc", "words", "acc_norm"]
    assert [line[0] for line in lines[2:]] == ["base", "0.8", "0.5", "chance"]
    assert lines[-1][1:] == [f"{(1 / 2 + 1 / 3 + 1 / 4) / 3:.3f}"] * 2  # of the three questions
    written = json.loads((copied / "benchmarks.json").read_text())
    assert written["settings"]["words"]["num_fewshot"] == 1 and written["limit"] == 3 and "text" not in written
    value = written["rows"][0]["tasks"]["words"]["acc"]
    assert f"{value['value']:.3f}" in lines[2]


@torch.no_grad()
def correlation(model: Any, tokenizer: Any, pairs: list[dict[str, Any]]) -> float:
    cosines = []
    for pair in pairs:
        one, two = (
            model(torch.tensor([tokenizer(pair[side])["input_ids"][:32]])).last_hidden_state[0].mean(0)
            for side in ("sentence1", "sentence2")
        )
        cosines.append(float(torch.nn.functional.cosine_similarity(one, two, dim=0)))
    return float(stats.spearmanr(cosines, [pair["score"] for pair in pairs]).statistic)


def test_sizes_of_an_encoder_are_held_against_scored_pairs(sources: Path, tmp_path: Path) -> None:
    lines, generator = TEXT.splitlines(), random.Random(0)
    pairs = [
        {"sentence1": lines[place], "sentence2": lines[place + 3][: 9 + place % 20], "score": generator.random()}
        for place in range(40)
    ]
    file, config = tmp_path / "pairs.jsonl", tmp_path / "config.yaml"
    file.write_text("\n".join(map(json.dumps, pairs)))
    values = settings(sources / "embedding", sources / "text.txt", tmp_path / "run", "embedding")
    values["distillation"] = {"steps": 0}
    values["deployment"] = {"slack": 0}
    config.write_text(yaml.safe_dump(values))
    result = invoke("evaluate", config, "--sts", file, "--budgets", ".8", "--output", tmp_path / "sts.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "sts.json").read_text())
    assert not (tmp_path / "run" / "benchmarks.json").exists()
    assert found["pairs"] == {"path": str(file), "number": 40} and "text" not in found
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "embedding")
    base = transformers.AutoModel.from_pretrained(sources / "embedding")
    wanted = [correlation(model, tokenizer, pairs) for model in (base, size_of(tmp_path / "run", 0.8))]
    assert [row["sts"] for row in found["rows"]] == pytest.approx(wanted, abs=1e-6) and wanted[0] != wanted[1]
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[1][-1] == "sts" and [lines[2][-1], lines[3][-1]] == [f"{value:.4g}" for value in wanted]
    assert "40 pairs of" in result.stdout.splitlines()[0]
    refused = invoke("evaluate", config, "--sts", tmp_path / "nowhere.csv")
    assert refused.exit_code == 2 and "nowhere.csv: no such file of scored pairs" in refused.stderr


def test_members_of_a_scored_group_are_left_out_of_the_table() -> None:
    scores = dict.fromkeys(["mmlu", "mmlu_stem", "physics", "piqa", "boolq"])
    groups = {"mmlu": ["mmlu_stem"], "mmlu_stem": ["physics"], "unscored": ["boolq"]}
    assert _outermost(scores, groups) == ["mmlu", "piqa", "boolq"]


@pytest.mark.usefixtures("only_own")
def test_a_group_of_tasks_is_scored(copied: Path, tasks: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(copied / "deployed" / "0.50")
    model = transformers.AutoModelForCausalLM.from_pretrained(copied / "deployed" / "0.50")
    loaded = load_tasks(["all_words"], tasks)
    scores, _ = score(model, tokenizer, loaded, 4)
    assert scores["all_words"]["acc"]["value"] == scores["words"]["acc"]["value"]
    assert settings_of(loaded)["groups"] == {"all_words": ["words", "more_words"]}
    with pytest.raises(FlexrankError, match="or an option has more tokens than the 64 that the model reads"):
        score(model, tokenizer, load_tasks(["long_words"], tasks), 4)
    model.model.embed_tokens.weight.data[tokenizer("3")["input_ids"]] = float("nan")  # in one question alone
    with pytest.raises(FlexrankError, match="task words: a log-likelihood is not finite"):
        score(model, tokenizer, load_tasks(["words"], tasks), 4)


@pytest.mark.usefixtures("only_own")
def test_chance_counts_all_right_options_and_is_of_accuracy_alone(copied: Path, tmp_path: Path) -> None:
    """Three of four options are right, then one of two; a task that computes its own score has no chance."""
    some = [("the quick", [" fox", " dogs", " cats", " and"], [0, 1, 2]), ("jumps", [" over", " under"], [1])]
    task = write_tasks(tmp_path, "several", questions=some)
    (tmp_path / "own.py").write_text("def results(doc, results):\n    return {'acc': 1.0}\n")
    own = yaml.safe_dump({"task": "own", **task}) + "process_results: !function own.results\n"
    (tmp_path / "own.yaml").write_text(own)
    model, tokenizer = (kind.from_pretrained(copied / "deployed" / "0.50") for kind in AUTO)
    scores, chance = score(model, tokenizer, load_tasks(["several", "own"], tmp_path), 4)
    assert chance == {"several": (3 / 4 + 1 / 2) / 2} and scores["own"]["acc"]["value"] == 1


@pytest.mark.usefixtures("only_own")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}], "doc_to_target": "x"},
            r"--tasks: lm-eval: Invalid configuration: requested max tokens to generate \(256\) must be less",
        ),
        (
            {"output_type": "loglikelihood_rolling", "metric_list": [{"metric": "word_perplexity"}],
             "doc_to_target": "{{text}}", "doc_to_text": ""},
            r"--tasks: lm-eval cannot compute a measure \(math range error\); leave it out",
        ),
    ],
)  # fmt: skip
def test_what_lm_eval_cannot_do_is_one_line_of_its_own_words(
    kind: dict[str, Any], message: str, copied: Path, tmp_path: Path
) -> None:
    task = write_tasks(tmp_path, "odd", questions=[("thequickbrownfox" * 40, [" a"], 0)])
    for key in ("doc_to_choice", "target_delimiter"):
        del task[key]
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump({"task": "odd", **task, **kind}))
    model, tokenizer = (one.from_pretrained(copied / "deployed" / "0.50") for one in AUTO)
    with pytest.raises(FlexrankError, match=message):
        score(model, tokenizer, load_tasks(["odd"], tmp_path), 4)


@pytest.mark.usefixtures("only_own")
def test_a_task_that_is_asked_without_examples_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = write_tasks(tmp_path, "bare")
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump({"task": "bare", **task, "num_fewshot": 0}))
    loaded = load_tasks(["bare"], tmp_path, 2)
    assert loaded["tasks"]["bare"].get_config("num_fewshot") == 0
    assert "--num-fewshot: bare is asked without examples, as its file says" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--tasks", "wrods"], "lm-eval has no task 'wrods'; did you mean words"),
        (["--tasks", "words,zzzzzz"], "lm-eval has no task 'zzzzzz'; `lm_eval ls tasks` lists"),
        (["--tasks", "lost_words"], "lm-eval cannot load them: Unable to find"),
        (["--tasks", " ,"], "--tasks names no task"),
        (["--limit", "3"], "--limit needs --tasks"),
        (["--window", "8"], "--window needs --perplexity"),
        (["--budgets", ".5,x"], "--budgets: 'x' is not a number"),
        (["--perplexity", "nowhere.txt"], "nowhere.txt: no such file or folder of texts"),
        (["--perplexity", "TEXT", "--window", "1"], "--window is 1; it is a number of tokens, 2 or more"),
        (["--perplexity", "TEXT", "--window", "65"], "--window is 65; this model reads at most 64 tokens"),
        (["--perplexity", "TEXT", "--budgets", "1.5"], "--budgets: 1.5 is out of range"),
        (["--perplexity", "TEXT", "--budgets", ".001"], "budget=0.001 is too small"),
        (["--perplexity", "TEXT", "--set", "task=embedding"], "need a run with task language; tiny has embedding"),
        (["--sts", "TEXT"], "--sts needs a run with task embedding; tiny has language"),
        (["--output", "x.json"], "--output needs --tasks, --perplexity, --sts or --budgets"),
        (["--budgets", ".5", "--output", "/"], "--output /: give the name of a new file that ends in .json"),
        (["--budgets", ".5", "--output", "x.txt"], "--output x.txt: give the name of a new file that ends in .json"),
        (
            ["--budgets", ".5", "--output", "RUN/summary.json"],
            "summary.json: give the name of a new file that ends in .json",
        ),
        (["--budgets", ".5", "--output", "nowhere/x.json"], "--output nowhere/x.json: no such directory as nowhere"),
    ],
)
@pytest.mark.usefixtures("only_own")
def test_a_wrong_request_is_one_line_before_anything_is_written(
    arguments: list[str], part: str, finished: Path, sources: Path, tasks: Path
) -> None:
    places = {"TEXT": str(sources / "text.txt")}
    include = ["--include-path", tasks] if "--tasks" in arguments else []
    given = [places.get(argument, argument).replace("RUN", str(finished)) for argument in arguments]
    result = invoke("evaluate", finished, *given, *include)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.splitlines()[-1].startswith("error: "), (
        result
    )
    assert part in result.stderr.splitlines()[-1]
    assert not (finished / "benchmarks.json").exists()


@pytest.mark.usefixtures("only_own")
def test_a_window_that_the_model_cannot_read_is_refused_before_anything_is_trained(
    finished: Path, sources: Path, tmp_path: Path
) -> None:
    new = ["--set", f"output={tmp_path / 'run'}"]
    result = invoke("evaluate", finished, "--perplexity", sources / "text.txt", "--window", "65", *new)
    assert result.exit_code == 2 and "this model reads at most 64 tokens" in result.stderr
    assert not (tmp_path / "run").exists()


def test_all_sizes_are_asked_with_the_same_examples(sources: Path, tasks: Path) -> None:
    """Examples are drawn at random; a size must not depend on how many were scored before it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "language")
    model = transformers.AutoModelForCausalLM.from_pretrained(sources / "language")
    loaded, prompts = load_tasks(["words"], tasks, num_fewshot=2), []
    for _ in range(2):
        score(model, tokenizer, loaded, 8)
        prompts.append([one.args[0] for one in loaded["tasks"]["words"].instances])
    assert prompts[0] == prompts[1] and len(set(prompts[0])) > 1
    load_tasks(["words"], tasks, num_fewshot=len(QUESTIONS))
    with pytest.raises(FlexrankError, match="--num-fewshot: words has 5 examples, and each prompt is to have 6"):
        load_tasks(["words"], tasks, num_fewshot=len(QUESTIONS) + 1)
