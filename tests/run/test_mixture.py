"""A run on a mixture of experts, whose experts are fused in the base model and separate in all that it writes."""

from pathlib import Path

import pytest
import torch
import transformers

import flexrank as fr
import tiny
from flexrank.nn.gauge_aligned import GaugeAlignedLinear
from flexrank.run import run_stages
from flexrank.run.config import parse_config
from flexrank.run.dry_run.architecture import build_architecture
from tiny import outputs
from tiny_runs import settings, summary_of, write_tokenizer


@pytest.mark.usefixtures("verified_here")
def test_a_mixture_of_experts_goes_all_the_way(sources: Path, tmp_path: Path) -> None:
    model = tiny.build("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    values = settings(tmp_path / "model", sources / "text.txt", tmp_path / "run")
    values |= {"layers": {"exclude": ["lm_head"]}, "evaluation": {"latency": False}}
    values["distillation"]["steps"] = 2
    run_stages(parse_config(values))
    summary = summary_of(tmp_path / "run")
    layers = {name: layer["shape"] for name, layer in summary["layers"].items()}
    assert layers["model.layers.1.mlp.experts.3.gate_up"] == [48, 32]
    assert summary["base"]["params_model"] == sum(parameter.numel() for parameter in model.parameters())
    assert summary["base"]["params_layers"] == sum(m * n for m, n in layers.values())
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "deployed" / "0.50")
    assert any(isinstance(layer, GaugeAlignedLinear) for layer in small.model.layers[0].mlp.experts.modules())
    size = {"quantization_config": fr.FlexRankConfig(budget=0.5)}
    cut = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "elastic", **size)
    batch = tiny.token_batch()
    torch.testing.assert_close(outputs(cut, batch), outputs(small, batch), rtol=1e-3, atol=1e-4)


def test_a_dry_run_counts_an_equal_share_of_tokens_for_each_expert(sources: Path, tmp_path: Path) -> None:
    """32 tokens choose two of four experts: 16 rows each."""
    model = tiny.build("mixtral")
    model.save_pretrained(tmp_path / "model")
    config = parse_config(settings(tmp_path / "model", sources / "text.txt", tmp_path / "run"))
    architecture = build_architecture(config)
    calls = {name: [call.rows for call in calls] for name, calls in architecture.calls.items()}
    for number in range(4):
        assert calls[f"model.layers.0.mlp.experts.{number}.gate_up"] == [16]
        assert calls[f"model.layers.1.mlp.experts.{number}.down"] == [16]
    assert calls["model.layers.0.self_attn.q_proj"] == [32]
    assert len(architecture.shapes) == len(fr.select_layers(architecture.teacher))
