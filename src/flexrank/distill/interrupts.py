"""Ctrl-C and SIGTERM while a model is trained: the step that runs is finished and saved first."""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

log = logging.getLogger("flexrank")


@contextlib.contextmanager
def deferred(is_wanted: bool = True) -> Iterator[Callable[[], bool]]:
    """Inside the block a Ctrl-C or SIGTERM is only noted, and the function that is given tells of it.

    A second one is a KeyboardInterrupt at once. Where it is not wanted, or in a thread that gets no signals, all stays
    as it is, and the function says False.
    """
    noted: list[int] = []
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(kind: int, _: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(kind)
        log.info("distill: this step is finished and saved first; once more leaves at once")

    before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(noted)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler or signal.SIG_DFL)  # None: it was not set from Python
