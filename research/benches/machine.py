"""The limits that a stage is measured against: this machine's matrix products, its memory, and a process's peak."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch


def interleave(runs: Sequence[Callable[[], object]], repeats: int = 7, warmup: int = 2) -> list[list[float]]:
    """Seconds of each run, `repeats` times in turn, so that drift meets all alike; one list a run."""
    for _ in range(warmup):
        for run in runs:
            run()
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, found in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return seconds


def product_rate(m: int, k: int, n: int, dtype: torch.dtype = torch.float32, repeats: int = 5) -> float:
    """Operations a second (two a multiply-add) of an (m, k) by (k, n) product here: the median of `repeats`."""
    left, right = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    (seconds,) = interleave([lambda: left @ right], repeats)
    return 2 * m * k * n / statistics.median(seconds)


def copy_rate(size: int = 2**27, repeats: int = 5) -> float:
    """Bytes a second, read and written, of copying `size` bytes here."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    (seconds,) = interleave([lambda: target.copy_(source)], repeats)
    return 2 * size / statistics.median(seconds)


def resident_peak() -> int:
    """The largest number of bytes that this process has had in memory (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Starts a new peak from what is in memory now; returns that (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a module's function returns in a new interpreter with as many threads, where no earlier memory counts."""
    context = multiprocessing.get_context("spawn")
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (threads,)) as pool:
        return pool.submit(function, *args).result()
