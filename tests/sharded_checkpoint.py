"""Processes that torchrun starts leave a sharded checkpoint of test_damage in a directory."""

import sys
from pathlib import Path

from flexrank import processes
from test_damage import consolidated

if __name__ == "__main__":
    with processes.joined():
        consolidated(Path(sys.argv[1]))
