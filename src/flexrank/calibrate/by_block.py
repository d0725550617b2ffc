"""Second moments, one block of a model's stack at a time, for models whose moments or weights exceed memory."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.calibrate.block_stream import Placement, States, Stream
from flexrank.calibrate.collector import Collector, GradientLoss, Side, calibration_mode, seeded_loss
from flexrank.calibrate.hooks import Hooks
from flexrank.calibrate.moments import Moments
from flexrank.calibrate.structure import groups_of, require_all_run
from flexrank.data.batches import Batch, one_row, row_masks, to_device
from flexrank.progress import track


@dataclasses.dataclass
class ByBlock:
    """The moments of a model whose blocks run one after another, each with the hidden states of all batches.

    `states` holds h_i of batch j at (i, j) and its gradient at ("g", j); without a loss, only the last h_i, at (0, j).
    """

    model: nn.Module
    stack: Sequence[tuple[str, nn.Module]]
    batches: Sequence[Batch]
    names: Sequence[str]
    placement: Placement
    states: States
    side: Side
    loss: GradientLoss | None

    def __post_init__(self) -> None:
        self._stream = Stream(self.model, [block for _, block in self.stack])
        # With several processes, each takes its share; one whose share is empty runs the first batch, uncounted.
        own = processes.share(len(self.batches))
        self._counts, self._numbers = bool(own), own or range(1)
        passes = (len(self.stack) + 1) * (1 if self.loss is None else 2) + bool(self._outside)
        self._progress = iter(track(range(passes * len(self._numbers)), "calibrating"))

    def obstacle(self) -> str | None:
        """Returns why blocks cannot run alone, or None if they can."""
        if not self.stack:
            return "it has no stack of blocks"
        if any(name in self.names for name, _ in self.stack):
            return "a block is a layer itself"
        if any(type(parameter).__name__ == "DTensor" for parameter in self.model.parameters()):
            return "it is sharded, and process 0 runs each block once by itself"
        row = one_row(self.batches[0])  # two outputs are compared, which may not fit for a full batch
        first = to_device(row, self.placement.device)
        with self._outside_placed(), self.placement.placed(self.stack[0][1]), self._calibration_mode():
            return self._stream.obstacle(first, self.loss is not None and bool(self._outside))

    def moments(self) -> Iterator[Moments]:
        """Yields the moments of each block's layers, last block first if there is a loss, then those of the rest."""
        with self._outside_placed():
            self._embed()
            indices = list(range(len(self.stack)))
            if self.loss is not None:
                self._go_forward(self.loss)
                indices.reverse()
            for index in indices:
                name, block = self.stack[index]
                with self.placement.placed(block):
                    yield from self._part(index, [one for one in self.names if one.startswith(f"{name}.")])
            if self._outside:
                yield from self._part(None, self._outside)
        next(self._progress, None)  # lets the progress bar finish

    @property
    def _outside(self) -> list[str]:
        """The layers outside the stack."""
        inside = tuple(f"{name}." for name, _ in self.stack)
        return [one for one in self.names if not one.startswith(inside)]

    def _embed(self) -> None:
        with self._calibration_mode(), torch.no_grad():
            for number, batch in self._numbered():
                self.states[0, number] = self._stream.first_input(batch)

    def _go_forward(self, loss: GradientLoss) -> None:
        """Stores each block's input for every batch, and the loss's gradient at the last block's output."""
        for index, (_, block) in enumerate(self.stack):
            with self.placement.placed(block), self._calibration_mode(), torch.no_grad():
                for number, batch in self._numbered():
                    self.states[index + 1, number] = self._stream.run_block(index, batch, self._state(index, number))
        with self._calibration_mode():
            for number, batch in self._numbered():
                end = self._state(len(self.stack), number).requires_grad_()
                output = self._stream.run_outside(batch, functools.partial(_instead, end))
                (self.states["g", number],) = torch.autograd.grad(seeded_loss(loss, output, batch, number), end)

    def _part(self, index: int | None, names: Sequence[str]) -> Iterator[Moments]:
        """Runs a block (None: everything outside the stack) on every batch; yields its layers' moments, if any."""
        layers = {name: self.model.get_submodule(name) for name in names}
        with self._calibration_mode(), Hooks() as hooks:
            with torch.no_grad():
                first = to_device(self.batches[0], self.placement.device)
                run = functools.partial(self._run, index, 0, first)
                # Process 0 has the first batch; in other batches a layer of an expert may not run.
                find = functools.partial(groups_of, run, layers)
                groups = processes.on_first_process(find) if layers else []
                require_all_run(layers, [name for group in groups for name in group])
            collector = Collector(layers, groups, self.side, self.loss is not None)
            hooks.on_forward(layers, collector.add_call)
            for number, batch in self._numbered():
                with collector.batch(number, row_masks(batch)):
                    output, *inputs = self._run(index, number, batch)
                self._keep(index, number, batch, output, inputs, collector)
        moments = collector.finish(self._counts)
        del collector, layers, find  # so only the caller holds the moments, and nothing the layers
        if moments:
            yield moments

    def _run(self, index: int | None, number: int, batch: Batch) -> tuple[Any, ...]:
        """Returns block `index`'s output and input, or for None only the model's output."""
        if index is not None:
            hidden = self._state(index if self.loss else 0, number).requires_grad_(self.loss is not None)
            return self._stream.run_block(index, batch, hidden.clone() if self.loss else hidden), hidden
        if self.loss is None:
            return (self._stream.run_outside(batch, functools.partial(_instead, self._state(0, number))),)
        end, gradient = self._state(len(self.stack), number), self._state("g", number)
        return (self._stream.run_outside(batch, lambda start: _Through.apply(start, end, gradient)),)

    def _keep(
        self, index: int | None, number: int, batch: Batch, output: Any, inputs: Sequence[Tensor], collector: Collector
    ) -> None:
        """Stores the next block's input, or adds gradient moments and stores the gradient at this block's input."""
        if self.loss is None and index is not None:
            self.states[0, number] = output
        elif index is not None:
            (self.states["g", number],) = collector.add_gradients(output, self._state("g", number), *inputs)
        elif self.loss is not None:
            collector.add_gradients(seeded_loss(self.loss, output, batch, number))

    def _state(self, key: Any, number: int) -> Tensor:
        """A copy on the device, which a block may change in place."""
        return self.states[key, number].to(self.placement.device, copy=True)

    def _numbered(self) -> Iterator[tuple[int, Batch]]:
        for number in self._numbers:
            next(self._progress)
            yield number, to_device(self.batches[number], self.placement.device)

    def _outside_placed(self) -> contextlib.AbstractContextManager[None]:
        """Places everything outside the blocks on the device."""
        return self.placement.placed(self.model, [block for _, block in self.stack])

    def _calibration_mode(self) -> contextlib.AbstractContextManager[None]:
        return calibration_mode(self.model, self.placement.device, self.loss is not None)


def _instead(end: Tensor, _: Tensor) -> Tensor:
    """Returns h_L in place of what the stack would compute."""
    return end


class _Through(torch.autograd.Function):
    """Stands for a stack that has already run: forward, it turns h_0 into h_L; backward, it gives h_0's gradient."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, end: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return end.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0], None, None
