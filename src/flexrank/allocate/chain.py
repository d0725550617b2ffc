"""Builds the chain from chosen profiles: the steps between them, and which entries answer a budget."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from flexrank.allocate.curves import Bools, CostTable, Ints, LayerCurve, step_slopes
from flexrank.profiles import ChainEntry

Anchor = tuple[Ints, float | None]  # levels (L,), and the budget they answer


def fill_chain(curves: Sequence[LayerCurve], anchors: Sequence[Anchor]) -> tuple[ChainEntry, ...]:
    """Entries from the smallest profile to the full one, in single steps through all anchors (nested, ascending cost).

    Between two anchors, the step that saves most error per parameter comes first, on the lower convex hull of each
    layer's part of the curve. A layer that is full at the next anchor becomes full in one step: after consolidation its
    full rank is a separate matrix, and the components in between are never trained.
    """
    table = CostTable(curves)
    entries: list[ChainEntry] = []
    stops: list[Anchor] = [*anchors, (table.top, None)]
    levels = np.zeros_like(table.top)
    if not np.array_equal(levels, stops[0][0]):
        entries += table.entries(levels[None])
    for number, (stop, requested) in enumerate(stops):
        is_whole = (stop == table.top) & (0 < number < len(stops) - 1)
        layers, raises = _ordered_steps(curves, levels, stop, is_whole)
        if len(layers) or number < len(stops) - 1 or not entries:
            raised = np.zeros((max(len(layers), 1), len(levels)), np.int64)
            raised[np.arange(len(layers)), layers] = raises
            entries += table.entries(levels + raised.cumsum(axis=0), requested)
        levels = stop
    return tuple(entries)


def mark_budgets(
    entries: Sequence[ChainEntry], budgets: Sequence[float], caps: Sequence[int]
) -> tuple[ChainEntry, ...]:
    """SelectProfiles (FlexRank, algorithm 2): marks the largest profile within each budget as requested."""
    costs = [entry.parameters for entry in entries]
    answers: dict[int, list[float]] = {}
    for budget, cap in zip(budgets, caps, strict=True):
        answers.setdefault(int(np.searchsorted(costs, cap, side="right")) - 1, []).append(budget)
    marked: list[ChainEntry] = []
    for index, entry in enumerate(entries):
        if index not in answers:
            marked.append(entry)
        marked += [dataclasses.replace(entry, requested=budget) for budget in answers.get(index, ())]
    return tuple(marked)


def _ordered_steps(curves: Sequence[LayerCurve], low: Ints, high: Ints, is_whole: Bools) -> tuple[Ints, Ints]:
    """The layers to raise, in order, from `low` to `high`, and by how many candidates: one, or all if `is_whole`."""
    slopes, layers, raises = [], [], []
    for layer, (curve, start, end) in enumerate(zip(curves, low, high, strict=True)):
        stretch = np.unique([start, end]) if is_whole[layer] else np.arange(start, end + 1)
        slopes.append(step_slopes(curve.parameters[stretch], curve.errors[stretch]))
        layers.append(np.full(len(stretch) - 1, layer))
        raises.append(np.diff(stretch))
    order = np.argsort(-np.concatenate(slopes), kind="stable")
    return np.concatenate(layers)[order], np.concatenate(raises)[order]
