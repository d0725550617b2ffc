"""What is timed and measured: layers that run in turn, random models, seconds and memory."""

import contextlib
import ctypes
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.deployment.machine import forget_peak, resident_peak

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


@contextlib.contextmanager
def effort() -> Iterator[dict[str, float]]:
    """After the block, its seconds and the most bytes that the process held above what it held before (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed, and the block would take no new memory for it
    taken, start, before = dict[str, float](), time.perf_counter(), forget_peak()
    yield taken
    taken |= {"seconds": time.perf_counter() - start, "peak_bytes": resident_peak() - before}


def random_llama(**sizes: Any) -> Any:
    """A Llama with random weights, in eval mode; `sizes` are its configuration's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
