"""What a verb prints: tables, paths, and with --json one object, last on standard output."""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Characters of the longest line of a table.
LINE = 10_000


def show_report(directory: Path, as_json: bool, more: dict[str, Any]) -> None:
    """Prints a run's table; with `as_json`, on standard error, and the JSON on standard output."""
    from flexrank.run import report

    summary = report.read_summary(directory)
    report.print_table(summary, console(stderr=as_json))
    page = directory / "report.html"
    if page.is_file():
        print(f"figures and page: {page}", file=sys.stderr)
    if as_json:
        print_json({"directory": str(directory), **more, **summary})


def show_qualities(export: Mapping[str, Any], own: str) -> None:
    """Prints the qualities of shared and a size's own weights on standard error; the export's path is the output."""
    from rich.table import Table

    table = Table("quality", "shared", own, box=None, padding=(0, 2))
    for name, quality in export["quality"].items():
        table.add_row(name, f"{export['shared'][name]:.4f}", f"{quality:.4f}")
    console(stderr=True).print(table)


def show_size(export: Mapping[str, Any]) -> None:
    """Logs the sizes of an export in one line."""
    millions = [export[key] / 1e6 for key in ("params_layers", "params_model", "bytes")]
    sizes = "{:.4g} M parameters in factorised layers, {:.4g} M in all, {:.4g} MB on disk".format(*millions)
    share = f"{export['relative_size']:.3g} of the layers' dense parameters"
    logging.getLogger("flexrank").info(f"{share}: {sizes} with tokenizer and config, in {export['dtype']}")


def show_stage(outcome: Any, result: dict[str, Any], as_json: bool) -> None:
    """Prints the directory of a stage's run or of an export, or with `as_json` the result."""
    place = result["export"]["directory"] if "export" in result else outcome.directory
    show_path(place, {"directory": str(outcome.directory), "executed": list(outcome.executed), **result}, as_json)


def show_path(path: str | Path, value: Any, as_json: bool) -> None:
    """Prints the path, or with `as_json` the object `value`."""
    if as_json:
        print_json(value)
    else:
        print(path)


def print_json(value: Any) -> None:
    """Prints one line of JSON, after everything that was printed before it."""
    sys.stdout.flush()
    print(json.dumps(value, allow_nan=False), flush=True)


def console(stderr: bool = False) -> Any:
    """A console that cuts no cell of a table: a line that is longer than the terminal continues on its next line."""
    from rich.console import Console

    return Console(stderr=stderr, width=LINE)
