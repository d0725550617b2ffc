"""Ctrl-C and SIGTERM while a model is trained: the step that runs is finished and saved first."""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from flexrank import processes

log = logging.getLogger("flexrank")


@contextlib.contextmanager
def deferred(is_wanted: bool = True) -> Iterator[Callable[[], bool]]:
    """Inside the block a Ctrl-C or SIGTERM is only noted, and the function that is given tells of it.

    A second one is a KeyboardInterrupt at once, but not under torchrun, which repeats a Ctrl-C to its processes. Where
    it is not wanted, or in a thread that gets no signals, all stays as it is, and the function says False.
    """
    noted: list[int] = []
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(kind: int, _: FrameType | None) -> None:
        if noted and processes.count() == 1:
            raise KeyboardInterrupt
        if not noted:
            more = "; once more leaves at once" if processes.count() == 1 else ""
            log.info("distill: this step is finished and saved first%s", more)
        noted.append(kind)

    before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(noted)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler or signal.SIG_DFL)  # None: it was not set from Python
