"""`balanced` consolidation: what each step does, what large sizes keep, and sizes between trained ones."""

import copy
import math
import statistics
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trainings import SETTINGS, SMALL, batches, error_at

from flexrank.allocate import allocate_ranks
from flexrank.calibrate import collect_moments
from flexrank.decompose import decompose_
from flexrank.distill import distill_, distillation_evaluator, mixing
from flexrank.distill.objectives import FeatureObjective
from flexrank.distill.schedule import Schedule
from flexrank.distill.trained import set_sizes_, trimmed_factors
from flexrank.errors import FlexrankError
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_profile, nested_layers, use_profile
from flexrank.probe import probe_sensitivity
from tiny import build, nest


def test_balanced_steps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss is divided by the root of its profile's running mean; own vectors learn up to four times as fast.

    They move by the root of their size's mean over the greatest.

    Of what sizes share, factors alone are trained, and they alone decay, up to the last component in use.
    """
    teacher, model = build("perceptron"), nest(build("perceptron"))
    profiles, order, rate = [SMALL, {"0": 8, "2": 4, "4": 5}], [0, 1, 1, 0], 1e-2
    monkeypatch.setattr(mixing, "MIXING_RATE", 0.0)  # `test_mixing` has these steps
    monkeypatch.setattr(Schedule, "draw", lambda schedule, step: order[step])
    twin, data, settings = copy.deepcopy(model), batches("perceptron")[:1], {"steps": 4, "learning_rate": rate}
    objective = FeatureObjective()
    history = distill_(model, teacher, data, profiles, objective=objective, max_norm=1e9, weight_decay=0.3, **settings)
    assert {name: layer.sizes.ranks for name, layer in nested_layers(model).items()} == {
        "0": [3, 8], "2": [4, 4], "4": [2, 5]
    }  # fmt: skip
    for name, layer in nested_layers(twin).items():
        layer.set_sizes_([profile[name] for profile in profiles])
    own = [p for name, p in twin.named_parameters() if ".sizes." in name]
    shared = [p for name, p in twin.named_parameters() if name.endswith((".u", ".v"))]
    optimizer = torch.optim.AdamW([{"params": shared, "weight_decay": 0.3}, {"params": own, "weight_decay": 0.0}])
    before = copy.deepcopy(twin)
    means: dict[int, float] = {}
    for step, choice in enumerate(order):
        now = rate * (1 + math.cos(math.pi * step / 4)) / 2
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = now, 4 * now
        with use_profile(twin, profiles[choice]):
            target = teacher(data[0]).detach()
            loss = (twin(data[0]) - target).square().sum() / target.square().sum()
            value = loss.item()
            assert history.losses[step] == pytest.approx(value, rel=1e-4)
            (loss / means.get(choice, value) ** 0.5).backward()
        old = [one.detach().clone() for one in own]
        optimizer.step()
        optimizer.zero_grad()
        shares = [(means[size] / max(means.values())) ** 0.5 if size in means else 1.0 for size in (0, 1)]
        for one, was in zip(own, old, strict=True):
            for size, share in enumerate(shares):
                one.data[size] = was[size] + share * (one.data[size] - was[size])
        means[choice] = 0.9 * means.get(choice, value) + 0.1 * value
    for name, used in profiles[1].items():
        for factor in ("u", "v"):
            untouched = before.get_submodule(name).get_parameter(factor)[used:]
            twin.get_submodule(name).get_parameter(factor).data[used:] = untouched
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("method", "profiles"), [("paper", [SMALL, {"0": 8, "2": 6, "4": 5}]), ("balanced", [SMALL])])
def test_steps_of_the_printed_method_and_of_one_size_by_hand(
    method: Any, profiles: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: torch's AdamW on all parameters; for one size, losses over the root of their running mean."""
    teacher, model = build("perceptron"), nest(build("perceptron"))
    monkeypatch.setattr(Schedule, "draw", lambda schedule, step: step % len(profiles))
    twin, data, objective = copy.deepcopy(model), batches("perceptron")[:1], FeatureObjective()
    settings = {"steps": 4, "learning_rate": 1e-2, "max_norm": 1.5}
    history = distill_(model, teacher, data, profiles, method=method, objective=objective, **settings)
    mean = 1.0
    if method == "balanced":
        mean = history.losses[0]
        for name, layer in nested_layers(twin).items():
            layer.set_sizes_([profile[name] for profile in profiles])
    own = [p for name, p in twin.named_parameters() if ".sizes." in name]
    rest = [p for name, p in twin.named_parameters() if ".sizes." not in name]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": own}], weight_decay=0.0)
    for step in range(4):
        now = 1e-2 * (1 + math.cos(math.pi * step / 4)) / 2
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = now, 4 * now
        with use_profile(twin, profiles[step % len(profiles)]):
            target = teacher(data[0]).detach()
            loss = (twin(data[0]) - target).square().sum() / target.square().sum()
            (loss / mean**0.5).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.5)  # clips two of the four
        optimizer.step()
        optimizer.zero_grad()
        mean = 0.9 * mean + 0.1 * loss.item() if method == "balanced" else 1.0
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)


def test_a_layer_that_only_larger_sizes_leave_full_keeps_its_matrix() -> None:
    """Layer 0 is full in one of two sizes, layer 2 in both, layer 4 in none; each size has gains of its own in all."""
    teacher, model = build("perceptron"), nest(build("perceptron"))
    full = full_profile(model)
    profiles = [{"0": 3, "2": full["2"], "4": 2}, {"0": full["0"], "2": full["2"], "4": 4}]
    before = {name: layer.matrix.clone() for name, layer in nested_layers(model).items()}
    tail = model.get_submodule("0").u[3:].clone()
    distill_(model, teacher, batches("perceptron"), profiles, **SETTINGS)
    layers = nested_layers(model)
    assert {name: layer.dense is not None for name, layer in layers.items()} == {"0": True, "2": False, "4": False}
    torch.testing.assert_close(layers["0"].dense, before["0"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layers["0"].u[3:], tail, rtol=0, atol=0)
    with trimmed_factors(model, profiles):
        assert [len(layer.u) for layer in layers.values()] == [3, full["2"], 4]
    with use_profile(model, profiles[1]):
        assert not torch.allclose(layers["0"].matrix, before["0"], atol=1e-3)  # its gains are trained
        large = layers["2"].matrix
        assert not torch.allclose(large, before["2"], atol=1e-3)
    with use_profile(model, profiles[0]):
        assert not torch.allclose(layers["2"].matrix, large, atol=1e-3)
    distill_(model, teacher, batches("perceptron"), profiles[1:], **SETTINGS)  # this size alone: all that it has
    assert not torch.allclose(layers["0"].dense, before["0"], atol=1e-3)


def test_components_that_were_moved_in_training_come_back() -> None:
    """`Module.to` puts them in other memory, as accelerate does where processes are several, with `cpu:0` for `cpu`."""
    model = nest(build("perceptron"))
    layers, whole = nested_layers(model), {name: layer.u for name, layer in nested_layers(model).items()}
    tails = {name: u[SMALL[name] :].clone() for name, u in whole.items()}
    with trimmed_factors(model, [SMALL]):
        model.to("cpu:0")
        with torch.no_grad():
            for layer in layers.values():
                layer.u.fill_(7.0)
    for name, layer in layers.items():
        assert layer.u is whole[name] and bool((layer.u[: SMALL[name]] == 7.0).all())
        assert torch.equal(layer.u[SMALL[name] :], tails[name]) and len(tails[name]) > 0


def test_sizes_between_trained_ones_lie_on_the_curve() -> None:
    """Of an allocated chain: on average nearer to the teacher than the next smaller trained size, and never far off."""
    teacher = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    model, data = copy.deepcopy(teacher), [torch.randn(32, 24) for _ in range(8)]
    decompose_(model, collect_moments(model, data, select_layers(model)))
    evaluate = distillation_evaluator(teacher, data, FeatureObjective())
    chain = allocate_ranks(probe_sensitivity(model, evaluate, 8), (0.3, 0.5, 0.7, 0.9))
    distill_(model, teacher, data, chain, steps=400, learning_rate=5e-3, warmup_steps=10)
    ratios, smaller = [], math.nan
    for entry in chain.entries[: chain.entries.index(chain.requested[-1])]:
        error = error_at(model, entry.profile, evaluate)
        if entry.requested:
            smaller = error
        elif not math.isnan(smaller):
            ratios.append(error / smaller)
    assert statistics.fmean(ratios) < 0.95 and max(ratios) < 1.4
    assert any(layer.dense is not None for layer in nested_layers(model).values())


def test_a_size_between_trained_ones_by_hand() -> None:
    """Its vectors are as far between those of the trained ones as its parameters are: here 112 of 464.

    A rank r of an m × n matrix has r (m + n - r): 68, 111 and 21 are those of the small size, 260, 319 and 85 of the
    large one, so that 200 and 664 are all of theirs, and 312 those of the size between.
    """
    teacher, model, x = build("perceptron"), nest(build("perceptron")), batches("perceptron")[0]
    small, large = {"0": 2, "2": 3, "4": 1}, {"0": 10, "2": 11, "4": 5}
    distill_(model, teacher, batches("perceptron"), [small, large], steps=6, learning_rate=0.1)
    ranks = (4, 4, 2)
    with torch.no_grad(), use_profile(model, dict(zip(small, ranks, strict=True))):
        found, layers = model(x), nested_layers(model).values()
        for layer, rank in zip(layers, ranks, strict=True):
            share = 112 / 464
            inputs, outputs = (low + share * (high - low) for low, high in (layer.sizes.inputs, layer.sizes.outputs))
            x = outputs * (x * inputs @ layer.v[:rank].T @ layer.u[:rank])
            if layer.bias is not None:
                low, high = layer.sizes.bias
                x = x + layer.bias + low + share * (high - low)
            x = x if layer is model[4] else x.relu()
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-5)


def test_consolidation_again_begins_where_it_ended() -> None:
    """At sizes that were trained, in another order, and at one between."""
    teacher, model, x = build("perceptron"), nest(build("perceptron")), batches("perceptron")[0]
    profiles = [{"0": 2, "2": 3, "4": 2}, {"0": 3, "2": 3, "4": 2}, {"0": 5, "2": 11, "4": 5}]
    distill_(model, teacher, batches("perceptron"), profiles, steps=12, learning_rate=0.1)
    after = [{"0": 3, "2": 6, "4": 4}, *profiles[1:], profiles[0]]
    before = [error_at(model, profile, lambda one: one(x)) for profile in after]
    set_sizes_(model, after)
    for profile, wanted in zip(after, before, strict=True):
        torch.testing.assert_close(error_at(model, profile, lambda one: one(x)), wanted, rtol=1e-5, atol=1e-6)
    assert nested_layers(model)["0"].sizes.ranks == [2, 3, 3, 5]


def test_the_full_model_is_never_drawn_and_stays_the_base() -> None:
    """Also where one size leaves it a layer, and where a part of the model was read, of a largest rank below full."""
    teacher, model = build("perceptron"), nest(build("perceptron"))
    full = full_profile(model)
    profiles = [{"0": rank, "2": rank, "4": full["4"]} for rank in (1, 2, 4)] + [full]
    drawn = Counter(distill_(model, teacher, batches("perceptron"), profiles, **SETTINGS).profiles)
    assert drawn[3] == 0 and drawn[2] == pytest.approx(30, abs=6)
    given = SETTINGS | {"steps": 20, "weights": [1, 1, 1, 9]}
    assert 3 not in distill_(model, teacher, batches("perceptron"), profiles, **given).profiles
    batch = batches("perceptron")[0]
    with torch.no_grad(), use_profile(model, full):
        torch.testing.assert_close(model(batch), teacher(batch), rtol=1e-5, atol=1e-6)
    for layer in nested_layers(model).values():
        layer.dense, layer.rank = None, 1
        layer.u, layer.v = (nn.Parameter(factor.detach()[:4]) for factor in (layer.u, layer.v))
    profiles = [{"0": rank, "2": rank, "4": rank} for rank in (1, 2, 4)]
    drawn = Counter(distill_(model, teacher, batches("perceptron"), profiles, **SETTINGS).profiles)
    assert drawn[2] == pytest.approx(30, abs=6) and not any(layer.dense for layer in nested_layers(model).values())


def test_a_loss_of_zero_or_below_is_not_scaled() -> None:
    class Negative(FeatureObjective):
        def loss(self, output, target, batch):
            return super().loss(output, target, batch) - 2

    teacher, model = build("perceptron"), nest(build("perceptron"))
    history = distill_(model, teacher, batches("perceptron"), [SMALL], objective=Negative(), **SETTINGS)
    assert history.losses[-1] < history.losses[0] < 0


@pytest.mark.parametrize(("method", "share"), [("balanced", 0.4), ("paper", 0.25)])
def test_how_often_the_largest_size_is_trained(method: str, share: float) -> None:
    """The largest below the full model; of `balanced` the full model never, for it is the teacher."""
    teacher, model = build("perceptron"), nest(build("perceptron"))
    profiles = [{"0": rank, "2": rank, "4": rank} for rank in (1, 2, 3, 4)]
    settings = {"steps": 120, "method": method}
    drawn = Counter(distill_(model, teacher, batches("perceptron"), profiles, **settings).profiles)
    assert abs(drawn[3] - 120 * share) <= 8
    assert all(abs(drawn[size] - 120 * (1 - share) / 3) <= 8 for size in range(3))
    assert all((layer.sizes is None) == (method == "paper") for layer in nested_layers(model).values())
    with pytest.raises(FlexrankError, match="method 'fair' is unknown; it is balanced or paper"):
        distill_(model, teacher, batches("perceptron"), profiles, method="fair")


def test_the_full_model_alone_has_nothing_to_learn_and_ranks_may_be_numpys() -> None:
    full = dict(full_profile(nest(build("perceptron"))))
    with pytest.raises(FlexrankError, match="the only size is the full model, which is the base model; give a smaller"):
        distill_(nest(build("perceptron")), build("perceptron"), batches("perceptron"), [full], steps=1)
    printed = distill_(
        nest(build("perceptron")), build("perceptron"), batches("perceptron"), [full], steps=1, method="paper"
    )
    assert printed.steps == 1
    found = [
        distill_(nest(build("perceptron")), build("perceptron"), batches("perceptron"), [profile], steps=2).losses
        for profile in (SMALL, {name: np.int64(rank) for name, rank in SMALL.items()})
    ]
    assert found[0] == found[1]


def test_budgets_of_one_profile_are_one_size() -> None:
    """Two sets of vectors, of which only one would learn, would lead sizes between budgets astray."""
    teacher, model = build("perceptron"), nest(build("perceptron"))
    middle, large = {"0": 5, "2": 4, "4": 3}, {"0": 8, "2": 4, "4": 5}
    data = batches("perceptron")
    profiles = [SMALL, middle, dict(middle), large]
    distill_(model, teacher, data, profiles, objective=FeatureObjective(), steps=12, learning_rate=1e-2)
    layers = nested_layers(model)
    assert {name: layer.sizes.ranks for name, layer in layers.items()} == {
        "0": [3, 5, 8],
        "2": [4, 4, 4],
        "4": [2, 3, 5],
    }
    assert all((row != 1).any() for layer in layers.values() for row in layer.sizes.outputs)
    assert set_sizes_(model, [large, middle, SMALL, middle]) == [2, 1, 0, 1]
