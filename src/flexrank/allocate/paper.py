"""The paper's rank selection, as printed: FlexRank, algorithms 2 and 3, vectorised.

    F_0 = {(0, 0)};   F_l = ParetoPrune(KeepMinErrorPerSaving(ExpandLayer(F_{l-1}, C_l)));   NestedChain(Backtrack(F_L))

A state is (total saving S, total error E). The result is exact if errors add up over layers, but the number of states
may grow with the product of the layers' candidates; a grid over the savings bounds it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexrank.allocate.curves import Floats, Ints

NO_SAVING = -1


class States(NamedTuple):
    """States with their origin: the previous state, and the candidate taken (`NO_SAVING` for none)."""

    savings: Ints
    errors: Floats
    parents: Ints
    choices: Ints

    def take(self, index: Ints) -> "States":
        """The states at `index`."""
        return States(self.savings[index], self.errors[index], self.parents[index], self.choices[index])


#: F_0: nothing is saved, and there is no error.
START = States(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int32), np.zeros(1, np.int16))


class Selection(NamedTuple):
    """Profiles by ascending saving: errors (P,), candidates chosen (L, P), and the states of the largest front."""

    errors: Floats
    choices: Ints
    states: int


def select_nested(savings: Sequence[Ints], errors: Sequence[Floats], unit: int = 1) -> Selection:
    """Algorithm 2: the chain of componentwise-nested Pareto profiles, from least to most saving.

    `savings` (positive) and `errors` are those of each layer's candidates, without full rank. The dynamic program
    counts savings in whole units of `unit`, rounded down; ParetoFilter and NestedChain use the exact savings.
    """
    front, backpointers, states = START, list[States](), 1
    for layer_savings, layer_errors in zip(savings, errors, strict=True):
        expanded = keep_min_error_per_saving(expand_layer(front, layer_savings // unit, layer_errors))
        front = pareto_prune(expanded)  # by ascending saving, and therefore ascending error
        backpointers.append(front)
        states = max(states, len(front.savings))
    choices = backtrack(len(front.savings), backpointers)
    kept = pareto_filter(front.errors, total_savings(savings, choices))
    chain = kept[nested_chain(savings, choices[:, kept])]
    return Selection(front.errors[chain], choices[:, chain], states)


def expand_layer(front: States, savings: Ints, errors: Floats) -> States:
    """ExpandLayer: combines every state with every candidate of the layer, and with none."""
    savings, errors = np.append(savings, 0), np.append(errors, 0.0)
    states, width = len(front.savings), len(savings)
    choices = np.append(np.arange(width - 1), NO_SAVING).astype(np.int16)
    return States(
        np.add.outer(front.savings, savings).ravel(),
        np.add.outer(front.errors, errors).ravel(),
        np.repeat(np.arange(states, dtype=np.int32), width),
        np.tile(choices, states),
    )


def keep_min_error_per_saving(expanded: States) -> States:
    """KeepMinErrorPerSaving: for each saving, ascending, the state of least error; of equals, the first expanded."""
    order = np.lexsort((expanded.errors, expanded.savings))  # stable
    sorted_savings = expanded.savings[order]
    first = np.append(True, sorted_savings[1:] != sorted_savings[:-1])
    return expanded.take(order[first])


def pareto_prune(expanded: States) -> States:
    """ParetoPrune: keeps a state if its error is below that of every state that saves more."""
    return expanded.take(_below_all_after(expanded.errors))


def _below_all_after(errors: Floats) -> Ints:
    least_after = np.append(np.minimum.accumulate(errors[::-1])[::-1][1:], np.inf)
    return np.flatnonzero(errors < least_after)


def backtrack(count: int, backpointers: Sequence[States]) -> Ints:
    """Backtrack: finds the candidate of every layer in every final state, (L, P)."""
    choices = np.empty((len(backpointers), count), np.int16)
    state = np.arange(count)
    for layer in range(len(backpointers) - 1, -1, -1):
        choices[layer] = backpointers[layer].choices[state]
        state = backpointers[layer].parents[state]
    return choices


def total_savings(savings: Sequence[Ints], choices: Ints) -> Ints:
    """The sum of each profile's savings over the layers, (P,)."""
    totals = np.zeros(choices.shape[1], np.int64)
    for layer_savings, chosen in zip(savings, choices, strict=True):
        totals += np.append(layer_savings, 0)[chosen]  # NO_SAVING = -1 reads the 0 at the end
    return totals


def pareto_filter(errors: Floats, totals: Ints) -> Ints:
    """ParetoFilter: the profiles, by ascending total saving, whose error is below that of all that save more."""
    order = np.argsort(totals, kind="stable")
    return order[_below_all_after(errors[order])]


def nested_chain(savings: Sequence[Ints], choices: Ints) -> Ints:
    """NestedChain: from the least saving up, keeps each profile that saves no less in any layer than the last kept."""
    width = max(len(layer_savings) for layer_savings in savings) + 1
    padded = np.zeros((len(savings), width), np.int64)
    for layer, layer_savings in enumerate(savings):
        padded[layer, : len(layer_savings)] = layer_savings
    layers = np.arange(len(savings))
    kept: list[int] = []
    last = np.zeros(len(savings), np.int64)
    for index, chosen in enumerate(np.ascontiguousarray(choices.T)):
        drops = padded[layers, chosen]  # NO_SAVING = -1 reads the last column, which is 0
        if not kept or bool((drops >= last).all()):
            kept.append(index)
            last = drops
    return np.array(kept, np.int64)
