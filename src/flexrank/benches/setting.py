"""What the benches share: budgets, the assets' place, the uniform profile, and how a table is printed."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank.costs import largest_rank
from flexrank.errors import FlexrankError
from flexrank.profiles import RankProfile
from flexrank.storage import write_json
from flexrank.surgery import nested_layers

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
#: The folder of real models and data, when FLEXRANK_ASSETS does not say otherwise.
DEFAULT_ASSETS = Path("..", "shared", "assets")


def assets_directory(*needed: str) -> Path:
    """The folder of models and data that a bench reads.

    Raises:
        FlexrankError: the folder, or one of the entries needed, is missing.
    """
    directory = Path(os.environ.get("FLEXRANK_ASSETS") or DEFAULT_ASSETS)
    for name in needed:
        if not (directory / name).exists():
            raise FlexrankError(f"{directory / name}: missing; set FLEXRANK_ASSETS to the folder that holds {name}")
    return directory


def uniform_profile(model: nn.Module, budget: float) -> RankProfile:
    """The same budget for every layer alone: its largest rank whose deployed parameters are within it."""
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    return RankProfile({name: max(1, largest_rank((m, n), budget * m * n)) for name, (m, n) in shapes.items()})


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> None:
    """Prints rows of numbers under columns on standard error, where it is not mixed with --json."""
    width = max(len(name) for name in rows)
    print(f"\n{title}\n{'':{width}}  " + "  ".join(f"{column:>7}" for column in columns), file=sys.stderr)
    for name, values in rows.items():
        cells = "  ".join("      –" if value is None else f"{value:7.4f}" for value in values)
        print(f"{name:{width}}  {cells}", file=sys.stderr, flush=True)


def machine_facts() -> dict[str, Any]:
    """What the figures of a run depend on: processor, cores, threads, torch, and the GPU where there is one."""
    facts = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return facts | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def finish(result: dict[str, Any], json_path: Path | None) -> dict[str, Any]:
    """Adds the machine to the result, writes it where a path is given, and returns it."""
    result["machine"] = machine_facts()
    if json_path is not None:
        write_json(json_path, result)
    return result
