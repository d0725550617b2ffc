"""Processes that torchrun starts, and what they say as they end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from research.kills import numbered_children

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SECONDS = 120.0


@contextlib.contextmanager
def started(count: int, *arguments: object, timeout: float = 60) -> Iterator[subprocess.Popen[str]]:
    """So many processes of one thread; they end with the block."""
    command = [*TORCHRUN, str(count), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLEXRANK_TIMEOUT": str(timeout)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        try:
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def ended(run: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """What the processes have written on standard output, and their errors and last words."""
    output, errors = run.communicate(timeout=SECONDS)
    words = [line for line in errors.splitlines() if line.startswith(("error: ", "interrupted"))]
    statuses = [line.split()[2] for line in errors.splitlines() if line.startswith("  exitcode")]
    return output, [*words, *(f"exit {status}" for status in statuses)]


def flexrank(count: int, *arguments: object) -> tuple[str, list[str]]:
    with started(count, "-m", "flexrank", *arguments) as run:
        return ended(run)


def children(run: subprocess.Popen[str]) -> list[int]:
    """The identities of the processes, by their number."""
    return [one for _, one in sorted(numbered_children(run.pid).items())]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def config_of(values: dict[str, Any], output: Path, **distillation: Any) -> Path:
    changed = values | {"output": str(output), "distillation": values["distillation"] | distillation}
    (path := output.with_suffix(".yaml")).write_text(yaml.safe_dump(changed))
    return path
