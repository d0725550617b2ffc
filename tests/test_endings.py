"""Processes that torchrun starts end together, by one line of one of them."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launched import children, config_of, ended, flexrank, started, wait_for
from tiny_runs import invoke


@pytest.mark.slow
def test_a_wrong_input_is_one_line_of_one_process(prepared: dict[str, Any], tmp_path: Path) -> None:
    """Here process 0 meets it, while the other waits."""
    shutil.copytree(prepared["output"], tmp_path / "two")
    (tmp_path / "two" / "chain.json").write_text("{}")
    output, words = flexrank(2, "run", tmp_path / "two", "--json")
    assert words[0].startswith(f"error: {tmp_path}/two/chain.json: was edited after `allocate` wrote it")
    assert words[1:] == ["exit 2", "exit 2"] and output == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_sharded"),
    [(signal.SIGSTOP, True), (signal.SIGTERM, False)],  # `test_processes` has SIGKILL
)
def test_all_end_when_one_does(
    kind: signal.Signals, is_sharded: bool, prepared: dict[str, Any], tmp_path: Path
) -> None:
    """A process that hangs is named by one line of another; a signal to torchrun saves and ends all."""
    shutil.copytree(prepared["output"], tmp_path / "two")
    keys = {"sharded": is_sharded, "gradient_checkpointing": is_sharded}
    config = config_of(prepared, tmp_path / "two", steps=10**6, checkpoint_every=2, **keys)
    with started(2, "-m", "flexrank", "distill", config, timeout=4) as run:
        wait_for(tmp_path / "two" / "partial")
        while not list((tmp_path / "two" / "partial").glob("distill-*/state.json")):
            time.sleep(0.05)
        start, pids = time.monotonic(), children(run)
        os.kill(run.pid if kind == signal.SIGTERM else pids[1], kind)
        if kind == signal.SIGSTOP:
            while Path(f"/proc/{pids[0]}/exe").exists():
                time.sleep(0.05)
            os.kill(pids[1], signal.SIGKILL)  # else torchrun waits for half a minute
        _, words = ended(run)
    assert time.monotonic() - start < 30
    (word,) = [word for word in words if not word.startswith("exit")]
    if kind == signal.SIGTERM:
        assert word == "interrupted; the same command continues from here"
    else:
        assert word.startswith("error: process 1 does not answer")
    (state,) = (tmp_path / "two" / "partial").glob("distill-*/state.json")
    assert len(json.loads(state.read_text())["losses"]) >= 2


ANY = "{name: one, task: embedding, model: none}"


def fail_as_a_gpu() -> None:
    said = "Tried to allocate 2 GiB. GPU 0 has 1 GiB that is free. Process 7 has 3 GiB. See the documentation"
    raise torch.OutOfMemoryError(f"CUDA out of memory. {said}")


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (
            lambda: torch.empty(10**17),
            "allocate 400000000000000000 bytes. Error code 12 (Cannot allocate memory));",
        ),
        (lambda: bytearray(10**17), "(MemoryError);"),
        (fail_as_a_gpu, "(CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB that is free);"),
    ],
)
def test_memory_that_is_out_is_one_line(
    fail: Callable[[], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(ANY)
    monkeypatch.setattr("flexrank.run.run_stages", lambda *_: fail())
    result = invoke("distill", tmp_path / "config.yaml")
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 1 and line.startswith("error: out of memory (") and words in line
    assert "`flexrank run CONFIG --dry-run` counts what each stage takes" in line and "gradient_checkpointing" in line


def test_another_fault_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(ANY)
    fault = RuntimeError("a fault")

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr("flexrank.run.run_stages", fail)
    result = invoke("distill", tmp_path / "config.yaml")
    assert result.exception is fault and result.stderr == ""


def test_an_interruption_while_processes_connect_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexrank.processes.joined", stop)
    result = invoke("report", "nothing")
    assert result.exit_code == 130 and result.stderr == "interrupted\n"


OUT_OF_MEMORY = """
import torch
import flexrank.cli, flexrank.run
from flexrank import processes

def work(*_):
    if processes.number() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    processes.sums(1.0)

flexrank.run.run_stages = work
flexrank.cli.main()
"""


@pytest.mark.slow
def test_the_process_that_is_out_of_memory_says_so(tmp_path: Path) -> None:
    """Here process 1 is, while process 0 waits for it."""
    (tmp_path / "out.py").write_text(OUT_OF_MEMORY)
    (tmp_path / "config.yaml").write_text(ANY)
    with started(2, tmp_path / "out.py", "distill", tmp_path / "config.yaml") as run:
        _, words = ended(run)
    assert words[0].startswith("error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB); `flexrank run")
    assert words[1:] == ["exit 1", "exit 1"]


SIGNALLED = """
import pathlib, sys, time
from flexrank import processes

with processes.joined():
    try:
        if processes.is_first():
            pathlib.Path(sys.argv[1]).touch()
            time.sleep(1000)
        processes.sums(1.0)
    except (processes.ProcessLost, KeyboardInterrupt):
        line, status = processes.agree_on_exit("interrupted", 130, is_certain=False)
        print(line, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
def test_a_signal_is_no_missing_process_though_one_waits_for_another(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(SIGNALLED)
    with started(2, tmp_path / "wait.py", tmp_path / "begun") as run:
        wait_for(tmp_path / "begun")
        time.sleep(1)
        start = time.monotonic()
        os.kill(run.pid, signal.SIGTERM)
        _, words = ended(run)
    assert words == ["interrupted"] and time.monotonic() - start < 8


LONG = """
import pathlib, signal, sys, time
from flexrank import processes

asked = []
with processes.joined():
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    pathlib.Path(sys.argv[1], str(processes.number())).touch()
    while not asked:
        time.sleep(0.05)
    if processes.is_first():  # ends a step, and saves
        time.sleep(3)
        pathlib.Path(sys.argv[1], "saved").touch()
    line, status = processes.agree_on_exit("interrupted", 130, is_certain=False, is_signal=True)
    print(line, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
def test_a_process_that_still_saves_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG)
    with started(2, tmp_path / "long.py", tmp_path, timeout=2) as run:
        wait_for(tmp_path / "0")
        wait_for(tmp_path / "1")
        os.kill(run.pid, signal.SIGTERM)
        _, words = ended(run)
    assert [word for word in words if word and not word.startswith("exit")] == ["interrupted"]
    assert (tmp_path / "saved").exists()


HUNG = """
import sys, time
from flexrank import processes

with processes.joined():
    if processes.number() == 1:
        time.sleep(1000)
    try:
        processes.sums(1.0)
    except processes.ProcessLost as error:
        print(*processes.agree_on_exit(str(error), 1, is_certain=False), file=sys.stderr)
sys.exit(1)
"""


@pytest.mark.slow
def test_a_process_that_hangs_is_named_though_it_sends_heartbeats(tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(HUNG)
    with started(2, tmp_path / "hung.py", timeout=2) as run:
        _, words = ended(run)
    assert words[0].startswith("error: process 1 does not answer")


WAITING = """
import pathlib, sys, time
from flexrank import processes

def work():
    time.sleep(3)
    pathlib.Path(sys.argv[1]).touch()
    return 7

with processes.joined():
    assert processes.on_first_process(work) == 7
    try:
        processes.on_first_process(lambda: time.sleep(1000))
    except processes.ProcessLost as error:
        print(*processes.agree_on_exit(str(error), 1, is_certain=False), file=sys.stderr)
        sys.exit(1)
"""


@pytest.mark.slow
def test_process_0_may_work_alone_for_longer_than_the_time_out_but_not_hang(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(WAITING)
    with started(2, tmp_path / "wait.py", tmp_path / "done", timeout=2) as run:
        wait_for(tmp_path / "done")
        time.sleep(0.5)
        pids = children(run)
        os.kill(pids[0], signal.SIGSTOP)
        while Path(f"/proc/{pids[1]}/exe").exists():
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
        _, words = ended(run)
    (word,) = [word for word in words if not word.startswith("exit")]
    assert word.startswith("error: process 0 does not answer")


@pytest.mark.slow
def test_a_wrong_time_out_is_one_line_though_all_meet_it() -> None:
    with started(2, "-m", "flexrank", "report", "nothing", timeout=float("nan")) as run:
        _, words = ended(run)
    line = "error: FLEXRANK_TIMEOUT is 'nan'; it is a number of seconds above 0"
    # torchrun interrupts a process that is still starting when the other one ends.
    assert [word for word in words if word not in ("interrupted", "exit 130")] in (
        [line, "exit 2"],
        [line, "exit 2", "exit 2"],
    )


ABSENT = """
import os, time
import flexrank.cli

if os.environ["RANK"] == "1":
    time.sleep(1000)
flexrank.cli.main()
"""


@pytest.mark.slow
def test_a_process_that_never_connects_is_named(tmp_path: Path) -> None:
    (tmp_path / "absent.py").write_text(ABSENT)
    with started(2, tmp_path / "absent.py", "report", "nothing", timeout=2) as run:
        _, words = ended(run)
    assert words[0].startswith("error: process 1 does not answer") and sorted(words[1:]) == ["exit -15", "exit 1"]
