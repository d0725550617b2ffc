"""Replays what modules before the probed layer returned in the full model, so they do not run again."""

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flexrank.calibrate import Hooks
from flexrank.calibrate.hooks import Event, traced
from flexrank.calibrate.structure import runs_in_order
from flexrank.files import digest_json, digest_tensor
from flexrank.nn.blocks import block_stack, replaced_forwards
from flexrank.nn.switch import nested_layers

log = logging.getLogger("flexrank")


class Start(NamedTuple):
    """Where a layer's probes start: everything that runs before the layer is the same in all of them."""

    segment: int  #: the part of the forward from the start of a block to the start of the next; 0 is before the first
    position: int  #: index of the layer's call among the events of the segment
    modules: tuple[nn.Module, ...]  #: the outermost modules that return in the segment before the layer's call


def find_starts(
    forwards: Sequence[Sequence[Event]], blocks: Collection[nn.Module], layers: Mapping[str, nn.Module]
) -> dict[str, Start]:
    """Finds where the probes of each layer start; leaves out layers that do not run."""
    divided = [_segments(forward, blocks) for forward in forwards]
    calls = collections.Counter(module for forward in forwards for module, returns in forward if not returns)
    once = {module for module, count in calls.items() if count == len(forwards)}
    starts = {}
    for name, layer in layers.items():
        call = (layer, False)
        segment = min((i for parts in divided for i, events in enumerate(parts) if call in events), default=None)
        if segment is not None:
            events = divided[0][segment]
            position = events.index(call) if all(parts[segment] == events for parts in divided) else 0
            starts[name] = Start(segment, position, _returned(events[:position], once))
    return starts


def _segments(forward: Iterable[Event], blocks: Collection[nn.Module]) -> list[list[Event]]:
    """Divides a forward's events at each call of a block."""
    segments: list[list[Event]] = [[]]
    for module, returns in forward:
        if module in blocks and not returns:
            segments.append([])
        segments[-1].append((module, returns))
    return segments


def _returned(events: Sequence[Event], once: Collection[nn.Module]) -> tuple[nn.Module, ...]:
    """The outermost of the modules that are called and return within these events, and run once per forward."""
    called = {module for module, returns in events if not returns}
    done = [module for module, returns in events if returns and module in once and module in called]
    inner = {child for module in done for child in itertools.islice(module.modules(), 1, None)}
    return tuple(module for module in done if module not in inner)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the probes of a model replay within `max_bytes`.

    Blocks' outputs are replayed if those of each single block fit, and those of modules inside a block if they fit too.
    """

    starts: Mapping[str, Start]
    stack: Sequence[nn.Module]  #: blocks that run one after the other; empty if they do not
    sizes: Mapping[nn.Module, float]  #: bytes of a module's outputs in one evaluation; infinite if unknown
    max_bytes: int

    def fits(self, modules: Iterable[nn.Module]) -> bool:
        """Whether the outputs of all these modules can be kept together."""
        return sum(self.sizes[module] for module in modules) <= self.max_bytes

    @property
    def fits_blocks(self) -> bool:
        """Whether the outputs of each single block can be kept; the last block's are not needed."""
        return all(self.fits([block]) for block in self.stack[:-1])

    def starts_in(self, segment: int) -> list[Start]:
        """Where the probes of one segment start, in the order of the layers."""
        return [start for start in self.starts.values() if start.segment == segment]

    def replayed(self, segment: int) -> tuple[Sequence[nn.Module], list[nn.Module]]:
        """The blocks and the modules that do not run in the probes of one segment."""
        blocks = self.stack[: max(segment - 1, 0)] if self.fits_blocks else []
        modules = list(dict.fromkeys(module for start in self.starts_in(segment) for module in start.modules))
        return blocks, modules if self.fits([*blocks[-1:], *modules]) else []

    def most_bytes(self) -> int:
        """Most bytes kept at one time, which is while a segment is recorded by replaying the block kept before it."""
        most, before = 0.0, list[nn.Module]()
        for segment in dict.fromkeys(start.segment for start in self.starts.values()):
            blocks, modules = self.replayed(segment)
            kept = [*blocks[-1:], *modules]
            together = [*before, *kept] if self.fits([*before, *kept]) else kept
            most, before = max(most, sum(self.sizes[module] for module in together)), list(blocks[-1:])
        return int(most)


def make_plan(model: nn.Module, evaluate: Callable[[nn.Module], object], max_bytes: int) -> Plan:
    """Finds what probes can replay, by one evaluation of the full model; on the meta device it takes no memory."""
    layers, sizes = nested_layers(model), dict.fromkeys(model.modules(), 0.0)
    blocks = [block for _, block in block_stack(model, layers)]

    def measure(module: nn.Module, _: object, output: Any) -> None:
        sizes[module] += _bytes(output)

    with traced(model) as forwards, Hooks() as hooks:
        for module in sizes:
            hooks.remove_on_exit(module.register_forward_hook(measure))
        evaluate(model)
    stack = blocks if runs_in_order(forwards, blocks) else []
    return Plan(find_starts(forwards, set(stack), layers), stack, sizes, max_bytes)


class _Outputs:
    """The outputs of one block, and of modules after it, in one evaluation."""

    def __init__(self) -> None:
        self.block: list[Any] = []
        self.modules: dict[nn.Module, list[Any]] = {}
        self._sums: dict[nn.Module, list[complex]] = {}

    def keep(self, module: nn.Module, _args: object, output: Any) -> None:
        self.modules.setdefault(module, []).append(output)
        self._sums.setdefault(module, []).append(_sum(output))

    def drop_changed(self) -> None:
        """Drops outputs that were changed in place after they were returned, or that hold more than tensors."""
        for module, sums in self._sums.items():
            if [_sum(output) for output in self.modules[module]] != sums:
                del self.modules[module]


def _bytes(output: Any) -> float:
    """Bytes of memory that keeping an output occupies; infinite if it has more than tensors, numbers and strings."""
    parts = list(_parts(output))
    if not all(isinstance(part, (Tensor, int, float, str)) for part in parts):
        return math.inf
    return sum(part.untyped_storage().nbytes() for part in parts if isinstance(part, Tensor))


def _sum(output: Any) -> complex:
    """A checksum of the values; NaN, which never equals itself, if the output has more than tensors."""
    parts = list(_parts(output))
    return sum(part.sum().item() if isinstance(part, Tensor) else math.nan for part in parts)


def _parts(output: Any) -> Iterator[Any]:
    """Yields the parts of a module's output, leaving out None."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        for part in output:
            yield from _parts(part)
    elif output is not None:
        yield output


class _OtherCall(Exception):
    """The model is called with other tensors than the full model was."""


def _before_calls(model: nn.Module, callback: Callable[[str], None]) -> RemovableHandle:
    """Calls `callback`, before each forward of the model, with a digest of the tensors that it is called with."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parts = (part for part in _parts([args, kwargs]) if isinstance(part, Tensor))
        callback(digest_json([digest_tensor(part) for part in parts]))

    return model.register_forward_pre_hook(hook, with_kwargs=True)


class Replay:
    """Replays what the full model's modules return before the probed layer, in every call of `evaluate`.

    Within `max_bytes` it keeps the outputs of the last block before the probed layer's segment, which all blocks
    before the segment then return, and of modules in the segment. A replay is used only if it reproduces the baseline
    bit for bit, and while the model is called with the same tensors, unlike one that reads its own output tokens.
    """

    def __init__(self, model: nn.Module, evaluate: Callable[[nn.Module], float], baseline: float, max_bytes: int):
        self._model, self._evaluate, self._baseline = model, evaluate, baseline
        self._calls: list[str] = []  # a digest of the inputs of each forward of the full model
        self.again = baseline  # what `evaluate` gives of the full model the second time
        with Hooks() as hooks:
            hooks.remove_on_exit(_before_calls(model, self._calls.append))
            self._plan = make_plan(model, self._evaluate_again, max_bytes)
        self._start, self._segment = Start(0, 0, ()), -1
        self._replayed: Sequence[nn.Module] = []
        self._outputs = _Outputs()
        self._log_what_does_not_fit()

    def _evaluate_again(self, model: nn.Module) -> None:
        self.again = self._evaluate(model)

    def record(self, name: str) -> None:
        """Prepares for the probes of a layer; call it while all layers are at full rank."""
        self._start = self._plan.starts.get(name, Start(0, 0, ()))
        if self._start.segment != self._segment:
            self._record(self._start.segment, name)

    def evaluate(self) -> float:
        """Returns `evaluate` of the model, with what comes before the layer replayed as far as possible."""
        try:
            with self._replaying(self._start.modules) as is_replaying, self._same_calls(is_replaying):
                return self._evaluate(self._model)
        except _OtherCall:
            log.info("probe: the model reads what it has written; all modules run for every probe")
            self._plan = dataclasses.replace(self._plan, starts={}, stack=())
            self._start, self._replayed, self._outputs = Start(0, 0, ()), [], _Outputs()
            return self._evaluate(self._model)

    @contextlib.contextmanager
    def _same_calls(self, matters: bool) -> Iterator[None]:
        """Inside the block, if it matters, raises `_OtherCall` at a forward whose inputs are not the full model's."""
        expected = iter(self._calls)

        def compare(digest: str) -> None:
            if next(expected, "") != digest:
                raise _OtherCall

        with Hooks() as hooks:
            if matters:
                hooks.remove_on_exit(_before_calls(self._model, compare))
            yield

    def _log_what_does_not_fit(self) -> None:
        plan, starts, limit = self._plan, self._plan.starts.values(), self._plan.max_bytes
        if not plan.fits_blocks:
            log.info("probe: a block's outputs take more than replay_bytes, %d; blocks run for every probe", limit)
        if any(start.modules and not plan.replayed(start.segment)[1] for start in starts):
            log.info("probe: outputs of modules inside a block do not fit into replay_bytes, %d; where they do not, "
                     "the modules run for every probe", limit)  # fmt: skip

    def _record(self, segment: int, name: str) -> None:
        """Records the outputs for the probes of one segment, and keeps those that reproduce the baseline."""
        blocks, modules = self._plan.replayed(segment)
        outputs = self._outputs_of(blocks[-1:], modules)
        self._segment, self._replayed, self._outputs = segment, blocks, outputs
        starts = self._plan.starts_in(segment)
        if outputs.modules and not self._gives_baseline(max(starts, key=lambda start: start.position).modules):
            outputs.modules.clear()
        # By themselves too: a replayed attention does not miss what blocks leave for it elsewhere, such as keys.
        if blocks and not self._gives_baseline(()):
            self._replayed, self._outputs = [], _Outputs()
        if len(self._replayed) < len(blocks):
            log.info("probe: cannot reuse the blocks before layer %s; they run for every probe", name)
        elif len(outputs.modules) < len(modules):
            log.info("probe: cannot reuse all modules in the block of layer %s; they run for every probe", name)

    def _outputs_of(self, last: Sequence[nn.Module], modules: Sequence[nn.Module]) -> _Outputs:
        """The outputs of the last block, if there is one, and of the modules, in one evaluation."""
        self._outputs.modules.clear()
        if not self._plan.fits([*self._replayed[-1:], *last, *modules]):
            self._replayed, self._outputs = [], _Outputs()  # all blocks run in this evaluation
        outputs = _Outputs()
        if last or modules:
            with Hooks() as hooks, self._replaying(()):  # the block kept for an earlier segment is replayed once more
                for block in last:
                    hooks.remove_on_exit(block.register_forward_hook(lambda *call: outputs.block.append(call[-1])))
                for module in modules:
                    hooks.remove_on_exit(module.register_forward_hook(outputs.keep))
                self._evaluate(self._model)
        outputs.drop_changed()
        return outputs

    def _gives_baseline(self, modules: Sequence[nn.Module]) -> bool:
        """Whether a replay gives the baseline; a model that reads all blocks' outputs, of other shapes, fails here."""
        try:
            with self._replaying(modules):
                return self._evaluate(self._model) == self._baseline
        except Exception:  # the model's own errors recur in the probes, which then run all modules
            return False

    @contextlib.contextmanager
    def _replaying(self, modules: Iterable[nn.Module]) -> Iterator[bool]:
        """Inside the block, these modules and blocks before the segment return what is kept; yields whether any do."""
        outputs = dict.fromkeys(self._replayed, self._outputs.block)
        outputs |= {module: self._outputs.modules[module] for module in modules if module in self._outputs.modules}
        with replaced_forwards({module: _returning(kept) for module, kept in outputs.items()}):
            yield bool(outputs)


def _returning(outputs: Sequence[Any]) -> Callable[..., Any]:
    """A forward that returns these outputs in turn, over and over."""
    calls = itertools.cycle(outputs)
    return lambda *_args, **_kwargs: next(calls)
