"""Models that a dry run counts in a way of their own, or refuses as a run does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexrank.calibrate import find_groups
from flexrank.errors import FlexrankError
from flexrank.nn.select import select_layers
from flexrank.run.dry_run import dry_run
from flexrank.run.dry_run.memory import matrix_bytes
from tiny import llama_untied
from tiny_dry_runs import config_of


def test_a_run_without_training_may_have_the_base_model_alone(tmp_path: Path) -> None:
    config = config_of(llama_untied, tmp_path, allocation={"budgets": [1.0]}, distillation={"steps": 0})
    assert dry_run(config)["operations"]["consolidation"] == 0


def test_a_layer_that_every_size_leaves_full_has_a_matrix_where_one_size_is_the_base_model(tmp_path: Path) -> None:
    """Two layers of 8 by 8 in float32; the matrices are what that size gets back."""
    profiles = [{"a": 2, "b": 8}, {"a": 4, "b": 8}, {"a": 8, "b": 8}]
    config = config_of(llama_untied, tmp_path)

    def counted(some: list[dict[str, int]]) -> int:
        chain = SimpleNamespace(requested=[SimpleNamespace(profile=one) for one in some])
        shapes = {"a": (8, 8), "b": (8, 8)}
        architecture: Any = SimpleNamespace(chain=chain, shapes=shapes, file_dtype=torch.float32)
        return matrix_bytes(architecture, config)

    assert [counted(profiles), counted(profiles[:2])] == [2 * 8 * 8 * 4, 0]


def test_a_layer_that_does_not_run_is_named_as_in_a_run(tmp_path: Path) -> None:
    """Mamba reads a layer's weight in its own kernel, without calling the layer."""
    from transformers import MambaConfig, MambaForCausalLM

    def mamba() -> Any:
        return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))

    model = mamba()
    with pytest.raises(FlexrankError, match="dt_proj' did not run on the first batch; exclude it"):
        find_groups(lambda: model(torch.tensor([[1, 2, 3]])), select_layers(model))
    with pytest.raises(FlexrankError, match="dt_proj' did not run on the first batch; exclude it"):
        dry_run(config_of(mamba, tmp_path))
    assert dry_run(config_of(mamba, tmp_path, layers={"exclude": ["dt_proj"]}))["layers"]


def test_a_language_model_within_a_model_of_images_and_texts(tmp_path: Path) -> None:
    """Its configuration has those of both; hidden states (32) and logits (64) are kept of 16 tokens, in 4 bytes."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    def gemma() -> Any:
        text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        text |= {"intermediate_size": 56, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 40}
        vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 56}
        return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28}))

    some: dict[str, Any] = {"layers": {"include": ["language_model"]}, "distillation": {"steps": 1, "batch_size": 1}}
    some["distillation"] |= {"autocast": "off", "accumulation": 1}
    config = config_of(gemma, tmp_path, data={"max_tokens": 16}, **some)
    assert dry_run(config)["memory"]["consolidation"]["targets"] == 16 * (32 + 64) * 4
    with pytest.raises(FlexrankError, match="data.max_tokens is 41; this model reads at most 40"):
        dry_run(config_of(gemma, tmp_path, data={"max_tokens": 41}, **some))


def test_windows_of_attention_with_other_heads_in_each_stage_are_counted_without(tmp_path: Path) -> None:
    from transformers import SwinConfig, SwinForImageClassification

    def swin() -> Any:
        sizes = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2}
        return SwinForImageClassification(SwinConfig(image_size=16, patch_size=4, **sizes))

    config = config_of(swin, tmp_path, task="classification", data={"source": "images"})
    assert dry_run(config)["parameters"]["model"] == swin().num_parameters()
