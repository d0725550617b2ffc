"""Progress bars with time left, on standard error."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
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

    Where standard error is not a terminal, it prints one line at the beginning and one at the end.
    """
    if total is None and isinstance(items, Sized):
        total = len(items) + start
    if not _shown:
        yield from items
    elif sys.stderr.isatty():
        yield from _track_on_terminal(items, description, total, start)
    else:
        print(f"{description}: {total if total is not None else 'some'} steps", file=sys.stderr, flush=True)
        yield from items
        print(f"{description}: done", file=sys.stderr, flush=True)


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
