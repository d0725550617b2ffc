"""How long the command takes to answer, and what `import flexrank` adds to torch's own import."""

import functools
import statistics
import subprocess
import sys
from typing import Any

from flexrank.deployment.machine import interleave
from research.experiment import Experiment, Request
from research.result import Result, goal, spread, table

REPEATS = 9
HELP, ADDED = 0.5, 0.3
#: What each fresh interpreter runs.
PROGRAMS = {
    "nothing": "pass",
    "flexrank --help": "import sys; sys.argv = ['flexrank', '--help']; from flexrank.cli import main; main()",
    "import torch": "import torch",
    "import torch, flexrank": "import torch, flexrank",
    "every public name": "import torch; from flexrank import *",
}


def run(_: Request) -> Result:
    """Starts each program in turn; seconds of the whole process."""
    starts = [functools.partial(_start, program) for program in PROGRAMS.values()]
    seconds = dict(zip(PROGRAMS, interleave(starts, REPEATS), strict=True))
    torch = seconds["import torch"]
    added = {
        name: statistics.median(own - base for own, base in zip(seconds[name], torch, strict=True))
        for name in ("import torch, flexrank", "every public name")
    }
    rows = [[name, statistics.median(all_of), spread(all_of), added.get(name)] for name, all_of in seconds.items()]
    return {
        "settings": {"repeats": REPEATS},
        "tables": [table("seconds of a fresh interpreter", ["program", "median", "all", "over import torch"], rows)],
        "claims": _goals(statistics.median(seconds["flexrank --help"]), *added.values()),
        "data": {"seconds": seconds},
    }


def _start(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def _goals(answer: float, added: float, whole: float) -> list[dict[str, Any]]:
    return [
        goal("flexrank --help answers", f"under {HELP} s", f"{answer:.2f} s", answer < HELP),
        goal("import flexrank, over torch's own import", f"under {ADDED} s", f"{added:.2f} s", added < ADDED),
        goal("the same, with every public name used", f"under {ADDED} s", f"{whole:.2f} s", whole < ADDED),
    ]


EXPERIMENT = Experiment(
    name="start",
    title="Import and start",
    shows="the seconds until the command answers, and those that `import flexrank` adds to torch's import",
    minutes=1,
    run=run,
)
