"""Joint allocation against brute force where one error is many times as large as those that a good profile has."""

import dataclasses

import numpy as np
import pytest
from tables import FOOTPRINT, allocate_ranks, brute_force, check_chain, weighted_error

from flexrank.profiles import SensitivityTable

BUDGETS = [0.5, 0.7, 0.9]
EXACT = {"gap": 1e-6, "monotone_errors": False}


def dwarfed(big: float, seed: int, low: float = 0.0) -> SensitivityTable:
    """Four layers; the first one's least rank has an error of `big`, all else of .01 to 10, less `low`."""
    random = np.random.default_rng(seed)
    names = [f"layer{layer}" for layer in range(4)]
    errors = {name: np.sort(random.random(4) * 10.0 ** random.uniform(-2, 1))[::-1] - low for name in names}
    errors["layer0"][0] = big
    found = {name: (*map(float, own), 0.0) for name, own in errors.items()}
    return SensitivityTable(
        dict.fromkeys(names, (64, 64)), dict.fromkeys(names, (4, 9, 16, 24, 64)), found, 0.0, FOOTPRINT
    )


@pytest.mark.parametrize("big", [1e3, 1e10, 1e22])
@pytest.mark.parametrize(("seed", "low"), [(0, 0.0), (2, 0.0), (3, 0.3)])
def test_one_error_that_dwarfs_all_others_hides_none(big: float, seed: int, low: float) -> None:
    table = dwarfed(big, seed, low)
    for budget in BUDGETS:
        best, chain = brute_force(table, [budget], [1.0]), allocate_ranks(table, [budget], **EXACT)
        assert chain.requested[0].error == pytest.approx(best, rel=1e-5)
    chain = allocate_ranks(table, BUDGETS, **EXACT)
    check_chain(chain, table, BUDGETS)
    assert weighted_error(chain) == pytest.approx(brute_force(table, BUDGETS, [1.0] * 3), rel=1e-5)


def test_a_profile_without_error_is_found_below_a_large_one() -> None:
    table = dwarfed(1e13, 0)
    errors = {name: own if name == "layer0" else (0.0,) * 5 for name, own in table.errors.items()}
    table = dataclasses.replace(table, errors=errors)
    assert brute_force(table, [0.5], [1.0]) == 0 == allocate_ranks(table, [0.5], gap=0).requested[0].error
