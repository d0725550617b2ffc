"""The rest of a run in a process of its own: what goes there, what comes back, and what goes wrong."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.config import load_config, parse_config
from flexrank.errors import FlexrankError
from flexrank.pipeline import fresh, run_stages, runner, stage_names
from flexrank.pipeline.fresh import go_on_in_fresh_process
from flexrank.pipeline.rundir import RunDirectory
from flexrank.pipeline.workspace import Workspace
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

    monkeypatch.setattr(runner, "go_on_in_fresh_process", lambda *_: pytest.fail("nothing was done before it here"))
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

    assert asked("cpu", "measured", False) and asked("cpu", "smallest", True)
    assert not asked("cpu", "smallest", False) and not asked("cuda", "measured", True)


def test_a_wrong_input_comes_back_in_its_own_words(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FlexrankError, match="is no run directory"):
        go_on_in_fresh_process(tmp_path, "report")
    directory = RunDirectory(load_config(copied).directory)
    with directory.locked(), pytest.raises(FlexrankError, match="writes to this run; wait for it"):
        go_on_in_fresh_process(copied, "report")
    monkeypatch.setattr(fresh.sys, "executable", "false")
    with pytest.raises(FlexrankError, match="ended with status 1; the same command goes on"):
        go_on_in_fresh_process(copied, "report")
