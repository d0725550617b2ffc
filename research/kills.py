"""Kills processes of a run at random moments of every stage, and compares the outcome with an undisturbed run.

    python -m research.kills CONFIG --kills 30 --processes 2

After each kill the same command starts again. A run that ends before its next kill is compared, and a new one starts.
"""

import collections
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flexrank.cli.exits import OneLineErrors
from flexrank.errors import FlexrankError
from flexrank.files import digest_file, digest_files
from flexrank.run.directory import RunDirectory
from flexrank.run.runner import STAGES, stage_names

app = typer.Typer(cls=OneLineErrors, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

#: Before the first stage: the interpreters start and find each other.
START = "start"
PLACES = (START, *stage_names())
#: Approximate extra seconds of a stage that is the first of its process, which then imports and loads.
LOADING = 3.0
POLL = 0.02
#: Seconds within which a start must reach its stage, and all of its processes must end after a kill.
PATIENCE = 900.0
#: Files without times or paths in them, which must be equal byte for byte.
COMPARED = (*(name for stage in STAGES[:-1] if not stage.is_timed for name in stage.outputs), "deployed")


@dataclasses.dataclass(frozen=True)
class Run:
    """The command that is restarted after each kill."""

    config: Path
    output: Path
    processes: int

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Starts the command, with its output in a file beside the run's. No process of it is left after the block."""
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes))
        verb = ("flexrank", "run", str(self.config), "--set", f"output={self.output}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", *launcher, "-m", *verb]
        with open(self.log_path, "wb") as file:
            run = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()

    @property
    def log_path(self) -> Path:
        """The file that holds what the command has printed since its last start."""
        return self.output.with_suffix(".log")

    def finish(self) -> None:
        """Runs the command to the end; raises FlexrankError if it fails or takes too long to end."""
        with self.started() as run:
            if status := run.wait(PATIENCE):
                raise FlexrankError(f"{self.log_path}: the run ended with {status}, and no process was killed")

    def kill(self, place: str, seconds: float, number: int) -> str | None:
        """Kills a process `seconds` into a stage, or into the first stage that is left, or as that stage ends.

        Returns the stage in which the kill fell; None if the run ended before it.
        """
        with self.started() as run:
            _wait(run, lambda: self._is_at(run, place) and number in numbered_children(run.pid), PATIENCE)
            at = self._place(run)
            _wait(run, lambda: self._place(run) != at, seconds)
            fell, found = self._place(run), numbered_children(run.pid)
            if run.poll() is None and number in found:
                os.kill(found[number], signal.SIGKILL)
            return fell if run.wait(PATIENCE) else None

    def _is_at(self, run: subprocess.Popen[bytes], place: str) -> bool:
        return PLACES.index(self._place(run)) >= PLACES.index(place)

    def _place(self, run: subprocess.Popen[bytes]) -> str:
        """Returns the current stage, from what process 0 has printed about earlier stages and from its lock."""
        said = self.log_path.read_text(encoding="utf8", errors="replace")
        done = [place for place in PLACES if f"{place}: up to date\n" in said or f"{place}: done in " in said]
        if done:
            return PLACES[min(PLACES.index(done[-1]) + 1, len(PLACES) - 1)]
        lock = self.output / "run.lock"
        holder = lock.read_text() if lock.is_file() else ""
        return PLACES[1] if holder and holder == str(numbered_children(run.pid).get(0)) else START


def kill_run(run: Run, undisturbed: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills a run `kills` times, spread evenly over the stages, and then lets it finish.

    Returns:
            kills (the stage of each), runs (how many ended) and differing (files that differ from the undisturbed run's
            in any of them).
    """
    seconds = {START: LOADING, **RunDirectory(undisturbed).seconds()}
    chance, fell, differing, runs = random.Random(seed), list[str](), set[str](), 1
    for number in range(kills):
        place, where = PLACES[number * len(PLACES) // kills], None
        while where is None:
            moment = chance.uniform(0, seconds[place] + chance.choice((0.0, LOADING)))
            where = run.kill(place, moment, chance.randrange(run.processes))
            if where is None:
                differing |= differences(undisturbed, run.output)
                runs += 1
                shutil.rmtree(run.output)
        print(f"kill {number + 1} of {kills}: in {where}", file=sys.stderr, flush=True)
        fell.append(where)
    run.finish()
    return {"kills": fell, "runs": runs, "differing": sorted(differing | differences(undisturbed, run.output))}


def differences(wanted: Path, found: Path) -> set[str]:
    """Returns artefact and result files that only one run has or that differ by a byte, and the leftovers of kills."""
    one, other = (
        {name: digest for name, digest in digest_files(run).items() if name.partition("/")[0] in COMPARED}
        for run in (wanted, found)
    )
    left = {path.relative_to(found).as_posix() for end in ("aside", "old", "was") for path in found.rglob(f"*.{end}")}
    return left | {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _wait(run: subprocess.Popen[bytes], is_so: Callable[[], bool], seconds: float) -> None:
    """Returns when `is_so()` is true, when the run has ended, or after `seconds`."""
    end = time.monotonic() + seconds
    while run.poll() is None and not is_so() and time.monotonic() < end:
        time.sleep(POLL)


def numbered_children(parent: int) -> dict[int, int]:
    """Returns the process ids of the processes that torchrun has started, by rank."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{parent}\n" in (place / "status").read_text():
                environment = dict(part.partition("=")[::2] for part in (place / "environ").read_text().split("\0"))
                if "RANK" in environment:
                    found[int(environment["RANK"])] = int(place.name)
    return found


@app.callback()
def _group() -> None:
    """Evidence that killed runs resume."""


@app.command()
def kills(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's YAML; a small one, it starts often.")],
    count: Annotated[int, typer.Option("--kills", min=1, help="How many.")] = 30,
    processes: Annotated[int, typer.Option(min=2, help="Of the run; each kill takes one of them.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the moments and the processes.")] = 0,
    work: Annotated[Path, typer.Option(help="Where the runs are; what is there of them goes.")] = Path("runs", "kills"),
) -> None:
    """Kills a run in all of its stages; exits with status 1 if a file differs from the undisturbed run's."""
    work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    plain, killed = (Run(config, work / name, processes) for name in ("undisturbed", "killed"))
    for run in (plain, killed):
        shutil.rmtree(run.output, ignore_errors=True)
    plain.finish()
    result = kill_run(killed, plain.output, count, seed)
    where = collections.Counter(result["kills"])
    for place in PLACES:
        print(f"{place:>17} {where[place]:3} kills")
    print(f"runs that ended: {result['runs']}; seconds: {time.perf_counter() - start:.0f}")
    print("files that differ: " + (", ".join(result["differing"]) or "none"))
    print("elastic artefact: " + digest_file(killed.output / "elastic" / "elastic.safetensors"))
    print(json.dumps(result))
    raise typer.Exit(1 if result["differing"] else 0)


if __name__ == "__main__":
    app(["kills", *sys.argv[1:]], prog_name="python -m research.kills")
