"""Calibration: the seconds that moments add to a forward, and the memory they take, of blocks of Llama 3.2 1B.

Random weights and tokens: neither time nor bytes depend on values. Moments are timed on what the layers of one block
read and returned in a real forward; peaks are those of fresh processes.
"""

import ctypes
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks, Moments, collect_moments, find_groups, moments_by_block
from flexrank.calibrate.collector import Collector
from flexrank.data.batches import call_model
from flexrank.deployment.machine import forget_peak, interleave, resident_peak
from flexrank.deployment.process import in_fresh_process
from flexrank.nn.linalg import STRIP
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.select import select_layers
from research import machine
from research.experiment import Experiment, Request
from research.result import Result, goal, measured, spread, table

#: Of Llama 3.2 1B; its vocabulary plays no part, for the head is not run.
SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 256,
}  # fmt: skip
BLOCKS = 16
#: One batch: sequences, tokens in each. Blocks of the model whose peak is measured, and batches.
SHAPE, MEASURED, BATCHES = (4, 512), 3, 2
DTYPES = ("float32", "bfloat16")
REPEATS, SHARE, MEBIBYTE = 3, 0.7, 2**20
#: Of a model that is calibrated before anything is measured.
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


def run(_: Request) -> Result:
    """Measures the moments' seconds and their peaks."""
    rates = {dtype: measure_moments(dtype) for dtype in DTYPES}
    peaks = {way: in_fresh_process(measure_peak, way, SIZES, MEASURED, SHAPE, BATCHES) for way in WAYS}
    copy = machine.copy_rate()
    settings = {"batch": list(SHAPE), "repeats": REPEATS, "blocks measured": MEASURED, "strip": STRIP}
    tables = [_seconds_table(rates), _roofline(rates, copy), _peak_table(peaks)]
    goals = [*(_rate_goal(dtype, one) for dtype, one in rates.items()), _peak_goal(peaks)]
    return measured(settings, tables, goals, {"rates": rates, "peaks": peaks, "copy_rate": copy})


@torch.no_grad()
def measure_moments(dtype: str) -> dict[str, Any]:
    """Seconds of one block's moments of one batch, in turn with the product they are held against and the forward."""
    model, (batch,) = build_model(SIZES, 1, getattr(torch, dtype)), build_batches(SHAPE, 1)
    layers = select_layers(model, exclude=["lm_head"])
    groups = find_groups(model, batch, layers)
    collector = Collector(layers, groups, "smaller", False)
    calls: list[tuple[Callable[[Tensor, Tensor], None], Tensor, Tensor]] = []
    with Hooks() as hooks:
        for name, layer in layers.items():
            see = functools.partial(collector.see, name)
            hooks.watch(layer, lambda inputs, output, see=see: calls.append((see, inputs, output)))  # type: ignore[misc]
        call_model(model, batch)

    def collect() -> None:
        with collector.batch(0, batch["attention_mask"].bool()):
            for see, inputs, output in calls:
                see(inputs, output)

    rows, width = SHAPE[0] * SHAPE[1], SIZES["hidden_size"]
    left, right = torch.randn(width, rows), torch.randn(rows, width)
    runs = {"moments": collect, "forward": lambda: call_model(model, batch), "product": lambda: left @ right}
    seconds = dict(zip(runs, interleave(list(runs.values()), REPEATS), strict=True))
    work = count_work(collector.finish(), layers, groups, rows, getattr(torch, dtype))
    peak = 2 * rows * width**2
    rates = [product / moments / peak for moments, product in zip(seconds["moments"], seconds["product"], strict=True)]
    shares, whole = ([work[key] * rate for rate in rates] for key in ("operations", "whole_operations"))
    rate = peak / statistics.median(seconds["product"])
    return {**work, "seconds": seconds, "product_rate": rate, "shares": shares, "whole_shares": whole}


def count_work(
    moments: Moments, layers: Mapping[str, nn.Module], groups: Iterable[list[str]], rows: int, dtype: torch.dtype
) -> dict[str, int]:
    """Operations (as done, and as if each moment were a whole product) and bytes moved of one batch's moments."""
    done = whole = moved = 0
    for group in groups:
        for name in group if moments[group[0]].side == "output" else group[:1]:
            size, (m, n) = len(moments[name].moment), matrix_shape(layers[name])
            entries = sum(min(STRIP, size - start) * (size - start) for start in range(0, size, STRIP))
            done, whole = done + 2 * rows * entries, whole + 2 * rows * size**2
            moved += 2 * 8 * entries + rows * size * max(4, dtype.itemsize)
            if moments[name].side == "output" and dtype.itemsize < 4:  # the output's product, taken again in float32
                done, whole = done + 2 * rows * m * n, whole + 2 * rows * m * n
                moved += (m * n + rows * n) * dtype.itemsize
    return {"operations": done, "whole_operations": whole, "bytes": moved}


def measure_peak(
    way: str, sizes: Mapping[str, int], blocks: int, shape: tuple[int, int], batches: int
) -> dict[str, int]:
    """Bytes, in the process that calls it: the model's own peak in plain forwards, and how much more `way` takes."""
    # Memory that was freed and is kept for the next request would count as taken: blocks from a MiB on are mapped each
    # for itself, and given back when freed (mallopt's M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, MEBIBYTE)
    model, data = build_model(sizes, blocks, torch.float32), build_batches(shape, batches)
    names = list(select_layers(model, exclude=["lm_head"]))
    small = build_model({**sizes, **SMALL}, 2, torch.float32)
    WAYS[way](small, build_batches((1, 4), 1), list(select_layers(small)))  # so that code is loaded before it counts
    with torch.no_grad():
        call_model(model, data[0])
        forget_peak()
        for batch in data:
            call_model(model, batch)
    own = resident_peak()
    forget_peak()
    moments = WAYS[way](model, data, names)
    return {"own": own, "above": resident_peak() - own, "moments": moments}


def _at_once(model: nn.Module, data: Any, names: list[str]) -> int:
    return moment_bytes(collect_moments(model, data, {name: model.get_submodule(name) for name in names}))


def _by_block(model: nn.Module, data: Any, names: list[str]) -> int:
    return max(map(moment_bytes, moments_by_block(model, data, names)))


#: What each process does, and the bytes of moments that are in memory at once.
WAYS: dict[str, Callable[[nn.Module, Any, list[str]], int]] = {"all at once": _at_once, "by block": _by_block}


def moment_bytes(moments: Moments) -> int:
    """Bytes of the moments; one that layers share counts once."""
    return sum({id(one.moment): one.moment.nbytes for one in moments.values()}.values())


def build_model(sizes: Mapping[str, int], blocks: int, dtype: torch.dtype) -> Any:
    """A Llama of these sizes with random weights, in eval mode."""
    return machine.random_llama(num_hidden_layers=blocks, use_cache=False, **sizes).to(dtype)


def build_batches(shape: tuple[int, int], count: int) -> list[dict[str, Tensor]]:
    """Random tokens without padding."""
    torch.manual_seed(1)
    ones = torch.ones(shape, dtype=torch.long)
    return [{"input_ids": torch.randint(0, SIZES["vocab_size"], shape), "attention_mask": ones} for _ in range(count)]


def _seconds_table(rates: Mapping[str, Any]) -> dict[str, Any]:
    rows, tokens = [], SHAPE[0] * SHAPE[1]
    for dtype, one in rates.items():
        forward, moments = (statistics.median(one["seconds"][what]) for what in ("forward", "moments"))
        million = (BLOCKS * seconds * 1e6 / tokens for seconds in (forward, moments))
        rows.append([dtype, forward, spread(one["seconds"]["moments"]), moments / forward, *million])
    title = f"seconds of one block on {tokens} tokens; of {BLOCKS} blocks on a million tokens by multiplication"
    columns = ["weights", "forward", "moments", "moments / forward", f"forward, {BLOCKS}", f"moments, {BLOCKS}"]
    return table(title, columns, rows, digits=[3, 3, 3, 0, 0])


def _roofline(rates: Mapping[str, Any], copy: float) -> dict[str, Any]:
    rows = []
    for dtype, one in rates.items():
        bound = max(one["operations"] / one["product_rate"], one["bytes"] / copy)
        reached, whole = bound / statistics.median(one["seconds"]["moments"]), statistics.median(one["whole_shares"])
        limits = [one["operations"], one["bytes"], one["product_rate"], copy]
        rows.append([dtype, *(limit / 1e9 for limit in limits), bound, reached, whole])
    columns = ["weights", "GFLOP", "GB", "GFLOP/s here", "GB/s here", "least seconds", "reached", "as whole products"]
    return table("roofline of one block's moments, float32 products", columns, rows, digits=[1, 2, 0, 1, 3, 2, 2])


def _peak_table(peaks: Mapping[str, Any]) -> dict[str, Any]:
    all_blocks = (BLOCKS / MEASURED, 1)  # of the blocks whose moments are in memory at once
    rows = [
        [way, *(size / MEBIBYTE for size in (one["own"], one["above"], one["moments"], one["moments"] * blocks))]
        for (way, one), blocks in zip(peaks.items(), all_blocks, strict=True)
    ]
    title = f"MiB of {MEASURED} blocks in float32: a plain forward's peak, what calibration adds to it, and moments"
    columns = ["way", "forward's peak", "added", "moments at once", f"moments of {BLOCKS} blocks, counted"]
    return table(title, columns, rows, digits=0)


def _rate_goal(dtype: str, one: Mapping[str, Any]) -> dict[str, Any]:
    share, whole = statistics.median(one["shares"]), statistics.median(one["whole_shares"])
    what = f"moments of one block, {dtype} weights: operations done per second, of the machine's product rate"
    why = f"as whole products {whole:.0%}: only the upper triangle's strips are taken"
    return goal(what, f"at least {SHARE:.0%}", f"{share:.0%}", share >= SHARE, why)


def _peak_goal(peaks: Mapping[str, Any]) -> dict[str, Any]:
    added, moments = peaks["by block"]["above"], peaks["by block"]["moments"]
    here = f"{added / MEBIBYTE:.0f} MiB, moments of a block {moments / MEBIBYTE:.0f} MiB"
    why = f"all {MEASURED} blocks at once add {peaks['all at once']['above'] / MEBIBYTE:.0f} MiB"
    what = "peak above the model's own forward, calibrating block by block"
    holds = added < moments + MEBIBYTE  # a process's own peak is known to about a MiB
    return goal(what, "at most the moments of one block, to the MiB", here, holds, why)


EXPERIMENT = Experiment(
    "calibrate", "Calibration",
    "the seconds of second moments against this machine's matrix products, and their peak of memory",
    minutes=1.5, run=run,
    tried=(
        "syrk, which torch lacks and SciPy's takes as long as strips of products",
        "grouping layers by held input tensors, which cost memory",
    ),
)  # fmt: skip
