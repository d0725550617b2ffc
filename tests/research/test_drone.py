"""DRONE's search of ranks against plain loops, and what it costs."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from test_rank_searches import costing, parameters
from torch import nn

from flexrank.nn.select import select_layers
from flexrank.nn.switch import layer_shapes, nested_layers
from research.baselines import RANK_METHODS, drone
from research.baselines.method import Measures


def test_drone_ranks_by_hand() -> None:
    """Layer a, then b in the model with a truncated; what a leaves of its part is not b's."""
    losses = {(1, 4): 3.0, (2, 4): 1.4, (4, 4): 1.0, (2, 1): 2.0, (2, 2): 1.7, (4, 1): 1.9, (4, 2): 1.2, (1, 1): 9.0}
    losses |= {(1, 2): 5.0}
    candidates = {"a": (1, 2, 4), "b": (1, 2, 4)}

    def ranks(part_a: float, part_b: float) -> tuple[int, ...]:
        parts = {"a": part_a, "b": part_b}
        return tuple(drone.within(candidates, parts, lambda one: losses[one["a"], one["b"]]).values())

    assert ranks(0.5, 0.2) == (2, 4) and ranks(0.5, 0.3) == (2, 2) and ranks(0.41, 0.61) == (2, 1)
    assert ranks(0.3, 0.5) == (4, 2) and ranks(0.0, 0.0) == (4, 4) and ranks(2.0, 2.0) == (1, 2)


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_drone_takes_the_least_allowance_within_each_size(offset: float) -> None:
    """Oracle: a plain loop over fine allowances and ascending ranks; a base model's loss above 0 rises by a ratio."""
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 6), nn.Linear(6, 10))
    RANK_METHODS["svd"].decompose_(model, [], select_layers(model), lambda *_: torch.zeros(()))
    shapes = layer_shapes(model)
    dense = {name: math.prod(shape) for name, shape in shapes.items()}
    weights = dict(zip(shapes, (0.01, 0.02, 0.09), strict=True))

    def tenths(name: str) -> list[int]:
        full, limits = min(shapes[name]), [dense[name] * level / 10 for level in range(1, 10)]
        fits = ([r for r in range(1, full + 1) if r == 1 or parameters(shapes[name], r) <= most] for most in limits)
        return sorted({full, *map(max, fits)})

    def loss(ranks: Mapping[str, int]) -> float:
        return offset + sum(weights[name] * (min(shapes[name]) - ranks[name]) ** 2 for name in shapes)

    def walked(allowance: float) -> dict[str, int]:
        chosen = {name: min(shape) for name, shape in shapes.items()}
        for name in shapes:
            part = allowance * dense[name] / sum(dense.values())
            most = loss(chosen) * math.exp(part) if offset else loss(chosen) + part
            chosen[name] = next(r for r in tenths(name) if loss({**chosen, name: r}) <= most + 1e-12)
        return chosen

    measured = costing(weights)
    measures = Measures(lambda model: offset + measured.loss(model), measured.distance)
    for budget in (0.9, 0.7, 0.5):
        fitting = (walked(1e-5 * 10 ** (n / 100)) for n in range(701))
        most = budget * sum(dense.values())
        best = next(one for one in fitting if sum(parameters(shapes[name], r) for name, r in one.items()) <= most)
        assert drone.searched(model, [budget], measures) == [best]
        (filled,) = drone.ranks(model, {}, [budget], measures)
        assert filled is not None and all(filled[name] >= best[name] for name in best)
        taken = {name: parameters(shapes[name], rank) for name, rank in filled.items()}
        steps = [
            parameters(shape, filled[name] + 1) - taken[name]
            for name, shape in shapes.items()
            if filled[name] < min(shape)
        ]
        assert sum(taken.values()) <= most < sum(taken.values()) + sum(steps)
    assert drone.searched(model, [0.01], measures) == drone.ranks(model, {}, [0.01], measures) == [None]


def test_drone_measures_no_ranks_twice_and_ends_near_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 6), nn.Linear(6, 10))
    RANK_METHODS["svd"].decompose_(model, [], select_layers(model), lambda *_: torch.zeros(()))
    shapes, cost, seen = layer_shapes(model), costing(dict.fromkeys(layer_shapes(model), 0.01)), []

    def loss(one: Any) -> float:
        seen.append(tuple(layer.rank for layer in nested_layers(one).values()))
        return cost.loss(one)

    def share(ranks: Mapping[str, int]) -> float:
        return sum(parameters(shapes[name], r) for name, r in ranks.items()) / sum(map(math.prod, shapes.values()))

    counts, found = [], []
    for spare in (0.0, 0.3):
        monkeypatch.setattr(drone, "SPARE", spare)
        (ranks,) = drone.searched(model, [0.7], Measures(loss, cost.distance))
        assert len(set(seen)) == len(seen) and 0.7 - max(spare, 0.1) < share(ranks) <= 0.7
        counts.append(len(seen))
        found.append(share(ranks))
        seen.clear()
    assert counts[1] < counts[0] and found[1] < found[0]
