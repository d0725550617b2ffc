"""The probe: evaluations a second with what runs before a layer replayed, against evaluating the whole model each time.

Both ways evaluate the same ranks of the same layers, and give the same errors to the bit.
"""

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank.batches import Batch, call_model
from flexrank.benches import machine
from flexrank.benches.bench import Bench
from flexrank.data import read_texts, token_blocks
from flexrank.decomposition import decompose_
from flexrank.distillation import distillation_evaluator
from flexrank.environment import assets_directory
from flexrank.findings import Result, goal, spread, table
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.objectives import LogitObjective
from flexrank.profiles import SensitivityTable
from flexrank.sensitivity import block_stack, probe_sensitivity
from flexrank.surgery import full_profile, nested_layers, select_layers, use_profile
from flexrank.views import matrix_shape

MODEL = "pycode5m"
#: Tokens of a block; blocks of one batch; ranks of a layer, the full one included.
LENGTH, BLOCKS, LEVELS = 256, 4, 6
REPEATS, FASTER, MEBIBYTE = 2, 1.7, 2**20


def run(_: Path | None = None) -> Result:
    """Probes both ways, in turn."""
    place = assets_directory(MODEL) / MODEL
    teacher: nn.Module = load_model(place, "language")
    batches = token_blocks(load_tokenizer(place), read_texts(place / "val.txt", "\0"), LENGTH, BLOCKS)[:1]
    return measure(teacher, batches)


@torch.no_grad()
def measure(teacher: nn.Module, batches: Sequence[Batch]) -> Result:
    """As `run`, of any model whose output is logits."""
    model = factorised(teacher)
    evaluate = distillation_evaluator(teacher, batches, LogitObjective())
    tables: dict[str, list[SensitivityTable]] = {"replayed": [], "whole": []}
    runs = [
        lambda: tables["replayed"].append(probe_sensitivity(model, evaluate, LEVELS)),
        lambda: tables["whole"].append(probe_whole(model, evaluate, tables["replayed"][-1])),
    ]
    seconds = dict(zip(tables, machine.interleave(runs, REPEATS, 0), strict=True))
    one = tables["replayed"][-1]
    found = {
        "seconds": seconds,
        "evaluations": 1 + sum(len(ranks) - 1 for ranks in one.ranks.values()),
        "same": one.errors == tables["whole"][-1].errors,
        "parts": time_parts(model, evaluate, batches),
        "work": count_work(model, teacher, batches),
        "blocks": len(block_stack(model)),
        "ratios": [b / a for a, b in zip(seconds["replayed"], seconds["whole"], strict=True)],
    }
    settings = {"model": MODEL, "tokens": [LENGTH, BLOCKS], "levels": LEVELS, "repeats": REPEATS}
    shown = [_rates(found), _roofline(found), _memory(found)]
    return {"settings": settings, "tables": shown, "claims": _goals(found), "data": found}


def factorised(teacher: nn.Module) -> nn.Module:
    """A copy in elastic form; by the weights alone, for how good the components are plays no part."""
    model = copy.deepcopy(teacher)
    decompose_(model, list(select_layers(model)), method="svd")
    return model


def probe_whole(model: nn.Module, evaluate: Callable[[nn.Module], float], table: SensitivityTable) -> SensitivityTable:
    """The plain loop: a whole evaluation for every rank of every layer below the full one."""
    full, errors = full_profile(model), {}
    with use_profile(model, full):
        baseline = evaluate(model)
    for name, ranks in table.ranks.items():
        found = []
        for rank in ranks[:-1]:
            with use_profile(model, {**full, name: rank}):
                found.append(evaluate(model) - baseline)
        errors[name] = (*found, 0.0)
    return SensitivityTable(table.shapes, table.ranks, errors, baseline, table.footprint)


def time_parts(model: nn.Module, evaluate: Callable[[nn.Module], float], batches: Sequence[Batch]) -> dict[str, float]:
    """Median seconds of one evaluation, of its forwards, and of the loss alone."""
    objective = LogitObjective()
    with torch.inference_mode():
        outputs = [call_model(model, batch) for batch in batches]
        targets = [objective.target(output, batch) for output, batch in zip(outputs, batches, strict=True)]

        def losses() -> list[float]:
            kept = zip(outputs, targets, batches, strict=True)
            return [float(objective.loss(output, target, batch)) for output, target, batch in kept]

        runs = [lambda: evaluate(model), lambda: [call_model(model, batch) for batch in batches], losses]
        whole, forward, loss = map(statistics.median, machine.interleave(runs, 5))
    return {"evaluation": whole, "forward": forward, "loss": loss}


def count_work(model: nn.Module, teacher: nn.Module, batches: Sequence[Batch]) -> dict[str, float]:
    """Operations of one whole evaluation's matrices, bytes it reads and writes, and what stands in memory."""
    rows = sum(batch["input_ids"].numel() for batch in batches if isinstance(batch, Mapping))
    layers = nested_layers(model)
    shapes = [layer.matrix_shape for layer in layers.values()]
    products = sum(2 * (rows + min(m, n)) * m * n for m, n in shapes)  # materialised, then dense
    weights = sum(2 * m * n + (m + n) * min(m, n) for m, n in shapes)
    vocabulary, width = matrix_shape(teacher.get_submodule("lm_head"))
    stack = block_stack(model)
    within = [name for name in layers if stack and name.startswith(f"{stack[0][0]}.")]
    outputs = sum(layers[name].matrix_shape[0] for name in within[:-1])
    moved = rows * (sum(map(sum, shapes)) + 5 * vocabulary) + weights
    return {
        "operations": products + 2 * rows * vocabulary * width,
        "bytes": 4 * moved,
        "rows": rows,
        "targets": 4 * rows * vocabulary,
        "replayed modules": 4 * rows * outputs,
        "replayed block": 4 * rows * width,
        "rate": machine.product_rate(rows, width, 2 * width),
        "copy_rate": machine.copy_rate(),
    }  # fmt: skip


def _rates(found: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for way, seconds in found["seconds"].items():
        rate = [found["evaluations"] / one for one in seconds]
        rows.append([way, found["evaluations"], spread(seconds), statistics.median(rate)])
    columns = ["what runs before the layer", "evaluations", "seconds", "evaluations a second"]
    return table(f"probe of {MODEL}, {found['blocks']} blocks, {LEVELS} ranks a layer", columns, rows, digits=[0, 2, 2])


def _roofline(found: Mapping[str, Any]) -> dict[str, Any]:
    work, parts = found["work"], found["parts"]
    least = max(work["operations"] / work["rate"], work["bytes"] / work["copy_rate"])
    limits = [work["operations"] / 1e9, work["bytes"] / 1e9, work["rate"] / 1e9, work["copy_rate"] / 1e9]
    cells = ["whole", parts["evaluation"], parts["forward"], parts["loss"], *limits, least, least / parts["evaluation"]]
    columns = ["", "seconds", "forward", "loss", "GFLOP", "GB", "GFLOP/s here", "GB/s here", "least", "reached"]
    title = "roofline of one whole evaluation; attention's own products are left out"
    return table(title, columns, [cells], digits=[3, 3, 3, 1, 2, 0, 1, 3, 2])


def _memory(found: Mapping[str, Any]) -> dict[str, Any]:
    work = found["work"]
    whole = sum(work[what] for what in ("targets", "replayed modules", "replayed block"))
    rows = []
    for what, told in (
        ("targets", "the teacher's logits"),
        ("replayed modules", "outputs of one block's modules, at least"),
        ("replayed block", "one block's output"),
    ):
        rows.append([told, work[what] / MEBIBYTE, 1000 * work[what] / work["rows"] / MEBIBYTE, work[what] / whole])
    columns = ["of all samples", "MiB", "MiB of 1,000 tokens", "share"]
    return table("what the probe keeps", columns, rows, digits=[1, 1, 2])


def _goals(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    ratio, parts = statistics.median(found["ratios"]), found["parts"]
    loss = parts["loss"] / parts["evaluation"]
    alike = f"errors {'the same to the bit' if found['same'] else 'DIFFER'}"
    why = f"the loss, never replayed, is {loss:.0%} of an evaluation; {alike}"
    what = "evaluations a second by cached prefixes, over as many evaluations of the whole model"
    return [goal(what, f"at least {FASTER:g} times", f"{ratio:.2f} times", ratio >= FASTER and found["same"], why)]


def draw(data: Mapping[str, Any]) -> Any:
    """Evaluations a second, both ways."""
    from matplotlib.figure import Figure

    from flexrank.findings.figures import OTHER, OURS

    figure = Figure(figsize=(3.6, 2.6), layout="constrained")
    axes = figure.subplots()
    rates = {way: data["evaluations"] / statistics.median(seconds) for way, seconds in data["seconds"].items()}
    bars = axes.bar(list(rates), list(rates.values()), color=[OURS, OTHER], width=0.5)
    axes.bar_label(bars, fmt="%.1f")
    axes.set(ylabel="evaluations a second")
    return figure


BENCH = Bench(
    name="probe",
    title="Probe",
    measures="evaluations a second with cached prefixes, against whole evaluations of the same ranks",
    minutes=2,
    run=run,
    draw=draw,
    tried=("replaying whole blocks alone, for attention still ran for every later layer of a block",),
)
