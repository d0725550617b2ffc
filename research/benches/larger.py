"""A model larger than the process's memory, from its files to an elastic artefact that loads small."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flexrank.errors import FlexrankError
from flexrank.files import directory_bytes
from flexrank.run.rates import write_rate
from research.benches.memory import Subject, language, write_config
from research.experiment import Experiment, Ledger, Request
from research.machine import last_line
from research.result import Result, goal, measured, table


class Form(NamedTuple):
    """The sizes of a random Llama, and its bytes over those that a process may take beyond libraries and texts."""

    sizes: dict[str, int]
    times: int


QUICK = Form({"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 52}, 3)
FULL = Form({"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 96}, 4)
BUDGET = 0.3
SETTINGS: dict[str, Any] = {
    "probe": {"method": "curvature", "levels": 4}, "decomposition": {"buffer_bytes": 2**24},
    "allocation": {"budgets": [0.8, 0.5, BUDGET]}, "distillation": {"steps": 0}, "layers": {"exclude": ["lm_head"]},
}  # fmt: skip
#: A model whose run takes no more memory than libraries and texts do.
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
#: Its arguments are the path of an artefact and the budget of a size.
LOAD = """
import sys, torch, flexrank as fr
model, _ = fr.load_elastic(sys.argv[1], float(sys.argv[2]))
with torch.no_grad():
    assert model(torch.arange(16).unsqueeze(0)).logits.isfinite().all()
"""
#: glibc gives large blocks back as they are freed only if this threshold is fixed, so it does not grow.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


def run(request: Request) -> Result:
    """Runs each command in its own memory cgroup, up to one that is killed; finished commands are not repeated."""
    form = FULL if request.full else QUICK
    tiny, config = (_config(request.work, name, sizes) for name, sizes in (("tiny", TINY), ("large", form.sizes)))
    place, model = config.parent / "run", config.parent / "model"
    ledger, size = Ledger(request.work, {"form": form._asdict(), **SETTINGS}), directory_bytes(model)
    libraries = ledger.take("libraries", _limited, ["-m", "flexrank", "decompose", str(tiny)], None)["peak"]
    limit = libraries + size // form.times
    commands = {name: ["-m", "flexrank", name, str(config)] for name in ("decompose", "allocate", "distill")}
    commands["load"] = ["-c", LOAD, str(place / "elastic"), str(BUDGET)]
    done = dict[str, dict[str, float]]()
    for name, command in commands.items():
        done[name] = ledger.take(name, _limited, command, limit)
        if done[name]["killed"]:
            break
    moved = {
        "decompose": [model, place / "elastic_initial"], "allocate": [place / "curvature.safetensors"],
        "distill": [place / "elastic_initial", place / "elastic"],
    }  # fmt: skip
    octets = {name: sum(map(_bytes_of, moved[name])) for name in moved.keys() & done.keys() if not done[name]["killed"]}
    disk = ledger.take("disk", functools.partial(write_rate, request.work))
    return measured({"limit": limit, **SETTINGS}, *_shown(done, octets, size, limit, libraries, disk))


def _config(work: Path, name: str, sizes: dict[str, int]) -> Path:
    settings = language() | SETTINGS
    return write_config(work, Subject(f"{name} Llama of {sizes['num_hidden_layers']}", settings, sizes), "run")


def _shown(
    done: Mapping[str, Mapping[str, float]],
    octets: Mapping[str, int],
    size: int,
    limit: int,
    libraries: int,
    disk: float,
) -> tuple[Any, Any, Any]:
    """Returns tables, claims and data."""
    rows = []
    for name, one in done.items():
        read = octets.get(name)  # of what is loaded, the system reads only what it needs; a killed one has no files
        shown = [None] * 3 if read is None else [read / 1e6, read / one["seconds"] / 1e6, read / one["seconds"] / disk]
        rows.append([name, one["seconds"], one["peak"] / 1e6, *shown])
    columns = ["command", "seconds", "own memory, MB", "files read and written, MB", "MB/s", "of the disk's speed"]
    title = (
        f"a model of {size / 1e6:.0f} MB within {limit / 1e6:.0f} MB, {libraries / 1e6:.0f} of them libraries and texts"
    )
    killed = [name for name, one in done.items() if one["killed"]]
    found = f"{max(one['peak'] for one in done.values()) / 1e6:.0f} MB"
    found = f"{killed[0]} is killed at {found}" if killed else found
    claims = [goal("memory of every command", f"within {limit / 1e6:.0f} MB", found, not killed)]
    data = {"rows": rows, "model": size, "limit": limit, "libraries": libraries, "disk": disk}
    return [table(title, columns, rows, [0, 0, 0, 1, 3])], claims, data


def _bytes_of(path: Path) -> int:
    return directory_bytes(path) if path.is_dir() else path.stat().st_size


def _limited(arguments: Sequence[str], limit: int | None) -> dict[str, float]:
    """Returns the seconds and peak anonymous memory of a Python process, and whether the system killed it at the limit.

    Raises:
        FlexrankError: it fails for another reason.
    """
    command, environment = [sys.executable, *arguments], {**os.environ, **ENVIRONMENT}
    start, peak = time.perf_counter(), 0
    with contextlib.nullcontext() if limit is None else memory_group(limit) as group:
        if group is not None:
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors) as child:
                try:
                    while child.poll() is None:
                        peak = max(peak, anonymous_bytes(child.pid))
                        time.sleep(0.005)
                finally:
                    child.kill()
            errors.seek(0)
            word = last_line(errors.read())
    is_killed = limit is not None and child.returncode == -signal.SIGKILL
    if child.returncode and not is_killed:
        raise FlexrankError(f"{' '.join(arguments[:3])} ended with {child.returncode} within {limit} bytes: {word}")
    return {"seconds": time.perf_counter() - start, "peak": peak, "killed": is_killed}


def anonymous_bytes(process: int) -> int:
    """Returns the bytes of a process's own memory; 0 once it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Makes a memory cgroup of this many bytes below this process's own, and removes it afterwards.

    Raises:
        FlexrankError: this process cannot make one.
    """
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {kind: path.lstrip("/") for _, kinds, path in lines for kind in kinds.split(",")}
    first = "memory" in own
    parent = Path("/sys/fs/cgroup/memory" if first else "/sys/fs/cgroup", own["memory" if first else ""])
    group = parent / f"flexrank-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
    except OSError as error:
        raise FlexrankError(f"{group}: a memory cgroup cannot be made here ({error.strerror}); run as root") from error
    try:
        yield group
    finally:
        group.rmdir()


EXPERIMENT = Experiment(
    "larger", "A model larger than its process's memory",
    "a random Llama's way to an elastic artefact that loads small, in a memory cgroup of what libraries take and a "
    "third of the model's bytes (`--full`: a quarter, and the model is some three times the whole)",
    minutes=5, full_minutes=60, run=run,
)  # fmt: skip
