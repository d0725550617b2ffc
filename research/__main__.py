"""`python -m research NAME`: runs a study of the paper or a bench of the package.

Standard output holds only the result: tables, or one JSON object with --json. Everything else goes to standard error.
Invalid input prints one line there, and the process exits with status 2.
"""

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flexrank.cli.exits import INTERRUPTED, OneLineErrors
from flexrank.errors import FlexrankError

app = typer.Typer(cls=OneLineErrors, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _group() -> None:
    """The evidence for flexrank."""


@app.command()
def run(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A study or bench; --list names them.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Shows each one's cost and what it measures.")] = False,
    studies: Annotated[bool, typer.Option("--all", help="Runs the quick form of every study.")] = False,
    benches: Annotated[bool, typer.Option("--benches", help="Runs every bench.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The paper's size of it, instead of the quick form.")] = False,
    model: Annotated[str | None, typer.Option(help="Any causal language model; of compare one of its own.")] = None,
    config: Annotated[Path | None, typer.Option(help="A run's YAML: its model, data and settings.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes a key.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many, where chance enters.")] = None,
    domain: Annotated[Path | None, typer.Option(help="Texts of the second domain (adaptation).")] = None,
    half: Annotated[str, typer.Option(help="Of what is held out; tuning to choose settings.")] = "reporting",
    tasks: Annotated[str | None, typer.Option(help="Of lm-eval, of a comparison with --config: piqa.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="With --tasks: a folder of task files of your own.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Parts of a comparison that run at once.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write; results/NAME by default.")] = None,
    page: Annotated[bool, typer.Option("--page", help="Then writes the pages of docs/.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prints one JSON object, last on standard output.")] = False,
) -> None:
    """Runs a study or bench: writes results/NAME/result.json and its figure, and prints its tables."""
    from research import runner

    options = runner.Options(
        full, model, config, tuple(overrides or ()), seeds, domain, output, half, tasks, include_path, jobs
    )
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            answer = _answer(name, listed, studies, benches, page, options)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last finished part", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))


def _answer(name: str | None, listed: bool, studies: bool, benches: bool, page: bool, options: Any) -> Any:
    """Runs the experiments and returns what `--json` prints: the list, the one result, or the results by name."""
    from research import runner
    from research.experiment import BENCHES, STUDIES

    if listed:
        if name is not None or studies or benches or page or options != runner.Options():
            raise FlexrankError("--list shows all experiments; it takes no other option but --json")
        return runner.list_experiments()
    if (name is not None) + studies + benches != 1 and (name is not None or studies or benches or not page):
        raise FlexrankError("give one experiment's NAME, or --all, or --benches, or --list, or --page alone")
    names = STUDIES * studies + BENCHES * benches
    answer = runner.run_all(names, options) if name is None else runner.run_named(name, options)
    if page:
        runner.refresh_pages()
    return answer


def main() -> None:
    """The entry point. It supplies the only verb, so nobody has to type it."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("flexrank").setLevel(logging.INFO)
    app(["run", *sys.argv[1:]], prog_name="python -m research")


if __name__ == "__main__":
    main()
