"""The process that `pipeline/fresh` starts: goes on with a run, and answers with one JSON object as its last line."""

import json
import logging
import sys
from typing import Any

import torch

from flexrank import progress
from flexrank.config import load_config
from flexrank.errors import FlexrankError
from flexrank.pipeline.runner import go_on


def main(asked: dict[str, Any]) -> int:
    """Does what was asked; a wrong input is the answer's `error`, and exit status 2."""
    torch.set_num_threads(asked["threads"])
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("flexrank").setLevel(asked["level"])
    progress.show(asked["progress"])
    try:
        outcome = go_on(load_config(asked["directory"]), asked["until"], asked["told"])
    except FlexrankError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    print(json.dumps({"executed": outcome.executed}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(130)  # the process that waits for this one was interrupted too, and tells of it
