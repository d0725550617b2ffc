"""The process that `pipeline/fresh` starts: goes on with a run, and writes what came of it to a file."""

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from flexrank import progress
from flexrank.errors import FlexrankError
from flexrank.files import write_json
from flexrank.run.config import load_config
from flexrank.run.runner import export_one, go_on


def main(asked: dict[str, Any]) -> int:
    """Does what was asked; a wrong input, or what the system refuses, is in the answer, with exit status 2."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(asked["threads"])
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("flexrank").setLevel(asked["level"])
    progress.show(asked["progress"])
    answer: dict[str, Any] = {}
    try:
        outcome = go_on(load_config(asked["directory"]), asked["until"], asked["told"])
        answer["executed"] = list(outcome.executed)
        if asked["limits"] is not None:
            answer["export"] = export_one(outcome, asked["limits"], Path(asked["place"]) if asked["place"] else None)
    except FlexrankError as error:
        answer = {"error": str(error)}
    except ModuleNotFoundError as error:
        answer = {"module": error.name}
    except OSError as error:
        answer = {"system": [error.errno, error.strerror or str(error), error.filename and str(error.filename)]}
    write_json(Path(asked["answer"]), answer)
    return 0 if "executed" in answer else 2


def _end_with_parent() -> None:
    """Ends this process when standard input does: nobody waits for it, and the run's lock is to be free."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(130)  # the process that waits for this one was interrupted too, and tells of it
