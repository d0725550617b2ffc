"""Curves of candidates: checked, fitted, refined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocation_tables import (
    FOOTPRINT,
    check_chain,
    run_often,
    transformer_table,
    weighted_error,
)
from flexrank.allocate import allocate_ranks
from flexrank.allocate.curves import LayerCurve, monotone, refine, step_slopes, undominated
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import deployed_parameters, rank_levels


def curve_of(errors, ranks=None, shape=(40, 60)) -> LayerCurve:
    ranks = np.array(ranks or [4 * (i + 1) for i in range(len(errors) - 1)] + [40])
    parameters = np.array([deployed_parameters(shape, int(rank)) for rank in ranks])
    return LayerCurve("a", ranks, parameters, np.array(errors, float))


def test_monotone_fit_by_hand_and_identity_on_falling_errors():
    assert monotone(curve_of([3.0, 1.0, 2.0, -1.0, 0.0])).errors.tolist() == [3.0, 1.5, 1.5, 0.0, 0.0]
    falling = [0.7 + 0.1, 0.3, 0.1, 0.0, 0.0]
    assert monotone(curve_of(falling)).errors.tolist() == falling


def test_undominated_keeps_strict_falls_and_full_rank():
    assert undominated(curve_of([3.0, 1.0, 1.0, 2.0, -1.0, 0.0])).errors.tolist() == [3.0, 1.0, -1.0, 0.0]


def test_noise_is_fitted_and_the_budget_is_still_spent():
    """One lucky probe far down: as measured, nothing larger looks worth its cost."""
    shape = (40, 60)
    table = SensitivityTable({"a": shape}, {"a": (4, 20, 30, 40)}, {"a": (-0.1, 0.4, 0.2, 0.0)}, 1.0, FOOTPRINT)
    measured = allocate_ranks(table, [0.95], monotone_errors=False)
    assert measured.requested[0].profile == {"a": 4}
    assert allocate_ranks(table, [0.95]).requested[0].profile == {"a": 30}


@run_often
@given(errors=st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=8), count=st.integers(2, 60))
def test_refined_curves_keep_probed_points_and_fall_between(errors, count):
    curve = curve_of([*sorted(errors, reverse=True), 0.0])
    fine = refine(curve, (40, 60), count)
    where = np.searchsorted(fine.ranks, curve.ranks)
    assert fine.ranks[where].tolist() == curve.ranks.tolist()
    assert fine.errors[where].tolist() == curve.errors.tolist()
    assert fine.parameters.tolist() == [deployed_parameters((40, 60), int(rank)) for rank in fine.ranks]
    assert (np.diff(fine.errors) <= 1e-12 * curve.errors[0]).all()
    assert fine.ranks[0] == curve.ranks[0] and len(fine.ranks) <= count + len(curve.ranks)


def test_interpolation_is_near_the_truth_on_an_exponential_and_even_in_cost():
    shape = (200, 300)
    ranks = [20 * (i + 1) for i in range(10)]
    curve = curve_of([*(5 * np.exp(-0.03 * np.array(ranks[:-1]))), 0.0], ranks, shape)
    fine = refine(curve, shape, 40)
    inside = fine.ranks <= 180
    np.testing.assert_allclose(fine.errors[inside], 5 * np.exp(-0.03 * fine.ranks[inside]), rtol=1e-9)
    widest = np.diff(fine.parameters).max()
    assert widest <= 1.3 * (fine.parameters[-1] - fine.parameters[0]) / 39


@pytest.mark.parametrize("shape, block", [((512, 512), 32), ((384, 1536), 16), ((64, 100), 4)])
def test_what_is_added_between_whole_blocks_is_whole_blocks(shape: tuple[int, int], block: int) -> None:
    for spacing in ("blocks", "parameters"):
        ranks = list(rank_levels(shape, 6, spacing))
        curve = curve_of([*np.exp(-0.1 * np.array(ranks[:-1])), 0.0], ranks, shape)
        added = sorted(set(refine(curve, shape, 24).ranks.tolist()) - set(ranks))
        assert added and all(rank % block == 0 for rank in added) == (spacing == "blocks")


def test_interpolated_candidates_lower_the_predicted_error_and_meet_budgets_more_closely():
    table = transformer_table(8, 6, seed=8)
    budgets = [0.35, 0.55, 0.75]
    coarse, fine = (allocate_ranks(table, budgets, candidates_per_layer=count) for count in (None, 24))
    check_chain(fine, table, budgets)
    assert weighted_error(fine) <= weighted_error(coarse) * (1 + 1e-3)
    unspent = [sum(e.requested - chain.relative_size(e) for e in chain.requested) for chain in (coarse, fine)]
    assert unspent[1] < unspent[0]


def test_step_slopes_are_those_of_the_lower_hull():
    parameters, errors = np.array([0, 1, 2, 4]), np.array([10.0, 9.0, 4.0, 3.0])
    assert step_slopes(parameters, errors).tolist() == [3.0, 3.0, 0.5]  # 10 → 4 over two steps; then 1 over 2
