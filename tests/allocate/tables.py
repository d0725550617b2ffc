"""Tables to allocate from, and oracles for what is allocated."""

import itertools
import json
import math
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from flexrank import allocate
from flexrank.profiles import Footprint, ProfileChain, SensitivityTable
from flexrank.profiles.costs import dense_parameters, deployed_parameters

FOOTPRINT = Footprint(7, 28, 4)
SOLVER_TOLERANCE = 1e-6  # of HiGHS, of the errors' scale
EVERY_RANK: dict[str, Any] = {"min_saving": 0.0, "slack_share": 0.0}
run_often = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def allocate_ranks(table: SensitivityTable, budgets, **options) -> ProfileChain:
    """Over every probed rank, slack not counted: what brute force searches."""
    return allocate.allocate_ranks(table, budgets, **{**EVERY_RANK, **options})


def random_table(layers: int, levels: int, seed: int, falling: bool = True, width: int = 24) -> SensitivityTable:
    random = np.random.default_rng(seed)
    shapes, ranks, errors = {}, {}, {}
    for layer in range(layers):
        m, n = (int(side) for side in random.integers(levels, width, size=2))
        probed = np.sort(random.choice(np.arange(1, min(m, n)), size=levels - 1, replace=False))
        values = random.lognormal(-2, 1.5, size=levels - 1)
        values = np.sort(values)[::-1] if falling else values - 0.1
        name = f"layer{layer}"
        shapes[name], ranks[name] = (m, n), (*probed.tolist(), min(m, n))
        errors[name] = (*values.tolist(), 0.0)
    return SensitivityTable(shapes, ranks, errors, 1.0, FOOTPRINT)


def transformer_table(layers: int, levels: int, seed: int) -> SensitivityTable:
    """Wider layers, so that every budget from .3 can be met."""
    random = np.random.default_rng(seed)
    shapes = {f"layer{i}": [(64, 64), (32, 64), (256, 64), (64, 256)][i % 4] for i in range(layers)}
    ranks, errors = {}, {}
    for name, shape in shapes.items():
        probed = np.round(np.linspace(0, 1, levels + 1)[1:] * min(shape)).astype(int)
        tail = np.sort(random.lognormal(-2, 2, size=levels - 1))[::-1]
        ranks[name], errors[name] = tuple(probed.tolist()), (*tail.tolist(), 0.0)
    return SensitivityTable(shapes, ranks, errors, 1.0, FOOTPRINT)


def least_budget(table: SensitivityTable) -> float:
    least = sum(deployed_parameters(shape, table.ranks[name][0]) for name, shape in table.shapes.items())
    return least / sum(map(dense_parameters, table.shapes.values()))


def spread_budgets(table: SensitivityTable, count: int) -> list[float]:
    least = least_budget(table)
    return [least + (1 - least) * (index + 0.5) / count for index in range(count)]


def weighted_error(chain: ProfileChain, weights=None) -> float:
    return sum(entry.error * (weights or {}).get(entry.requested, 1.0) for entry in chain.requested)


def brute_force(table: SensitivityTable, budgets: list[float], weights: list[float]) -> float:
    """Least weighted error over all tuples of nested profiles within the (rising) budgets."""
    names = list(table.shapes)
    profiles = []
    for levels in itertools.product(*(range(len(table.ranks[name])) for name in names)):
        ranks = {name: table.ranks[name][level] for name, level in zip(names, levels, strict=True)}
        error = sum(table.errors[name][level] for name, level in zip(names, levels, strict=True))
        cost = sum(deployed_parameters(table.shapes[name], ranks[name]) for name in names)
        profiles.append((levels, cost, error))
    dense = sum(m * n for m, n in table.shapes.values())
    best = {levels: 0.0 for levels, _, _ in profiles}  # least error of the smaller budgets, all within `levels`
    for budget, weight in zip(budgets, weights, strict=True):
        own = [(levels, best[levels] + weight * error) for levels, cost, error in profiles if cost <= budget * dense]
        best = {
            levels: min((v for low, v in own if all(map(int.__le__, low, levels))), default=math.inf) for levels in best
        }
    return min(best.values())


def check_chain(chain: ProfileChain, table: SensitivityTable, budgets) -> None:
    assert ProfileChain.from_json(json.loads(json.dumps(chain.to_json()))) == chain
    assert chain.budgets == tuple(sorted(budgets))
    full = {name: min(shape) for name, shape in table.shapes.items()}
    assert chain.entries[0].profile == {name: ranks[0] for name, ranks in table.ranks.items()}
    assert chain.entries[-1].profile == full and chain.entries[-1].error == 0
    assert chain.dense_parameters == chain.entries[-1].parameters
    for small, large in itertools.pairwise(chain.entries):
        assert small.profile.fits_in(large.profile) and small.parameters <= large.parameters
    for entry in chain.entries:
        costs = [deployed_parameters(table.shapes[name], rank) for name, rank in entry.profile.items()]
        assert entry.parameters == sum(costs)
    for entry in chain.requested:
        assert entry.parameters <= entry.requested * chain.dense_parameters
