"""What a process finds around it: the machine, and the folder of models and data."""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from flexrank.errors import FlexrankError

#: The folder of real models and data, when FLEXRANK_ASSETS does not say otherwise.
DEFAULT_ASSETS = Path("..", "shared", "assets")


def assets_directory(*needed: str) -> Path:
    """The folder of models and data that benches and studies read.

    Raises:
        FlexrankError: the folder, or one of the entries needed, is missing.
    """
    directory = Path(os.environ.get("FLEXRANK_ASSETS") or DEFAULT_ASSETS)
    for name in needed:
        if not (directory / name).exists():
            raise FlexrankError(f"{directory / name}: missing; set FLEXRANK_ASSETS to the folder that holds {name}")
    return directory


def modules_environment() -> dict[str, str]:
    """The environment of a new interpreter that is to see the same modules as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


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
