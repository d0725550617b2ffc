"""Progress bars with time left, on standard error."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
_shown = True


def show(shown: bool) -> None:
    """Whether `track` tells of progress at all; it does until told otherwise."""
    global _shown
    _shown = shown


def is_shown() -> bool:
    """Whether `track` tells of progress."""
    return _shown


def track(items: Iterable[T], description: str, total: int | None = None, start: int = 0) -> Iterator[T]:
    """Iterates over `items` under a progress bar; `start` items count as done before the first one.

    Where standard error is no terminal, one line tells the beginning and one the end, so that logs stay short.
    """
    if total is None and isinstance(items, Sized):
        total = len(items) + start
    if not _shown:
        yield from items
        return
    if not sys.stderr.isatty():
        yield from _track_in_log(items, description, total)
        return
    yield from _track_on_terminal(items, description, total, start)


def _track_on_terminal(items: Iterable[T], description: str, total: int | None, start: int) -> Iterator[T]:
    from rich.console import Console  # a fifth of a second, which `import flexrank` need not take
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total, completed=start)
        for item in items:
            yield item
            progress.advance(task)


def _track_in_log(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    print(f"{description}: {total if total is not None else 'some'} steps", file=sys.stderr, flush=True)
    yield from items
    print(f"{description}: done", file=sys.stderr, flush=True)
