"""Small models with random weights, one of each kind that the package must carry, and a batch that fits each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 64


def mlp() -> nn.Module:
    """Three linear layers, of wide, tall and square matrices."""
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 8, bias=False), nn.GELU(), nn.Linear(8, 8)).eval()


def conv_net() -> nn.Module:
    """Two convolutions, strided and padded, and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2, bias=False),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    ).eval()  # fmt: skip


def llama(*, tied: bool = False) -> Any:
    """Grouped-query attention: four heads on two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(), tie_word_embeddings=tied)).eval()


def tied_llama() -> Any:
    """The head is the embedding."""
    return llama(tied=True)


def qwen3() -> Any:
    """Norms of queries and keys, and a head size of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_decoder(), head_dim=16, tie_word_embeddings=True)).eval()


def phi3() -> Any:
    """Fused `qkv_proj` and `gate_up_proj`."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**_decoder(), pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()


def gpt2() -> Any:
    """`Conv1D` layers, a fused `c_attn`, a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config).eval()


def bert() -> Any:
    """An encoder of sentences, with a pooler."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    return BertModel(config).eval()


def vit() -> Any:
    """An image classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config).eval()


def dinov3() -> Any:
    """An encoder of images with rotary positions."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config = DINOv3ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    return DINOv3ViTModel(config).eval()


def _decoder() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip


CAUSAL: tuple[Callable[[], Any], ...] = (llama, tied_llama, qwen3, phi3, gpt2)
VISION: tuple[Callable[[], Any], ...] = (vit, dinov3)
TRANSFORMERS: tuple[Callable[[], Any], ...] = (*CAUSAL, bert, *VISION)
ALL: tuple[Callable[[], Any], ...] = (mlp, conv_net, *TRANSFORMERS)


def batch_for(build: Callable[[], Any], rows: int = 3, seed: int = 0) -> Any:
    """A batch that `build()` takes; token batches have one padded row."""
    generator = torch.Generator().manual_seed(seed)
    if build is mlp:
        return torch.randn(rows, 12, generator=generator)
    if build is conv_net:
        return torch.randn(rows, 3, 9, 9, generator=generator)
    if build in VISION:
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    return token_batch(rows, 10, seed)


def token_batch(rows: int = 3, length: int = 10, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens; the last row's last three are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[-1, -3:], mask[-1, -3:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


class WordTokenizer:
    """A token a word (its place in the vocabulary is a checksum of it), and the options of transformers' tokenizers."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __call__(
        self,
        text: list[str],
        *,
        truncation: bool = False,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        verbose: bool = True,
    ) -> dict[str, list[list[int]]]:
        rows = []
        for one in text:
            row = [3 + sum(word.encode()) % (VOCABULARY - 3) for word in one.split()]
            if add_special_tokens:
                row = [self.bos_token_id, *row][: max_length if truncation else None]
            rows.append(row)
        return {"input_ids": rows}
