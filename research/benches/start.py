"""How long the command takes to answer, and what `import flexrank` adds to torch's own import."""

import functools
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research.benches.bench import Bench
from research.benches.machine import interleave
from research.findings import Result, goal, spread, table

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


def run(_: Path | None = None) -> Result:
    """Starts each program in turn; seconds of the whole process."""
    starts = [functools.partial(_start, program) for program in PROGRAMS.values()]
    seconds = dict(zip(PROGRAMS, interleave(starts, REPEATS), strict=True))
    base = seconds["import torch"]
    added = {
        name: [one - torch for one, torch in zip(seconds[name], base, strict=True)]
        for name in ("import torch, flexrank", "every public name")
    }
    rows = [[name, statistics.median(found), spread(found), _over(added, name)] for name, found in seconds.items()]
    return {
        "settings": {"repeats": REPEATS},
        "tables": [table("seconds of a fresh interpreter", ["program", "median", "all", "over import torch"], rows)],
        "claims": _goals(seconds, added),
        "data": {"seconds": seconds},
    }


def _start(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def _over(added: Mapping[str, list[float]], name: str) -> float | None:
    return statistics.median(added[name]) if name in added else None


def _goals(seconds: Mapping[str, list[float]], added: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    answer, more = statistics.median(seconds["flexrank --help"]), statistics.median(added["import torch, flexrank"])
    whole = statistics.median(added["every public name"])
    return [
        goal("flexrank --help answers", f"under {HELP} s", f"{answer:.2f} s", answer < HELP),
        goal("import flexrank, over torch's own import", f"under {ADDED} s", f"{more:.2f} s", more < ADDED),
        goal("the same, with every public name used", f"under {ADDED} s", f"{whole:.2f} s", whole < ADDED),
    ]


BENCH = Bench(
    name="start",
    title="Import and start",
    measures="the seconds until the command answers, and those that `import flexrank` adds to torch's import",
    minutes=1,
    run=run,
)
