"""Prints a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flexrank.run.report import count

PARTS = ("teacher", "student", "gradients", "optimizer", "moments", "targets", "outputs", "all")
SCALES = ((1e18, "E"), (1e15, "P"), (1e12, "T"))


def print_plan(plan: Mapping[str, Any], console: Console) -> None:
    """Prints what `make_plan` found: four tables, and what their figures mean."""
    for line in _heading(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_layers(plan))
    console.print(_budgets(plan))
    console.print(_stages(plan))
    for note in plan["notes"]:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _heading(plan: Mapping[str, Any]) -> list[str]:
    sizes, probe, moments = plan["parameters"], plan["probe"], plan["moments"]
    source, batch = plan["architecture"] or plan["model"], plan["samples_per_step"]
    return [
        f"{plan['name']}: {plan['class']} from {source}, {count(sizes['model'])} parameters of {plan['dtype']}; "
        "nothing is loaded and nothing written",
        f"factorised: {probe['layers']} layers of {count(sizes['layers'])} parameters; U and V at full rank "
        f"{count(sizes['factors'])}; trained {count(sizes['trained'])}",
        f"probe: {probe['candidates']} candidates ({probe['layers']} x {probe['levels']}), "
        f"{probe['evaluations']} evaluations; moments {_bytes(moments['all'])}, of the largest block "
        f"{_bytes(moments['largest_block'])}",
        f"consolidation: {plan['steps']} steps of {batch} samples of {plan['sample_tokens']} tokens, "
        f"{_scaled(plan['tokens'])} tokens in all",
    ]


def _layers(plan: Mapping[str, Any]) -> Table:
    table = _table("layers", ["layer", "matrix", "number", "parameters", "form"], left=("layer", "form"))
    for row in plan["layers"]:
        shape = " x ".join(map(str, row["shape"]))
        table.add_row(row["kind"], shape, str(row["layers"]), count(row["parameters"]), "factorised")
    for row in plan["dense"]:
        number = str(row["modules"]) if row["modules"] else ""
        table.add_row(row["kind"], "", number, count(row["parameters"]), f"dense: {row['reason']}")
    return table


def _budgets(plan: Mapping[str, Any]) -> Table:
    columns = ["budget", "mean rank", "params, layers", "params, model", "bytes, deployed"]
    table = _table("sizes, by uniform profile", columns)
    for row in plan["budgets"]:
        sizes = count(row["params_layers"]), count(row["params_model"]), _bytes(row["bytes"])
        table.add_row(f"{row['budget']:g}", f"{row['mean_rank']:.0f}", *sizes)
    return table


def _stages(plan: Mapping[str, Any]) -> Table:
    parts_of = [*PARTS[:3], "AdamW", *PARTS[4:7], "bytes in all"]
    columns = ["stage", *parts_of, "operations", f"hours at {plan['tflops']:g} T/s"]
    table = _table("stages", columns, left=("stage",))
    for stage, parts in plan["memory"].items():
        cells = [_bytes(parts[part]) if part in parts else "" for part in PARTS]
        table.add_row(stage, *cells, _scaled(plan["operations"][stage]), _hours(plan["hours"][stage]))
    blank = [""] * len(PARTS)
    table.add_row("in all", *blank, _scaled(plan["operations"]["all"]), _hours(plan["hours"]["all"]))
    return table


def _table(title: str, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def _bytes(number: int) -> str:
    return f"{count(number)}B"


def _scaled(number: int) -> str:
    """A count of any size: 5.24G, 31.2P, 88E."""
    for scale, unit in SCALES:
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return count(number)


def _hours(hours: float | None) -> str:
    if hours is None:
        return "-"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
