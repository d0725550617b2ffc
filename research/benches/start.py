"""How long the command takes to answer, and what `import flexrank` adds to torch's own import."""

import functools
import statistics
import subprocess
import sys

from flexrank.deployment.machine import interleave
from research.experiment import Experiment, Request
from research.result import Result, goal, measured, spread, table

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
    """Starts each program in turn, and measures the seconds of the whole process."""
    starts = [functools.partial(_start, program) for program in PROGRAMS.values()]
    seconds = dict(zip(PROGRAMS, interleave(starts, REPEATS), strict=True))
    torch, programs = seconds["import torch"], ("import torch, flexrank", "every public name")
    added = {name: statistics.median(a - b for a, b in zip(seconds[name], torch, strict=True)) for name in programs}
    rows = [[name, statistics.median(each), spread(each), added.get(name)] for name, each in seconds.items()]
    tables = [table("seconds of a fresh interpreter", ["program", "median", "all", "over import torch"], rows)]
    goals = {
        "flexrank --help answers": (statistics.median(seconds["flexrank --help"]), HELP),
        "import flexrank, over torch's own import": (added[programs[0]], ADDED),
        "the same, with every public name used": (added[programs[1]], ADDED),
    }
    claims = [goal(what, f"under {most} s", f"{here:.2f} s", here < most) for what, (here, most) in goals.items()]
    return measured({"repeats": REPEATS}, tables, claims, {"seconds": seconds})


def _start(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


EXPERIMENT = Experiment(
    "start", "Import and start",
    "the seconds until the command answers, and those that `import flexrank` adds to torch's import",
    minutes=1, run=run,
)  # fmt: skip
