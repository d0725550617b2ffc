"""Curves of candidates: fitted, and their slopes."""

import numpy as np
import pytest
from tables import FOOTPRINT, allocate_ranks

from flexrank.allocate.curves import LayerCurve, monotone, read_curves, step_slopes
from flexrank.errors import FlexrankError
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import deployed_parameters


def curve_of(errors, ranks=None, shape=(40, 60)) -> LayerCurve:
    ranks = np.array(ranks or [4 * (i + 1) for i in range(len(errors) - 1)] + [40])
    parameters = np.array([deployed_parameters(shape, int(rank)) for rank in ranks])
    return LayerCurve("a", ranks, parameters, np.array(errors, float))


def test_monotone_fit_by_hand_and_identity_on_falling_errors():
    assert monotone(curve_of([3.0, 1.0, 2.0, -1.0, 0.0])).errors.tolist() == [3.0, 1.5, 1.5, 0.0, 0.0]
    falling = [0.7 + 0.1, 0.3, 0.1, 0.0, 0.0]
    assert monotone(curve_of(falling)).errors.tolist() == falling


def test_noise_is_fitted_and_the_budget_is_still_spent():
    """One lucky probe far down: as measured, nothing larger looks worth its cost."""
    shape = (40, 60)
    table = SensitivityTable({"a": shape}, {"a": (4, 20, 30, 40)}, {"a": (-0.1, 0.4, 0.2, 0.0)}, 1.0, FOOTPRINT)
    measured = allocate_ranks(table, [0.95], monotone_errors=False)
    assert measured.requested[0].profile == {"a": 4}
    assert allocate_ranks(table, [0.95]).requested[0].profile == {"a": 30}


def test_step_slopes_are_those_of_the_lower_hull():
    parameters, errors = np.array([0, 1, 2, 4]), np.array([10.0, 9.0, 4.0, 3.0])
    assert step_slopes(parameters, errors).tolist() == [3.0, 3.0, 0.5]  # 10 → 4 over two steps; then 1 over 2


def test_a_rank_that_costs_as_much_as_the_dense_layer_is_no_candidate():
    """Its step to full rank saves nothing over nothing; of 64 × 64, 48 with a slack of 5 costs 48 · 85 of 4,096."""
    ranks, errors = (16, 32, 48, 49, 61, 64), (3.0, 1.0, 0.5, 0.1, 0.0, 0.0)
    table = SensitivityTable({"a": (64, 64)}, {"a": ranks}, {"a": errors}, 1.0, FOOTPRINT)
    (curve,) = read_curves(table, 0.0, slack_share=0.1)
    assert curve.ranks.tolist() == [16, 32, 48, 64] and curve.parameters.tolist()[-2:] == [48 * 85, 4096]
    assert allocate_ranks(table, [0.99], min_saving=0.0, slack_share=0.1).requested[0].profile == {"a": 32}


def test_a_budget_that_is_a_ranks_exact_cost_allows_it():
    """0.145 · 200 is 28.999… in binary; rank 1 of 20 × 10 takes 29."""
    table = SensitivityTable({"a": (20, 10)}, {"a": (1, 10)}, {"a": (1.0, 0.0)}, 0.0, FOOTPRINT)
    chain = allocate_ranks(table, [0.145], min_saving=0, slack_share=0)
    assert chain.requested[0].profile == {"a": 1} and chain.requested[0].parameters == 29


@pytest.mark.parametrize("weights", [1.0, ["a"], "1"])
def test_weights_that_are_no_list_of_numbers_are_refused(weights):
    table = SensitivityTable({"a": (20, 10)}, {"a": (1, 10)}, {"a": (1.0, 0.0)}, 0.0, FOOTPRINT)
    with pytest.raises(FlexrankError, match="weights is .+; it is a list of numbers, one for each budget"):
        allocate_ranks(table, [0.5], weights=weights)
