"""The bench of serving, with a stand-in for vLLM's environment: a script that decodes by a plain loop."""

import sys
from pathlib import Path
from typing import Any

import pytest

from flexrank.errors import FlexrankError
from research.benches import serving
from research.experiment import Request
from research.result import shown_rows
from tiny import build

#: It spoils the last token of the first prompt where the model has fewer than `FEW` parameters.
SERVER = """#!{python}
import json, sys, torch, flexrank
from transformers import AutoModelForCausalLM
question = json.load(open(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(question["directory"]).eval()
tokens = []
for ids in question["prompts"]:
    ids, start = list(ids), len(ids)
    for _ in range(question["new"]):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    tokens.append(ids[start:])
if sum(one.numel() for one in model.parameters()) < {few}:
    tokens[0][-1] += 1
seconds = [2.0, 1.0] if {few} else [4.0, 5.0]
json.dump({{"tokens": tokens, "seconds": seconds, "version": "0.0"}}, open(sys.argv[3], "w"))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"PROMPTS": 2, "PROMPT": 5, "NEW": 4, "BUDGETS": (1.0, 0.5)}.items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(serving, "MODELS", {"a": lambda: build("llama_untied")})
    python = tmp_path / "python"
    python.write_text(SERVER.format(python=sys.executable, few=0))
    python.chmod(0o755)
    monkeypatch.setenv(serving.PYTHON, str(python))
    return tmp_path


def test_tokens_are_compared_and_speeds_are_over_the_base_models(here: Path) -> None:
    result = serving.run(Request(here / "work"))
    rows: list[Any] = result["data"]["a"]
    assert [row["equal"] for row in rows] == [2, 2]
    assert [row["tokens per second"] for row in rows] == [2.0, 2.0]  # 2 · 4 tokens in 4 seconds, the best of two
    sizes = [row["parameters"] for row in rows]
    model = build("llama_untied")
    assert sizes[0] == sum(one.numel() for one in model.parameters()) > sizes[1]
    assert [one["holds"] for one in result["claims"]] == [True, False]
    assert shown_rows(result["tables"][0])[1][3:] == ["2.00", "1.00", "2"]


def test_another_token_is_counted(here: Path) -> None:
    few = sum(one.numel() for one in build("llama_untied").parameters())
    (here / "python").write_text(SERVER.format(python=sys.executable, few=few))
    result = serving.run(Request(here / "work"))
    assert [row["equal"] for row in result["data"]["a"]] == [2, 1] and not result["claims"][0]["holds"]
    assert result["claims"][0]["here"] == "3"


def test_a_missing_environment_and_a_failing_one_are_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "python").write_text("#!/bin/sh\necho not today >&2\nexit 1\n")
    with pytest.raises(FlexrankError, match="vLLM did not serve the export: not today"):
        serving.run(Request(here / "work"))
    monkeypatch.setenv(serving.PYTHON, str(here / "nothing"))
    with pytest.raises(FlexrankError, match="FLEXRANK_VLLM must be the Python of an environment"):
        serving.run(Request(here / "work"))
