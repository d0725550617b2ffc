"""Prints the result of a dry run."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from flexrank.run.tables import count, new_table, print_line

PARTS = (
    "teacher", "student", "gradients", "optimizer", "activations", "moments", "factors", "buffers", "matrices",
    "targets", "replayed", "gathered", "outputs", "deployed", "all",
)  # fmt: skip
STYLE: dict[str, Any] = {"title_justify": "left"}


def print_dry_run(result: Mapping[str, Any], console: Console) -> None:
    """Prints what `dry_run` returned: a summary, four tables, the plan in one line, and what the figures mean."""
    for line in _summary(result):
        print_line(console, line)
    work = _plan(result["plan"]) if "plan" in result else _work(result)
    for table in (_layers(result), _budgets(result), _memory(result), work):
        console.print(table)
    if "plan" in result:
        print_line(console, _sum(result["plan"]))
    for note in result["notes"]:
        print_line(console, note)


def _summary(result: Mapping[str, Any]) -> list[str]:
    sizes, probe, moments = result["parameters"], result["probe"], result["moments"]
    source, batch = result["architecture"] or result["model"], result["samples_per_step"]
    return [
        f"{result['name']}: {result['class']} from {source}, {count(sizes['model'])} parameters of {result['dtype']}; "
        "nothing is loaded and nothing written",
        f"factorised: {probe['layers']} layers of {count(sizes['layers'])} parameters; U and V at full rank "
        f"{count(sizes['factors'])}; trained {count(sizes['trained'])}",
        f"probe: {probe['candidates']} candidates ({probe['layers']} x {probe['levels']}), "
        f"{probe['evaluations']} evaluations; moments {count(moments['all'])}B, of the largest block "
        f"{count(moments['largest_block'])}B",
        f"consolidation: {result['steps']} steps of {batch} samples of {result['sample_tokens']} tokens, "
        f"{count(result['tokens'])} tokens in all",
    ]


def _layers(result: Mapping[str, Any]) -> Table:
    columns = ["layer", "matrix", "number", "parameters", "format"]
    table = new_table(columns, left=("layer", "format"), title="layers", **STYLE)
    for row in result["layers"]:
        shape = " x ".join(map(str, row["shape"]))
        table.add_row(row["kind"], shape, str(row["layers"]), count(row["parameters"]), "factorised")
    for row in result["dense"]:
        table.add_row(row["kind"], "", str(row["modules"] or ""), count(row["parameters"]), f"dense: {row['reason']}")
    return table


def _budgets(result: Mapping[str, Any]) -> Table:
    columns = ["budget", "mean rank", "params, layers", "params, model", "bytes, deployed"]
    table = new_table(columns, title="sizes", **STYLE)
    for row in result["budgets"]:
        sizes = count(row["params_layers"]), count(row["params_model"]), f"{count(row['bytes'])}B"
        table.add_row(f"{row['budget']:g}", f"{row['mean_rank']:.0f}", *sizes)
    return table


def _memory(result: Mapping[str, Any]) -> Table:
    names = {"optimizer": "AdamW", "all": "in all"}
    held = [part for part in PARTS if any(part in parts for parts in result["memory"].values())]
    columns = ["stage", *(names.get(part, part) for part in held)]
    table = new_table(columns, left=("stage",), title="memory, bytes", **STYLE)
    for stage, parts in result["memory"].items():
        table.add_row(stage, *(count(parts[part]) if part in parts else "" for part in held))
    return table


def _work(result: Mapping[str, Any]) -> Table:
    table = new_table(["stage", "operations"], left=("stage",), title="work", **STYLE)
    for stage, operations in result["operations"].items():
        table.add_row("in all" if stage == "all" else stage, count(operations))
    return table


def _plan(plan: Mapping[str, Any]) -> Table:
    columns = ["stage", "bytes a device", "fits", "operations a device", "hours", "money"]
    device, stages = plan["device"], plan["stages"]
    title = f"plan: {plan['devices']} x {device['name']} of {count(device['memory'])}B"
    table = new_table(columns, left=("stage", "fits"), title=title, **STYLE)
    for stage, row in stages.items():
        missing, work = row["bytes_missing"], row["work"]
        fits = f"no, by {count(missing)}B" if missing else "yes"
        operations = count(round(work["operations"])) if work else "-"
        table.add_row(stage, count(row["bytes"]), fits, operations, _hours(row["hours"]), _money(row["money"]))
    table.add_row("in all", "", "yes" if plan["fits"] else "no", "", _hours(plan["hours"]), _money(plan["money"]))
    return table


def _sum(plan: Mapping[str, Any]) -> str:
    speed, price = plan["tokens_per_second"], plan["device"]["price"]
    cost = f"{plan['money']:,.2f} at {price:g} an hour and device" if price is not None else "no price: give --price"
    return f"plan: {_hours(plan['hours'])} hours, {count(round(speed or 0))} tokens per second in consolidation; {cost}"


def _money(money: float | None) -> str:
    return "-" if money is None else f"{money:,.2f}"


def _hours(hours: float | None) -> str:
    if hours is None:
        return "-"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
