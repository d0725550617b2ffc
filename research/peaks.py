"""Measures the peak memory of a stage of a run, in a fresh process."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Literal

from flexrank.errors import FlexrankError
from research.machine import last_line

Stage = Literal["decompose", "probe", "distill", "evaluate", "deploy"]
#: The stage completed before each one is measured; stages between the two are measured with it.
NEEDED: dict[str, str | None] = {
    "decompose": None, "probe": "decompose", "distill": "allocate", "evaluate": "distill", "deploy": "slack",
}  # fmt: skip
#: The other stages that are measured together with one.
WITH = {"evaluate": ["slack", "evaluate_initial"]}
#: What the process runs for each configuration. Its arguments name the stage and what it needs.
PROGRAM = """
import contextlib, ctypes, functools, gc, json, pathlib, sys, threading, unittest.mock
libc = ctypes.CDLL(None)
libc.mallopt(-3, 65536)  # what is freed is given back: else memory kept for the next request would count
import torch, transformers
import torch._dynamo, torchao.optim
from flexrank import processes
from flexrank.run import run_stages, stages
from flexrank.run.config import load_config
from flexrank.run.directory import RunDirectory
from flexrank.run.workspace import Workspace

stage, needed, together, counted = sys.argv[1], *map(json.loads, sys.argv[2:5])
if stage == "distill":
    stages.save_elastic = lambda *_, **__: ended.set()  # which a stage's memory is not about

def held():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(tuple(counted)))

def watch(peak, ended):
    while not ended.wait(0.002):
        peak[0] = max(peak[0], held())

peaks = []
with processes.joined():
    for config in map(load_config, sys.argv[5:]):
        if needed:
            run_stages(config, needed)
        for done in (stage, *together):  # by an earlier process
            processes.on_first_process(functools.partial(RunDirectory(config.directory).forget, done))
        work = Workspace(config, RunDirectory(config.directory))
        read = {"tokenizer": work.tokenizer, "samples": work.samples}
        gc.collect()
        libc.malloc_trim(0)
        start, peak, ended = held(), [0], threading.Event()
        thread = threading.Thread(target=watch, args=(peak, ended))
        thread.start()
        try:
            with unittest.mock.patch.multiple(Workspace, **read):
                with contextlib.suppress(FileNotFoundError):  # of the artefact, which is not written
                    run_stages(config, stage)
        finally:
            ended.set()
            thread.join()
        if stage == "distill":
            processes.on_first_process(functools.partial(RunDirectory(config.directory).forget, stage))  # no artefact
        peaks.append(peak[0] - start)
    print(json.dumps(peaks[1:]), flush=True)
    processes.on_first_process(lambda: None)
"""


def peaks_of(stage: Stage, *configs: str, processes: int = 1) -> list[int]:
    """Returns the peak bytes that the stage holds above what was there before, for each configuration after the first.

    With several processes it is the peak of the one that holds most; sharded models are mapped from their files.

    The first configuration only brings in what libraries load late; texts and tokenizers are read beforehand. Blocks
    being decomposed and the size being deployed are mapped from their files, whose pages the system can evict, so for
    these stages only the process's own memory counts.

    Raises:
        FlexrankError: the process fails, or the system has no /proc.
    """
    counted = ["RssAnon"] if stage in ("decompose", "deploy") or processes > 1 else ["RssAnon", "RssFile"]
    arguments = [stage, *map(json.dumps, (NEEDED[stage], WITH.get(stage, []), counted)), *configs]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # each further thread has its own buffers
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(PROGRAM)
        program.flush()
        command = [sys.executable, *(launcher if processes > 1 else []), program.name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    if done.returncode:
        raise FlexrankError(f"measuring the memory of {stage} failed: {last_line(done.stderr)}")
    return [max(peaks) for peaks in zip(*map(json.loads, done.stdout.splitlines()), strict=True)]
