"""What tables and figures share: short counts, the order of layers, and tables on a console."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

#: The style of tables without rules.
PLAIN: dict[str, Any] = {"box": None, "padding": (0, 2)}


def count(number: int) -> str:
    """A count with three or four digits: 31.20P, 10.62M, 381k, 950."""
    for scale, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.2f}{unit}" if number / scale < 100 else f"{number / scale:.0f}{unit}"
    return str(number)


def split_block(name: str) -> tuple[str, str]:
    """A layer's block (its name up to the first number) and the rest; the block is "" for a layer outside blocks."""
    parts = name.split(".")
    for number, part in enumerate(parts[:-1], 1):
        if part.isdigit():
            return ".".join(parts[:number]), ".".join(parts[number:])
    return "", name


def ordered_layers(layers: Iterable[str]) -> list[str]:
    """Layer names in the model's order, those of one block together."""
    blocks: dict[str, list[str]] = {}
    for name in layers:
        blocks.setdefault(split_block(name)[0] or name, []).append(name)
    return [name for names in blocks.values() for name in names]


def new_table(columns: Sequence[str], left: Sequence[str] = (), **style: Any) -> Table:
    """A table whose columns are right-aligned, except those in `left`."""
    table = Table(**{"box": box.SIMPLE, **style})
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def print_line(console: Console, line: str) -> None:
    """Prints a line unchanged and unwrapped, however long."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_artefact(directory: Path, artefact: Mapping[str, Any], console: Console) -> None:
    """Prints what `inspect_artefact` returns: kind, sizes, budgets and layers; for an export, its runtime and error."""
    size = f"{count(artefact['bytes_on_disk'])}B on disk"
    if "to" in artefact:
        print_line(console, f"{directory}: {artefact['class']} for {artefact['to']}, {artefact['dtype']}, {size}")
        near = f"{artefact['error']:.1e} of the deployed model's, relative (bound {artefact['bound']:.0e})"
        print_line(console, f"takes {', '.join(artefact['inputs'])}; outputs are within {near}")
        print_line(console, "written by " + ", ".join(f"{name} {one}" for name, one in artefact["versions"].items()))
        return
    values = f"{count(artefact['parameters'])} parameters of {artefact['dtype']}"
    print_line(console, f"{directory}: {artefact['kind']} {artefact['class']}, {values}, {size}")
    if artefact.get("budgets"):
        console.print(_budgets(artefact["budgets"]))
    console.print(_layers(artefact["layers"]))


def _budgets(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table(["budget", "mean rank", "params, layers", "params, model", "tensors"], **PLAIN)
    for row in reversed(rows):
        cells = count(row["params_layers"]), count(row["params_model"]), f"{count(row['bytes'])}B"
        table.add_row(f"{row['budget']:g}", f"{row['mean_rank']:.1f}", *cells)
    return table


def _layers(layers: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = ["layer", "format", "shape", "rank"]
    table = new_table(columns, left=columns, **PLAIN)
    for name, spec in layers.items():
        form = spec["form"]
        if form == "aligned":  # without aligned rows it is plain U Vᵀ
            form = "gauge-aligned" if spec["aligned"] else "low-rank"
        rank = f"{spec.get('rank', 'full')}" + (", full" if spec.get("dense") else "")
        table.add_row(name, form, " x ".join(map(str, spec["shape"])), rank)
    return table
