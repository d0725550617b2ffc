"""`python -m research.originals CLONES`: compares the rivals with their authors' code, and writes docs/baselines.md.

CLONES is a directory with a clone of each original at its commit; if one is missing, the error gives the command.
"""

import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from flexrank.cli.exits import OneLineErrors
from flexrank.errors import FlexrankError
from flexrank.files import write_text
from research.originals import ORIGINALS
from research.originals.original import Row

app = typer.Typer(cls=OneLineErrors, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

PAGE = Path("docs", "baselines.md")
HEAD = """# Rivals beside their authors' code

`python -m research.originals CLONES` writes this page. It imports the authors' functions from clones of their
repositories, and runs them on a random Llama of two blocks in float32. The rivals in `research/baselines` are written
from the papers, and none of the authors' code is in this repository. A difference is ‖ours − theirs‖ / ‖ours‖, the
largest over layers and ranks. A difference without a bound has no verdict.

Plain SVD, FWSVD, DRONE, the ranks of SVD-LLM V2, A3 and, among the trained rivals, LLM-Pruner, nested widths and
LayerSkip are not compared with any code. They follow their papers alone (A3 follows what is known of its paper), and
the authors' code may be better. Each file of `research/baselines` begins with its departures from the paper. Uniform
ranks, and those of SVD-LLM V2, use up what rounding to whole ranks leaves over; the originals do not, and the
comparison here leaves it out.
"""


@app.callback()
def _group() -> None:
    """Rivals beside their authors' code."""


@app.command()
def compare(
    clones: Annotated[Path, typer.Argument(help="The directory that holds the clones.")],
    page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE,
) -> None:
    """Compares every original, and writes the page; fails if a difference is beyond its bound."""
    places = {name: original.clone_in(clones) for name, original in ORIGINALS.items()}
    rows = {name: original.compare(places[name]) for name, original in ORIGINALS.items()}
    write_text(page, text_of(rows))
    failed = [f"{name}: {one['what']}" for name, found in rows.items() for one in found if one["holds"] is False]
    if failed:
        raise FlexrankError(f"{page}: {len(failed)} of the differences are beyond their bounds: {'; '.join(failed)}")
    typer.echo(f"{page}: {sum(map(len, rows.values()))} differences with {', '.join(rows)}")


def text_of(rows: Mapping[str, Sequence[Row]]) -> str:
    """Returns the page's text."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    parts = [HEAD, f"Python {platform.python_version()}, {versions}.\n"]
    for name, found in rows.items():
        original = ORIGINALS[name]
        parts.append(f"## {name}\n\n{original.url} at `{original.commit}`.\n\n{(original.about or '').strip()}\n")
        lines = ["| what | difference | bound | holds |", "|---|---|---|---|", *map(_line, found)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(one: Row) -> str:
    bound = "–" if one["bound"] is None else f"{one['bound']:.0e}" if one["bound"] else "0"
    verdict = {None: "–", True: "yes", False: "no"}[one["holds"]]
    return f"| {one['what']} | {one['difference']:.1e} | {bound} | {verdict} |"


if __name__ == "__main__":
    app(["compare", *sys.argv[1:]], prog_name="python -m research.originals")
