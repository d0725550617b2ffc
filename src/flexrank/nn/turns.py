"""Who may use an elastic model's size now: forward passes side by side, or one that changes it."""

import collections
import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

#: The attribute of a model that has its `Turns`.
PLACE = "_flexrank_turns"
#: Seconds after which a change that waits looks whether the passes that it waits for still run.
PATIENCE = 1.0
_making = threading.Lock()


class Turns:
    """Forward passes of a model, which may run at once, and changes of its size, each of which runs alone."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._running = collections.defaultdict[int, list[int]](list)  # by thread, the frames of its forward passes
        self._changes = 0  # that wait or run

    def __reduce__(self) -> tuple[type["Turns"], tuple[()]]:
        return Turns, ()  # a copy of the model has turns of its own

    def begin(self, *_: Any) -> None:
        """Begins a forward pass: a model's hook before it. A pass within a pass does not wait."""
        if torch.compiler.is_compiling():
            return
        own = threading.get_ident()
        with self._turn:
            self._turn.wait_for(lambda: own in self._running or not self._changes)
            self._running[own].append(id(sys._getframe(1)))

    def end(self, *_: Any) -> None:
        """Ends a forward pass: a model's hook after it."""
        if torch.compiler.is_compiling():
            return
        own = threading.get_ident()
        with self._turn:
            passes = self._running.get(own, [])
            del passes[-1:]  # none is there of a pass that began before the first change
            if not passes:
                self._running.pop(own, None)
            self._turn.notify_all()

    def _forget_ended(self) -> None:
        """Forgets passes that ended without their hook, as Ctrl-C and a thread's end let them."""
        stacks = sys._current_frames()
        for thread, passes in list(self._running.items()):
            alive = {id(frame) for frame, _ in traceback.walk_stack(stacks[thread])} if thread in stacks else set()
            passes[:] = [one for one in passes if one in alive]
            if not passes:
                del self._running[thread]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block no other thread runs the model: passes under way have ended, others wait."""
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
    """The model's turns; it gets them, and hooks around its forward, when they are first asked for."""
    with _making:
        if PLACE not in model.__dict__:
            turns = model.__dict__[PLACE] = Turns()
            model.register_forward_pre_hook(turns.begin)
            model.register_forward_hook(turns.end, always_call=True)
        return model.__dict__[PLACE]
