"""Calibration: the seconds that moments add to a forward pass, and their memory, for blocks of Llama 3.2 1B.

Weights and tokens are random: neither time nor bytes depend on values. Moments are timed on what the layers of one
block read and returned in a real forward pass; peaks are measured in fresh processes.
"""

import ctypes
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks, Moments, collect_moments, find_groups, moments_by_block
from flexrank.calibrate.collector import Collector
from flexrank.data.batches import call_model, row_masks
from flexrank.deployment.machine import interleave, median_ratio, reset_peak, resident_peak
from flexrank.deployment.process import in_fresh_process
from flexrank.nn.linalg import STRIP
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.select import select_layers
from research.experiment import Experiment, Request
from research.machine import random_llama
from research.result import Result, goal, measured, spread, table

#: Sizes of Llama 3.2 1B, but with a small vocabulary, because the head is not calibrated.
SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 256,
}  # fmt: skip
#: One batch: sequences, and tokens in each. Then the blocks of the model whose peak is measured, and its batches.
SHAPE, MEASURED, BATCHES = (4, 512), 3, 2
DTYPES = ("float32", "bfloat16")
REPEATS, SHARE, MEBIBYTE = 3, 0.7, 2**20
#: Sizes of a model that is calibrated before anything is measured.
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


def run(_: Request) -> Result:
    """Measures the moments' seconds and peak memory."""
    rates = {dtype: measure_moments(dtype) for dtype in DTYPES}
    peaks = {way: in_fresh_process(measure_peak, way) for way in WAYS}
    settings = {"batch": list(SHAPE), "repeats": REPEATS, "blocks measured": MEASURED, "strip": STRIP}
    tables = [_seconds_table(rates), _peak_table(peaks)]
    return measured(settings, tables, _goals(rates, peaks), {"rates": rates, "peaks": peaks})


@torch.no_grad()
def measure_moments(dtype: str) -> dict[str, Any]:
    """Times one block's moments of one batch, in turn with a reference matrix product and the forward pass."""
    model, (batch,) = build_model(SIZES, 1, getattr(torch, dtype)), build_batches(SHAPE, 1)
    layers = select_layers(model, exclude=["lm_head"])
    groups = find_groups(lambda: call_model(model, batch), layers)
    collector = Collector(layers, groups, "smaller", False)
    calls: list[tuple[str, Tensor, Tensor]] = []
    with Hooks() as hooks:
        hooks.on_forward(layers, lambda *call: calls.append(call))
        call_model(model, batch)

    def collect() -> None:
        with collector.batch(0, row_masks(batch)):
            for call in calls:
                collector.add_call(*call)

    rows, width = math.prod(SHAPE), SIZES["hidden_size"]
    left, right = torch.randn(width, rows), torch.randn(rows, width)
    runs = {"moments": collect, "forward": lambda: call_model(model, batch), "product": lambda: left @ right}
    seconds = dict(zip(runs, interleave(list(runs.values()), REPEATS), strict=True))
    done = count_operations(collector.finish(), layers, groups, rows, getattr(torch, dtype))
    product = 2 * rows * width**2
    share = done / product * median_ratio(seconds["product"], seconds["moments"])
    rate = product / statistics.median(seconds["product"])
    return {"operations": done, "seconds": seconds, "product_rate": rate, "share": share}


def count_operations(
    moments: Moments, layers: Mapping[str, nn.Module], groups: Iterable[list[str]], rows: int, dtype: torch.dtype
) -> int:
    """Returns the operations of one batch's moments, two per multiply-add, over the upper triangle's strips only."""
    done = 0
    for group in groups:
        for name in group if moments[group[0]].side == "output" else group[:1]:
            size, (m, n) = len(moments[name].moment), matrix_shape(layers[name])
            done += 2 * rows * sum(min(STRIP, size - start) * (size - start) for start in range(0, size, STRIP))
            if moments[name].side == "output" and dtype.itemsize < 4:  # the output's product, recomputed in float32
                done += 2 * rows * m * n
    return done


def measure_peak(way: str) -> dict[str, int]:
    """Returns bytes measured in this process: the peak of plain forward passes, and how much more `way` takes."""
    # Freed memory that is kept for the next request would count as taken. With this threshold blocks from a MiB on are
    # mapped individually, and given back when freed (mallopt's M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, MEBIBYTE)
    model, data = build_model(SIZES, MEASURED, torch.float32), build_batches(SHAPE, BATCHES)
    small = build_model({**SIZES, **SMALL}, 2, torch.float32)
    WAYS[way](small, build_batches((1, 4), 1), select_layers(small))  # loads the code before memory is measured
    layers = select_layers(model, exclude=["lm_head"])
    with torch.no_grad():
        call_model(model, data[0])
        reset_peak()
        for batch in data:
            call_model(model, batch)
    own = resident_peak()
    reset_peak()
    moments = WAYS[way](model, data, layers)
    return {"own": own, "above": resident_peak() - own, "moments": moments}


def moment_bytes(moments: Moments) -> int:
    """Returns the bytes of the moments; one that layers share counts once."""
    return sum({id(one.moment): one.moment.nbytes for one in moments.values()}.values())


#: What each process does with a model, batches and layers; returns the bytes of moments in memory at once.
WAYS: dict[str, Callable[[nn.Module, Any, dict[str, nn.Module]], int]] = {
    "all at once": lambda model, data, layers: moment_bytes(collect_moments(model, data, layers)),
    "by block": lambda model, data, layers: max(map(moment_bytes, moments_by_block(model, data, layers))),
}


def build_model(sizes: Mapping[str, int], blocks: int, dtype: torch.dtype) -> Any:
    """Returns a Llama of these sizes with random weights, in eval mode."""
    return random_llama(num_hidden_layers=blocks, use_cache=False, **sizes).to(dtype)


def build_batches(shape: tuple[int, int], count: int) -> list[dict[str, Tensor]]:
    """Returns batches of random tokens without padding."""
    torch.manual_seed(1)
    ones = torch.ones(shape, dtype=torch.long)
    return [{"input_ids": torch.randint(0, SIZES["vocab_size"], shape), "attention_mask": ones} for _ in range(count)]


def _seconds_table(rates: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for dtype, one in rates.items():
        forward, moments = (statistics.median(one["seconds"][what]) for what in ("forward", "moments"))
        work = one["operations"] / 1e9, one["product_rate"] / 1e9
        rows.append([dtype, forward, spread(one["seconds"]["moments"]), moments / forward, *work])
    columns = ["weights", "forward", "moments", "moments / forward", "GFLOP of moments", "GFLOP/s of float32 products"]
    return table(f"seconds of one block on {math.prod(SHAPE)} tokens", columns, rows, digits=[3, 3, 3, 1, 0])


def _peak_table(peaks: Mapping[str, Any]) -> dict[str, Any]:
    rows = [[way, *(one[key] / MEBIBYTE for key in ("own", "above", "moments"))] for way, one in peaks.items()]
    title = f"MiB of {MEASURED} blocks in float32: a plain forward's peak, what calibration adds to it, and moments"
    return table(title, ["way", "forward's peak", "added", "moments at once"], rows, digits=0)


def _goals(rates: Mapping[str, Any], peaks: Mapping[str, Any]) -> list[dict[str, Any]]:
    goals = []
    for dtype, one in rates.items():
        what = f"moments of one block, {dtype} weights: operations done per second, of the machine's product rate"
        goals.append(goal(what, f"at least {SHARE:.0%}", f"{one['share']:.0%}", one["share"] >= SHARE))
    added, moments = peaks["by block"]["above"], peaks["by block"]["moments"]
    here = f"{added / MEBIBYTE:.0f} MiB, moments of a block {moments / MEBIBYTE:.0f} MiB"
    states = (BATCHES + 2) * math.prod(SHAPE) * SIZES["hidden_size"] * 4
    why = f"all {MEASURED} blocks at once add {peaks['all at once']['above'] / MEBIBYTE:.0f} MiB; hidden states of all "
    why += f"batches, and a block's input and output, take {states / MEBIBYTE:.0f} MiB"
    what, most = "peak above the model's own forward, calibrating block by block", "at most the moments of one block"
    holds = added < moments + MEBIBYTE  # a process's own peak is accurate to about a MiB
    return [*goals, goal(what, f"{most}, to the MiB", here, holds, why)]


EXPERIMENT = Experiment(
    "calibrate", "Calibration",
    "the seconds of second moments against this machine's matrix products, and their peak of memory",
    minutes=1.5, run=run,
)  # fmt: skip
