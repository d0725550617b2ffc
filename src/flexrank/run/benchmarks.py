"""The base model and a run's sizes, at any budget: the run's measures, lm-eval's tasks, perplexity: benchmarks.json."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from flexrank import progress
from flexrank.data.metrics import nats_per_token
from flexrank.data.text import read_texts, token_blocks
from flexrank.errors import FlexrankError
from flexrank.files import write_json
from flexrank.run.config import RunConfig, load_config
from flexrank.run.directory import RunDirectory
from flexrank.run.harness import score, settings_of
from flexrank.run.samples import NO_SEPARATOR
from flexrank.run.sizes import Sizes, count_parameters
from flexrank.run.tables import count, new_table, print_line
from flexrank.run.workspace import Workspace

RESULT = "benchmarks.json"


class Windows(NamedTuple):
    """What the perplexity is taken of: a file or folder of texts, in windows of so many tokens that do not overlap.

    In each window every token but the first is predicted from those before it there; a last, shorter one is left out.
    """

    path: Path
    tokens: int


def require_language(config: RunConfig, windows: Windows | None) -> None:
    """Refuses tasks or a text in a run of another task, a text that cannot be read, a window that predicts nothing."""
    if config.task != "language":
        raise FlexrankError(f"--tasks and --perplexity need a run of task language; {config.name} is of {config.task}")
    if windows is not None:
        read_texts(windows.path)
        if windows.tokens < 2:
            raise FlexrankError(f"--window is {windows.tokens}; it is a number of tokens, 2 or more")


def benchmark_run(
    directory: Path,
    loaded: Mapping[str, Any],
    windows: Windows | None,
    budgets: Sequence[float] = (),
    limit: int | None = None,
) -> dict[str, Any]:
    """Evaluates the base model and sizes of a run that is done up to its slack; writes RUN/benchmarks.json.

    Args:
        directory: the run's.
        loaded: of `harness.load_tasks`; empty for no tasks.
        windows: None for no perplexity.
        budgets: any; those of the run if there are none.
        limit: documents of each task; None is all.

    Raises:
        FlexrankError: a budget or window that the model does not have, or a value that is not finite.
    """
    sizes = Sizes(Workspace(load_config(directory), RunDirectory(directory)))
    work, chance = sizes.work, dict[str, float]()
    profiles = {budget: sizes.within({"budget": budget}) for budget in budgets or work.config.allocation.budgets}
    batches = [] if windows is None else _batches(work, windows)
    full = {name: min(shape) for name, shape in sizes.shapes.items()}
    rows = list[dict[str, Any]]()
    for budget, profile in progress.track([(None, full), *profiles.items()], "evaluating"):
        model = work.base if budget is None else sizes.deployed(profile)
        row = {"budget": budget, **count_parameters(model, profile, sizes.shapes), "quality": work.judge(model)}
        if batches:
            row["perplexity"] = math.exp(nats_per_token(model, batches))
        if loaded:
            row["tasks"], chance = score(model, work.tokenizer, loaded, work.config.data.batch_size, limit)
        rows.append(row)
    result: dict[str, Any] = {"model": work.config.model}
    if windows is not None:
        predicted = sum(batch["input_ids"][:, 1:].numel() for batch in batches)
        place = {"path": str(windows.path), "window": windows.tokens, "predicted_tokens": predicted}
        result["text"] = {**place, "tokenizer": work.config.model}
    if loaded:
        result |= {**settings_of(loaded), "limit": limit, "chance": chance}
    result["rows"] = rows
    write_json(directory / RESULT, result)
    return result


def _batches(work: Workspace, windows: Windows) -> list[dict[str, Any]]:
    limit = getattr(work.base.config, "max_position_embeddings", None)
    if limit is not None and windows.tokens > limit:
        raise FlexrankError(f"--window is {windows.tokens}; this model reads at most {limit} tokens")
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
    rows, scores = result["rows"], result["rows"][0].get("tasks", {})
    if scores:
        print_line(console, f"lm-eval {result['lm_eval']}, value ± standard error")
    columns = [(task, metric) for task in _outermost(scores, result.get("groups", {})) for metric in scores[task]]
    measures = [*rows[0]["quality"], *["perplexity"] * ("perplexity" in rows[0])]
    names = ["params", "layers", *measures, *map(" ".join, columns)]
    table = new_table(["budget", *names], left=["budget"], box=None, padding=(0, 2))
    for row in rows:
        cells = [count(row["params_model"]), f"{row['relative_size']:.3f}"]
        cells += [f"{value:.4f}" for value in row["quality"].values()]
        cells += [f"{row['perplexity']:.4g}"] if "perplexity" in row else []
        cells += [_cell(row["tasks"][task][metric]) for task, metric in columns]
        table.add_row("base" if row["budget"] is None else f"{row['budget']:g}", *cells)
    chance = {(task, "acc"): f"{value:.3f}" for task, value in result.get("chance", {}).items()}
    if chance:
        blank = [""] * (len(names) - len(columns))
        table.add_row("chance", *blank, *(chance.get((task, metric.partition("_")[0]), "") for task, metric in columns))
    console.print(table)


def _outermost(scores: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Tasks and groups with a score that are in no other group that has one."""
    inside = {member for name in scores for member in groups.get(name, ())}
    return [name for name in scores if name not in inside]


def _cell(metric: Mapping[str, float | None]) -> str:
    return f"{metric['value']:.3f}" + ("" if metric["stderr"] is None else f" ±{metric['stderr']:.3f}")
