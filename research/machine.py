"""What is timed: layers that run in turn, and random models."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Like layers together have at least as many bytes as caches hold, unless the layers are tiny.
WEIGHT_BYTES, MOST_COPIES = 2**25, 64


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
