"""What runs before the probed layer returns what it returned to the full model, and does not run again."""

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.calibrate.hooks import Event, traced
from flexrank.calibrate.structure import runs_in_order
from flexrank.nn.blocks import block_stack, replaced_forwards
from flexrank.nn.switch import nested_layers

log = logging.getLogger("flexrank")


class Start(NamedTuple):
    """Where a layer's probes start: what runs before the layer is the same in all of them."""

    stretch: int  #: the part of the forward from the start of a block to the start of the next; 0 is before the first
    place: int  #: of the layer's call among the events of the stretch
    modules: tuple[nn.Module, ...]  #: the outermost ones that return in the stretch before the layer is called


def find_starts(
    forwards: Sequence[Sequence[Event]], blocks: Collection[nn.Module], layers: Mapping[str, nn.Module]
) -> dict[str, Start]:
    """Where the probes of each layer that runs start."""
    divided = [_stretches(forward, blocks) for forward in forwards]
    calls = collections.Counter(module for forward in forwards for module, returns in forward if not returns)
    once = {module for module, count in calls.items() if count == len(forwards)}
    starts = {}
    for name, layer in layers.items():
        call = (layer, False)
        stretch = min((i for parts in divided for i, events in enumerate(parts) if call in events), default=None)
        if stretch is not None:
            events = divided[0][stretch]
            place = events.index(call) if all(parts[stretch] == events for parts in divided) else 0
            starts[name] = Start(stretch, place, _returned(events[:place], once))
    return starts


def _stretches(forward: Iterable[Event], blocks: Collection[nn.Module]) -> list[list[Event]]:
    """A forward's events, divided where one of the blocks is called."""
    stretches: list[list[Event]] = [[]]
    for module, returns in forward:
        if module in blocks and not returns:
            stretches.append([])
        stretches[-1].append((module, returns))
    return stretches


def _returned(events: Sequence[Event], once: Collection[nn.Module]) -> tuple[nn.Module, ...]:
    """The outermost of the modules that both are called and return within these events, once in each forward."""
    done = [module for module, returns in events if returns and module in once and (module, False) in events]
    inner = {child for module in done for child in itertools.islice(module.modules(), 1, None)}
    return tuple(module for module in done if module not in inner)


class _Outputs:
    """What one block, and modules after it, return in one evaluation; of the modules up to `room` bytes."""

    def __init__(self, room: int):
        self.block: list[Any] = []
        self.modules: dict[nn.Module, list[Any]] = {}
        self._sums: dict[nn.Module, list[float]] = {}
        self._room = room

    def keep(self, module: nn.Module, _args: object, output: Any) -> None:
        size, total = _size_and_sum(output)
        self._room -= size
        self.modules.setdefault(module, []).append(output)
        self._sums.setdefault(module, []).append(total)
        if self._room < 0:
            self.modules.clear()

    def drop_changed(self) -> None:
        """Forgets outputs that were changed in place after they were returned, or hold more than tensors."""
        for module, sums in self._sums.items():
            if [_size_and_sum(output)[1] for output in self.modules.get(module, [])] != sums:
                self.modules.pop(module, None)


def _size_and_sum(output: Any) -> tuple[int, float]:
    """Bytes, and what changes with the values: NaN, which never equals itself, where there is more than tensors."""
    parts = [part for part in (output if isinstance(output, tuple) else (output,)) if part is not None]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    total = sum(float(tensor.sum()) for tensor in tensors) if len(tensors) == len(parts) else float("nan")
    return sum(tensor.nbytes for tensor in tensors), total


class Replay:
    """Gives back what the full model's modules return before the probed layer, in every call of `evaluate`.

    Kept are the outputs of the last block before the probed layer's stretch, which all blocks before the stretch return
    then, and of the stretch's own modules. A replay is used only if it gives the baseline back to the bit.
    """

    def __init__(self, model: nn.Module, evaluate: Callable[[nn.Module], float], baseline: float, room: int):
        self._model, self._evaluate, self._baseline, self._room = model, evaluate, baseline, room
        layers = nested_layers(model)
        blocks = [block for _, block in block_stack(model, layers)]
        with traced(model) as forwards:
            evaluate(model)
        self._stack = blocks if runs_in_order(forwards, blocks) else []
        self._starts = find_starts(forwards, set(self._stack), layers)
        self._stretch = -1
        self._replayed: list[nn.Module] = []
        self._outputs = _Outputs(room)

    @contextlib.contextmanager
    def before(self, name: str) -> Iterator[None]:
        """Inside the block, nothing runs that comes before the layer, as far as it can be replayed."""
        start = self._starts.get(name, Start(0, 0, ()))
        if start.stretch != self._stretch:
            self._record(start.stretch, name)
        with self._replaying(start.modules):
            yield

    def _record(self, stretch: int, name: str) -> None:
        """Records the outputs for the probes of one stretch, and keeps those that give the baseline."""
        blocks = self._stack[: max(stretch - 1, 0)]
        starts = [start for start in self._starts.values() if start.stretch == stretch]
        modules = list(dict.fromkeys(module for start in starts for module in start.modules))
        outputs = self._outputs_of(blocks, modules)
        self._stretch, self._replayed, self._outputs = stretch, blocks, outputs
        if outputs.modules and not self._gives_baseline(max(starts, key=lambda start: start.place).modules):
            outputs.modules.clear()
        if blocks and not outputs.modules and not self._gives_baseline(()):
            self._replayed = []
        if len(self._replayed) < len(blocks):
            log.info("probe: cannot reuse the blocks before layer %s; they run for every probe", name)
        elif len(outputs.modules) < len(modules):
            log.info("probe: cannot reuse all modules in the block of layer %s; they run for every probe", name)

    def _outputs_of(self, blocks: Sequence[nn.Module], modules: Sequence[nn.Module]) -> _Outputs:
        """Outputs of the last of the blocks and of the modules in one evaluation, if there are any."""
        self._outputs.modules.clear()
        outputs = _Outputs(self._room)
        if blocks or modules:
            with Hooks() as hooks, self._replaying(()):  # the block kept for an earlier stretch serves once more
                for block in blocks[-1:]:
                    hooks.add(block.register_forward_hook(lambda *call: outputs.block.append(call[-1])))
                for module in modules:
                    hooks.add(module.register_forward_hook(outputs.keep))
                self._evaluate(self._model)
        outputs.drop_changed()
        return outputs

    def _gives_baseline(self, modules: Sequence[nn.Module]) -> bool:
        with self._replaying(modules):
            return self._evaluate(self._model) == self._baseline

    @contextlib.contextmanager
    def _replaying(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Inside the block these modules, and the blocks before the stretch, return what is kept of them."""
        outputs = dict.fromkeys(self._replayed, self._outputs.block)
        outputs |= {module: self._outputs.modules[module] for module in modules if module in self._outputs.modules}
        with replaced_forwards({module: _returning(kept) for module, kept in outputs.items()}):
            yield


def _returning(outputs: Sequence[Any]) -> Callable[..., Any]:
    """A forward that returns these in turn, again and again."""
    calls = itertools.cycle(outputs)
    return lambda *_args, **_kwargs: next(calls)
