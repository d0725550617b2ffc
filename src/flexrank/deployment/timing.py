"""Which form of a layer is fastest here: measured once, and remembered for this machine, thread count and dtype.

A layer of one shape is timed dense, plain and gauge-aligned at a few ranks, in whole blocks, and numbers of tokens;
between the ranks measured, time is interpolated, which is too little for ranks of no whole blocks, and a slack other
than the one timed counts by its parameters. Tables live in
`FLEXRANK_CACHE`, by default the user's cache directory.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.deployment.environment import machine_facts
from flexrank.files import read_json, write_json
from flexrank.nn.layers import GaugeAlignedLinear
from flexrank.profiles.costs import Shape, aligned_parameters, nearest_rank, whole_slack
from flexrank.progress import track

log = logging.getLogger("flexrank")

#: Tokens that forms are timed at: one as in decoding, a few sentences, and enough to be bound by arithmetic. From 512
#: to 2048 narrow layers still gain (768 x 768, bfloat16, half the rank: 1.7 and .75 of dense). A layer whose dense form
#: would take longer than SLOWEST seconds at the last counts there in proportion to the number before.
TOKENS, SLOWEST = (1, 16, 128, 512, 2048), 0.1
SHARES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
#: Of the timed gauge-aligned form, over its rank.
SLACK_SHARE = 0.05
#: Seconds that one timing of a layer takes at least, and bytes of weights that it goes through in turn: a model's next
#: layer is seldom in the cache.
LEAST_SECONDS, WEIGHT_BYTES, MOST_COPIES = 1e-3, 2**25, 64
#: Rounds in turn, fewer where the dense layer takes longer than SLOW seconds; and how often all is gone through. A busy
#: moment of the machine outlasts nine rounds: of three sweeps the median is off by half as much as one.
REPEATS, FEW_REPEATS, SLOW, SWEEPS = 9, 3, 0.02, 3
#: Raised whenever a layer's forward, or how it is timed, changes, so that no older times are read.
FORMAT = 9


class FormKey(NamedTuple):
    """What a layer's times depend on, beside the machine."""

    shape: Shape
    has_bias: bool


@dataclasses.dataclass(frozen=True)
class Load:
    """One forward, as its linear layers see it.

    Attributes:
        rows: layer name to the rows of each of its calls.
        correction: what low-rank forms take inside the model, over what they take in the table.
    """

    rows: Mapping[str, Sequence[int]]
    correction: float = 1.0

    def __str__(self) -> str:
        counts = sorted({count for counts in self.rows.values() for count in counts})
        return f"{', '.join(map(str, counts))} rows a layer"

    def seconds(self, times: "TimeTable", name: str, key: FormKey, rank: int, slack: int | None) -> float:
        """Of all calls of one layer in one form."""
        alone = sum(times.seconds_at(key, rank, slack, rows) for rows in self.rows.get(name, ()))
        return alone if slack is None else alone * self.correction


class TimeTable:
    """Seconds of linear layers on this machine, by shape, form, rank and tokens; measured when first asked for.

    Args:
        dtype: of weights and inputs.
        device: where they are timed.
        directory: of the file that remembers them; None for the user's cache.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu", directory: Path | None = None):
        self.dtype, self.device = dtype, torch.device(device)
        facts = {**machine_facts(), "dtype": str(dtype), "device": self.device.type}
        facts |= {"tokens": TOKENS, "shares": SHARES, "slack_share": SLACK_SHARE, "format": FORMAT}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self.path = (directory or cache_directory()) / "times" / f"{digest}.json"
        self._facts = facts
        kept = read_json(self.path)["layers"] if self.path.is_file() else {}
        self._times: dict[FormKey, dict[str, list[list[float]]]] = {_key(name): one for name, one in kept.items()}
        self._found: dict[tuple[FormKey, int, int | None], tuple[float, ...]] = {}

    def measure(self, keys: Sequence[FormKey]) -> None:
        """Measures those of the layers that are not known yet, and remembers each."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._times]
        for key in track(missing, "timing layers") if missing else ():
            self._times[key] = measure_forms(key, self.dtype, self.device)
            self._remember()

    def _remember(self) -> None:
        """Adds to what other processes may have written since; a place that cannot be written is told."""
        kept = read_json(self.path)["layers"] if self.path.is_file() else {}
        layers = kept | {_name(one): times for one, times in self._times.items()}
        try:
            write_json(self.path, {"machine": self._facts, "layers": layers})
        except OSError as error:
            log.warning("layers' times are not remembered: %s: %s; set FLEXRANK_CACHE", self.path, error.strerror)

    def seconds(self, key: FormKey, rank: int, slack: int | None) -> tuple[float, ...]:
        """Seconds at each of TOKENS of the layer dense (slack None), plain (slack = rank) or gauge-aligned."""
        if (key, rank, slack) not in self._found:
            self.measure([key])
            self._found[key, rank, slack] = self._interpolated(key, rank, slack)
        return self._found[key, rank, slack]

    def _interpolated(self, key: FormKey, rank: int, slack: int | None) -> tuple[float, ...]:
        times = self._times[key]
        if slack is None:
            return tuple(row[0] for row in times["dense"])
        ranks = [nearest_rank(key.shape, share) for share in SHARES]
        found = (float(np.interp(rank, ranks, row)) for row in times["plain" if slack == rank else "aligned"])
        if slack == rank:
            return tuple(found)
        timed = timed_slack(key.shape, rank, self.dtype)
        counted = aligned_parameters(key.shape, rank, slack) / aligned_parameters(key.shape, rank, timed)
        return tuple(one * max(1.0, counted) for one in found)

    def seconds_at(self, key: FormKey, rank: int, slack: int | None, tokens: int) -> float:
        """As `seconds`, between TOKENS, and in proportion beyond the last of them."""
        found = self.seconds(key, rank, slack)
        return float(np.interp(tokens, TOKENS, found)) * max(1.0, tokens / TOKENS[-1])


def cache_directory() -> Path:
    """Where tables are kept: FLEXRANK_CACHE, else flexrank's directory of the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FLEXRANK_CACHE") or Path(home) / "flexrank")


def timed_slack(shape: Shape, rank: int, dtype: torch.dtype) -> int:
    """The slack that the gauge-aligned form is timed with at this rank, in whole blocks where it is deployed so."""
    slack = min(rank, max(1, round(SLACK_SHARE * rank)))
    return whole_slack(shape, rank, slack, dtype)


@torch.inference_mode()
def measure_forms(key: FormKey, dtype: torch.dtype, device: torch.device) -> dict[str, list[list[float]]]:
    """Seconds of each form, a row for each of TOKENS: one number for "dense", one for each of SHARES for the others.

    A form's time is the dense one's times the median ratio of runs in turn, and of SWEEPS of them: a machine's speed
    changes within minutes by more than the forms differ.
    """
    sweeps = np.array([_measure_tokens(key, dtype, device) for _ in range(SWEEPS)])
    times = np.median(sweeps, axis=0)  # TOKENS x SHARES x (dense, plain over it, aligned over it)
    dense = np.median(times[:, :, 0], axis=1, keepdims=True)
    plain, aligned = dense * times[:, :, 1], dense * times[:, :, 2]
    return {"dense": dense.tolist(), "plain": plain.tolist(), "aligned": aligned.tolist()}


def _measure_tokens(key: FormKey, dtype: torch.dtype, device: torch.device) -> list[list[tuple[float, ...]]]:
    """For each of TOKENS what `_measure_ranks` gives."""
    *fewer, most = TOKENS
    found = [_measure_ranks(key, tokens, dtype, device) for tokens in fewer]
    growth, (longest, *_) = most / fewer[-1], found[-1][0]
    if growth * longest > SLOWEST:
        return [*found, [(growth * dense, *ratios) for dense, *ratios in found[-1]]]
    return [*found, _measure_ranks(key, most, dtype, device)]


def _measure_ranks(key: FormKey, tokens: int, dtype: torch.dtype, device: torch.device) -> list[tuple[float, ...]]:
    """For each of SHARES: the dense layer's seconds, and the ratios of plain and of gauge-aligned."""
    m, n = key.shape
    x = torch.randn(tokens, n, device=device).to(dtype)
    dense = rotate_weights(lambda: nn.Linear(n, m, bias=key.has_bias, device=device, dtype=dtype), x)
    rows = []
    for share in SHARES:  # one at a time: all of a large head's would not fit in memory
        rank = nearest_rank(key.shape, share)
        aligned = min(rank - timed_slack(key.shape, rank, dtype), m - 1)
        forms = [functools.partial(_random_layer, key, rank, count, dtype, device) for count in (0, aligned)]
        rows.append(_paired_seconds([dense, *(rotate_weights(form, x) for form in forms)], _between(x)))
    return rows


def _random_layer(key: FormKey, rank: int, aligned: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return GaugeAlignedLinear(key.shape, rank, aligned, bias=key.has_bias, device=device, dtype=dtype)


def rotate_weights(build: Callable[[], nn.Module], x: Tensor) -> Callable[[], object]:
    """Runs one of several like layers at each call, so that weights come from memory as they do in a model."""
    first = build()
    size = sum(parameter.nbytes for parameter in first.parameters())
    layers = [first, *(build() for _ in range(min(MOST_COPIES, math.ceil(WEIGHT_BYTES / size)) - 1))]
    place = -1

    def run() -> object:
        nonlocal place
        place = (place + 1) % len(layers)
        return layers[place](x)

    return run


def _between(x: Tensor) -> Callable[[], object] | None:
    """What a model does between two linear layers, as far as the second one's time goes.

    After it a layer's code and objects come from further away in the memory, and more so where it has more of them:
    at 25 tokens through 384 x 384 the gauge-aligned form of rank 128 takes .95 of the dense one's time, and .88 to .93
    where each follows another call of its kind. On a GPU they are ready before it needs them.
    """
    if x.device.type == "cuda":
        return None
    norm = nn.LayerNorm(x.shape[-1], device=x.device, dtype=x.dtype)
    return lambda: functional.gelu(norm(x)) + x


def _paired_seconds(
    runs: Sequence[Callable[[], object]], between: Callable[[], object] | None = None
) -> tuple[float, ...]:
    """Median seconds of a call of the first run, then of each other's median ratio to it, over rounds in turn."""
    for run in runs:
        run()
    once = [max(seconds_of(run, 1, between), 1e-7) for run in runs]
    calls = [math.ceil(LEAST_SECONDS / seconds) for seconds in once]
    repeats = FEW_REPEATS if once[0] > SLOW else REPEATS
    rounds = [[seconds_of(run, count, between) for run, count in zip(runs, calls, strict=True)] for _ in range(repeats)]
    ratios = [[other / base for other in others] for base, *others in rounds]
    return statistics.median(base for base, *_ in rounds), *map(statistics.median, zip(*ratios, strict=True))


def seconds_of(run: Callable[[], object], calls: int, between: Callable[[], object] | None = None) -> float:
    """Seconds of one call, the mean of several, with something else before each that does not count."""
    if between is None:
        start = time.perf_counter()
        for _ in range(calls):
            output = run()
        if isinstance(output, Tensor) and output.device.type == "cuda":
            torch.cuda.synchronize(output.device)
        return (time.perf_counter() - start) / calls
    seconds = 0.0
    for _ in range(calls):
        between()
        start = time.perf_counter()
        run()
        seconds += time.perf_counter() - start
    return seconds / calls


def _name(key: FormKey) -> str:
    return f"{key.shape[0]}x{key.shape[1]}" + ("+bias" if key.has_bias else "")


def _key(name: str) -> FormKey:
    shape, _, bias = name.partition("+")
    m, _, n = shape.partition("x")
    return FormKey((int(m), int(n)), bool(bias))
