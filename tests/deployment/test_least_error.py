"""Ranks and forms chosen together, against brute force over every choice of a small model."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import models
from flexrank.calibrate import collect_moments
from flexrank.decompose import decompose_
from flexrank.deployment.fitting import Limits, default_loads, fit, fit_plans
from flexrank.deployment.planning import LayerPlan, Planner, form_key, plan_least_error
from flexrank.deployment.timing import Load, TimeTable
from flexrank.errors import FlexrankError
from flexrank.nn.surgery import footprint, select_layers
from flexrank.profiles import SensitivityTable
from hand_tables import by_hand, chain_of, small_model

LOADS = (1, 16)


def random_case(place: Path, seed: int) -> tuple[Planner, TimeTable, SensitivityTable, list[Load]]:
    """Forms cost from half to three times their parameters; errors fall with rank."""
    planner, random = Planner(small_model(), slack=1), np.random.default_rng(seed)
    table = by_hand(place, {"dense": 1e-6, "plain": 1e-6, "aligned": 1e-6}, planner.model)
    for times in table._times.values():
        for form in ("plain", "aligned"):
            times[form] = [[one * random.uniform(0.5, 3) for one in row] for row in times[form]]
    ranks, errors = {}, {}
    for name, layer in planner.layers.items():
        ranks[name] = (*sorted(random.choice(np.arange(1, layer.max_rank), 3, replace=False).tolist()), layer.max_rank)
        errors[name] = (*sorted(random.lognormal(-2, 1.5, 3).tolist(), reverse=True), 0.0)
    shapes = {name: layer.matrix_shape for name, layer in planner.layers.items()}
    sensitivity = SensitivityTable(shapes, ranks, errors, 1.0, footprint(planner.model))
    return planner, table, sensitivity, [Load(dict.fromkeys(planner.layers, (rows,))) for rows in LOADS]


def brute_force(
    planner: Planner, table: TimeTable, sensitivity: SensitivityTable, loads: list[Load], most: int
) -> float | None:
    """The least error of all choices within the size and every load's seconds."""
    options = []
    for name, layer in planner.layers.items():
        m, n = layer.matrix_shape
        found = [(0.0, m * n, None, layer.max_rank)]
        for rank, error in zip(sensitivity.ranks[name], sensitivity.errors[name], strict=True):
            sizes = {slack: rank * (m + n - rank + slack) for slack in (1, rank)}
            found += [(error, size, slack, rank) for slack, size in sizes.items() if size < m * n]
        options.append([
            (*one[:2], [load.seconds(table, name, form_key(layer), one[3], one[2]) for load in loads]) for one in found
        ])  # fmt: skip
    limit = np.sum([option[0][2] for option in options], axis=0) * (1 + 1e-6)
    errors = [
        sum(one[0] for one in choice)
        for choice in itertools.product(*options)
        if sum(one[1] for one in choice) <= most and (np.sum([one[2] for one in choice], axis=0) <= limit).all()
    ]
    return min(errors, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_within_size_and_time_has_less_error(seed: int, tmp_path: Path) -> None:
    planner, table, sensitivity, loads = random_case(tmp_path, seed)
    dense = sum(m * n for m, n in sensitivity.shapes.values())
    for share in (0.05, 0.4, 0.6, 0.8, 1.0):
        most = int(share * dense)
        least = brute_force(planner, table, sensitivity, loads, most)
        plans = plan_least_error(planner, sensitivity, most, table, loads)
        assert (plans is None) == (least is None)
        if plans is None:
            continue
        assert sum(plan.parameters for plan in plans.values()) <= most
        found = sum(
            0.0
            if plan.slack is None
            else dict(zip(sensitivity.ranks[n], sensitivity.errors[n], strict=True))[plan.rank]
            for n, plan in plans.items()
        )
        assert least - 1e-9 <= found <= least + 2e-3 * max(map(max, sensitivity.errors.values()))
        for load in loads:
            taken, limit = (
                sum(load.seconds(table, n, form_key(planner.layers[n]), p.rank, p.slack) for n, p in chosen.items())
                for chosen in (plans, {name: planner.dense(name) for name in plans})
            )
            assert taken <= limit * (1 + 1e-5)
    assert plans == {name: planner.dense(name) for name in plans}  # all of the size: no error at all


def test_slack_is_chosen_for_the_weights(tmp_path: Path) -> None:
    """The program counts on the slack that was timed; where the weights want more, it is solved again."""
    _, table, sensitivity, loads = random_case(tmp_path, 0)
    for times in table._times.values():
        times["aligned"] = [[0.1 * one for one in row] for row in times["aligned"]]
    model = small_model()
    with torch.no_grad():
        for layer in Planner(model).layers.values():
            layer.u[:, 0] = 0  # a first output of zeros: nothing can be aligned with it
    planner = Planner(model, slack="auto")
    most = int(0.7 * sum(m * n for m, n in sensitivity.shapes.values()))
    plans = plan_least_error(planner, sensitivity, most, table, loads)
    assert plans is not None and sum(plan.parameters for plan in plans.values()) <= most
    low_rank = {name: plan for name, plan in plans.items() if plan.slack is not None}
    assert low_rank and all(
        plan in (planner.layer(n, plan.rank), plain(planner, n, plan)) for n, plan in low_rank.items()
    )


def plain(planner: Planner, name: str, plan: LayerPlan) -> LayerPlan:
    return LayerPlan(plan.rank, plan.rank, plan.rank * sum(planner.layers[name].matrix_shape))


def test_every_limit_of_size_holds(tmp_path: Path) -> None:
    planner, table, sensitivity, loads = random_case(tmp_path, 3)
    chain, small = chain_of(planner.model), 0
    for limits in (Limits(0.6), Limits(max_params=500), Limits(max_bytes=2000), Limits(0.9, max_params=400)):
        plans = fit(planner, chain, limits, table, loads, sensitivity=sensitivity).plans
        most = min(
            (limits.budget or 1) * chain.dense_parameters,
            limits.max_params or 1e9,
            (limits.max_bytes or 1e9) / 4,
        )
        size = sum(plan.parameters for plan in plans.values())
        other = 0 if limits.budget and not limits.max_params else footprint(planner.model).other_parameters
        assert size + other <= most
        small += size < 0.5 * chain.dense_parameters
    assert small < 4
    with pytest.raises(FlexrankError, match="too small"):
        fit_plans(planner.model, chain, 0.01, slack=1, times=table, loads=loads, sensitivity=sensitivity)


def test_a_fit_takes_what_the_program_finds(tmp_path: Path) -> None:
    planner, table, sensitivity, loads = random_case(tmp_path, 5)
    chain = chain_of(planner.model)
    most = int(0.7 * chain.dense_parameters)
    plans = plan_least_error(planner, sensitivity, most, table, loads)
    together = fit(planner, chain, Limits(0.7), table, loads, sensitivity=sensitivity)
    assert together.plans == plans != fit(planner, chain, Limits(0.7), table, loads).plans and not together.slow
    for times in table._times.values():  # nothing of low rank is ever fast enough: what the chain gives, and it is told
        times["plain"], times["aligned"] = (
            [[1.0 for _ in row] for row in times[form]] for form in ("plain", "aligned")
        )
    table._found.clear()
    assert plan_least_error(planner, sensitivity, most, table, loads) is None
    hopeless = fit(planner, chain, Limits(0.7), table, loads, sensitivity=sensitivity)
    assert hopeless == fit(planner, chain, Limits(0.7), table, loads) and hopeless.slow


def test_a_lucky_probe_cuts_nothing(tmp_path: Path) -> None:
    planner, table, sensitivity, loads = random_case(tmp_path, 1)
    lucky = {name: (*errors[:-2], -1.0, 0.0) for name, errors in sensitivity.errors.items()}
    noisy = dataclasses.replace(sensitivity, errors=lucky)
    dense = {name: planner.dense(name) for name in planner.layers}
    size = sum(plan.parameters for plan in dense.values())
    assert plan_least_error(planner, noisy, size, table, loads) == dense
    fitted = dataclasses.replace(noisy, errors={name: (*e[:-2], 0.0, 0.0) for name, e in lucky.items()})
    found = [plan_least_error(planner, one, size // 2, table, loads) for one in (noisy, fitted)]
    assert found[0] == found[1]


def test_convolutions_take_no_time_and_their_smallest_form(tmp_path: Path) -> None:
    model = models.conv_net()
    moments = collect_moments(model, [torch.randn(4, 3, 9, 9)], select_layers(model))
    decompose_(model, moments)
    planner = Planner(model, slack=1)
    shapes = {name: layer.matrix_shape for name, layer in planner.layers.items()}
    ranks = {name: (max(1, min(shape) // 2), min(shape)) for name, shape in shapes.items()}
    sensitivity = SensitivityTable(shapes, ranks, {n: (0.1, 0.0) for n in ranks}, 1.0, footprint(model))
    table = by_hand(tmp_path, {"dense": 1e-6, "plain": 1e-6, "aligned": 1e-6}, model)
    dense = sum(m * n for m, n in shapes.values())
    plans = plan_least_error(planner, sensitivity, int(0.8 * dense), table, default_loads(planner.layers))
    assert plans is not None and sum(plan.parameters for plan in plans.values()) <= 0.8 * dense
    cut = {name: plan for name, plan in plans.items() if plan.slack is not None}
    assert cut and all(plan == planner.layer(name, plan.rank) for name, plan in cut.items())


def test_a_sensitivity_of_other_layers_is_refused(tmp_path: Path) -> None:
    planner, table, sensitivity, loads = random_case(tmp_path, 2)
    other = dataclasses.replace(sensitivity, shapes={**sensitivity.shapes, "2": (9, 9)})
    for given in (other, dataclasses.replace(sensitivity, shapes={"x": (2, 2)})):
        with pytest.raises(FlexrankError, match="is not alike in the model and in it"):
            plan_least_error(planner, given, 10, table, loads)
