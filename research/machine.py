"""Helpers for timing and measuring: layers that run in turn, random models, seconds and memory."""

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

from flexrank.deployment.machine import reset_peak, resident_peak

#: Copies of a layer take at least these bytes in all, about as many as caches hold; and there are at most 64 of them.
WEIGHT_BYTES, MOST_COPIES = 2**25, 64


def rotating_forward(build: Callable[[], nn.Module], x: Tensor) -> Callable[[int], None]:
    """Returns a function that runs a number of forward passes over copies of a layer in turn, and waits for them.

    Weights then come from memory, as in a model.
    """
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
def track_resources() -> Iterator[dict[str, float]]:
    """Yields a dict that after the block holds its seconds and its peak bytes above those held before it (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which would serve the block without a new peak
    resources, start, before = dict[str, float](), time.perf_counter(), reset_peak()
    yield resources
    resources |= {"seconds": time.perf_counter() - start, "peak_bytes": resident_peak() - before}


def last_line(errors: str) -> str:
    """Returns the last line that a process wrote on standard error, or that there is none."""
    return (errors.strip().splitlines() or ["without a word"])[-1]


def random_llama(**sizes: Any) -> Any:
    """Returns a Llama with random weights in eval mode; `sizes` are fields of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
