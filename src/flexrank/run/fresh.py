"""Work of a run in a process of its own, which times models as they will be: fresh, not after a training.

A process that has trained hands out memory otherwise: a small model took .70 of its base's time there, and .55 in a
process that had done nothing else (docs/log.md).
"""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flexrank import progress
from flexrank.deployment.environment import modules_environment
from flexrank.errors import FlexrankError
from flexrank.files import read_json


def in_fresh_process(
    directory: Path,
    until: str,
    told: Sequence[str] = (),
    limits: Mapping[str, Any] | None = None,
    place: Path | None = None,
) -> dict[str, Any]:
    """Goes on with a run by `python -m flexrank.run`; what that tells is on this standard error.

    It ends with this process, however that ends. Between the two nobody holds the run: another process may take it,
    which is told then as at any other time.

    Args:
        directory: the run's, which no process holds.
        until: the last stage.
        told: stages that were told of here, done or standing.
        limits: of a size to export after that, as `runner.export_one`; None exports none.
        place: of the export.

    Returns:
        The stages that ran there, "executed"; and what was exported, "export".

    Raises:
        FlexrankError: a wrong input of a stage, in its own words; or the process was killed.
        OSError: a full disk, and the like, as it was there.
        ModuleNotFoundError: an optional package is missing.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked = {
            "directory": str(directory), "until": until, "told": list(told), "threads": torch.get_num_threads(),
            "level": logging.getLogger("flexrank").getEffectiveLevel(), "progress": progress.is_shown(),
            "limits": None if limits is None else dict(limits), "place": None if place is None else str(place),
            "answer": str(Path(scratch, "answer.json")),
        }  # fmt: skip
        command = [sys.executable, "-m", "flexrank.run", json.dumps(asked)]
        # Its standard input ends when this process does; standard output stays this process's own.
        with subprocess.Popen(command, env=modules_environment(), stdin=subprocess.PIPE, stdout=2) as process:
            status = process.wait()
        answer: dict[str, Any] = read_json(Path(scratch, "answer.json")) if status in (0, 2) else {}
    _raise_as_there(answer)
    if status:
        told_status = f"the process that measures its models ended with status {status}"
        raise FlexrankError(f"{directory}: {told_status}; the same command goes on from there")
    return answer


def _raise_as_there(answer: Mapping[str, Any]) -> None:
    if "error" in answer:
        raise FlexrankError(answer["error"])
    if "system" in answer:
        raise OSError(*answer["system"])
    if "module" in answer:
        raise ModuleNotFoundError(f"No module named {answer['module']!r}", name=answer["module"])
