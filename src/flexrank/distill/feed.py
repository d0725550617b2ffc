"""Batches without end, in an order that a resumed run finds again."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError


class Feed:
    """Batches without end. A sequence is shuffled by (seed, pass); an iterable is taken in its own order."""

    def __init__(self, batches: Sequence[Batch] | Iterable[Batch], seed: int):
        self._batches, self._seed = batches, seed
        self._indexed = isinstance(batches, Sequence)
        self._count = 0
        self._shuffled: tuple[int, list[int]] = (-1, [])
        self._iterator: Iterator[Batch] | None = None

    def next(self) -> tuple[int | None, Batch]:
        """The next batch, and its place in the sequence (None where the batches are an iterable).

        Raises:
            FlexrankError: there are none.
        """
        if self._indexed:
            assert isinstance(self._batches, Sequence)
            if not self._batches:
                raise FlexrankError("distillation got no batches; it needs at least one")
            epoch, position = divmod(self._count, len(self._batches))
            self._count += 1
            index = self._order(epoch)[position]
            return index, self._batches[index]
        self._count += 1
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._batches)
            for batch in self._iterator:
                return None, batch
            self._iterator = None
        raise FlexrankError("distillation got no batches; an iterable must give them again on each pass")

    def _order(self, epoch: int) -> list[int]:
        if self._shuffled[0] != epoch:
            order = list(range(len(self._batches)))  # type: ignore[arg-type]
            random.Random(f"{self._seed} batches {epoch}").shuffle(order)
            self._shuffled = epoch, order
        return self._shuffled[1]

    def state(self) -> dict[str, Any]:
        """Where it stands, as a JSON object."""
        own = getattr(self._batches, "state_dict", None)
        return {"count": self._count, "loader": own() if callable(own) else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`: by the loader's own means where it has them, else by skipping."""
        load = getattr(self._batches, "load_state_dict", None)
        if self._indexed or state["count"] == 0:
            self._count = state["count"]
        elif callable(load) and state["loader"] is not None:
            load(state["loader"])
            self._count = state["count"]
        else:
            while self._count < state["count"]:
                self.next()
