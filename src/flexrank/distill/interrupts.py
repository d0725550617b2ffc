"""Ctrl-C and SIGTERM during training: the current step is finished and saved first."""

import contextlib
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from torch.utils.data import DataLoader

from flexrank import processes

log = logging.getLogger("flexrank")


@contextlib.contextmanager
def deferred(is_wanted: bool = True) -> Iterator[Callable[[], bool]]:
    """Inside the block a Ctrl-C or SIGTERM is only noted; the yielded function returns whether there was one.

    A second one raises KeyboardInterrupt at once, except with several processes, because torchrun repeats a Ctrl-C to
    them. If not `is_wanted`, or in a thread that gets no signals, nothing changes, and the function returns False.
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


@contextlib.contextmanager
def shielded(batches: object) -> Iterator[None]:
    """Inside the block the workers that a DataLoader starts are in process groups of their own.

    torchrun and `timeout` send SIGTERM to a whole group; if a worker ends by it, the loader breaks the current step.
    """
    loader = getattr(batches, "base_dataloader", batches)  # of accelerate's
    if not isinstance(loader, DataLoader):
        yield
        return
    own = loader.worker_init_fn
    loader.worker_init_fn = functools.partial(_leave_group, own)
    try:
        yield
    finally:
        loader.worker_init_fn = own


def _leave_group(own: Callable[[int], None] | None, worker: int) -> None:
    os.setpgrp()
    if own is not None:
        own(worker)
