"""The small models of `models.py` made elastic, with chains for them, and plain networks a fresh process can build."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import models
from flexrank.data.batches import call_model, output_tensor
from flexrank.nn.linalg import plain_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.surgery import footprint, nest_, nested_layers, select_layers
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile


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
    "bert": models.bert,
    "llama_tied": models.tied_llama,
    "llama_untied": models.llama,
    "gpt2": models.gpt2,
    "qwen3": models.qwen3,
    "phi3": models.phi3,
    "vit": models.vit,
    "dinov3": models.dinov3,
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


def outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    """The tensor that the model's output stands for."""
    with torch.no_grad():
        return output_tensor(call_model(model, batch))


def agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the same weights, loaded anew, gave the same outputs.

    A few roundings may differ: kernels choose their order of sums by where in memory a tensor begins.
    """
    bound = 2**-7 if wanted.dtype == torch.bfloat16 else 1e-6
    alike = found.dtype == wanted.dtype and found.shape == wanted.shape
    return alike and bool((found - wanted).norm() <= bound * wanted.norm())


def batch_for(name: str) -> Any:
    """A batch of three for the model `name`; for text with padding."""
    if name in TRANSFORMERS:
        return models.batch_for(TRANSFORMERS[name])
    generator = torch.Generator().manual_seed(1)
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
