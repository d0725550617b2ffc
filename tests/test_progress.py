"""Progress: a line at the beginning, every minute and at the end of a log, and a bar on a terminal."""

import io
import sys

import pytest

from flexrank import progress


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_log_gets_a_line_every_minute_with_the_time_left(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    for _ in progress.track(range(10), "distilling"):
        clock.sleep(25)
    assert lines(capsys) == [
        "distilling: 10 steps",
        "distilling: 3 of 10, 0:02:55 left",
        "distilling: 6 of 10, 0:01:40 left",
        "distilling: 9 of 10, 0:00:25 left",
        "distilling: done",
    ]


def test_a_resumed_loop_counts_what_was_done_but_not_its_time(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    for _ in progress.track(range(90, 100), "distilling", start=90):
        clock.sleep(60)
    assert lines(capsys)[:3] == [
        "distilling: 100 steps, from 90 on",
        "distilling: 91 of 100, 0:09:00 left",
        "distilling: 92 of 100, 0:08:00 left",
    ]


def test_items_of_unknown_number_are_counted(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    for _ in progress.track(iter(range(2)), "calibrating"):
        clock.sleep(70)
    assert lines(capsys) == ["calibrating: some steps", "calibrating: 1", "calibrating: 2", "calibrating: done"]


def test_a_short_loop_has_two_lines(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    assert list(progress.track([3, 4], "probing")) == [3, 4]
    assert lines(capsys) == ["probing: 2 steps", "probing: done"]


def test_nothing_is_printed_where_progress_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    progress.show(False)
    try:
        assert list(progress.track([3, 4], "probing")) == [3, 4]
    finally:
        progress.show(True)
    assert lines(capsys) == []


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.track([5, 6], "probing", total=8, start=6)) == [5, 6]
    assert "8/8" in terminal.getvalue() and "left" in terminal.getvalue()
