"""The bench of self-speculative decoding on a tiny Llama: what is accepted, by a plain loop without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexrank.artefacts.elastic import load_elastic
from flexrank.distill.objectives import LogitObjective
from flexrank.nn.switch import use_profile
from flexrank.profiles import ProfileChain
from research.benches import speculative
from research.benches.quality import Subject
from research.experiment import Request
from research.result import shown_rows
from tiny import VOCABULARY, build, chain_of, elastic, token_batch, with_sizes

SETTINGS = {"DRAFTS": (0.5, 0.25), "CALIBRATION": 1, "STEPS": 2, "DRAFTED": 3, "PROMPTS": 2, "NEW": 8, "REPEATS": 1}
TEXTS = list(torch.randint(3, VOCABULARY, (2, 1, 5), generator=torch.Generator().manual_seed(0)))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in SETTINGS.items():
        monkeypatch.setattr(speculative, name, value)
    return monkeypatch


@torch.no_grad()
def next_token(model: Any, ids: Tensor) -> int:
    logits = model(ids).logits[0, -1]
    logits[model.generation_config.eos_token_id] = -torch.inf
    return int(logits.argmax())


def by_a_plain_loop(model: Any, chain: ProfileChain, budget: float) -> tuple[int, int]:
    """Calls of the large size and of the draft."""
    checks = drafts = 0
    for text in TEXTS:
        ids, end = text, text.shape[1] + 8
        while ids.shape[1] < end:
            guess, count = ids, min(3, end - ids.shape[1] - 1)
            with use_profile(model, chain.at(budget)):
                for _ in range(count):
                    guess = torch.cat([guess, torch.tensor([[next_token(model, guess)]])], 1)
            checks, drafts = checks + 1, drafts + count
            for place in range(count + 1):
                ids = torch.cat([ids, torch.tensor([[next_token(model, ids)]])], 1)
                if place < count and ids[0, -1] != guess[0, ids.shape[1] - 1]:
                    break
    return checks, drafts


def test_accepted_tokens_are_those_of_a_plain_loop() -> None:
    model = with_sizes(elastic("llama_untied"))
    chain = chain_of(model)
    data = speculative.measure(model, chain, build("llama_untied"), TEXTS)
    assert [row["budget"] for row in data["rows"]] == [0.5, 0.25]
    for row in data["rows"]:
        checks, drafts = by_a_plain_loop(model, chain, row["budget"])
        share = chain.model_parameters(chain.entry_at(row["budget"])) / chain.model_parameters(chain.entries[-1])
        assert row["equal"] == 2 and row["tokens"] == 16 / checks
        assert row["accepted"] == (16 - checks) / drafts
        assert row["bound"] == pytest.approx(16 / (checks + share * drafts))
        assert min(row["rate"], row["speed"], row["deployed"], data["base"], data["large"]) > 0
    assert 0 < max(row["accepted"] for row in data["rows"]) < 1


def test_it_consolidates_once_and_says_whether_it_pays(tiny: pytest.MonkeyPatch, tmp_path: Path) -> None:
    batch, base = token_batch(), build("llama_untied")
    subject = Subject(base, [batch] * 2, [batch], LogitObjective(), lambda model: {})
    tiny.setattr(speculative, "subject_of", lambda texts: (subject, [batch]))
    tiny.setattr(speculative, "assets_directory", lambda *names: tmp_path)
    tiny.setattr(speculative, "load_model", lambda path, task: base)
    tiny.setattr(speculative, "prompts", lambda: TEXTS)
    measured: list[ProfileChain] = []

    def measure(model: Any, chain: ProfileChain, *_: Any) -> dict[str, Any]:
        measured.append(chain)
        keys = {"accepted": 0.5, "tokens": 2.0, "rate": 63.0, "deployed": 0.8, "bound": 1.5}
        rows = [{"budget": b, "equal": 2, "speed": s, **keys} for b, s in ((0.5, 0.7), (0.25, 0.9))]
        return {"base": 100.0, "large": 90.0, "rows": rows}

    tiny.setattr(speculative, "measure", measure)
    result = speculative.run(Request(tmp_path))
    assert set(measured[0].budgets) == {0.25, 0.5, 1.0}
    artefact = next(tmp_path.glob("*/elastic"))
    assert load_elastic(artefact)[1] == measured[0]
    assert [one["holds"] for one in result["claims"]] == [True, False]
    assert shown_rows(result["tables"][0])[1] == ["0.25", "0.50", "2.00", "63.00", "0.90", "0.80", "1.50"]
    tiny.setattr(speculative, "consolidate", lambda path: pytest.fail("it is there"))
    assert speculative.run(Request(tmp_path))["data"] == result["data"]


def test_prompts_are_the_first_tokens_of_held_out_blocks(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXRANK_ASSETS", str(assets))
    found = speculative.prompts()
    assert len(found) == 2 and {text.shape for text in found} == {(1, speculative.PROMPT)}
    assert not torch.equal(*found)
