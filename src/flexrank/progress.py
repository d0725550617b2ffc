"""Progress bars with time left, on standard error."""

import datetime
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
#: Seconds between two lines of a log.
EVERY = 60.0
_shown = True


def show(shown: bool) -> None:
    """Switches the progress that `track` shows on or off; by default it is on."""
    global _shown
    _shown = shown


def is_shown() -> bool:
    """Whether `track` shows progress."""
    return _shown


def track(items: Iterable[T], description: str, total: int | None = None, start: int = 0) -> Iterator[T]:
    """Iterates over `items` under a progress bar; `start` items count as done before the first one.

    Where standard error is not a terminal, but a log, it prints a line at the beginning, every minute, and at the end.
    """
    if total is None and isinstance(items, Sized):
        total = len(items) + start
    if not _shown:
        yield from items
    elif sys.stderr.isatty():
        yield from _track_on_terminal(items, description, total, start)
    else:
        yield from _track_in_log(items, description, total, start)


def _track_in_log(items: Iterable[T], description: str, total: int | None, start: int) -> Iterator[T]:
    def say(what: str) -> None:
        print(f"{description}: {what}", file=sys.stderr, flush=True)

    say(f"{total if total is not None else 'some'} steps" + f", from {start} on" * (start > 0))
    began = latest = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - latest >= EVERY:
            latest = now
            say(f"{start + count}" + ("" if total is None else _rest(total, start + count, (now - began) / count)))
    say("done")


def _rest(total: int, done: int, seconds_each: float) -> str:
    return f" of {total}, {datetime.timedelta(seconds=round(seconds_each * (total - done)))} left"


def _track_on_terminal(items: Iterable[T], description: str, total: int | None, start: int) -> Iterator[T]:
    from rich import progress as rich  # here, because it takes a fifth of a second that `import flexrank` need not take
    from rich.console import Console

    done, elapsed, left = rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TimeRemainingColumn()
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), done, elapsed, rich.TextColumn("left"), left)
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, completed=start)
        for item in items:
            yield item
            bar.advance(task)
