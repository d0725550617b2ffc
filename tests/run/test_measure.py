"""What a run and `flexrank measure` say of a size: qualities before training, and times set by hand."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import tiny
from flexrank.artefacts.elastic import load_elastic
from flexrank.data.batches import call_model
from flexrank.deployment import latency
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.nn.switch import stored_sizes, use_profile
from flexrank.profiles import ProfileChain
from flexrank.run import measure
from flexrank.run.config import load_config
from flexrank.run.directory import RunDirectory
from flexrank.run.measure import Workload
from flexrank.run.samples import load_samples
from flexrank.run.workspace import Workspace
from tiny_runs import invoke, summary_of


def test_tied_tensors_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the parameters, in float32; the head is the embedding, and rotary frequencies are not stored."""
    for name, value in {"LEAST_SECONDS": 0.0, "REPEATS": 1, "_peak": lambda *_: None}.items():
        monkeypatch.setattr(measure, name, value)
    model, work = tiny.llama_tied(), Any
    workload = Workload("one", 1, lambda one: call_model(one, tiny.token_batch()))
    found = measure._measure(work, model, model, [workload])  # type: ignore[arg-type]
    assert found["bytes"] == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight and found["peak"] is None


def test_qualities_before_training_are_those_of_the_decomposition_at_each_size(finished: Path, sources: Path) -> None:
    base, tokenizer = load_model(sources / "language", "language"), load_tokenizer(sources / "language")
    score = load_samples(load_config(finished), tokenizer).quality_function(base)
    model, _ = load_elastic(finished / "elastic_initial")
    chain = ProfileChain.from_json(json.loads((finished / "chain.json").read_text()))
    for row in summary_of(finished)["rows"]:
        with use_profile(model, chain.at(row["budget"])):
            assert row["quality_before"] == pytest.approx(score(model), rel=1e-5)


@pytest.mark.parametrize(("limit", "length"), [(None, 32), (57, 32), (56, 32), (48, 24), (24, 1)])
def test_a_prompt_and_what_is_generated_fit_the_model(
    limit: int | None, length: int, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 tokens and 24 more, or fewer where the model reads fewer."""
    monkeypatch.setattr(measure, "most_tokens", lambda _: limit)
    asked: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(measure, "_generate", lambda prompt, _: asked.append(prompt))
    work = Workspace(load_config(finished), RunDirectory(finished))
    measure._workloads(work, work.base)[-1].call(work.base)
    assert asked[0]["input_ids"].shape == (1, length)


def test_a_model_that_reads_fewer_tokens_generates_none(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "most_tokens", lambda _: 23)
    work = Workspace(load_config(finished), RunDirectory(finished))
    assert not any("generated" in one.name for one in measure._workloads(work, work.base))


@pytest.mark.parametrize(("size", "count"), [(1, 2), (4, 3)])
def test_a_batch_of_one_text_is_timed_once(size: int, count: int, finished: Path) -> None:
    """Decoding, one text and, if that is another, the batch."""
    work = Workspace(load_config(finished, [f"evaluation.latency_batch_size={size}"]), RunDirectory(finished))
    assert len({one.name for one in measure._workloads(work, work.base)}) == count
    assert len(measure._workloads(work, work.base)) == count


def test_a_size_is_timed_over_the_base_model(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes as many seconds as it has parameters."""
    asked = []

    def ratio(model: nn.Module, base: nn.Module, _: Any, repeats: int, least_seconds: float) -> float:
        asked.append((repeats, least_seconds))
        return stored_sizes(model)[1] / stored_sizes(base)[1]

    monkeypatch.setattr(measure, "latency_ratio", ratio)
    monkeypatch.setattr(measure, "RATIO_SECONDS", 0.25)
    rows = summary_of(finished)
    expected = [row["params_model"] / rows["base"]["params_model"] for row in rows["rows"]]
    assert measure.latency_ratios(str(finished)) == pytest.approx(expected, rel=0.01) and max(expected) < 1
    assert asked == [(3, 0.25)] * 2


@pytest.mark.usefixtures("verified_here")
def test_the_size_within_a_latency_is_exported(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model takes 100 ms, and a size as much of that as it has of the base model's parameters."""
    monkeypatch.setattr(latency, "interleave", lambda *_, **__: [[0.1]])
    monkeypatch.setattr(
        latency, "latency_ratio", lambda one, base, *_, **__: stored_sizes(one)[1] / stored_sizes(base)[1]
    )
    summary = summary_of(copied)
    large, small = (100 * row["params_model"] / summary["base"]["params_model"] for row in summary["rows"])
    sizes = [row["relative_size"] for row in summary["rows"]]
    for limit, size in ((large + 1, sizes[0]), (small + 1, sizes[1])):
        result = invoke("deploy", copied, "--max-latency-ms", limit, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["export"]["relative_size"] == size


def test_times_are_those_of_the_size_and_ratios_those_over_the_base(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size takes 1, 2 and 6 seconds where the base model takes 2, 4 and 3."""
    rounds = []

    def interleave(runs: Any, repeats: int, least_seconds: float) -> list[list[float]]:
        rounds.append((repeats, least_seconds))
        return [[1.0, 2.0, 6.0], [2.0, 4.0, 3.0]]

    monkeypatch.setattr(measure, "interleave", interleave)
    monkeypatch.setattr(measure, "_peak", lambda *_: None)
    base, *sizes = measure.measure_sizes(str(finished))["rows"]
    assert [(row["name"], row["times"]) for row in sizes] == [
        (name, [{"seconds": 2.0, "ratio": 0.5}] * 3) for name in ("0.8", "0.5")
    ]
    assert base["name"] == "base" and base["bytes"] > sizes[0]["bytes"] > sizes[1]["bytes"]
    assert rounds == [(measure.REPEATS, measure.LEAST_SECONDS)] * 9


def test_the_table_has_tokens_per_second() -> None:
    """32 tokens in half a second are 64 in one; 2 MB are counted by millions."""
    time = {"seconds": 0.5, "ratio": 0.25}
    rows = [{"name": "0.5", "times": [time], "bytes": 2_000_000, "peak": 5_000_000}]
    result = {"workloads": [{"name": "1 text", "tokens": 32, "unit": "tokens"}], "rows": rows}
    measure.print_measurement(result, Console(file=(written := io.StringIO()), width=120))
    words = written.getvalue().split()
    assert {"0.25", "64", "500.0", "2.0", "5.0"} <= set(words)
