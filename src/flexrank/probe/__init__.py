"""Stage two, first half: how much each layer's truncation costs, probed one layer at a time or by curvature."""

import itertools
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.errors import FlexrankError
from flexrank.files import read_document, write_document
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.select import require_unwrapped
from flexrank.nn.sharding import require_whole
from flexrank.nn.switch import (
    footprint,
    full_matrices,
    full_profile,
    nested_layers,
    require_whole_factors,
    use_profile,
)
from flexrank.probe.curvature import curvature_rises as curvature_rises
from flexrank.probe.curvature import curvature_sensitivity as curvature_sensitivity
from flexrank.probe.curvature import curvature_table as curvature_table
from flexrank.probe.replay import Replay
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import MIN_SAVING, SLACK_SHARE, Spacing, rank_levels
from flexrank.progress import track

log = logging.getLogger("flexrank")

Evaluate = Callable[[nn.Module], float]

#: Most bytes of matrices that a probe keeps for layers at full rank.
MATRIX_BYTES = 2**32
#: Largest relative difference from a checkpoint's error: another number of threads sums in another order.
RESUMED_BOUND = 1e-3
#: Largest relative and absolute difference of two evaluations of the full model; a GPU may sum in another order.
REPEATED_BOUND = 1e-2, 1e-6
#: The kind of a checkpoint's document.
CHECKPOINT = "probe"


@torch.no_grad()
def probe_sensitivity(
    model: nn.Module,
    evaluate: Evaluate,
    num_levels: int = 10,
    *,
    spacing: Spacing = "blocks",
    min_saving: float = MIN_SAVING,
    slack_share: float = SLACK_SHARE,
    checkpoint: str | Path | None = None,
    replay_bytes: int = 2**30,
    matrix_bytes: int = MATRIX_BYTES,
) -> SensitivityTable:
    """Measures the rise of `evaluate` with one layer truncated, all others full (FlexRank, appendix C.2, step 1).

    This takes L × (K − 1) + 1 evaluations, divided among processes if there are several. In a layer's probes, earlier
    blocks of the stack, and modules of its own block that return before it is called, do not run again but replay what
    they returned in the full model. That halves the work, at the cost of a few more evaluations per block that record
    and check outputs. It is used only if it reproduces the baseline bit for bit, and while the model is called with the
    same inputs as the full model, unlike a model that reads its own output tokens.

    Args:
        model: an elastic model; evaluated in the mode it is in, and left as it was.
        evaluate: any deterministic measure of a model, lower is better, over batches in a fixed order.
        num_levels: number of ranks per layer, full rank included; this and the next three as in `costs.rank_levels`.
        min_saving: this and `slack_share` as for `allocate_ranks`, which leaves out the ranks that save less.
        checkpoint: a JSON file; an interrupted probe resumes from it.
        replay_bytes: most bytes of outputs kept for replay: those of one block and, if they fit as well, of the next
            block's modules. If not even one block's outputs fit, all blocks run each time, with the same errors.
        matrix_bytes: most bytes of matrices kept for layers at full rank, which then cost no more than dense layers.

    Raises:
        FlexrankError: there are fewer than two levels, an evaluation is not finite, a second evaluation of the full
            model gives another value, or the checkpoint is of another probe.
    """
    require_unwrapped(model)
    if not callable(evaluate):
        raise FlexrankError(f"evaluate is {evaluate!r}; it is a function of a model, as distillation_evaluator returns")
    require_whole(model, "probe_sensitivity")
    layers = nested_layers(model)
    require_whole_factors(layers)
    shapes = {name: layer.matrix_shape for name, layer in layers.items()}
    ranks = {name: rank_levels(shape, num_levels, spacing, min_saving, slack_share) for name, shape in shapes.items()}
    with use_profile(model, full_profile(model)), full_matrices(model, matrix_bytes):
        baseline = _finite(evaluate(model), "the full model")
        state = _Checkpoint(checkpoint, {name: list(levels) for name, levels in ranks.items()}, baseline)
        for name, kept in itertools.islice(state.errors.items(), 1):
            found_again = _probe(layers[name], name, ranks[name][0], lambda: evaluate(model), baseline)
            state.require_near(found_again, kept[0])
        for name in itertools.islice(layers, processes.count() > 1):  # the full model's own value may be 0 on any data
            _require_alike(_probe(layers[name], name, ranks[name][0], lambda: evaluate(model), 0.0))
        replay = Replay(model, evaluate, baseline, replay_bytes)
        _require_repeatable(baseline, _finite(replay.again, "the full model"))
        left = track([n for n in layers if n not in state.errors], "probing", len(layers), len(state.errors))
        while names := list(itertools.islice(left, processes.count())):
            found = _probe_layers(layers, {name: ranks[name] for name in names}, baseline, replay)
            for name in names:
                state.add(name, found[name])
    errors = {name: tuple(state.errors[name]) for name in layers}
    _warn_of_unread([name for name, found in errors.items() if len(found) > 1 and not any(found)])
    return SensitivityTable(shapes, ranks, errors, state.baseline, footprint(model))


def _is_repeated(baseline: float, again: float) -> bool:
    return abs(again - baseline) <= REPEATED_BOUND[0] * abs(baseline) + REPEATED_BOUND[1]


def _require_alike(value: float) -> None:
    """Raises FlexrankError unless all processes got this value, or nearly."""
    mean = processes.sums(value)[0] / processes.count()
    if processes.any_process(not _is_repeated(mean, value)):
        right = "it must read the same batches in all of them, without a DistributedSampler"
        raise FlexrankError(
            f"evaluate gave {value:.6g} for the first layer, and {mean:.6g} over all processes; {right}"
        )


def _require_repeatable(baseline: float, again: float) -> None:
    """Raises FlexrankError unless a second evaluation of the full model gave the value of the first."""
    if not _is_repeated(baseline, again):
        right = "it must read the same batches in every call: a list, no shuffling, and no dropout"
        raise FlexrankError(f"evaluate gave {baseline:.6g} for the full model, and then {again:.6g}; {right}")


def _warn_of_unread(names: Sequence[str]) -> None:
    if names:
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        right = "if nothing reads them, exclude them (in a run `layers.exclude`), and otherwise change the evaluation"
        log.warning("probe: no rank of %s changes the evaluation, so they get the smallest; %s", listed, right)


def _probe_layers(
    layers: Mapping[str, NestedLayer], ranks: Mapping[str, Sequence[int]], baseline: float, replay: Replay
) -> dict[str, list[float]]:
    """The errors of these layers at their ranks; with several processes, each evaluates its share of the pairs."""
    errors = {name: [0.0] * len(levels) for name, levels in ranks.items()}
    pairs = [(name, i) for name, levels in ranks.items() for i, r in enumerate(levels) if r < layers[name].max_rank]
    own = [pairs[number] for number in processes.share(len(pairs))]
    for name, group in itertools.groupby(own, key=lambda pair: pair[0]):
        replay.record(name)
        for _, place in group:
            errors[name][place] = _probe(layers[name], name, ranks[name][place], replay.evaluate, baseline)
    every = iter(processes.sums(*itertools.chain.from_iterable(errors.values())))
    return {name: list(itertools.islice(every, len(levels))) for name, levels in ranks.items()}


def _probe(layer: NestedLayer, name: str, rank: int, evaluate: Callable[[], float], baseline: float) -> float:
    if rank == layer.max_rank:
        return 0.0
    layer.rank = rank
    try:
        return _finite(evaluate(), f"layer {name!r} at rank {rank}") - baseline
    finally:
        layer.rank = layer.max_rank


def _finite(value: float, where: str) -> float:
    if not (isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)):
        raise FlexrankError(f"evaluating {where} gave a {type(value).__name__}; it must be one number")
    if not math.isfinite(value):
        raise FlexrankError(f"evaluating {where} gave {value}; check the model's weights and the batches")
    return float(value)


class _Checkpoint:
    """The errors of the layers probed so far, written after each layer, and the baseline of the run that began it."""

    def __init__(self, path: str | Path | None, ranks: dict[str, list[int]], baseline: float):
        self.path, self.ranks, self.baseline = path, ranks, baseline
        self.errors: dict[str, list[float]] = {}
        if path is not None and Path(path).exists():
            value = read_document(path, CHECKPOINT, ("ranks", "baseline", "errors"))
            if value["ranks"] != ranks:
                raise FlexrankError(f"{path}: belongs to another probe, of other ranks; remove it")
            self.errors, self.baseline = value["errors"], value["baseline"]

    def require_near(self, error: float, kept: float) -> None:
        """Checks one error, to make sure that model, data and loss are those of the checkpoint."""
        if abs(error - kept) > RESUMED_BOUND * abs(kept) + 1e-7:
            both = f"{kept:.6g} there, {error:.6g} here"
            raise FlexrankError(f"{self.path}: belongs to another probe ({both}); remove it")

    def add(self, name: str, errors: list[float]) -> None:
        self.errors[name] = errors
        if self.path is not None and processes.is_first():
            content = {"ranks": self.ranks, "baseline": self.baseline, "errors": self.errors}
            write_document(self.path, CHECKPOINT, content)
