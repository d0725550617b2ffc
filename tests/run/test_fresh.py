"""The rest of a run in a process of its own: what goes there, what comes back, and what goes wrong."""

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.deployment.environment import modules_environment
from flexrank.errors import FlexrankError
from flexrank.run import fresh, run_stages, runner, stage_names
from flexrank.run.config import load_config, parse_config
from flexrank.run.directory import RunDirectory
from flexrank.run.fresh import in_fresh_process
from flexrank.run.workspace import Workspace
from tiny_runs import settings


def test_what_is_timed_runs_elsewhere_once_this_process_has_worked(
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    times_apart: Callable[..., bool],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="flexrank")  # of the other process too
    here, do = [], runner._do

    def noted(stage: runner.Stage, *others: Any) -> None:
        here.append(stage.name)
        do(stage, *others)

    monkeypatch.setattr(runner, "_times_apart", times_apart)
    monkeypatch.setattr(runner, "_do", noted)
    config = parse_config(settings(sources / "language", sources / "text.txt", tmp_path / "run"))
    outcome = run_stages(config)
    told = capfd.readouterr().err
    assert "evaluating: done" in told and told.count("stands") == 0  # one process did the rest, and told of it here
    assert outcome.executed == stage_names() and not outcome.skipped
    assert here == ["decompose", "probe", "allocate", "distill"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rows"][0]["latency_ratio"] > 0
    assert outcome.workspace.elastic("elastic")

    monkeypatch.setattr(runner, "in_fresh_process", lambda *_: pytest.fail("nothing was done before it here"))
    assert run_stages(config).skipped == stage_names()
    (tmp_path / "run" / "evaluation.json").unlink()
    assert run_stages(config).executed == ("evaluate", "report")


def test_only_a_cpu_that_is_to_be_timed_is_left(tmp_path: Path, times_apart: Callable[..., bool]) -> None:
    def asked(device: str, forms: str, latency: bool) -> bool:
        config = parse_config(
            settings(tmp_path, tmp_path, tmp_path)
            | {"deployment": {"forms": forms}, "evaluation": {"latency": latency}}
        )
        work = Workspace(config, RunDirectory(tmp_path / "run"))
        work.__dict__["device"] = torch.device(device)
        return times_apart(work)

    assert asked("cpu", "measured", False) and asked("cpu", "quickest", False) and asked("cpu", "smallest", True)
    assert not asked("cpu", "smallest", False) and not asked("cuda", "measured", True)


def test_a_wrong_input_comes_back_in_its_own_words(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FlexrankError, match="is no run directory"):
        in_fresh_process(tmp_path, "report")
    directory = RunDirectory(load_config(copied).directory)
    with directory.locked(), pytest.raises(FlexrankError, match="writes to this run; wait for it"):
        in_fresh_process(copied, "report")
    (copied / "deployed.json").unlink()
    shutil.rmtree(copied / "deployed")
    (copied / "deployed").write_text("in the way")
    with pytest.raises(FileExistsError) as refused:
        in_fresh_process(copied, "report")
    assert refused.value.filename == str(copied / "deployed")
    monkeypatch.setattr(fresh.sys, "executable", "false")
    with pytest.raises(FlexrankError, match="ended with status 1; the same command goes on"):
        in_fresh_process(copied, "report")


def test_a_missing_package_comes_back_as_one() -> None:
    with pytest.raises(ModuleNotFoundError) as missing:
        fresh._raise_as_there({"module": "peft"})
    assert missing.value.name == "peft"


def test_an_export_after_a_training_is_chosen_elsewhere(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times_apart: Callable[..., bool]
) -> None:
    shutil.rmtree(copied / "elastic")
    outcome = run_stages(load_config(copied), "distill")
    assert outcome.executed == ("distill",)
    monkeypatch.setattr(runner, "_times_apart", times_apart)
    monkeypatch.setattr(runner.deploying, "export_within", lambda *_: pytest.fail("not here"))
    found = runner.export_one(outcome, {"budget": 0.5}, tmp_path / "small")
    assert found["budget"] == 0.5 and found["relative_size"] <= 0.5
    assert (tmp_path / "small" / "flexrank.json").is_file()


def test_it_ends_with_the_process_that_waits_for_it(copied: Path) -> None:
    """Killed at once: its child, which would hold the run for many seconds, lets go of it."""
    (copied / "evaluation.json").unlink()
    waiting = (
        "import pathlib, sys; from flexrank.run.fresh import in_fresh_process;"
        "in_fresh_process(pathlib.Path(sys.argv[1]), 'report')"
    )
    command = [sys.executable, "-c", waiting, str(copied)]
    with subprocess.Popen(command, env=modules_environment(), stderr=subprocess.DEVNULL) as process:
        lock = copied / "run.lock"
        while process.poll() is None and not (lock.is_file() and lock.read_text()):
            time.sleep(0.05)
        child = int(lock.read_text())
        process.kill()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    assert "report" in run_stages(load_config(copied)).executed
