"""Evaluates the base model and a run's sizes, at any budget: the run's qualities, lm-eval, perplexity, scored pairs."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from flexrank import progress
from flexrank.data.metrics import embed, nats_per_token, spearman
from flexrank.data.pairs import read_pairs
from flexrank.data.text import read_texts, sentence_batches, token_blocks
from flexrank.errors import FlexrankError
from flexrank.files import write_json
from flexrank.hf import models
from flexrank.profiles import RankProfile
from flexrank.profiles.costs import full_ranks
from flexrank.run.config import RunConfig
from flexrank.run.fitting import most_tokens
from flexrank.run.harness import score, settings_of
from flexrank.run.samples import NO_SEPARATOR
from flexrank.run.sizes import Sizes, count_parameters
from flexrank.run.tables import PLAIN, count, new_table, print_line
from flexrank.run.workspace import Workspace

RESULT = "benchmarks.json"


class Windows(NamedTuple):
    """What perplexity is measured on: a file or folder of texts, in non-overlapping windows of `tokens` tokens.

    Each token of a window except the first is predicted from those before it in the window; a last, shorter window is
    left out.
    """

    path: Path
    tokens: int


class Measures(NamedTuple):
    """What sizes are measured on, in addition to the run's own qualities."""

    tasks: Mapping[str, Any] = {}  # from `harness.load_tasks`
    limit: int | None = None  # documents of each task; None is all
    windows: Windows | None = None  # for the perplexity
    pairs: Path | None = None  # `data.pairs.read_pairs`: scored pairs of sentences


def require_task(config: RunConfig, has_tasks: bool, windows: Windows | None, pairs: Path | None) -> None:
    """Refuses measures that do not fit a run's task, data that cannot be read, and a window that does not fit."""
    if (has_tasks or windows is not None) and config.task != "language":
        raise FlexrankError(f"--tasks and --perplexity need a run with task language; {config.name} has {config.task}")
    if pairs is not None:
        if config.task != "embedding":
            raise FlexrankError(f"--sts needs a run with task embedding; {config.name} has {config.task}")
        read_pairs(pairs)
    if windows is not None:
        read_texts(windows.path)
        if windows.tokens < 2:
            raise FlexrankError(f"--window is {windows.tokens}; it is a number of tokens, 2 or more")
        limit = most_tokens(models.load_model(config.model, config.task, dtype=None))
        if limit is not None and windows.tokens > limit:
            raise FlexrankError(f"--window is {windows.tokens}; this model reads at most {limit} tokens")


def benchmark_run(
    directory: Path, measures: Measures, budgets: Sequence[float] = (), output: Path | None = None
) -> dict[str, Any]:
    """Evaluates the base model and sizes of a run that is finished up to `slack`; writes RUN/benchmarks.json.

    Args:
        directory: the run directory.
        measures: in addition to the run's own qualities.
        budgets: any budgets; the run's own if there are none.
        output: the file to write instead of RUN/benchmarks.json.

    Raises:
        FlexrankError: the model has no such budget, or a value is not finite.
    """
    sizes = Sizes.of_run(directory)
    work = sizes.work
    profiles = {budget: sizes.within({"budget": budget}) for budget in budgets or work.config.allocation.budgets}
    benchmarks, rows = _benchmarks(work, measures), list[dict[str, Any]]()
    full = RankProfile(full_ranks(sizes.shapes))
    result: dict[str, Any] = {"model": work.config.model}
    for budget, profile in progress.track([(None, full), *profiles.items()], "evaluating"):
        model = work.base if budget is None else sizes.deployed(profile)
        row = {"budget": budget, **count_parameters(model, profile, sizes.shapes)}
        row["quality"] = work.measure_quality(model)
        for name, benchmark in benchmarks.items():
            row[name], facts = benchmark(model)
            result |= facts
        rows.append(row)
    result["rows"] = rows
    write_json(directory / RESULT if output is None else output, result)
    return result


#: Returns a model's measure, and facts about what it was measured on, which go into the result once.
Benchmark = Callable[[Any], tuple[Any, dict[str, Any]]]


def _benchmarks(work: Workspace, measures: Measures) -> dict[str, Benchmark]:
    """The benchmark for each requested key of a row."""
    benchmarks: dict[str, Benchmark] = {}
    if measures.windows is not None:
        benchmarks["perplexity"] = _perplexity(work, measures.windows)
    if measures.pairs is not None:
        benchmarks["sts"] = _correlation(work, measures.pairs)
    if measures.tasks:
        benchmarks["tasks"] = _scores(work, measures.tasks, measures.limit)
    return benchmarks


def _perplexity(work: Workspace, windows: Windows) -> Benchmark:
    batches = _batches(work, windows)
    predicted = sum(batch["input_ids"][:, 1:].numel() for batch in batches)
    facts = {"path": str(windows.path), "window": windows.tokens, "predicted_tokens": predicted}
    return lambda model: (
        math.exp(nats_per_token(model, batches)), {"text": {**facts, "tokenizer": work.config.model}}
    )  # fmt: skip


def _correlation(work: Workspace, path: Path) -> Benchmark:
    first, second, scores = zip(*read_pairs(path), strict=True)
    data = work.config.data
    sides = [sentence_batches(work.tokenizer, texts, data.batch_size, data.max_tokens) for texts in (first, second)]

    def benchmark(model: Any) -> tuple[float, dict[str, Any]]:
        one, two = (embed(model, batches) for batches in sides)
        return spearman((one * two).sum(-1), scores), {"pairs": {"path": str(path), "number": len(scores)}}

    return benchmark


def _scores(work: Workspace, loaded: Mapping[str, Any], limit: int | None) -> Benchmark:
    def benchmark(model: Any) -> tuple[Any, dict[str, Any]]:
        found, chance = score(model, work.tokenizer, loaded, work.config.data.batch_size, limit)
        return found, {**settings_of(loaded), "limit": limit, "chance": chance}

    return benchmark


def _batches(work: Workspace, windows: Windows) -> list[dict[str, Any]]:
    texts = read_texts(windows.path, work.config.data.separator or NO_SEPARATOR)
    try:
        return token_blocks(work.tokenizer, texts, windows.tokens, work.config.data.batch_size)
    except FlexrankError as error:
        raise FlexrankError(f"--perplexity {windows.path}: {error}") from error


def print_benchmarks(result: Mapping[str, Any], console: Console) -> None:
    """Prints a row for the base model, one for each budget, and what chance would score."""
    if text := result.get("text"):
        windows = f"{text['predicted_tokens']} tokens, windows of {text['window']}, tokenizer of {text['tokenizer']}"
        print_line(console, f"perplexity of {text['path']}: {windows}")
    if pairs := result.get("pairs"):
        print_line(
            console, f"sts: Spearman's correlation of cosines and scores, {pairs['number']} pairs of {pairs['path']}"
        )
    rows, scores = result["rows"], result["rows"][0].get("tasks", {})
    if scores:
        print_line(console, f"lm-eval {result['lm_eval']}, value ± standard error")
    columns = [(task, metric) for task in _outermost(scores, result.get("groups", {})) for metric in scores[task]]
    single = [name for name in ("perplexity", "sts") if name in rows[0]]
    measures = [*rows[0]["quality"], *single]
    names = ["params", "layers", *measures, *map(" ".join, columns)]
    table = new_table(["budget", *names], left=["budget"], **PLAIN)
    for row in rows:
        cells = [count(row["params_model"]), f"{row['relative_size']:.3f}"]
        cells += [f"{value:.4f}" for value in row["quality"].values()]
        cells += [f"{row[name]:.4g}" for name in single]
        cells += [_cell(row["tasks"][task][metric]) for task, metric in columns]
        table.add_row("base" if row["budget"] is None else f"{row['budget']:g}", *cells)
    chance = {(task, "acc"): f"{value:.3f}" for task, value in result.get("chance", {}).items()}
    if chance:
        blank = [""] * (len(names) - len(columns))
        table.add_row("chance", *blank, *(chance.get((task, metric.partition("_")[0]), "") for task, metric in columns))
    console.print(table)


def _outermost(scores: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The scored tasks and groups that are in no other scored group."""
    inside = {member for name in scores for member in groups.get(name, ())}
    return [name for name in scores if name not in inside]


def _cell(metric: Mapping[str, float | None]) -> str:
    return f"{metric['value']:.3f}" + ("" if metric["stderr"] is None else f" ±{metric['stderr']:.3f}")
