"""Runs of the whole way on a tiny model: its files, its settings, and how it is run again."""

import json
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from flexrank import cli
from flexrank.run import run_stages
from flexrank.run.config import load_config

TEXT = "\n".join(
    f"the quick brown fox number {n} jumps over {n * 7 % 13} lazy dogs and {n % 5} cats" for n in range(400)
)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set(TEXT))
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(directory)


def write_model(directory: Path, task: str) -> Path:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"initializer_range": 0.2, "pad_token_id": 0}  # large enough that truncation is felt
    if task == "language":
        config: Any = LlamaConfig(**common, intermediate_size=56, num_key_value_heads=2, max_position_embeddings=64)
        model: Any = LlamaForCausalLM(config)
    else:
        model = BertModel(BertConfig(**common, intermediate_size=64, max_position_embeddings=128))
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def settings(model: Path, data: Path, output: Path, task: str = "language") -> dict[str, Any]:
    return {
        "name": "tiny",
        "task": task,
        "model": str(model),
        "device": "cpu",
        "output": str(output),
        "data": {
            "source": "text", "path": str(data), "calibration": 64, "probe": 15, "training": 64, "evaluation": 16,
            "max_tokens": 32, "batch_size": 8,
        },
        "probe": {"levels": 4},
        "allocation": {"budgets": [0.8, 0.5]},
        "distillation": {"steps": 6, "batch_size": 4, "checkpoint_every": 2, "warmup_steps": 1, "learning_rate": 1e-3},
        "deployment": {"budgets": [0.5]},
        "evaluation": {"latency_repeats": 3, "latency_batch_size": 4},
    }  # fmt: skip


def rerun(directory: Path, *overrides: str, until: str = "report") -> tuple[str, ...]:
    """The stages that run again."""
    return run_stages(load_config(directory, overrides), until).executed


def summary_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def invoke(*arguments: object) -> Any:
    """The result of `flexrank ARGUMENTS` in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The message of a call that must end with 2 and one line."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("left dense", "calibrating"))]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


def blank_figures(_: Any, directory: Path) -> list[Path]:
    """In place of `draw_figures`, without the seconds that drawing takes; `test_report` has the drawn ones."""
    directory.mkdir(exist_ok=True)
    paths = [directory / f"{name}.png" for name in ("quality", "ranks")]
    for path in paths:
        path.touch()
    return paths


def here(function: Any, *arguments: Any, **_: Any) -> Any:
    """In place of `in_fresh_process`, without the seconds that a process takes; other tests start one."""
    return json.loads(json.dumps(function(*json.loads(json.dumps(arguments)))))
