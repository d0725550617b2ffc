"""Locking of an elastic model's size: forward passes may run at once, and a change of size runs alone."""

import collections
import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

#: The attribute in which a model holds its `SizeLock`.
ATTRIBUTE = "_flexrank_size_lock"
#: Seconds after which a waiting change checks whether the passes that it waits for still run.
PATIENCE = 1.0
_making = threading.Lock()


class SizeLock:
    """A readers-writer lock of a model: forward passes may run at once, and each change of its size runs alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = collections.defaultdict[int, list[int]](list)  # the frames of each thread's forward passes
        self._changes = 0  # the number that wait or run

    def __reduce__(self) -> tuple[type["SizeLock"], tuple[()]]:
        return SizeLock, ()  # a copy of the model gets a new lock

    def begin(self, *_: Any) -> None:
        """Begins a forward pass, as the model's forward pre-hook. A nested pass does not wait."""
        if torch.compiler.is_compiling():
            return
        own = threading.get_ident()
        with self._condition:
            self._condition.wait_for(lambda: own in self._running or not self._changes)
            self._running[own].append(id(sys._getframe(1)))

    def end(self, *_: Any) -> None:
        """Ends a forward pass, as the model's forward hook."""
        if torch.compiler.is_compiling():
            return
        own = threading.get_ident()
        with self._condition:
            passes = self._running.get(own, [])
            del passes[-1:]  # a pass that began before the first change has no entry
            if not passes:
                self._running.pop(own, None)
            self._condition.notify_all()

    def _forget_ended(self) -> None:
        """Forgets passes that ended without their hook, as after Ctrl-C or the end of their thread."""
        stacks = sys._current_frames()
        for thread, passes in list(self._running.items()):
            alive = {id(frame) for frame, _ in traceback.walk_stack(stacks[thread])} if thread in stacks else set()
            passes[:] = [one for one in passes if one in alive]
            if not passes:
                del self._running[thread]

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside the block no other thread runs the model: passes under way end first, and new ones wait."""
        own = threading.get_ident()
        with self._condition:
            self._changes += 1
            try:
                while not self._condition.wait_for(lambda: self._running.keys() <= {own}, PATIENCE):
                    self._forget_ended()
                yield
            finally:
                self._changes -= 1
                self._condition.notify_all()


def size_lock_of(model: nn.Module) -> SizeLock:
    """The model's `SizeLock`; the first call creates it, and registers hooks around the model's forward."""
    with _making:
        if ATTRIBUTE not in model.__dict__:
            lock = model.__dict__[ATTRIBUTE] = SizeLock()
            model.register_forward_pre_hook(lock.begin)
            model.register_forward_hook(lock.end, always_call=True)
        return model.__dict__[ATTRIBUTE]


def drop_size_lock_(model: nn.Module) -> None:
    """Removes the lock, and its hooks, of a model whose size changes no more."""
    lock = model.__dict__.pop(ATTRIBUTE, None)
    for hooks in (model._forward_pre_hooks, model._forward_hooks) if lock else ():
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is lock]:
            del hooks[key]
            model._forward_hooks_always_called.pop(key, None)
