"""Work in a fresh process: its value, its errors, and its end."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flexrank import progress
from flexrank.deployment.process import in_fresh_process
from flexrank.errors import FlexrankError


def describe(numbers: list[float], place: str) -> dict[str, object]:
    quiet = [logging.getLogger("flexrank").level, progress.is_shown(), signal.getsignal(2) is signal.SIG_IGN]
    known = {"process": os.getpid(), "threads": torch.get_num_threads(), "here": os.environ[place]}
    return known | {"sum": sum(numbers), "quiet": quiet}


def refuse(message: str) -> None:
    raise FlexrankError(message)


def divide(number: int) -> float:
    return number / 0


def wait(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


def test_the_value_comes_from_another_process_like_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_shown", False)
    monkeypatch.setattr(logging.getLogger("flexrank"), "level", logging.ERROR)
    answer = in_fresh_process(describe, [1.5, 2.0], "PLACE", environment={"PLACE": "there"})
    assert answer["sum"] == 3.5 and answer["here"] == "there" and "PLACE" not in os.environ
    assert answer["process"] != os.getpid() and answer["threads"] == torch.get_num_threads()
    assert answer["quiet"] == [logging.ERROR, False, True]


def test_a_wrong_input_comes_back_in_its_own_words_and_other_errors_with_their_status(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(FlexrankError, match="^this is wrong; do that$"):
        in_fresh_process(refuse, "this is wrong; do that")
    with pytest.raises(FlexrankError, match="No such file or directory: '/nowhere/at/all'"):
        in_fresh_process(wait, "/nowhere/at/all")
    with pytest.raises(FlexrankError, match="ran test_process:divide ended with status 1"):
        in_fresh_process(divide, 1)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_it_is_ended_after_its_time(tmp_path: Path) -> None:
    with pytest.raises(FlexrankError, match=r"did not finish test_process:wait within 0\.01 s"):
        in_fresh_process(wait, str(tmp_path / "pid"), timeout=0.01)


def test_it_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    """Killed at once, the parent leaves no child that goes on for a minute."""
    place = tmp_path / "pid"
    waiting = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_process;"
        "from flexrank.deployment.process import in_fresh_process;"
        f"in_fresh_process(test_process.wait, {str(place)!r})"
    )
    with subprocess.Popen([sys.executable, "-c", waiting], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (place.is_file() and place.read_text()):
            time.sleep(0.05)
        child = int(place.read_text())
        process.kill()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
