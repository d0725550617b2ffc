"""Tiny models of every kind that must go all the way, and inputs for them. Seeded; no weights are downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flexrank.linalg import plain_svd
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile
from flexrank.surgery import footprint, nest_, nested_layers, select_layers
from flexrank.views import weight_matrix

TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = TEXT | {"intermediate_size": 56, "num_key_value_heads": 2, "max_position_embeddings": 64}
IMAGE = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**TEXT, intermediate_size=64, max_position_embeddings=32))


def _llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**ROTARY, **PLAIN_IDS, tie_word_embeddings=tied))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, **PLAIN_IDS))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**ROTARY, **PLAIN_IDS, head_dim=8))


def _phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**ROTARY, **PLAIN_IDS))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**IMAGE, intermediate_size=64, num_labels=5))


def _dinov3() -> nn.Module:
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    return DINOv3ViTModel(DINOv3ViTConfig(**IMAGE, intermediate_size=64))


class TiedBlocks(nn.Module):
    """A plain network with a module used twice, batch normalisation, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.GELU())
        self.shared = nn.Linear(20, 20)
        self.again = self.shared
        self.head = nn.Linear(20, 6, bias=False)
        self.register_buffer("shift", torch.linspace(0, 1, 20), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(torch.relu(self.shared(self.first(x)) + self.shift)))


def tied_blocks() -> nn.Module:
    return TiedBlocks()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16, bias=False), nn.ReLU(), nn.Linear(16, 6))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 20, 3, stride=2, padding=1, dilation=2, bias=False),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(80, 6),
    )


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "bert": _bert,
    "llama_tied": lambda: _llama(True),
    "llama_untied": lambda: _llama(False),
    "gpt2": _gpt2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "vit": _vit,
    "dinov3": _dinov3,
}
PLAIN: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convnet": convnet,
    "tied_blocks": tied_blocks,
}
CAUSAL = ("llama_tied", "llama_untied", "gpt2", "qwen3", "phi3")


def build(name: str, seed: int = 0) -> nn.Module:
    """The model `name` in eval mode, with biases and norms off their initial zeros and ones."""
    torch.manual_seed(seed)
    model = {**TRANSFORMERS, **PLAIN}[name]().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def batch_for(name: str) -> Any:
    """A batch of three for the model `name`; for text with padding."""
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "dinov3"):
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    if name in TRANSFORMERS:
        mask = torch.ones(3, 9, dtype=torch.long)
        mask[1, 6:] = 0
        return {"input_ids": torch.randint(3, 99, (3, 9), generator=generator), "attention_mask": mask}
    return torch.randn(*((3, 3, 8, 8) if name == "convnet" else (3, 12)), generator=generator)


def nest(model: nn.Module) -> nn.Module:
    """The model with every layer elastic, by plain SVD."""
    for name, layer in select_layers(model).items():
        nest_(model, name, plain_svd(weight_matrix(layer).detach()))
    return model


def chain_of(model: nn.Module, budgets: tuple[float, ...] = (0.25, 0.5, 0.8, 1.0)) -> ProfileChain:
    """A chain of equal shares of every layer's full rank; the predicted errors are made up."""
    layers = nested_layers(model)
    dense = sum(layer.matrix_shape[0] * layer.matrix_shape[1] for layer in layers.values())
    entries = []
    for budget in budgets:
        ranks, parameters = {}, 0
        for name, layer in layers.items():
            m, n = layer.matrix_shape
            fitting = [r for r in range(1, layer.max_rank + 1) if r * (m + n - r) <= max(budget * m * n, m + n - 1)]
            ranks[name] = fitting[-1]
            parameters += ranks[name] * (m + n - ranks[name])
        entries.append(ChainEntry(RankProfile(ranks), parameters, 1 - budget, parameters / dense))
    return ProfileChain(tuple(entries), dense, footprint(model), "uniform")
