"""lm-eval: loads tasks by name, its own or from a folder of task files, and scores a model on them."""

import contextlib
import difflib
import io
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flexrank import progress
from flexrank.errors import FlexrankError, first_line

#: lm-eval's default seed for few-shot examples.
FEWSHOT_SEED = 1234

log = logging.getLogger("flexrank")
Scores = dict[str, dict[str, dict[str, float | None]]]  #: task, metric, `value` and `stderr` (None where it has none)


def load_tasks(
    names: Sequence[str], include_path: Path | None = None, num_fewshot: int | None = None
) -> dict[str, Any]:
    """Loads lm-eval's tasks, groups and tags of these names or globs, with their data, as its `evaluate` takes them.

    Args:
        names: lm-eval's own, or those of YAML files under `include_path`.
        include_path: a folder of task files, which take precedence over lm-eval's own.
        num_fewshot: examples in each prompt; None is each task's own number.

    Raises:
        FlexrankError: a name is unknown, a task's data cannot be read, a task runs code that a model has written, or it
            has fewer examples than each prompt is to have.
    """
    if include_path is not None and not include_path.is_dir():
        raise FlexrankError(f"--include-path {include_path}: no such folder of task files")
    with _lm_eval_logging(logging.ERROR, bars=False):
        manager = _manager(names, include_path)
        _require_known(names, manager)
        try:
            loaded: dict[str, Any] = manager.load(manager.match_tasks(list(names)))
        except Exception as error:  # from any library that reads a task's data
            raise FlexrankError(f"--tasks {','.join(names)}: lm-eval cannot load them: {first_line(error)}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise FlexrankError(f"--tasks: {name} runs code that the model writes; run lm_eval itself on an export")
        own = task.get_config("num_fewshot")
        if own == 0 and num_fewshot:
            log.warning("--num-fewshot: %s is asked without examples, as its file says", name)
        if own is None or (own and num_fewshot is not None):  # like lm-eval, keeps a 0 in a task's file
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        _require_examples(name, task)
    return loaded


def _require_examples(name: str, task: Any) -> None:
    """Refuses more examples in a prompt than the task has, without the document that is asked."""
    shots, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    if shots and sampler is not None:
        there = len(sampler.df) - (task.fewshot_cfg.split == task.config.test_split)
        if shots > there:
            raise FlexrankError(f"--num-fewshot: {name} has {there} examples, and each prompt is to have {shots}")


def _manager(names: Sequence[str], include_path: Path | None) -> Any:
    """A manager of a folder's tasks and, unless all names are there, lm-eval's own: listing those takes seconds."""
    from lm_eval.tasks import TaskManager

    place = None if include_path is None else str(include_path)
    if place is not None:
        manager = TaskManager(include_path=place, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    return TaskManager(include_path=place)


def _require_known(names: Sequence[str], manager: Any) -> None:
    for name in names:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists those there are"
            raise FlexrankError(f"--tasks: lm-eval has no task {name!r}; {hint}")


def settings_of(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """What scores depend on besides the model: the versions of lm-eval and of each task, and its number of examples."""
    import lm_eval

    tasks = {
        name: {"num_fewshot": task.get_config("num_fewshot"), "version": task.VERSION}
        for name, task in loaded["tasks"].items()
    }
    groups = {name: list(members) for name, members in loaded["group_map"].items()}
    return {"lm_eval": lm_eval.__version__, "settings": tasks, "groups": groups}


def score(
    model: nn.Module, tokenizer: Any, loaded: Mapping[str, Any], batch_size: int, limit: int | None = None
) -> tuple[Scores, dict[str, float]]:
    """A transformers model's scores on loaded tasks and groups, and what chance would score on multiple-choice tasks.

    Args:
        model: on the device and in the dtype to run in.
        tokenizer: a transformers tokenizer.
        loaded: what `load_tasks` returned.
        batch_size: texts per batch.
        limit: documents of each task; None is all.

    Raises:
        FlexrankError: a question or option is empty, an option too long, or a log-likelihood is not finite.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    with _lm_eval_logging(logging.ERROR, bars=False):  # it warns about getting a model, not a name
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)  # each call draws on: without it, every model had other examples
    with _lm_eval_logging(logging.WARNING, bars=progress.is_shown()):
        try:
            found = lm_eval.evaluate(lm, dict(loaded), limit=limit)
        except AssertionError as error:  # lm-eval's checks of each question have no message, others do
            what = f"is empty, or an option has more tokens than the {lm.max_length} that the model reads"
            why = f": {first_line(error)}" if str(error) else f" cannot ask a question: it or an option {what}"
            raise FlexrankError(f"--tasks: lm-eval{why}") from error
        except ArithmeticError as error:  # such as a perplexity by word of a text without blanks
            raise FlexrankError(
                f"--tasks: lm-eval cannot compute a measure ({first_line(error)}); leave it out"
            ) from error
    for name, samples in found["samples"].items():
        if not all(math.isfinite(number) for sample in samples for number in _numbers(sample["resps"])):
            raise FlexrankError(f"task {name}: a log-likelihood is not finite; check the model's weights")
    scores = {name: _metrics(values) for name, values in found["results"].items()}
    return scores, {
        name: sum(_chance(task, sample["doc"]) for sample in samples) / len(samples)
        for name, task in loaded["tasks"].items()
        if task.OUTPUT_TYPE == "multiple_choice"
        and (samples := found["samples"][name])
        and getattr(task.config, "process_results", None) is None  # then the score is of another kind
    }


def _chance(task: Any, doc: Any) -> float:
    """The share of a question's options that are right: several may be."""
    right = task.doc_to_target(doc)
    return (len(right) if isinstance(right, list) else 1) / len(task.doc_to_choice(doc))


def _metrics(values: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """The metrics by name; the name of one that lm-eval takes through a filter also has the filter's name."""
    metrics = dict[str, dict[str, float | None]]()
    for key, value in values.items():
        name, comma, filtered = key.partition(",")
        if comma and not name.endswith("_stderr") and isinstance(value, int | float):
            error = values.get(f"{name}_stderr,{filtered}")  # "N/A" where there is none
            stderr = float(error) if isinstance(error, int | float) and math.isfinite(error) else None
            label = name if filtered == "none" else f"{name} ({filtered})"
            metrics[label] = {"value": float(value), "stderr": stderr}
    return metrics


def _numbers(value: Any) -> Iterator[float]:
    """Yields the numbers in a model's nested answers; tasks that generate have texts there instead."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, float):
        yield value


@contextlib.contextmanager
def _lm_eval_logging(level: int, bars: bool) -> Iterator[None]:
    """Inside the block lm-eval logs to standard error from this level up, and shows progress bars if `bars`."""
    log, handler = logging.getLogger("lm_eval"), logging.StreamHandler(sys.stderr)
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        with contextlib.redirect_stderr(sys.stderr if bars else io.StringIO()):
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
