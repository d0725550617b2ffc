"""What a measurement depends on, and the timing of two models: in turn, so the machine's drift affects both."""

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank.data.batches import Batch, call_model, eval_mode, model_device, to_device
from flexrank.errors import FlexrankError


def machine_facts() -> dict[str, Any]:
    """The processor, cores, threads, torch's version, and the GPU if there is one."""
    facts = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return facts | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def interleave(
    runs: Sequence[Callable[[], object]], repeats: int = 7, warmup: int = 2, least_seconds: float = 0.0
) -> list[list[float]]:
    """Times the runs in turn for at least `repeats` rounds; returns one list of seconds per run.

    Rounds go on until `least_seconds` are measured: other work on a machine comes in bursts that outlast a few rounds.
    """
    for _ in range(warmup):
        for run in runs:
            run()
    rounds: list[list[float]] = []
    while len(rounds) < repeats or sum(map(sum, rounds)) < least_seconds:
        rounds.append([_seconds(run) for run in runs])
    return [list(seconds) for seconds in zip(*rounds, strict=True)]


def median_ratio(seconds: Sequence[float], base_seconds: Sequence[float]) -> float:
    """The median over rounds of one run's time over another's."""
    return statistics.median(own / base for own, base in zip(seconds, base_seconds, strict=True))


def latency_ratio(
    model: nn.Module, base: nn.Module, batch: Batch, repeats: int = 15, least_seconds: float = 0.0
) -> float:
    """The time of the model's forward pass on one batch over the base model's, as the median over rounds.

    Raises:
        FlexrankError: the two are on different devices.
    """
    if model_device(model) != model_device(base):
        raise FlexrankError(
            f"the model is on {model_device(model)}, the base on {model_device(base)}; latency compares one device"
        )
    with eval_mode(model, base), torch.inference_mode():
        runs = [forward_of(model, batch), forward_of(base, batch)]
        return median_ratio(*interleave(runs, repeats, least_seconds=least_seconds))


def forward_of(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """A function that runs the forward pass on the batch, and returns when the device has finished it."""
    device = model_device(model)
    return synchronised(functools.partial(call_model, model, to_device(batch, device)), device)


def synchronised(run: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Wraps `run` in a function that returns only when the device has finished it."""

    def finish() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return finish


def resident_peak() -> int:
    """The peak of this process's resident memory, in bytes (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Resets the peak to the memory that is resident now, and returns it (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
