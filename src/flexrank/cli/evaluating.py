"""The options of `flexrank evaluate`: lm-eval tasks, a text, scored pairs, and budgets."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flexrank import processes
from flexrank.cli.outputs import require_output
from flexrank.cli.printing import console, print_json
from flexrank.errors import FlexrankError


@dataclasses.dataclass(frozen=True)
class Request:
    """The options as typed; None for each that is not given."""

    tasks: str | None
    include_path: Path | None
    num_fewshot: int | None
    limit: int | None
    perplexity: Path | None
    window: int | None
    sts: Path | None
    budgets: str | None
    output: Path | None

    def wants_benchmarks(self) -> bool:
        """Whether there is anything to measure, or budgets are given; refuses an option without the one it needs."""
        needs = dict.fromkeys(("include_path", "num_fewshot", "limit"), "tasks") | {"window": "perplexity"}
        for option, other in needs.items():
            if getattr(self, option) is not None and getattr(self, other) is None:
                raise FlexrankError(f"--{option.replace('_', '-')} needs --{other}")
        wants_benchmarks = any(one is not None for one in (self.tasks, self.perplexity, self.sts, self.budgets))
        if self.output is not None and not wants_benchmarks:
            raise FlexrankError("--output needs --tasks, --perplexity, --sts or --budgets")
        return wants_benchmarks

    def prepare(self, config: Path, overrides: Iterable[str]) -> Callable[[Path], dict[str, Any]]:
        """Checks all options and loads the tasks, before a run begins; returns what evaluates a run directory."""
        from flexrank.run.benchmarks import Measures, Windows, benchmark_run, require_task
        from flexrank.run.config import load_config
        from flexrank.run.harness import load_tasks

        run = load_config(config, overrides)
        tokens = run.data.max_tokens if self.window is None else self.window
        windows = None if self.perplexity is None else Windows(self.perplexity, tokens)
        require_task(run, self.tasks is not None, windows, self.sts)
        if self.output is not None:
            require_output(self.output, ".json")
        names = [name.strip() for name in (self.tasks or "").split(",") if name.strip()]
        if self.tasks is not None and not names:
            raise FlexrankError("--tasks names no task; write them as arc_easy,piqa")
        loaded: dict[str, Any] = {}  # filled only in process 0, which alone evaluates
        if names:
            processes.on_first_process(lambda: loaded.update(load_tasks(names, self.include_path, self.num_fewshot)))
        measures = Measures(loaded, self.limit, windows, self.sts)
        return functools.partial(benchmark_run, measures=measures, budgets=_budgets(self.budgets), output=self.output)


def show_benchmarks(directory: Path, result: dict[str, Any], as_json: bool) -> None:
    """Prints the table; with `as_json`, on standard error, and the JSON on standard output."""
    from flexrank.run.benchmarks import print_benchmarks

    print_benchmarks(result, console(stderr=as_json))
    if as_json:
        print_json({"directory": str(directory), **result})


def _budgets(text: str | None) -> list[float]:
    """Parses budgets such as `.9,.5`; returns them from the largest to the smallest."""
    budgets = []
    for part in text.split(",") if text is not None else ():
        try:
            budgets.append(float(part))
        except ValueError:
            raise FlexrankError(f"--budgets: {part!r} is not a number; write them as .9,.5") from None
        if not 0 < budgets[-1] <= 1:
            raise FlexrankError(f"--budgets: {part} is out of range; a budget is a fraction in (0, 1]")
    return sorted(set(budgets), reverse=True)
