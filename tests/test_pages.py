"""The code of pages that are no tutorials runs as it is written, but for numbers of steps, on a tiny language model."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import DefaultDataCollator, LlamaForCausalLM, TrainingArguments

import flexrank as fr
from flexrank.nn.switch import nested_layers
from flexrank.run.config import parse_config
from test_tutorials import BLOCK
from tiny import batch_for, build, chain_of, elastic, nest, with_sizes

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str = "python") -> list[str]:
    """The page's blocks of a language, in their order."""
    text = (ROOT / page).read_text(encoding="utf8")
    return [content for kind, _, content in BLOCK.findall(text) if kind == language]


def run(code: str, names: Mapping[str, Any], **changes: str) -> dict[str, Any]:
    """What is defined after the code has run with these names, where `changes` are other values of arguments."""
    for name, value in changes.items():
        assert f"{name}=" in code
        before, _, after = code.partition(f"{name}=")
        code = f"{before}{name}={value}{after.lstrip('0123456789')}"
    defined = dict(names)
    exec(compile(code, "page", "exec"), defined)
    return defined


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("verified_here")
def test_the_readme(here: Path) -> None:
    """From a model to an export, and both loaded in one line each; the configuration is one."""
    first, last = blocks("README.md")
    batch = batch_for("llama_untied")
    data = dict.fromkeys(("calibration_batches", "probe_batches", "train_batches"), [batch])
    names = {"model": build("llama_untied"), "teacher": build("llama_untied"), "batch": batch, **data}
    done = run(first, names, steps="3")
    shutil.copytree("elastic", "runs/mine/elastic")
    loaded = run(last, {})
    parameters = [sum(one.numel() for one in model.parameters()) for model in (done["small"], loaded["model"])]
    assert parameters[1] < parameters[0] < sum(one.numel() for one in done["teacher"].parameters())
    assert isinstance(loaded["model"], LlamaForCausalLM)
    (text,) = blocks("README.md", "yaml")
    assert parse_config(yaml.safe_load(text)).deployment.budgets == (0.6,)


def test_switching(here: Path) -> None:
    model = with_sizes(elastic("llama_untied"))
    fr.save_elastic(model, chain_of(model, (0.2, 0.4, 0.5, 0.7, 1.0)), "elastic")
    a_budget, own, a_cascade, drafts = blocks("docs/switching.md")
    done = run(a_budget + own, {"fr": fr})
    budgets = [nested_layers(done[name])["lm_head"].rank for name in ("model", "own")]
    assert budgets[0] > budgets[1] > 0
    prompt = {"input_ids": torch.tensor([[5, 9, 2, 7]])}
    draft = run(drafts, done | {"tokenizer": lambda *_, **__: prompt}, max_new_tokens="4")["draft"]
    assert nested_layers(draft)["lm_head"].rank < nested_layers(done["model"])["lm_head"].rank
    images = nest(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)))
    rows = [{"input": torch.randn(200, 12)} for _ in range(4)]
    names = {"model": images, "chain": chain_of(images, (0.3, 0.9)), "batch": rows[0]}
    done = run(a_cascade, {"fr": fr, **names, "calibration_batches": rows, "held_out_batches": rows})
    assert done["logits"].shape == (200, 4)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # the Trainer's default, without a GPU
def test_training_by_the_trainer(here: Path) -> None:
    code = next(block for block in blocks("docs/evaluation.md") if "DistillationTrainer" in block)
    model, rows = elastic("llama_untied"), batch_for("llama_untied")
    dataset = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    names = {"fr": fr, "model": model, "teacher": build("llama_untied"), "chain": chain_of(model), "dataset": dataset}
    run(code, names | {"collator": DefaultDataCollator(), "TrainingArguments": TrainingArguments}, max_steps="2")
    assert fr.load_elastic("elastic")[1].budgets[-1] == 1
