"""The rest of a run in a process of its own, which times models as they will be: fresh, not after a training.

A process that has trained hands out memory otherwise: a small model took .70 of its base's time there, and .55 in a
process that had done nothing else (docs/log.md).
"""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flexrank import progress
from flexrank.environment import modules_environment
from flexrank.errors import FlexrankError


def go_on_in_fresh_process(directory: Path, until: str, told: Sequence[str] = ()) -> list[str]:
    """Goes on with a run to a stage by `python -m flexrank.pipeline`; what it tells is on this standard error.

    Args:
        directory: the run's, which no process holds.
        until: the last stage.
        told: stages that were told of here, done or standing.

    Returns:
        The stages that ran.

    Raises:
        FlexrankError: a wrong input of a stage, in its own words; or the process was killed.
    """
    asked = {
        "directory": str(directory), "until": until, "told": list(told), "threads": torch.get_num_threads(),
        "level": logging.getLogger("flexrank").getEffectiveLevel(), "progress": progress.is_shown(),
    }  # fmt: skip
    command = [sys.executable, "-m", "flexrank.pipeline", json.dumps(asked)]
    done = subprocess.run(command, env=modules_environment(), stdout=subprocess.PIPE, text=True)
    answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode in (0, 2) else {}
    if "error" in answer:
        raise FlexrankError(answer["error"])
    if done.returncode:
        status = f"the process that measures its models ended with status {done.returncode}"
        raise FlexrankError(f"{directory}: {status}; the same command goes on from there")
    executed: list[str] = answer["executed"]
    return executed
