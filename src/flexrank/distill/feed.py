"""Batches without end, in an order that a resumed run repeats."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError


class Feed:
    """Batches without end. A sequence is shuffled by (seed, pass); an iterable is taken in its own order."""

    def __init__(self, batches: Sequence[Batch] | Iterable[Batch], seed: int):
        self._batches, self._seed, self._count = batches, seed, 0
        self._shuffled: tuple[int, list[int]] = (-1, [])
        self._iterator: Iterator[Batch] = iter(())

    def next(self) -> tuple[int | None, Batch]:
        """The next batch, and its place in the sequence (None where the batches are an iterable).

        Raises:
            FlexrankError: there are none.
        """
        if isinstance(self._batches, Sequence):
            index = self._next_index(len(self._batches))
            batch = self._batches[index]
        else:
            index, batch = None, self._next_of_iterable(self._batches)
        self._count += 1
        return index, batch

    def _next_index(self, size: int) -> int:
        if size == 0:
            raise FlexrankError("distillation got no batches; it needs at least one")
        epoch, position = divmod(self._count, size)
        if self._shuffled[0] != epoch:
            order = list(range(size))
            random.Random(f"{self._seed} batches {epoch}").shuffle(order)
            self._shuffled = epoch, order
        return self._shuffled[1][position]

    def _next_of_iterable(self, batches: Iterable[Batch]) -> Batch:
        for batch in self._iterator:
            return batch
        self._iterator = iter(batches)
        for batch in self._iterator:
            return batch
        raise FlexrankError("distillation got no batches; an iterable must give them again on each pass")

    def state(self) -> dict[str, Any]:
        """Its place, as a JSON object."""
        own = getattr(self._batches, "state_dict", None)
        return {"count": self._count, "loader": own() if callable(own) else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`: by the loader's own means where it has them, else by skipping."""
        load = getattr(self._batches, "load_state_dict", None)
        if isinstance(self._batches, Sequence) or state["count"] == 0:
            self._count = state["count"]
        elif callable(load) and state["loader"] is not None:
            load(state["loader"])
            self._count = state["count"]
        else:
            while self._count < state["count"]:
                self.next()
