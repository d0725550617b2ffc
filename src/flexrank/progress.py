"""Progress bars with time left, on standard error."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")
_shown = True


def show(shown: bool) -> None:
    """Whether `track` tells of progress at all; it does until told otherwise."""
    global _shown
    _shown = shown


def track(items: Iterable[T], description: str, total: int | None = None, start: int = 0) -> Iterator[T]:
    """Iterates over `items` under a progress bar; `start` items count as done before the first one.

    Where standard error is no terminal, one line tells the beginning and one the end, so that logs stay short.
    """
    if total is None and isinstance(items, Sized):
        total = len(items) + start
    if not _shown:
        yield from items
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _track_in_log(items, description, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total, completed=start)
        for item in items:
            yield item
            progress.advance(task)


def _track_in_log(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    print(f"{description}: {total if total is not None else 'some'} steps", file=sys.stderr, flush=True)
    yield from items
    print(f"{description}: done", file=sys.stderr, flush=True)
