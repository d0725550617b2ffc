"""The command line: one verb for each stage of a run, and verbs that report on what a run has written.

Standard output holds only the result: a table, a path, or with --json one JSON object. Everything else goes to standard
error. A wrong input prints one line there and exits with status 2. Each verb imports the heavy libraries that it needs.
"""

import atexit
import contextlib
import gc
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from flexrank import processes, progress
from flexrank.cli.deploying import deploy_elastic, sibling_path
from flexrank.cli.exits import OneLineErrors, resumable
from flexrank.cli.limits import check_limits, parse_bytes, parse_parameters
from flexrank.cli.outputs import require_output
from flexrank.cli.printing import console, print_json, show_path, show_qualities, show_report, show_size, show_stage
from flexrank.errors import FlexrankError
from flexrank.files import read_json, write_json
from flexrank.version import __version__

app = typer.Typer(
    cls=OneLineErrors,
    name="flexrank",
    help="One pretrained network, every size: nested low-rank models from a single set of weights. Most commands "
    "first run the stages that they need and that are missing.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or a run directory.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key of CONFIG; a run keeps it.")
]
Json = Annotated[bool, typer.Option("--json", help="Prints one JSON object, last on standard output.")]


def main() -> None:
    """The entry point of the command `flexrank`."""
    atexit.register(gc.freeze)  # or the interpreter, as it ends, looks for cycles in all of torch: about a second
    app()


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _start(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Prints only warnings and errors.")] = False,
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Prints the version and exits.")
    ] = False,
) -> None:
    log = logging.getLogger("flexrank")
    log.handlers = [_StandardError()]
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    progress.show(not quiet)


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`, as `print` does."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@app.command()
def run(
    config: Config,
    overrides: Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prints sizes and costs of the run and exits.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help="With --dry-run: the GPU to plan for: h200, …, local or FILE.json.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="With --gpu: number of GPUs, one process each; default 1.")] = None,
    price: Annotated[
        float | None, typer.Option(help="With --gpu: price per GPU and hour, instead of the listed one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Runs all stages; continues an earlier run of the same config."""
    planned = {"gpu": gpu, "gpus": gpus, "price": price}
    _check_planned({option: value for option, value in planned.items() if value is not None}, dry_run)
    if dry_run:
        _show_dry_run(config, overrides, planned, as_json)
        return
    outcome = _run(config, overrides, "report")
    show_report(outcome.directory, as_json, {"executed": list(outcome.executed)})


def _add_stage(stage: str, help: str, result: str) -> None:
    """Adds the verb that runs up to `stage` and prints the run directory, or with --json what the stage wrote there."""

    @app.command(stage, help=help)
    def verb(config: Config, overrides: Set = None, as_json: Json = False) -> None:
        outcome = _run(config, overrides, stage)
        show_stage(outcome, _read_result(outcome.directory, result), as_json)


def _read_result(run: Path, name: str) -> dict[str, Any]:
    """A stage's result: the content of a JSON file, or an artefact's path, for `elastic` with facts of its training."""
    if name.endswith(".json"):
        return read_json(run / name)
    result: dict[str, Any] = {"artefact": str(run / name)}
    if name == "elastic":
        history = read_json(run / "history.json")
        last = history["losses"][-1] if history["losses"] else None
        result |= {"steps": history["steps"], "learning_rate": history["learning_rate"], "last_loss": last}
    return result


for _stage, _help, _result in (
    ("decompose", "Calibrates, and decomposes each layer: elastic_initial/.", "elastic_initial"),
    ("probe", "Probes each layer's sensitivity: sensitivity.json.", "sensitivity.json"),
    ("allocate", "Chooses the ranks of every budget: chain.json.", "chain.json"),
    ("distill", "Consolidates all sizes into one set of weights: elastic/.", "elastic"),
):
    _add_stage(_stage, _help, _result)


@app.command(short_help="Measures the quality of sizes; also by lm-eval, perplexity or STS.")
def evaluate(
    config: Config,
    overrides: Set = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, separated by commas: arc_easy,piqa.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="With --tasks: a directory of your own task files.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="With --tasks: number of examples in each prompt.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: documents per task, for a quick try.")] = None,
    perplexity: Annotated[Path | None, typer.Option(help="Text to measure perplexity on: a file or folder.")] = None,
    window: Annotated[
        int | None, typer.Option(help="With --perplexity: tokens per window; default data.max_tokens.")
    ] = None,
    sts: Annotated[
        Path | None, typer.Option(help="A file of scored sentence pairs: rank correlation with cosines.")
    ] = None,
    budgets: Annotated[str | None, typer.Option(help="Budgets to measure: .9,.35; default those of the run.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="With these options: file to write; default RUN/benchmarks.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures every size: evaluation.json. With budgets or measures of your own it writes benchmarks.json instead."""
    from flexrank.cli.evaluating import Request, show_benchmarks

    request = Request(tasks, include_path, num_fewshot, limit, perplexity, window, sts, budgets, output)
    if not request.wants_benchmarks():
        outcome = _run(config, overrides, "evaluate")
        show_stage(outcome, _read_result(outcome.directory, "evaluation.json"), as_json)
        return
    task = request.prepare(config, overrides or ())
    outcome = _run(config, overrides, "slack")
    show_benchmarks(outcome.directory, processes.on_first_process(lambda: task(outcome.directory)), as_json)


@app.command(short_help="Exports small models: the config's, or one within limits.")
def deploy(
    config: Config,
    overrides: Set = None,
    budget: Annotated[float | None, typer.Option(help="Share of the factorised layers' dense parameters.")] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(parser=parse_bytes, metavar="N", help="Most bytes of the whole model's tensors: 200MB."),
    ] = None,
    max_params: Annotated[
        int | None, typer.Option(parser=parse_parameters, metavar="N", help="Most parameters of the whole model: 1.5M.")
    ] = None,
    max_latency_ms: Annotated[float | None, typer.Option(help="Most milliseconds per batch, on this machine.")] = None,
    tune: Annotated[int, typer.Option(help="Steps of training for this size alone, before its export.")] = 0,
    refit: Annotated[bool, typer.Option("--refit", help="Fits this size alone, without training.")] = False,
    output: Annotated[Path | None, typer.Option(help="Directory to write; default RUN/exports/LIMITS.")] = None,
    as_json: Json = False,
) -> None:
    """Exports small models, verified in a fresh process: those of the config, or one within the given limits.

    An elastic artefact may stand for its run: then the limits are of budget, bytes or parameters.
    """
    given = {"budget": budget, "max_bytes": max_bytes, "max_params": max_params, "max_latency_ms": max_latency_ms}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    check_limits(limits, output, tune, refit)
    if (config / "elastic.json").is_file():
        deploy_elastic(config, limits, output, bool(overrides or tune or refit), as_json)
        return
    outcome = _run(config, overrides, "slack" if limits else "deploy")
    if not limits:
        show_stage(outcome, {"deployed": read_json(outcome.directory / "deployed.json")}, as_json)
        return
    from flexrank.run import export_one

    with resumable() if tune else contextlib.nullcontext():  # the other ways begin again
        export = processes.on_first_process(lambda: export_one(outcome, limits, output, tune, refit))
    if tune or refit:
        show_qualities(export, "refitted" if refit else "tuned")
    show_size(export)
    show_stage(outcome, {"export": export}, as_json)


@app.command(short_help="Writes a deployed model for another runtime.")
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A transformers model that deploy wrote.")],
    to: Annotated[str, typer.Option("--to", help="dense, torch, onnx, openvino or executorch.")],
    output: Annotated[Path | None, typer.Option(help="Directory to write; default DIR-FORMAT.")] = None,
    as_json: Json = False,
) -> None:
    """Writes a deployed model for another runtime, loaded and run there before it is published."""
    from flexrank.deployment.formats import export_to, require_format

    require_format(to)
    place = output or sibling_path(directory, to)
    facts = processes.on_first_process(lambda: export_to(directory, to, place))
    show_path(place, {"directory": str(place), **facts}, as_json)


@app.command(short_help="Measures time and memory of every size.")
def measure(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file, or a run directory.")] = None,
    overrides: Set = None,
    calibrate_plan: Annotated[
        bool, typer.Option(help="Measures this machine for `run --dry-run --gpu local`.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="With --calibrate-plan: file to write; default plan.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures time and memory of every size: measurement.json. With --calibrate-plan it measures this machine."""
    if calibrate_plan:
        if config is not None or overrides:
            raise FlexrankError("--calibrate-plan measures the machine, and takes no CONFIG and no --set")
        _calibrate_plan(output, as_json)
        return
    if output is not None:
        raise FlexrankError("--output belongs to --calibrate-plan; a run's measurement.json is in its directory")
    if config is None:
        raise FlexrankError("give CONFIG; without one there is --calibrate-plan, which measures this machine")
    from flexrank.run.measure import measure_run, print_measurement

    outcome = _run(config, overrides, "slack")
    result = processes.on_first_process(lambda: measure_run(outcome.directory))
    print_measurement(result, console(stderr=as_json))
    if as_json:
        print_json({"directory": str(outcome.directory), **result})


def _calibrate_plan(output: Path | None, as_json: bool) -> None:
    """Measures the machine, writes the result to a file, and prints the file's path, or with --json its content."""
    from flexrank.run.dry_run import LOCAL, is_device
    from flexrank.run.rates import measure_device

    path = output or LOCAL
    require_output(path, ".json", is_device)
    progress.show(False)  # the models that are timed are of no interest to the user
    logging.getLogger("flexrank").setLevel(logging.WARNING)
    device = processes.on_first_process(lambda: measure_device(path.parent).model_dump())
    if processes.is_first():
        write_json(path, device)
    show_path(path, device, as_json)


@app.command(short_help="Redraws a run's figures and page, or one page of several runs.")
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="One or more run directories, or their YAML files.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="With several runs: page to write; default comparison.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Redraws a run's figures and page from its files, and prints the table; or makes one page of several runs."""
    from flexrank.run.config import load_config
    from flexrank.run.page import is_page
    from flexrank.run.report import write_comparison, write_report
    from flexrank.run.runner import check_report

    directories = [one if one.is_dir() else load_config(one).directory for one in runs]
    for directory in directories:
        check_report(directory)
    if len(directories) == 1:
        if output is not None:
            raise FlexrankError("--output is the page of several runs; that of one is RUN/report.html")
        written = processes.on_first_process(lambda: list(map(str, write_report(directories[0]))))
        show_report(directories[0], as_json, {"written": written})
        return
    page = output or Path("comparison.html")
    require_output(page, ".html", is_page)
    processes.on_first_process(lambda: write_comparison(directories, page))
    show_path(page, {"written": [str(page)], "runs": list(map(str, directories))}, as_json)


@app.command(short_help="Lists what an artefact holds, without its weights.")
def inspect(directory: Annotated[Path, typer.Argument(metavar="DIR")], as_json: Json = False) -> None:
    """Lists what an artefact holds, elastic or deployed, without loading its weights."""
    from flexrank.artefacts.inspect import inspect_artefact
    from flexrank.run.tables import print_artefact

    artefact = inspect_artefact(directory)
    if as_json:
        print_json(artefact)
    else:
        print_artefact(directory, artefact, console())


def _run(config: Path, overrides: list[str] | None, until: str) -> Any:
    """Runs the stages up to `until`, and returns their `Outcome`."""
    from flexrank.run.config import load_config

    checked = load_config(config, overrides or ())
    with resumable():
        from flexrank.run import run_stages

        return run_stages(checked, until)


def _check_planned(given: Mapping[str, Any], is_dry: bool) -> None:
    """Refuses an option without the one that it belongs to, and a price out of range."""
    for option in given:
        if not is_dry:
            raise FlexrankError(f"--{option} belongs to --dry-run")
        if option in ("gpus", "price") and "gpu" not in given:
            raise FlexrankError(f"--{option} belongs to --gpu")
    if not 0 <= given.get("price", 0) < float("inf"):
        raise FlexrankError(f"--price is {given['price']:g}; it is the price of one GPU for an hour, 0 or more")


def _show_dry_run(config: Path, overrides: list[str] | None, planned: Mapping[str, Any], as_json: bool) -> None:
    from flexrank.run.config import load_config
    from flexrank.run.dry_run import dry_run, find_device, print_dry_run

    device = find_device(planned["gpu"], planned["price"]) if planned["gpu"] is not None else None
    devices = 1 if planned["gpus"] is None else planned["gpus"]
    result = dry_run(load_config(config, overrides or ()), device, devices)
    if as_json:
        print_json(result)
    else:
        print_dry_run(result, console())
