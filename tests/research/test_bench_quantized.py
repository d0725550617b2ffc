"""The bench of precisions: codes and bytes by hand, the front by comparing all pairs, a tiny Llama all the way."""

import contextlib
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flexrank import deploy
from flexrank.data.metrics import nats_per_token
from flexrank.distill.objectives import LogitObjective
from flexrank.nn.gauge_aligned import GaugeAlignedLinear
from research.benches import quantized
from research.benches.quality import Subject
from research.experiment import Request
from research.result import shown_rows
from tiny import build, token_batch

pytest.importorskip("torchao")
# torchao's own, as it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def layer(columns: int, rows: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, rows))


@pytest.mark.parametrize(
    ("bits", "wanted"), [(16, 12288), (8, 6144 + 4 * 192), (4, 3072 + 4 * 192), (3, 2304 + 4 * 192)]
)
def test_bytes_and_codes_of_groups_of_thirty_two(bits: int, wanted: int) -> None:
    """96 rows of 64: two groups a row, so 192 scales of four bytes."""
    model = layer(64, 96)
    before = model[0].weight.detach().clone()
    assert quantized.quantize_(model, ["0"], bits) == wanted
    after = model(torch.eye(64)).T - model[0].bias[:, None]
    if bits == 16:
        torch.testing.assert_close(after, before.bfloat16().float())
        return
    groups, codes = before.view(96, 2, 32), after.detach().view(96, 2, 32)
    steps = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    assert ((codes - groups).abs() <= 0.51 * steps + 1e-6).all()
    assert max(len(group.unique()) for group in (codes / steps).round().reshape(-1, 32)) <= 2**bits


def test_a_row_has_one_scale_where_groups_do_not_divide_it() -> None:
    """60 columns divide by 4 alone; 48 by 16."""
    assert quantized.quantize_(layer(60, 10), ["0"], 8) == 600 + 4 * 10
    assert quantized.quantize_(layer(48, 10), ["0"], 8) == 480 + 4 * 30


def test_both_factors_and_no_other_layer_are_quantised() -> None:
    factors = GaugeAlignedLinear.from_factors(torch.randn(40, 8), torch.randn(64, 8), slack=8)
    model = nn.ModuleDict({"small": factors, "head": nn.Linear(64, 4)})
    size = quantized.quantize_(model, ["small"], 4)
    assert size == 256 + 4 * 16 + 160 + 4 * 40  # 8 rows of two groups, and 40 rows of one
    assert type(factors.latent.weight).__name__ == type(factors.expand.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert type(model["head"].weight) is nn.Parameter


def test_a_factor_of_one_column_keeps_sixteen_bits_and_no_other_does() -> None:
    model = nn.ModuleDict({"rank 1": nn.Linear(1, 40, bias=False), "after it": nn.Linear(64, 10, bias=False)})
    assert quantized.quantize_(model, ["rank 1", "after it"], 8) == 80 + 640 + 4 * 20
    assert type(model["rank 1"].weight) is nn.Parameter


@pytest.mark.parametrize("more_is_better", [True, False])
def test_the_front_is_what_no_other_point_beats(more_is_better: bool) -> None:
    draw = random.Random(0)
    points = [{"bytes": draw.randrange(9), "score": draw.randrange(9)} for _ in range(40)]
    sign = 1 if more_is_better else -1

    def beaten(one: Any) -> bool:
        return any(
            other["bytes"] <= one["bytes"] and sign * other["score"] >= sign * one["score"]
            and (other["bytes"], other["score"]) != (one["bytes"], one["score"])
            for other in points
        )  # fmt: skip

    wanted = {(one["bytes"], one["score"]) for one in points if not beaten(one)}
    front = quantized.in_front(points, more_is_better)
    assert {(one["bytes"], one["score"]) for one in front} == wanted and len(front) == len(wanted) > 1


def test_table_and_verdict_by_hand() -> None:
    def point(form: str, budget: float, bits: int, score: float = 0.0) -> dict[str, Any]:
        return {"form": form, "budget": budget, "bits": bits, "bytes": bits * budget * 1e6, "score": score}

    points = [point("base model", 1.0, bits, bits / 16) for bits in quantized.BITS]
    sizes = itertools.product(quantized.FORMS, quantized.BUDGETS, quantized.BITS)
    # 4 MB: above the base model's 4 bits (4 MB, .25), not its 6 (6 MB, .375).
    points += [point(*one, 0.35 if one == ("plain", 0.5, 8) else 0.0) for one in sizes]
    shown = {tuple(row[:2]): row[2:] for row in shown_rows(quantized._table("all-MiniLM-L6-v2", points))}
    assert shown["plain", "8"][4] == "4.00 0.3500 *" and shown["aligned", "8"][4] == "4.00 0.0000"
    base = [shown["base model", str(bits)][0] for bits in (6, 4, 3)]
    assert base == ["6.00 0.3750 *", "4.00 0.2500", "3.00 0.1875 *"]
    goal = quantized._goal("all-MiniLM-L6-v2", points)
    assert (goal["goal"], goal["here"], goal["holds"]) == ("4 of 4", "1 (bits: 4)", False)
    points[1]["score"] = 0.3  # 8 bits, behind the base model's own 6, and behind the size
    assert quantized._goal("all-MiniLM-L6-v2", points)["here"] == "2 (bits: 8, 4)"
    points[1]["score"] = 0.37  # behind its own 6 alone
    assert quantized._goal("all-MiniLM-L6-v2", points)["here"] == "1 (bits: 4)"


def test_every_size_is_scored_in_every_form_at_every_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    teacher, batch = build("llama_untied"), token_batch()
    scored, asked = [], []

    def score(model: Any) -> dict[str, float]:
        scored.append({one.dtype for one in model.parameters()})
        return {"nats": nats_per_token(model, [batch])}

    def deployed(*arguments: Any, activations: Any, **options: Any) -> Any:
        asked.append(options)
        return deploy(*arguments, activations=activations, **options)

    monkeypatch.setattr(quantized, "deploy", deployed)
    subject = Subject(teacher, [batch], [batch], LogitObjective(), score, ("lm_head",))
    monkeypatch.setattr(quantized, "BUDGETS", (0.6, 0.3))
    monkeypatch.setattr(quantized, "BITS", (16, 4))
    monkeypatch.setattr(quantized, "TRAINING", {"pycode5m": {"steps": 2, "learning_rate": 1e-4}})
    training = subject, [batch], LogitObjective(), lambda model: contextlib.nullcontext()
    monkeypatch.setattr(quantized, "_training_of", lambda name, request: training)
    result = quantized.run(Request(tmp_path))
    points = result["data"]["pycode5m"]
    forms = [("base model", 1.0), *((form, budget) for budget in (0.6, 0.3) for form in quantized.FORMS)]
    assert [(one["form"], one["budget"], one["bits"]) for one in points] == [
        (*one, n) for one in forms for n in (16, 4)
    ]
    base, by_place = points[0], {(one["form"], one["budget"], one["bits"]): one for one in points}
    matrices = [part for name, part in teacher.named_modules() if isinstance(part, nn.Linear) and name != "lm_head"]
    assert base["bytes"] == 2 * sum(part.weight.numel() for part in matrices)
    assert base["score"] == pytest.approx(nats_per_token(teacher, [batch]), abs=0.02)
    assert by_place["aligned", 0.6, 16]["bytes"] <= 0.6 * base["bytes"]
    # Of rank r, plain factors have r(m + n) numbers, which alignment without slack lessens by r².
    assert by_place["plain", 0.3, 16]["bytes"] > by_place["aligned", 0.3, 16]["bytes"]
    same = [by_place[form, 0.3, 16]["score"] for form in ("aligned", "plain")]
    assert same[0] == pytest.approx(same[1], abs=0.05)  # both rounded to bfloat16
    assert all(points[n]["bytes"] > points[n + 1]["bytes"] for n in range(0, len(points), 2))
    assert asked == 2 * [{}, {"dtype": torch.bfloat16}, {"slack": 2**30}] and scored == len(points) * [{torch.float32}]
    assert all(type(part.weight) is nn.Parameter for part in matrices)  # the base model is as it was
    assert len(quantized.draw(result["data"]).axes) == 1
    monkeypatch.setattr(quantized, "measure", None)  # all is kept
    assert quantized.run(Request(tmp_path))["data"] == result["data"]
