"""Sizes and precisions together: quality by bytes, against the base model quantised alone.

One short consolidation gives all sizes; torchao quantises the deployed models, weights only, after training. Gauge
alignment saves parameters but spreads their values, so each size is deployed with the slack of float32, with that of
bfloat16, and as plain factors. Bytes are those of the decomposed layers, dense or factorised, in a packed file: codes
side by side, and a float32 scale for each group of weights. torchao's tensors hold a byte for each code.
"""

import copy
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flexrank import (
    ProfileChain,
    allocate_ranks,
    collect_rows,
    deploy,
    distill_,
    distillation_evaluator,
    probe_sensitivity,
)
from flexrank.distill.objectives import EmbeddingObjective, Objective
from flexrank.hf.models import eager_attention, hidden_states
from flexrank.nn.switch import nested_layers
from flexrank.run.training import autocast_dtype
from research.benches import language, sts
from research.benches.quality import Subject
from research.experiment import Experiment, Ledger, Request
from research.figures import NEUTRAL, panels
from research.result import Result, goal, measured, table

#: Sizes besides the base model, 1; bits of a weight, 16 being bfloat16; weights per scale; levels of the probe.
BUDGETS, BITS, GROUP, LEVELS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), (16, 8, 6, 4, 3), 32, 6
#: How a size is deployed; `plain` leaves every column unaligned.
FORMS: dict[str, dict[str, Any]] = {
    "aligned": {}, "for bfloat16": {"dtype": torch.bfloat16}, "plain": {"slack": 2**30}
}  # fmt: skip
#: A layer whose inputs do not divide into groups of at least this many has one scale for each row.
LEAST_GROUP = 8
#: For each model: its score, whether more of it is better, and how it is consolidated.
SCORES = {"all-MiniLM-L6-v2": ("cosine", True), "pycode5m": ("nats", False)}
TRAINING: dict[str, dict[str, Any]] = {
    "all-MiniLM-L6-v2": {"steps": 400, "learning_rate": 1e-4, "warmup_steps": 20},
    "pycode5m": {"steps": 200, "learning_rate": 2e-4, "warmup_steps": 10},
}
Point = dict[str, Any]  #: a size: its budget, form, bits per weight, the bytes of its weights, and its score


def run(request: Request) -> Result:
    """Consolidates each model once, and scores every size in every form at every precision."""
    settings = {"budgets": BUDGETS, "levels": LEVELS, "half": request.half}
    data = {}
    for name, training in TRAINING.items():
        ledger = Ledger(request.work, {"model": name, **training, **settings})
        unit = f"points of {BITS} bits in groups of {GROUP}, {', '.join(FORMS)}"
        data[name] = ledger.take(unit, measure, name, request, ledger)
    settings |= {"bits": BITS, "group": GROUP}
    tables = [_table(name, points) for name, points in data.items()]
    return measured(settings | TRAINING, tables, [_goal(name, points) for name, points in data.items()], data)


def measure(name: str, request: Request, ledger: Ledger) -> list[Point]:
    """Returns the points of the base model at every precision, then those of every size."""
    subject, batches, objective, forwards = _training_of(name, request)
    model = subject.decomposed("fisher")
    rows = collect_rows(model, subject.calibration, nested_layers(model))
    evaluate = distillation_evaluator(subject.teacher, subject.probe, subject.objective)
    chosen = ledger.take("chain", lambda: allocate_ranks(probe_sensitivity(model, evaluate, LEVELS), BUDGETS).to_json())
    chain = ProfileChain.from_json(chosen)
    with forwards(model):
        distill_(
            model, subject.teacher, batches, chain, objective=objective, checkpoint=ledger.directory / "training",
            autocast=autocast_dtype("auto", torch.device("cpu")), **TRAINING[name],
        )  # fmt: skip
    score = functools.partial(_points, subject, SCORES[name][0], list(nested_layers(model)))
    points = score(subject.teacher, 1.0, "base model")
    for budget, form in itertools.product(BUDGETS, FORMS):
        small = deploy(model, chain.at(budget), activations=rows, **FORMS[form])
        points += score(small.to(next(model.parameters()).dtype), budget, form)
    return points


def _training_of(name: str, request: Request) -> tuple[Subject, Any, Objective, Any]:
    """Returns a model, its training batches and objective, and the context in which its forward passes run."""
    if name == "pycode5m":
        subject, batches = language.subject_of(language.PYCODE, request.half)
        return subject, batches, language.FOLLOWED, lambda model: hidden_states(model, subject.teacher)
    subject, batches = sts.subject_of(request.half)
    return subject, batches, EmbeddingObjective(sts.HIDDEN_WEIGHT), eager_attention


def _points(
    subject: Subject, measure: str, layers: Sequence[str], model: nn.Module, budget: float, form: str
) -> list[Point]:
    points = []
    for bits in BITS:
        low = copy.deepcopy(model)
        facts = {"budget": budget, "form": form, "bits": bits, "bytes": quantize_(low, layers, bits)}
        points.append(facts | {"score": subject.score(low)[measure]})
    return points


def quantize_(model: nn.Module, layers: Sequence[str], bits: int) -> int:
    """Quantises the weights of these layers, or of both their factors, in place; returns the bytes of a packed file."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    size = 0
    for part in (
        part for name in layers for part in model.get_submodule(name).modules() if isinstance(part, nn.Linear)
    ):
        count, group = part.weight.numel(), math.gcd(GROUP, part.in_features)
        group = group if group >= LEAST_GROUP else part.in_features
        width = bits if part.in_features > 1 else 16  # torchao accepts no matrix of one column
        if width == 16:
            part.weight.data = part.weight.data.bfloat16().to(part.weight.dtype)
        else:
            quantize_(part, IntxWeightOnlyConfig(getattr(torch, f"int{width}"), PerGroup(group)), lambda *_: True)
        size += math.ceil(count * width / 8) + (4 * count // group if width < 16 else 0)
    return size


def in_front(points: Sequence[Point], more_is_better: bool) -> list[Point]:
    """Returns the points, by bytes, that no point of as few bytes or fewer surpasses."""
    front: list[Point] = []
    sign = -1 if more_is_better else 1
    for point in sorted(points, key=lambda one: (one["bytes"], sign * one["score"])):
        if not front or sign * point["score"] < sign * front[-1]["score"]:
            front.append(point)
    return front


def _table(name: str, points: Sequence[Point]) -> dict[str, Any]:
    measure, more_is_better = SCORES[name]
    front = in_front(points, more_is_better)
    cells = {
        (one["form"], one["bits"], one["budget"]):
            f"{one['bytes'] / 1e6:.2f} {one['score']:.4f}{' *' if one in front else ''}"
        for one in points
    }  # fmt: skip
    rows = [["base model", str(bits), cells["base model", bits, 1.0], *[""] * (len(BUDGETS) - 1)] for bits in BITS]
    rows += [
        [form, str(bits), *(cells[form, bits, budget] for budget in BUDGETS)]
        for form, bits in itertools.product(FORMS, BITS)
    ]
    title = f"{name}: MB of the decomposed layers, and {measure}; * nothing of as few bytes is better"
    return table(title, ["", "bits", *BUDGETS], rows)


def _goal(name: str, points: Sequence[Point]) -> dict[str, Any]:
    """Returns the goal on how many precisions of the base model are behind a size of as few bytes."""
    sizes = [one for one in points if one["budget"] < 1]
    low = [one for one in points if one["budget"] == 1 and one["bits"] < 16]
    behind = [one for one in low if one not in in_front([one, *sizes], SCORES[name][1])]
    what = f"{name}: precisions of the base model, below bfloat16, behind a size of as few bytes"
    bits = ", ".join(f"{one['bits']:g}" for one in behind) or "none"
    return goal(what, f"{len(low)} of {len(low)}", f"{len(behind)} (bits: {bits})", len(behind) == len(low))


def draw(data: Mapping[str, Sequence[Point]]) -> Any:
    """Draws the score by bytes, a panel for each model.

    Each precision has a line of the best form of each size; the base model is grey.
    """
    import matplotlib

    figure, axes = panels(len(data), (5 * len(data), 3.8))
    colours = matplotlib.colormaps["viridis"].resampled(len(BITS))
    for panel, (name, points) in zip(axes, data.items(), strict=True):
        measure, more_is_better = SCORES[name]
        sizes = [one for one in points if one["budget"] < 1]
        for number, bits in enumerate(BITS):
            line = in_front([one for one in sizes if one["bits"] == bits], more_is_better)
            panel.plot(*_places(line), "o-", color=colours(number), markersize=4, label=f"{bits} bits")
        panel.plot(*_places([one for one in points if one["budget"] == 1]), "s--", color=NEUTRAL, label="base model")
        panel.set(title=name, xlabel="MB of the decomposed layers", ylabel=measure)
        shown = [one["score"] for one in points if one["bits"] == BITS[0]]
        best, worst = (max, min) if more_is_better else (min, max)
        span = worst(shown) - best(shown)
        panel.set_ylim(*sorted((best(shown) - 0.05 * span, worst(shown) + 0.5 * span)))
    axes[0].legend()
    return figure


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [one["bytes"] / 1e6 for one in points], [one["score"] for one in points]


EXPERIMENT = Experiment(
    "quantized", "Sizes and precisions together",
    "quality by bytes, those of packed files, of every size at every precision, against the base model quantised alone",
    minutes=45, has_halves=True, run=run, draw=draw,
)  # fmt: skip
