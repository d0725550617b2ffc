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

#: The attribute in which a model holds its `Turns`.
PLACE = "_flexrank_turns"
#: Seconds after which a waiting change checks whether the passes that it waits for still run.
PATIENCE = 1.0
_making = threading.Lock()


class Turns:
    """A readers-writer lock of a model: forward passes may run at once, and each change of its size runs alone."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._running = collections.defaultdict[int, list[int]](list)  # the frames of each thread's forward passes
        self._changes = 0  # the number that wait or run

    def __reduce__(self) -> tuple[type["Turns"], tuple[()]]:
        return Turns, ()  # a copy of the model gets new turns

    def begin(self, *_: Any) -> None:
        """Begins a forward pass, as the model's forward pre-hook. A nested pass does not wait."""
        if torch.compiler.is_compiling():
            return
        own = threading.get_ident()
        with self._turn:
            self._turn.wait_for(lambda: own in self._running or not self._changes)
            self._running[own].append(id(sys._getframe(1)))

    def end(self, *_: Any) -> None:
        """Ends a forward pass, as the model's forward hook."""
        if torch.compiler.is_compiling():
            return
        own = threading.get_ident()
        with self._turn:
            passes = self._running.get(own, [])
            del passes[-1:]  # a pass that began before the first change has no entry
            if not passes:
                self._running.pop(own, None)
            self._turn.notify_all()

    def _forget_ended(self) -> None:
        """Forgets passes that ended without their hook, as after Ctrl-C or the end of their thread."""
        stacks = sys._current_frames()
        for thread, passes in list(self._running.items()):
            alive = {id(frame) for frame, _ in traceback.walk_stack(stacks[thread])} if thread in stacks else set()
            passes[:] = [one for one in passes if one in alive]
            if not passes:
                del self._running[thread]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block no other thread runs the model: passes under way end first, and new ones wait."""
        own = threading.get_ident()
        with self._turn:
            self._changes += 1
            try:
                while not self._turn.wait_for(lambda: self._running.keys() <= {own}, PATIENCE):
                    self._forget_ended()
                yield
            finally:
                self._changes -= 1
                self._turn.notify_all()


def turns_of(model: nn.Module) -> Turns:
    """The model's `Turns`; the first call creates them, and registers hooks around the model's forward."""
    with _making:
        if PLACE not in model.__dict__:
            turns = model.__dict__[PLACE] = Turns()
            model.register_forward_pre_hook(turns.begin)
            model.register_forward_hook(turns.end, always_call=True)
        return model.__dict__[PLACE]
