"""Who may use an elastic model's size now: forward passes side by side, or one that changes it."""

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

#: The attribute of a model that has its `Turns`.
PLACE = "_flexrank_turns"
_making = threading.Lock()


class Turns:
    """Forward passes of a model, which may run at once, and changes of its size, each of which runs alone."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._running = collections.Counter[int]()  # forward passes, by thread
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
            self._running[own] += 1

    def end(self, *_: Any) -> None:
        """Ends a forward pass: a model's hook after it."""
        if torch.compiler.is_compiling():
            return
        own = threading.get_ident()
        with self._turn:
            self._running[own] -= 1
            self._running += collections.Counter()  # drops those at zero
            self._turn.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block no other thread runs the model: passes under way have ended, others wait."""
        own = threading.get_ident()
        with self._turn:
            self._changes += 1
            try:
                self._turn.wait_for(lambda: self._running.keys() <= {own})
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
