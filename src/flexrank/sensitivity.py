"""Stage two, first half: how much each layer's truncation costs, probed one layer at a time or by curvature."""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flexrank.calibration import LayerMoment
from flexrank.costs import Shape, dense_parameters, largest_rank
from flexrank.errors import FlexrankError
from flexrank.layers import NestedLayer
from flexrank.profiles import SensitivityTable
from flexrank.progress import track
from flexrank.storage import read_json, require_keys, write_json
from flexrank.surgery import footprint, full_profile, nested_layers, use_profile

Evaluate = Callable[[nn.Module], float]
Spacing = Literal["parameters", "ranks"]
log = logging.getLogger("flexrank")

#: How far an error may be from a checkpoint's, relatively: another number of threads sums in another order.
RESUMED_BOUND = 1e-3


@torch.no_grad()
def probe_sensitivity(
    model: nn.Module,
    evaluate: Evaluate,
    num_levels: int = 10,
    *,
    spacing: Spacing = "parameters",
    checkpoint: str | Path | None = None,
) -> SensitivityTable:
    """Evaluates the model with one layer truncated at a time, all others full (FlexRank, appendix C.2, step 1).

    L × (K − 1) + 1 evaluations. Where the model is a stack of blocks, a layer's probes start from the cached input of
    its block, which halves the work; the cache is used only if it gives the baseline back to the bit.

    Args:
        model: elastic; evaluated in the mode it is in, and left as it was.
        evaluate: any measure of a model, lower is better; deterministic, its batches in a fixed order.
        num_levels: ranks probed for each layer, the full one included.
        spacing: ranks even in deployed parameters, or in ranks (the paper's).
        checkpoint: a JSON file; a probe interrupted and called again goes on from it.

    Raises:
        FlexrankError: fewer than two levels, an evaluation that is not finite, or a checkpoint of another probe.
    """
    layers = nested_layers(model)
    ranks = {name: rank_levels(layer.matrix_shape, num_levels, spacing) for name, layer in layers.items()}
    with use_profile(model, full_profile(model)):
        baseline = _finite(evaluate(model), "the full model")
        state = _Checkpoint(checkpoint, {name: list(levels) for name, levels in ranks.items()}, baseline)
        for name, kept in itertools.islice(state.errors.items(), 1):
            state.check(_probe(model, layers[name], name, ranks[name][0], evaluate, baseline), kept[0])
        with _replayed_blocks(model, evaluate, baseline) as starts:
            for name in track([n for n in layers if n not in state.errors], "probing", len(layers), len(state.errors)):
                with starts(name):
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
    spacing: Spacing = "parameters",
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


def rank_levels(shape: Shape, num_levels: int, spacing: Spacing = "parameters") -> tuple[int, ...]:
    """Rising ranks, the last one full: level j of K has j/K of the full rank, or of the dense parameters.

    Even steps in parameters put the levels where budgets are: for a square layer, 9 of 10 even ranks cost over .19.

    Raises:
        FlexrankError: fewer than two levels.
    """
    if num_levels < 2:
        raise FlexrankError(f"num_levels is {num_levels}; probing needs at least 2")
    full = min(shape)
    if spacing == "ranks":
        return tuple(sorted({max(1, round(full * level / num_levels)) for level in range(1, num_levels + 1)}))
    levels = {full}
    for level in range(1, num_levels):
        levels.add(max(1, largest_rank(shape, dense_parameters(shape) * level / num_levels)))
    return tuple(sorted(levels))


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


Starts = Callable[[str], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _replayed_blocks(model: nn.Module, evaluate: Evaluate, baseline: float) -> Iterator[Starts]:
    """Gives a context for each layer in which the blocks before the layer's own are replayed, not run."""
    stack = block_stack(model)
    replay = _Replay(model, evaluate, baseline, stack)

    @contextlib.contextmanager
    def starts(name: str) -> Iterator[None]:
        index = next((i for i, (block, _) in enumerate(stack) if name.startswith(f"{block}.")), 0)
        with replay.before(index):
            yield

    yield starts


@dataclasses.dataclass
class _Replay:
    """Holds the outputs of one block, the one before that being probed, for every call that an evaluation makes."""

    model: nn.Module
    evaluate: Evaluate
    baseline: float
    stack: Sequence[tuple[str, nn.Module]]
    index: int = 0
    outputs: list[Any] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def before(self, index: int) -> Iterator[None]:
        if index and index != self.index:
            self._record(index)
        if index == 0 or not self.outputs:
            yield
            return
        with self._replaying(index):
            yield

    def _record(self, index: int) -> None:
        self.index, self.outputs = index, []
        _, block = self.stack[index - 1]
        handle = block.register_forward_hook(lambda _module, _args, output: self.outputs.append(output))
        try:
            in_order = self._runs_in_order()
        finally:
            handle.remove()
        with self._replaying(index):
            same = in_order and self.evaluate(self.model) == self.baseline
        if not same:
            self.outputs = []
            log.info("probing: the blocks before %s cannot be replayed; they run each time", self.stack[index][0])

    def _runs_in_order(self) -> bool:
        """Evaluates once; whether each forward of the model ran every block once, in the stack's order.

        A block that runs after the probed one, in a loop or out of order, must not be replayed: the baseline would not
        tell, for at full rank it returns what it returned before.
        """
        forwards, order = 0, []

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        handles = [self.model.register_forward_pre_hook(count)]
        for place, (_, block) in enumerate(self.stack):
            handles.append(block.register_forward_pre_hook(lambda *_, place=place: order.append(place)))
        try:
            self.evaluate(self.model)
        finally:
            for handle in handles:
                handle.remove()
        return order == list(range(len(self.stack))) * forwards

    @contextlib.contextmanager
    def _replaying(self, index: int) -> Iterator[None]:
        blocks = [block for _, block in self.stack[:index]]
        calls = dict.fromkeys(blocks, 0)

        def replay(block: nn.Module) -> Callable[..., Any]:
            def forward(*_: object, **__: object) -> Any:
                call = calls[block] % len(self.outputs)
                calls[block] += 1
                return self.outputs[call]

            return forward

        own = {block: block.__dict__.get("forward") for block in blocks}
        for block in blocks:
            block.__dict__["forward"] = replay(block)
        try:
            yield
        finally:
            for block, forward in own.items():
                block.__dict__.pop("forward")
                if forward is not None:
                    block.__dict__["forward"] = forward


def block_stack(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of the ModuleList or Sequential that holds most elastic layers."""
    best: list[tuple[str, nn.Module]] = []
    names = list(nested_layers(model))
    most = 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children: Mapping[str, nn.Module] = dict(module.named_children())
        prefix = f"{name}." if name else ""
        held = sum(layer.startswith(f"{prefix}{child}.") for layer in names for child in children)
        if held > most and len(children) > 1:
            most, best = held, [(f"{prefix}{child}", block) for child, block in children.items()]
    return best
