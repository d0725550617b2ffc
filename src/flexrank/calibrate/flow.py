"""What one model's layers read, one layer after the other, while the layers before it may change."""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from flexrank.calibrate.block_stream import Reached, States, Stream
from flexrank.calibrate.hooks import Hooks
from flexrank.data.batches import Batch, call_model, model_device, one_row, to_device
from flexrank.nn.blocks import block_stack


class Flow:
    """The inputs of a model's layers, which are asked for in the order in which they run.

    In a stack of blocks only the layer's own block runs, from the hidden states before it, if blocks can run alone;
    `states` keeps those of all batches.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], layers: Sequence[str], states: States):
        self._model, self._batches, self._states, self._device = model, batches, states, model_device(model)
        stack = block_stack(model, layers)
        self._stream, self._names = Stream(model, [block for _, block in stack]), [name for name, _ in stack]
        self._next: int | None = None  # the block that reads the hidden states
        self._layers = {name: model.get_submodule(name) for name in layers}
        self._counts: dict[tuple[str, int], int] = {}  # of calls, by layer and batch, once they have been counted
        row = one_row(batches[0])  # two outputs are compared
        is_layer = any(name in layers for name in self._names)  # which may be replaced
        if not stack or is_layer or self._stream.obstacle(to_device(row, self._device)):
            self._names = []

    def inputs(self, name: str) -> Iterator[list[Tensor]]:
        """Yields, for each batch, what the layer reads at each of its calls."""
        block = next((index for index, one in enumerate(self._names) if name.startswith(f"{one}.")), None)
        if block is not None:
            self._go_to(block)
        for number in range(len(self._batches)):
            calls, called, most = list[Tensor](), Counter[str](), self._counts.get((name, number), 0)
            with Hooks() as hooks, contextlib.suppress(Reached):
                if not most:  # this forward goes to its end, and counts the calls of all layers
                    hooks.on_forward(self._layers, functools.partial(_count, called))
                hooks.on_forward({most: self._layers[name]}, functools.partial(_keep, calls))
                self._run(block, number)
            self._counts |= {(one, number): count for one, count in called.items()}
            yield calls

    def _go_to(self, block: int) -> None:
        if self._next is None:
            self._next = 0
            for number, batch in enumerate(self._batches):
                self._states[self, number] = self._stream.first_input(to_device(batch, self._device))
        while self._next < block:
            for number in range(len(self._batches)):
                self._states[self, number] = self._run(self._next, number)
            self._next += 1

    def _run(self, block: int | None, number: int) -> Any:
        batch = to_device(self._batches[number], self._device)
        if block is None:
            return call_model(self._model, batch)
        return self._stream.run_block(block, batch, self._states[self, number].to(self._device, copy=True))


def _count(called: Counter[str], name: str, *_: Tensor) -> None:
    called[name] += 1


def _keep(calls: list[Tensor], most: int, inputs: Tensor, _: Tensor) -> None:
    """Keeps a copy, as what follows may change the input in place; ends the forward at its last call."""
    calls.append(inputs.clone())
    if len(calls) == most:
        raise Reached
