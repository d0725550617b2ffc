"""Profiles brought to their caps: lowered where they overrun them, raised where they leave parameters spare."""

from collections.abc import Sequence

import numpy as np

from flexrank.allocate.curves import CostTable, Ints


def repair(table: CostTable, levels: Ints, caps: Sequence[int]) -> None:
    """Lowers profiles that overrun their cap by the solver's tolerance, in place, by steps of least error a saving."""
    layers = np.arange(levels.shape[1])
    for budget in range(len(caps) - 1, -1, -1):
        row = levels[budget]
        while table.cost(row) > caps[budget]:
            below = np.maximum(row - 1, 0)
            saved = table.parameters[layers, row] - table.parameters[layers, below]
            lost = table.errors[layers, below] - table.errors[layers, row]
            layer = int(np.argmin(np.where(saved > 0, lost / np.maximum(saved, 1), np.inf)))
            row[layer] -= 1
        levels[:budget] = np.minimum(levels[:budget], row)


def spend(table: CostTable, levels: Ints, caps: Sequence[int]) -> None:
    """Spends spare parameters, in place, by raises of most error saved a parameter; the profiles stay nested."""
    layers = np.arange(levels.shape[1])[:, None]
    candidates = np.arange(table.parameters.shape[1])[None, :]
    for budget in range(len(caps) - 1, -1, -1):
        row = levels[budget]
        limit = levels[budget + 1] if budget + 1 < len(caps) else table.top
        spare = caps[budget] - table.cost(row)
        while True:
            spent = table.parameters - table.parameters[layers, row[:, None]]
            saved = table.errors[layers, row[:, None]] - table.errors
            allowed = (candidates > row[:, None]) & (candidates <= limit[:, None]) & (spent <= spare) & (saved >= 0)
            if not allowed.any():
                break
            best = np.argmax(np.where(allowed, saved / np.maximum(spent, 1), -np.inf))
            layer, level = divmod(int(best), table.parameters.shape[1])
            spare -= int(spent[layer, level])
            row[layer] = level
