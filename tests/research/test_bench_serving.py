"""The bench of serving: tokens against a plain loop's in vLLM's place, and the process that it would ask."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexrank.errors import FlexrankError
from research.benches import serving
from research.experiment import Request
from research.result import shown_rows
from tiny import build


@torch.no_grad()
def plain_loop(python: str, directory: str, prompts: Sequence[Sequence[int]]) -> Any:
    """Greedy tokens without a cache; the base model takes 4 seconds, any other 2 at best."""
    model, tokens = AutoModelForCausalLM.from_pretrained(directory).eval(), []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        tokens.append(ids[len(prompt) :])
    is_base = sum(one.numel() for one in model.parameters()) == PARAMETERS
    return {"tokens": tokens, "seconds": [4.0, 5.0] if is_base else [3.0, 2.0], "version": "0.0"}


PARAMETERS = sum(one.numel() for one in build("llama_untied").parameters())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"PROMPTS": 2, "PROMPT": 5, "NEW": 4, "BUDGETS": (1.0, 0.5)}.items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(serving, "MODELS", {"a": lambda: build("llama_untied")})
    (tmp_path / "python").touch(0o755)
    monkeypatch.setenv(serving.PYTHON, str(tmp_path / "python"))
    return tmp_path


def test_tokens_are_compared_and_speeds_are_over_the_base_models(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "serve", plain_loop)
    result = serving.run(Request(here / "work"))
    base, half = result["data"]["a"]
    assert base["equal"] == half["equal"] == 2
    assert base["tokens per second"] == 2.0 and half["tokens per second"] == 4.0  # 2 · 4 tokens, the best of two
    assert base["parameters"] == PARAMETERS > half["parameters"]
    assert [one["holds"] for one in result["claims"]] == [True, True]
    assert shown_rows(result["tables"][0])[1][3:] == ["4.00", "2.00", "2"]


def test_another_token_is_counted_and_a_slow_size_misses_its_goal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(python: str, directory: str, prompts: Sequence[Sequence[int]]) -> Any:
        answer = plain_loop(python, directory, prompts)
        answer["tokens"][0][-1] += answer["seconds"][0] == 3.0  # of the half size
        return answer | {"seconds": [4.0]}

    monkeypatch.setattr(serving, "serve", spoilt)
    result = serving.run(Request(here / "work"))
    assert [row["equal"] for row in result["data"]["a"]] == [2, 1]
    assert [one["holds"] for one in result["claims"]] == [False, False] and result["claims"][0]["here"] == "3"


def test_another_python_is_asked_and_answers_by_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the script, the question and the answer's place, and nothing of this environment's packages."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    seen = f'echo "$1 [$PYTHONPATH]" > {here}/seen; cp "$2" {here}/question'
    (here / "python").write_text(f"""#!/bin/sh\n{seen}; echo '{{"a": 1}}' > "$3"; echo log\n""")
    assert serving.serve(str(here / "python"), "small/", [[1, 2]]) == {"a": 1}
    question = json.loads((here / "question").read_text())
    assert question == {"directory": "small/", "prompts": [[1, 2]], "new": 4, "repeats": serving.REPEATS}
    assert (here / "seen").read_text() == f"{serving.serve_by_vllm.__file__} []\n"


def test_a_missing_environment_and_a_failing_one_are_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "python").write_text("#!/bin/sh\necho not today >&2\nexit 1\n")
    with pytest.raises(FlexrankError, match="vLLM did not serve the export: not today"):
        serving.serve(str(here / "python"), "small/", [[1, 2]])
    monkeypatch.setenv(serving.PYTHON, str(here / "nothing"))
    with pytest.raises(FlexrankError, match="FLEXRANK_VLLM must be the Python of an environment"):
        serving.run(Request(here / "work"))
