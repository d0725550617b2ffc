"""Runs a benchmark and writes what it measured: result.json and the figure; and docs/performance.md from those."""

import functools
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flexrank.deployment.environment import machine_facts
from flexrank.errors import FlexrankError
from flexrank.files import write_aside, write_json
from research.benches import NAMES, find_bench
from research.benches.bench import KEYS, Bench
from research.findings import RESULT, Result, read_result
from research.findings.figures import save_figure
from research.findings.pages import beside, markdown, section, told
from research.findings.terminal import print_claims, print_table

RESULTS = Path("results", "bench")

_HEAD = """# Performance

Made by `flexrank bench --page docs/performance.md` from `results/bench/*/result.json`; nothing in it is written by
hand. Each section is one command. Ratios are medians of runs in turn in one process. *met* and *missed* are computed
from the numbers beside them.
"""


def measure(bench: Bench, target: Path | None, output: Path) -> Result:
    """Runs the bench, writes result.json and its figure into `output`, and returns the result.

    Raises:
        FlexrankError: it needs a directory and has none, or the other way round; or as the bench.
    """
    if (bench.takes is None) != (target is None):
        wanted = f"needs DIR, {bench.takes}" if bench.takes else "takes no directory"
        raise FlexrankError(f"bench {bench.name!r} {wanted}")
    if bench.draw is not None:
        import matplotlib  # noqa: F401  # its absence is to be told before the bench has run

    start = time.perf_counter()
    found = bench.run(target)
    command = " ".join(["flexrank bench", bench.name, *([str(target)] if target else [])])
    facts = {"bench": bench.name, "title": bench.title, "command": command}
    result = {**facts, **found, "seconds": time.perf_counter() - start, "machine": machine_facts()}
    write_json(output / RESULT, result)
    if bench.draw is not None:
        save_figure(functools.partial(bench.draw, result["data"]), output / bench.name)
    return result


def answer(name: str | None, target: Path | None, listed: bool, page: Path | None, output: Path | None) -> Any:
    """Lists the benches, or runs one and prints what it measured; then writes the page. Returns what `--json` prints.

    Raises:
        FlexrankError: it is not said what to do.
    """
    if listed + (name is not None) != 1 and (listed or page is None):
        raise FlexrankError("bench takes one benchmark's NAME, or --list, or --page alone")
    if listed:
        benches = [find_bench(one) for one in NAMES]
        _print_list(benches)
        return [{"name": one.name, "measures": one.measures, "minutes": one.minutes} for one in benches]
    result = None
    if name is not None:
        bench = find_bench(name)
        result = measure(bench, target, output or RESULTS / name)
        _print_result(result)
    if page is not None:
        missing = write_page(RESULTS, page)
        print(f"{page} written" + (f"; no results yet of {', '.join(missing)}" if missing else ""), file=sys.stderr)
    return result


def write_page(results: Path, page: Path) -> list[str]:
    """Writes the page of all results under `results`; returns the benches that have none.

    Raises:
        FlexrankError: there is no result at all, or one is not whole.
    """
    sections, missing, overview = [], [], []
    for name in NAMES:
        directory = results / name
        if not (directory / RESULT).is_file():
            missing.append(name)
            continue
        bench, result = find_bench(name), read_result(directory / RESULT, KEYS)
        figure = None if bench.draw is None else beside(page, directory / f"{name}.png")
        told_first = " ".join([f"Measures {bench.measures}.", *(f"Tried and left out: {one}." for one in bench.tried)])
        sections.append(section(bench.title, told_first, result, figure, ("goal", "asked")))
        overview += [[name, *told(one)] for one in result["claims"]]
    if not sections:
        raise FlexrankError(f"{results}: holds no results; run flexrank bench NAME first")
    with write_aside(page) as aside:
        table = markdown(["bench", "goal", "asked", "here", ""], overview)
        aside.write_text("\n".join([_HEAD, table, "", *sections]), encoding="utf8")
    return missing


def _print_list(benches: list[Bench]) -> None:
    drawn = Table("name", "minutes", "measures", box=None, padding=(0, 2, 0, 0))
    for bench in benches:
        drawn.add_row(bench.name + (" DIR" if bench.takes else ""), f"{bench.minutes:g}", bench.measures)
    Console(width=None if sys.stdout.isatty() else 160).print(drawn)


def _print_result(result: Result) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180)
    for one in result["tables"]:
        print_table(one, console)
    print_claims(result, console)
