"""What a stage is timed on and held against: random models, and this machine's matrix products and memory."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.deployment.machine import interleave

#: Like layers together have at least as many bytes as caches hold, unless the layers are tiny.
WEIGHT_BYTES, MOST_COPIES = 2**25, 64


def product_rate(m: int, k: int, n: int, dtype: torch.dtype = torch.float32, repeats: int = 5) -> float:
    """Operations per second (two for a multiply-add) of an (m, k) by (k, n) product: the median of `repeats`."""
    left, right = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    (seconds,) = interleave([lambda: left @ right], repeats)
    return 2 * m * k * n / statistics.median(seconds)


def copy_rate(size: int = 2**27, repeats: int = 5) -> float:
    """Bytes per second, read and written, of copying `size` bytes."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    (seconds,) = interleave([lambda: target.copy_(source)], repeats)
    return 2 * size / statistics.median(seconds)


def forward_in_turn(build: Callable[[], nn.Module], x: Tensor) -> Callable[[int], None]:
    """Runs that many forwards of like layers in turn, so that weights come from memory as in a model, and waits."""
    first = build()
    size = sum(parameter.nbytes for parameter in first.parameters())
    copies = min(MOST_COPIES, math.ceil(WEIGHT_BYTES / size))
    layers = itertools.cycle([first, *(build() for _ in range(copies - 1))])

    def run(calls: int) -> None:
        for layer in itertools.islice(layers, calls):
            layer(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)  # the call returns before the work is done

    return run


def random_llama(**sizes: Any) -> Any:
    """A Llama with random weights, in eval mode; `sizes` are its configuration's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
