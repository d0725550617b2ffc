"""Sizes of Llamas in vLLM: their greedy tokens against transformers', and tokens per second over the base model's.

vLLM has its own environment, with flexrank in it; FLEXRANK_VLLM names its Python. Nothing is calibrated or trained:
factors are by plain SVD, and every layer has the rank that a budget allows. Values do not affect the timing.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flexrank import FlexrankError
from flexrank.hf.models import load_model
from research import machine, serve_by_vllm
from research.assets import assets_directory
from research.benches.runtimes import deployed_sizes
from research.experiment import Experiment, Ledger, Request
from research.measures import inference
from research.result import Result, goal, measured, table

PYTHON = "FLEXRANK_VLLM"
#: The first is the base model: each layer at full rank is a dense matrix.
BUDGETS = (1.0, 0.7, 0.5, 0.3)
PROMPTS, PROMPT, NEW, REPEATS = 8, 64, 32, 3
WIDTH, BLOCKS = 1024, 8


def pycode() -> Any:
    """Returns a small Llama with trained weights."""
    return load_model(assets_directory("pycode5m") / "pycode5m", "language")


def random_llama() -> Any:
    """Returns a wider Llama with random weights."""
    heads = {"num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 64, "vocab_size": 4096}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": BLOCKS}
    return machine.random_llama(**heads, **sizes, max_position_embeddings=512)


MODELS: dict[str, Callable[[], Any]] = {"pycode5m": pycode, f"random Llama, width {WIDTH}": random_llama}


def run(request: Request) -> Result:
    """Runs every size of every model in a vLLM process; finished models are not repeated."""
    python = os.environ.get(PYTHON)
    if python is None or not Path(python).is_file():
        raise FlexrankError(f"{PYTHON} must be the Python of an environment that has vLLM and flexrank")
    settings = {
        "models": list(MODELS), "budgets": list(BUDGETS), "prompts": PROMPTS, "prompt tokens": PROMPT,
        "new tokens": NEW, "repeats": REPEATS, "dtype": "float32",
    }  # fmt: skip
    ledger = Ledger(request.work, settings)
    data = {name: ledger.take(name, measure, build(), python) for name, build in MODELS.items()}
    rows = [row for one in data.values() for row in one]
    equal, prompts = sum(row["equal"] for row in rows), PROMPTS * len(rows)
    half = {name: next(row["speed"] for row in one if row["budget"] == 0.5) for name, one in data.items()}
    goals = [
        goal("greedy tokens equal to transformers', every size and prompt", f"{prompts} of {prompts}", str(equal),
             equal == prompts),
        *(goal(f"{name}: tokens per second of size 0.5 over the base model's", "above 1", f"{speed:.2f}", speed > 1)
          for name, speed in half.items()),
    ]  # fmt: skip
    versions = {"vllm": rows[0]["version"], "machine": "other work may have shared it"}
    return measured(settings | versions, [_table(data)], goals, data)


def measure(model: Any, python: str) -> list[dict[str, Any]]:
    """Returns a row for every budget."""
    vocabulary = model.config.vocab_size
    texts = torch.randint(3, vocabulary, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    for budget, small in deployed_sizes(model, BUDGETS, ["lm_head"]):
        with tempfile.TemporaryDirectory() as scratch:
            small.save_pretrained(scratch)
            served = serve(python, scratch, texts.tolist())
        with inference(small):
            wanted = [greedy(small, text) for text in texts]
        size = sum(parameter.numel() for parameter in small.parameters())
        seconds = min(served["seconds"])
        rows.append({
            "budget": budget, "parameters": size, "version": served["version"],
            "equal": sum(map(list.__eq__, served["tokens"], wanted)), "tokens per second": PROMPTS * NEW / seconds,
            "speed": 1.0 if not rows else PROMPTS * NEW / seconds / rows[0]["tokens per second"],
        })  # fmt: skip
    return rows


def serve(python: str, directory: str, prompts: Sequence[Sequence[int]]) -> Any:
    """Returns what `research/serve_by_vllm.py` answers: tokens, seconds of each repetition, and vLLM's version."""
    question = {"directory": directory, "prompts": prompts, "new": NEW, "repeats": REPEATS}
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch, "question.json"), Path(scratch, "answer.json")
        asked.write_text(json.dumps(question))
        command = [python, serve_by_vllm.__file__, str(asked), str(answered)]
        done = subprocess.run(command, text=True, capture_output=True, env=own)
        if done.returncode:
            raise FlexrankError(f"vLLM did not serve the export: {machine.last_line(done.stderr)}")
        return json.loads(answered.read_text())


def greedy(model: Any, text: torch.Tensor) -> list[int]:
    """Returns transformers' tokens after a prompt."""
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    ids = model.generate(text[None], attention_mask=torch.ones_like(text[None]), pad_token_id=0, **lengths)
    return ids[0, len(text) :].tolist()


def _table(data: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [name, row["budget"], row["parameters"] / 1e6, row["tokens per second"], row["speed"], row["equal"]]
        for name, one in data.items()
        for row in one
    ]
    head = ["model", "budget", "million parameters", "tokens per second", "over the base model", "prompts equal"]
    return table(f"{PROMPTS} prompts at once, {NEW} tokens after {PROMPT}", head, rows, digits=2)


EXPERIMENT = Experiment(
    "serving", "Sizes in vLLM",
    f"greedy tokens against transformers', and tokens per second: each size in its own process, best of {REPEATS}",
    minutes=12, needs=PYTHON, run=run,
)  # fmt: skip
