"""Stage two, first half: how much each layer's truncation costs, probed one layer at a time or by curvature."""

import collections
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexrank import calibrate as calibration
from flexrank.calibrate import Hooks, LayerMoment
from flexrank.errors import FlexrankError
from flexrank.files import read_json, require_keys, write_json
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.switch import footprint, full_matrices, full_profile, nested_layers, use_profile
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import Spacing, rank_levels
from flexrank.progress import track

Evaluate = Callable[[nn.Module], float]
log = logging.getLogger("flexrank")

#: Of full layers' matrices that a probe keeps at most.
MATRIX_BYTES = 2**32
#: How far an error may be from a checkpoint's, relatively: another number of threads sums in another order.
RESUMED_BOUND = 1e-3


@torch.no_grad()
def probe_sensitivity(
    model: nn.Module,
    evaluate: Evaluate,
    num_levels: int = 10,
    *,
    spacing: Spacing = "blocks",
    checkpoint: str | Path | None = None,
    replay_bytes: int = 2**30,
    matrix_bytes: int = MATRIX_BYTES,
) -> SensitivityTable:
    """Evaluates the model with one layer truncated at a time, all others full (FlexRank, appendix C.2, step 1).

    L × (K − 1) + 1 evaluations. What runs before a layer is not run again in its probes: blocks of a stack, and modules
    of the layer's own block that have returned before it is called, return what they returned to the full model. That
    halves the work, and is done only where it gives the baseline back to the bit.

    Args:
        model: elastic; evaluated in the mode it is in, and left as it was.
        evaluate: any measure of a model, lower is better; deterministic, its batches in a fixed order.
        num_levels: ranks probed for each layer, the full one included.
        spacing: of the ranks, see `costs.rank_levels`.
        checkpoint: a JSON file; a probe interrupted and called again goes on from it.
        replay_bytes: most bytes of outputs of one block's modules that are kept; where they are more, only whole
            blocks are replayed.
        matrix_bytes: most bytes of full layers' matrices that are kept, so that they cost no more than dense ones.

    Raises:
        FlexrankError: fewer than two levels, an evaluation that is not finite, or a checkpoint of another probe.
    """
    layers = nested_layers(model)
    ranks = {name: rank_levels(layer.matrix_shape, num_levels, spacing) for name, layer in layers.items()}
    with use_profile(model, full_profile(model)), full_matrices(model, matrix_bytes):
        baseline = _finite(evaluate(model), "the full model")
        state = _Checkpoint(checkpoint, {name: list(levels) for name, levels in ranks.items()}, baseline)
        for name, kept in itertools.islice(state.errors.items(), 1):
            state.check(_probe(model, layers[name], name, ranks[name][0], evaluate, baseline), kept[0])
        replay = _Replay(model, evaluate, baseline, replay_bytes)
        for name in track([n for n in layers if n not in state.errors], "probing", len(layers), len(state.errors)):
            with replay.before(name):
                state.add(name, [_probe(model, layers[name], name, r, evaluate, baseline) for r in ranks[name]])
    return SensitivityTable(
        shapes={name: layer.matrix_shape for name, layer in layers.items()},
        ranks=ranks,
        errors={name: tuple(state.errors[name]) for name in layers},
        baseline=state.baseline,
        footprint=footprint(model),
    )


@torch.no_grad()
def curvature_sensitivity(
    model: nn.Module,
    moments: Mapping[str, LayerMoment],
    rows: int,
    num_levels: int = 10,
    *,
    spacing: Spacing = "blocks",
) -> SensitivityTable:
    """Predicts every probe from one calibration pass: ½ tr(G ΔW Σ ΔWᵀ), all ranks of all layers at once.

    The second-order rise of a divergence to the model itself, a mean over rows, where activations and gradients are
    taken for independent and tokens for uncorrelated (the K-FAC approximation). With H = (UᵀGU) ∘ (VᵀΣV), a layer's
    error at rank r is half the sum of H over the components after r.

    Args:
        model: elastic, with the weights that the moments are of.
        moments: from `collect_moments(..., side="input", gradient_loss=objective.fisher_loss)`.
        rows: rows of the loss in the calibration data: real tokens (language), sentences, images.
        num_levels: as `probe_sensitivity`.
        spacing: as `probe_sensitivity`.

    Raises:
        FlexrankError: a layer's moment is missing, not of its input, or without gradients; or rows is below 1.
    """
    if rows < 1:
        raise FlexrankError(f"rows is {rows}; it must be at least 1")
    layers = nested_layers(model)
    ranks = {name: rank_levels(layer.matrix_shape, num_levels, spacing) for name, layer in layers.items()}
    errors = {}
    for name, layer in layers.items():
        moment = moments.get(name)
        if moment is None or moment.side != "input" or moment.gradient_moment is None:
            raise FlexrankError(
                f"layer {name!r}: curvature needs collect_moments(..., side='input', gradient_loss=...) of this layer"
            )
        rises = _curvature_errors(layer, moment.moment, moment.gradient_moment) / (moment.tokens * rows)
        errors[name] = tuple(float(rises[rank]) for rank in ranks[name])
    shapes = {name: layer.matrix_shape for name, layer in layers.items()}
    return SensitivityTable(shapes, ranks, errors, 0.0, footprint(model))


def _curvature_errors(layer: NestedLayer, moment: Tensor, gradient_moment: Tensor) -> Tensor:
    """½ tr(G ΔW_r Σ ΔW_rᵀ) for r = 0 … k, (k + 1,), with the sums of both moments."""
    u, v = layer.u.detach().double(), layer.v.detach().double()
    products = (u @ gradient_moment.to(u.device) @ u.T) * (v @ moment.to(v.device) @ v.T)
    after = products.flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0)
    # Both factors are positive semidefinite, and so is their product: what is below zero is rounding.
    return torch.cat([after.clamp(min=0), after.new_zeros(1)]) / 2


def _probe(model: nn.Module, layer: NestedLayer, name: str, rank: int, evaluate: Evaluate, baseline: float) -> float:
    if rank == layer.max_rank:
        return 0.0
    layer.rank = rank
    try:
        return _finite(evaluate(model), f"layer {name!r} at rank {rank}") - baseline
    finally:
        layer.rank = layer.max_rank


def _finite(value: float, where: str) -> float:
    value = float(value)
    if value != value or value in (float("inf"), float("-inf")):
        raise FlexrankError(f"evaluating {where} gave {value}; the probe needs finite numbers")
    return value


class _Checkpoint:
    """The errors found so far, written after each layer, and the first process's baseline."""

    def __init__(self, path: str | Path | None, ranks: dict[str, list[int]], baseline: float):
        self.path, self.ranks, self.baseline = path, ranks, baseline
        self.errors: dict[str, list[float]] = {}
        if path is not None and Path(path).exists():
            value = read_json(path)
            require_keys(value, ("ranks", "baseline", "errors"), str(path))
            if value["ranks"] != ranks:
                raise FlexrankError(f"{path}: belongs to another probe, of other ranks; remove it")
            self.errors, self.baseline = value["errors"], value["baseline"]

    def check(self, found: float, kept: float) -> None:
        """Sees by one error that model, data and loss are those of the checkpoint."""
        if abs(found - kept) > RESUMED_BOUND * abs(kept) + 1e-7:
            raise FlexrankError(
                f"{self.path}: belongs to another probe ({kept:.6g} there, {found:.6g} here); remove it"
            )

    def add(self, name: str, errors: list[float]) -> None:
        self.errors[name] = errors
        if self.path is not None:
            write_json(self.path, {"ranks": self.ranks, "baseline": self.baseline, "errors": self.errors})


class _Start(NamedTuple):
    """Where a layer's probes start: what runs before the layer is the same in all of them.

    Attributes:
        stretch: of the forward: from a block's start to the next one's. 0 is before the first block.
        place: of its call among the events of the stretch.
        modules: what has run in the stretch before the layer is called, the outermost of it.
    """

    stretch: int
    place: int
    modules: tuple[str, ...]


#: A module's name, and whether it was called or has returned.
_Event = tuple[str, bool]


class _Survey:
    """Sees one evaluation: in which order each forward calls the model's modules, and when they return."""

    def __init__(self, model: nn.Module, stack: Sequence[str]):
        self._model, self._stack = model, list(stack)
        self._forwards: list[list[_Event]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks for the length of the block."""
        with Hooks() as hooks:
            hooks.add(self._model.register_forward_pre_hook(lambda *_: self._forwards.append([])))
            for name, module in self._model.named_modules():
                if name:
                    hooks.add(module.register_forward_pre_hook(functools.partial(self._note, (name, False))))
                    hooks.add(module.register_forward_hook(functools.partial(self._note, (name, True))))
            yield

    def _note(self, event: _Event, *_: object) -> None:
        if not self._forwards:  # a part of the model was called without the model: nothing tells forwards apart
            self._forwards.append([])
        self._forwards[-1].append(event)

    @property
    def in_order(self) -> bool:
        """Whether every forward ran every block once, in the stack's order."""
        calls = [(name, False) for name in self._stack]
        return all([event for event in forward if event in calls] == calls for forward in self._forwards)

    def starts(self, layers: Iterable[str]) -> dict[str, _Start]:
        """Where the probes of each of these layers start that was called."""
        blocks = set(self._stack) if self.in_order else set()
        forwards = [_stretches(forward, blocks) for forward in self._forwards]
        calls = collections.Counter(name for forward in self._forwards for name, returned in forward if not returned)
        starts: dict[str, _Start] = {}
        for layer in layers:
            places = [i for forward in forwards for i, found in enumerate(forward) if (layer, False) in found]
            if not places:
                continue
            stretch = min(places)
            events, place = forwards[0][stretch], 0
            modules: tuple[str, ...] = ()
            if all(forward[stretch] == events for forward in forwards):
                place = events.index((layer, False))
                before = events[:place]
                once = [
                    name for name, back in before if back and calls[name] == len(forwards) and (name, False) in before
                ]
                modules = tuple(name for name in once if not any(name.startswith(f"{other}.") for other in once))
            starts[layer] = _Start(stretch, place, modules)
        return starts


def _stretches(forward: Sequence[_Event], blocks: Collection[str]) -> list[list[_Event]]:
    """A forward's events, divided where one of the blocks is called."""
    stretches: list[list[_Event]] = [[]]
    for name, returned in forward:
        if name in blocks and not returned:
            stretches.append([])
        stretches[-1].append((name, returned))
    return stretches


class _Record:
    """What one block, and modules of the stretch after it, return in one evaluation; of modules up to `room` bytes."""

    def __init__(self, room: int):
        self.block: list[Any] = []
        self.modules: dict[nn.Module, list[Any]] = {}
        self._sums: dict[nn.Module, list[float]] = {}
        self._room = room

    def keep_block(self, _block: nn.Module, _args: object, output: Any) -> None:
        """A hook."""
        self.block.append(output)

    def keep_module(self, module: nn.Module, _args: object, output: Any) -> None:
        """A hook."""
        self._room -= sum(tensor.nbytes for tensor in _tensors(output))
        self.modules.setdefault(module, []).append(output)
        self._sums.setdefault(module, []).append(_sum(output))
        if self._room < 0:
            self.modules.clear()

    def drop_changed(self) -> None:
        """Forgets outputs that were changed in place after they were returned, or hold more than tensors."""
        for module, sums in self._sums.items():
            if module in self.modules and [_sum(output) for output in self.modules[module]] != sums:
                del self.modules[module]


def _tensors(output: Any) -> list[Tensor]:
    return [one for one in (output if isinstance(output, tuple) else (output,)) if isinstance(one, Tensor)]


def _sum(output: Any) -> float:
    """Tells, in practice, whether an output has other values than before; of what is no tensor NaN, never the same."""
    parts = output if isinstance(output, tuple) else (output,)
    if not all(one is None or isinstance(one, Tensor) for one in parts):
        return float("nan")
    return sum(float(one.sum()) for one in parts if one is not None)


class _Replay:
    """Gives back what the full model's modules returned before the probed layer, in every call of evaluating.

    Held are the outputs of one block, the one before the probed layer's stretch, and of the stretch's own modules.
    """

    def __init__(self, model: nn.Module, evaluate: Evaluate, baseline: float, room: int):
        self._model, self._evaluate, self._baseline, self._room = model, evaluate, baseline, room
        stack = block_stack(model)
        survey = _Survey(model, [name for name, _ in stack])
        with survey.watching():
            evaluate(model)
        self._stack = [block for _, block in stack] if survey.in_order else []
        self._starts = survey.starts(nested_layers(model))
        self._stretch = -1
        self._blocks = 0  # so many are replayed; all return what the last of them did
        self._kept = _Record(room)

    @contextlib.contextmanager
    def before(self, name: str) -> Iterator[None]:
        """Inside the block, nothing runs that comes before the layer, as far as it can be replayed."""
        start = self._starts.get(name, _Start(0, 0, ()))
        if start.stretch != self._stretch:
            self._record(start.stretch, name)
        with self._replaying(start.modules):
            yield

    def _record(self, stretch: int, name: str) -> None:
        blocks, kept = max(stretch - 1, 0), _Record(self._room)
        starts = [start for start in self._starts.values() if start.stretch == stretch]
        modules = {module: None for start in starts for module in start.modules}  # a set in order
        self._kept.modules.clear()
        if blocks or modules:
            with Hooks() as hooks, self._replaying(()):  # what was kept for an earlier stretch serves once more
                for block in self._stack[blocks - 1 : blocks] if blocks else ():
                    hooks.add(block.register_forward_hook(kept.keep_block))
                for module in modules:
                    hooks.add(self._model.get_submodule(module).register_forward_hook(kept.keep_module))
                self._evaluate(self._model)
        self._stretch, self._blocks, self._kept = stretch, blocks, kept
        kept.drop_changed()
        if kept.modules and not self._gives_baseline(max(starts, key=lambda start: start.place).modules):
            kept.modules.clear()
        if blocks and not kept.modules and not self._gives_baseline(()):
            self._blocks = 0
        if self._blocks < blocks or len(kept.modules) < len(modules):
            what = "modules" if self._blocks == blocks else "blocks and modules"
            log.info("probing: the %s before %s are not all replayed; what is not runs each time", what, name)

    def _gives_baseline(self, modules: Sequence[str]) -> bool:
        with self._replaying(modules):
            return self._evaluate(self._model) == self._baseline

    @contextlib.contextmanager
    def _replaying(self, modules: Sequence[str]) -> Iterator[None]:
        outputs: dict[nn.Module, list[Any]] = dict.fromkeys(self._stack[: self._blocks], self._kept.block)
        for module in map(self._model.get_submodule, modules):
            if module in self._kept.modules:
                outputs[module] = self._kept.modules[module]
        own = {module: module.__dict__.get("forward") for module in outputs}
        for module, found in outputs.items():
            module.__dict__["forward"] = _replayed(found)
        try:
            yield
        finally:
            for module, forward in own.items():
                module.__dict__.pop("forward")
                if forward is not None:
                    module.__dict__["forward"] = forward


def _replayed(outputs: Sequence[Any]) -> Callable[..., Any]:
    """A forward that returns these in turn, again and again."""
    calls = itertools.cycle(outputs)
    return lambda *_args, **_kwargs: next(calls)


def block_stack(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of the ModuleList or Sequential that holds most elastic layers."""
    return calibration.block_stack(model, nested_layers(model))
