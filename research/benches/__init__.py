"""Benchmarks, one module each: `flexrank bench NAME`.

A module holds its benchmark as `BENCH`. Times are ratios of runs in turn in one process, medians of them; peaks of
memory are a process's own. No test asserts a time.
"""

import importlib
from typing import Any

from flexrank.errors import FlexrankError

#: In the order of docs/performance.md: speed, stage by stage; then quality.
NAMES = ("gar", "model", "train", "calibrate", "decompose", "probe", "search", "start", "sts", "language")


def find_bench(name: str) -> Any:
    """The `bench.Bench` of this name.

    Raises:
        FlexrankError: there is none.
    """
    if name not in NAMES:
        raise FlexrankError(f"bench {name!r} is unknown; it is one of {', '.join(NAMES)}")
    return importlib.import_module(f"research.benches.{name}").BENCH
