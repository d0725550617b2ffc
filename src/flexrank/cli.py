"""The command line: a verb a stage, and verbs that look, draw and measure.

Standard output holds the result alone, the table or with --json one JSON object; all else goes to standard error. A
wrong input is one line there, and exit 2. Everything heavy is imported by the verb that needs it.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flexrank import progress
from flexrank.errors import FlexrankError

WRONG_INPUT, INTERRUPTED = 2, 130

# What a verb may need beyond the core, and the extra that brings it.
EXTRAS = {"transformers": "hf", "matplotlib": "report", "peft": "peft", "PIL": "images"}


class OneLineErrors(TyperGroup):
    """Turns every wrong input into one line on standard error and exit 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """As click's, but for how errors end."""
        options = {"complete_var": complete_var, "windows_expand_args": windows_expand_args, **extra}
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **options)
        try:
            sys.exit(super().main(args, prog_name, standalone_mode=False, **options) or 0)
        except FlexrankError as error:
            _fail(str(error))
        except OSError as error:
            # A full disk, a file that may not be read: the system's own words, and the file they are about.
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            _fail(f"{error.name} is not installed: pip install 'flexrank[{EXTRAS[error.name]}]'")
        except typer.Abort:
            sys.exit(INTERRUPTED)
        except _USAGE_ERROR as error:
            _fail(error.format_message())


# typer carries its own click in newer versions; its public exceptions tell which.
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    cls=OneLineErrors,
    name="flexrank",
    help="One pretrained network, every size: nested low-rank models from a single set of weights.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or a run directory.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key of the config.")]
Json = Annotated[bool, typer.Option("--json", help="Prints one JSON object, last on standard output.")]
Directory = Annotated[Path, typer.Argument(metavar="DIR")]


def main() -> None:
    """The entry point of the command `flexrank`."""
    app()


@app.callback()
def _start(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Tells warnings and errors only.")] = False,
) -> None:
    log = logging.getLogger("flexrank")
    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.addHandler(_StandardError())
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    progress.show(not quiet)


class _StandardError(logging.Handler):
    """Writes to what is standard error at the time, as `print` does."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@app.command()
def run(
    config: Config,
    overrides: Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prints the run's plan; computes nothing.")] = False,
    tflops: Annotated[float | None, typer.Option(help="With --dry-run: 10^12 operations a second; 100.")] = None,
    as_json: Json = False,
) -> None:
    """Goes the whole way; goes on from where an earlier run of this config was."""
    if dry_run or tflops is not None:
        _show_plan(config, overrides, dry_run, tflops, as_json)
        return
    from flexrank.run import report

    outcome = _run(config, overrides, "report")
    summary = report.read_summary(outcome.directory)
    _show_report(outcome.directory, summary, as_json, {"executed": list(outcome.executed)})


@app.command()
def decompose(config: Config, overrides: Set = None, as_json: Json = False) -> None:
    """Calibrates, and decomposes each layer: elastic_initial/."""
    outcome = _run(config, overrides, "decompose")
    _show_stage(outcome, {"artefact": str(outcome.directory / "elastic_initial")}, as_json)


@app.command()
def probe(config: Config, overrides: Set = None, as_json: Json = False) -> None:
    """Probes each layer's sensitivity: sensitivity.json."""
    from flexrank.files import read_json

    outcome = _run(config, overrides, "probe")
    _show_stage(outcome, read_json(outcome.directory / "sensitivity.json"), as_json)


@app.command()
def allocate(config: Config, overrides: Set = None, as_json: Json = False) -> None:
    """Chooses the ranks of every budget: chain.json."""
    from flexrank.files import read_json

    outcome = _run(config, overrides, "allocate")
    _show_stage(outcome, read_json(outcome.directory / "chain.json"), as_json)


@app.command()
def distill(config: Config, overrides: Set = None, as_json: Json = False) -> None:
    """Consolidates all sizes into one set of weights: elastic/."""
    from flexrank.files import read_json

    outcome = _run(config, overrides, "distill")
    history = read_json(outcome.directory / "history.json")
    last = history["losses"][-1] if history["losses"] else None
    found = {"artefact": str(outcome.directory / "elastic"), "steps": history["steps"], "last_loss": last}
    _show_stage(outcome, found, as_json)


@app.command()
def evaluate(config: Config, overrides: Set = None, as_json: Json = False) -> None:
    """Measures sizes, qualities and latencies of every budget: evaluation.json."""
    from flexrank.files import read_json

    outcome = _run(config, overrides, "evaluate")
    _show_stage(outcome, read_json(outcome.directory / "evaluation.json"), as_json)


@app.command()
def deploy(
    config: Config,
    overrides: Set = None,
    budget: Annotated[float | None, typer.Option(help="Share of the factorised layers' dense parameters.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="The most bytes of the whole model's tensors.")] = None,
    max_params: Annotated[int | None, typer.Option(help="The most parameters of the whole model.")] = None,
    max_latency_ms: Annotated[
        float | None, typer.Option(help="The most milliseconds here, for a batch as the table's latency is of.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write; RUN/exports/LIMITS by default.")] = None,
    as_json: Json = False,
) -> None:
    """Exports small models, verified in a fresh process: those of the config, or one within the limits given."""
    from flexrank.files import read_json

    given = {"budget": budget, "max_bytes": max_bytes, "max_params": max_params, "max_latency_ms": max_latency_ms}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    for name, limit in limits.items():
        if limit <= 0 or (name == "budget" and limit > 1):
            right = "a fraction in (0, 1]" if name == "budget" else "a number above 0"
            raise FlexrankError(f"--{name.replace('_', '-')} is {limit}; it is {right}")
    if output is not None and not limits:
        raise FlexrankError(
            "--output needs --budget, --max-bytes, --max-params or --max-latency-ms: what to write there"
        )
    is_empty = output is not None and output.is_dir() and not any(output.iterdir())
    if output is not None and output.exists() and not is_empty and not (output / "flexrank.json").is_file():
        raise FlexrankError(f"--output {output}: is there and no deployed model; only one of those is written over")
    if not limits:
        outcome = _run(config, overrides, "deploy")
        _show_stage(outcome, {"deployed": read_json(outcome.directory / "deployed.json")}, as_json)
        return
    from flexrank.run import export_one

    outcome = _run(config, overrides, "distill")
    with _resumable(outcome.directory):
        found = export_one(outcome, limits, output)
    _show_stage(outcome, {"export": found}, as_json)


@app.command()
def report(run_directory: Config, as_json: Json = False) -> None:
    """Draws the figures and the page again from summary.json, and prints the table; computes nothing."""
    from flexrank.run import report as pages
    from flexrank.run.config import load_config

    directory = run_directory if run_directory.is_dir() else load_config(run_directory).directory
    summary = pages.read_summary(directory)
    written = [str(path) for path in pages.write_report(directory)]
    _show_report(directory, summary, as_json, {"written": written})


@app.command()
def inspect(directory: Directory, as_json: Json = False) -> None:
    """Tells what an artefact holds, elastic or deployed, without loading its weights."""
    from flexrank.artefacts.elastic import inspect_artefact

    found = inspect_artefact(directory)
    if as_json:
        _print_json(found)
    else:
        _print_artefact(directory, found)


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A benchmark; --list tells them.")] = None,
    target: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="What some benchmarks measure.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Tells what each measures, and its minutes.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write; results/bench/NAME by default.")] = None,
    page: Annotated[Path | None, typer.Option(help="Then writes all of results/bench/ as this Markdown page.")] = None,
    as_json: Json = False,
) -> None:
    """Runs a benchmark: results/bench/NAME/result.json, its figure, and its tables."""
    from research.benches import driver

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        found = driver.answer(name, target, listed, page, output)
    if as_json:
        _print_json(found)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A study of the paper; --list tells them.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Tells each study's cost and the paper's figure.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Runs the quick form of every study.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The paper's size of it, instead of the quick form.")] = False,
    model: Annotated[str | None, typer.Option(help="Any causal language model, in place of the study's own.")] = None,
    config: Annotated[Path | None, typer.Option(help="A run's YAML: its model, data and settings.")] = None,
    overrides: Set = None,
    seeds: Annotated[int | None, typer.Option(help="How many, where chance enters.")] = None,
    domain: Annotated[Path | None, typer.Option(help="Texts of the second domain (adaptation).")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write; results/NAME by default.")] = None,
    page: Annotated[Path | None, typer.Option(help="Then writes all of results/ as this Markdown page.")] = None,
    as_json: Json = False,
) -> None:
    """Repeats an experiment of the paper: results/NAME/result.json, its figure, and one table."""
    from research.studies import driver

    wishes = driver.Wishes(full, model, config, tuple(overrides or ()), seeds, domain, output)
    with _study_interrupted(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        found = driver.answer(name, listed, every, page, wishes)
    if as_json:
        _print_json(found)


def _run(config: Path, overrides: list[str] | None, until: str) -> Any:
    from flexrank.run.config import load_config

    checked = load_config(config, overrides or ())
    with _resumable(checked.directory):
        from flexrank.run import run_stages

        return run_stages(checked, until)


def _show_plan(config: Path, overrides: list[str] | None, dry_run: bool, tflops: float | None, as_json: bool) -> None:
    """Prints what a run would do; nothing is computed, downloaded or written."""
    if not dry_run:
        raise FlexrankError("--tflops belongs to --dry-run: a run takes the time it takes")
    from rich.console import Console

    from flexrank.run.config import load_config
    from flexrank.run.dry_run import DEFAULT_TFLOPS, make_plan, print_plan

    found = make_plan(load_config(config, overrides or ()), DEFAULT_TFLOPS if tflops is None else tflops)
    if as_json:
        _print_json(found)
    else:
        print_plan(found, Console(width=None if sys.stdout.isatty() else 160))


@contextlib.contextmanager
def _study_interrupted() -> Iterator[None]:
    """Ends a Ctrl-C with one line; finished units are kept."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last finished unit", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def _resumable(directory: Path) -> Iterator[None]:
    """Ends a Ctrl-C with one line that tells how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted; `flexrank run {directory}` goes on from here", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _show_report(directory: Path, summary: dict[str, Any], as_json: bool, more: dict[str, Any]) -> None:
    """Prints the table, on standard error where standard output is for JSON."""
    from rich.console import Console

    from flexrank.run import report

    # Wide enough for the table: without a terminal rich would cut it at 80.
    width = None if (sys.stderr if as_json else sys.stdout).isatty() else 140
    report.print_table(summary, Console(stderr=as_json, width=width))
    page = directory / "report.html"
    if page.is_file():
        print(f"figures and page: {page}", file=sys.stderr)
    if as_json:
        _print_json({"directory": str(directory), **more, **summary})


def _show_stage(outcome: Any, found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json({"directory": str(outcome.directory), "executed": list(outcome.executed), **found})
    else:
        print(found["export"]["directory"] if "export" in found else outcome.directory)


def _print_json(value: Any) -> None:
    sys.stdout.flush()
    print(json.dumps(value, allow_nan=False), flush=True)


def _print_artefact(directory: Path, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from flexrank.run.report import count

    console = Console(width=None if sys.stdout.isatty() else 120)
    told = f"{directory}: {found['kind']} {found['class']}, {count(found['parameters'])} parameters of {found['dtype']}"
    console.print(f"{told}, {count(found['bytes_on_disk'])}B on disk", markup=False, highlight=False, soft_wrap=True)
    if found.get("budgets"):
        table = Table("budget", "mean rank", "params, layers", "params, model", "tensors", box=None, padding=(0, 2))
        for row in reversed(found["budgets"]):
            sizes = (count(row["params_layers"]), count(row["params_model"]), f"{count(row['bytes'])}B")
            table.add_row(f"{row['budget']:g}", f"{row['mean_rank']:.1f}", *sizes)
        console.print(table)
    table = Table("layer", "form", "shape", "rank", box=None, padding=(0, 2))
    for name, spec in found["layers"].items():
        shape = " x ".join(str(size) for size in spec["shape"])
        table.add_row(name, str(spec["form"]), shape, str(spec.get("rank", "full")))
    console.print(table)


def _fail(message: str) -> None:
    """Prints the message as one line, and ends with 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(WRONG_INPUT)
