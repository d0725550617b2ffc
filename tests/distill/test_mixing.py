"""Steps that mix components: what they change, by how much, and what they leave as it is."""

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainings import SMALL, batches, error_at, weights_of

from flexrank.distill import TrainingStep, distill_, distillation_evaluator, mixing
from flexrank.distill.objectives import FeatureObjective
from flexrank.distill.optimizer import stochastically_rounded
from flexrank.nn.elastic import NestedLinear
from flexrank.nn.switch import nested_layers
from tiny import build, nest

RANKS = [2, 4, 5]


def layer_of(dtype: torch.dtype = torch.float64, ranks: list[int] = RANKS) -> NestedLinear:
    """A layer of 6 × 7 with five components."""
    draw = torch.Generator().manual_seed(0)
    layer = NestedLinear(*(torch.randn(5, size, generator=draw, dtype=torch.float64).to(dtype) for size in (6, 7)))
    layer.set_sizes_(ranks)
    return layer


def mixed(layer: NestedLinear, drawn: list[int], rate: float, scales: list[float]) -> list[torch.Tensor]:
    """Takes steps at the drawn ranks in which AdamW moves nothing; the matrix before each, of all components."""
    factors = [layer.u, layer.v]
    optimizer = torch.optim.AdamW([{"params": factors, "scale": 1e-20, "weight_decay": 0.0}], lr=rate * 1e-20)
    model, seen = nn.Sequential(layer), []
    mixing.mix_after_steps_(optimizer, model, lambda: scales)
    for number, rank in enumerate(drawn):
        layer.rank = rank
        seen.append(layer.u.detach().T @ layer.v.detach())
        loss_of(layer.u[:rank], layer.v[:rank], number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def loss_of(u: torch.Tensor, v: torch.Tensor, number: int) -> torch.Tensor:
    x, y = (torch.randn(9, size, generator=torch.Generator().manual_seed(number)).to(u) for size in (7, 6))
    return (x @ v.T @ u - y).square().sum() * (0.01 if number == 3 else 1.0)


def mixed_by_hand(layer: NestedLinear, drawn: list[int], rate: float, scales: list[float]) -> None:
    """The same steps by gradients of the matrices that mix, in loops over their entries."""
    u, v = layer.u.data, layer.v.data
    k, means = len(u), torch.zeros(2, len(u), dtype=u.dtype)
    for number, r in enumerate(drawn):
        x = torch.zeros(k - r, r, dtype=u.dtype, requires_grad=True)
        y = torch.zeros(r, k - r, dtype=u.dtype, requires_grad=True)
        loss_of(u[:r] + x.T @ u[r:], v[:r] - y @ v[r:], number).backward()
        gradient = torch.zeros(k, k, dtype=u.dtype)
        gradient[r:, :r], gradient[:r, r:] = x.grad, y.grad
        means = 0.999 * means + 0.001 * torch.stack([gradient.square().sum(1), gradient.square().sum(0)])
        rows, columns = means / (1 - 0.999 ** (number + 1))
        for a in range(k):
            for b in range(k):
                gradient[a, b] /= (rows[a] * columns[b] / rows.sum()).sqrt() if gradient[a, b] else 1.0
        gradient /= max(1.0, math.sqrt(float(gradient.square().sum()) / (2 * r * (k - r) or 1)))
        entry = torch.cat([u.flatten(), v.flatten()]).square().mean().sqrt()
        for a in range(r, k):
            largest = max(size for size, rank in enumerate(layer.sizes.ranks) if rank <= a)
            step = -min(0.15, 16.0 * rate / entry) * scales[largest] / math.sqrt(k)
            gradient[a] *= step
            gradient[:, a] *= step
        mixer = torch.eye(k, dtype=u.dtype)
        below, above = mixer.clone(), mixer.clone()
        below[r:, :r], above[:r, r:] = gradient[r:, :r], gradient[:r, r:]
        whole = below @ above
        u.copy_(whole.T @ u)
        v.copy_(torch.linalg.inv(whole) @ v)


@pytest.mark.parametrize("rate", [5e-3, 0.1])
def test_steps_by_hand(rate: float) -> None:
    """Also where two sizes lack a component, gradients are longer or shorter than usual, and steps as long as may."""
    layer, scales, drawn = layer_of(), [1.0, 0.5, 0.25], [2, 4, 5, 4, 2, 2]
    twin = copy.deepcopy(layer)
    mixed(layer, drawn, rate, scales)
    mixed_by_hand(twin, drawn, rate, scales)
    assert (layer.u - layer_of().u).abs().max() > 0.05
    torch.testing.assert_close(layer.u, twin.u, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.v, twin.v, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_the_largest_size_stays_as_it_is(dtype: torch.dtype, bound: float) -> None:
    """Also after many steps, and long ones."""
    layer = layer_of(dtype)
    small, rest = layer.u.detach()[:2].clone(), layer.u.detach()[2:].clone()
    before, *_ = mixed(layer, [2, 4] * 50, 0.05, [1.0, 1.0, 1.0])
    assert (layer.u[:2] - small).norm() > small.norm() / 2 and (layer.u[2:] - rest).norm() > rest.norm() / 2
    torch.testing.assert_close(layer.u.T @ layer.v, before, rtol=0, atol=bound * float(before.norm()))


def test_a_size_between_stays_where_its_scale_is_zero() -> None:
    """Of ranks 2 and 4, only what 4 has is mixed into 2; and the loss of 2 falls."""
    layer = layer_of()
    before = copy.deepcopy(layer)
    mixed(layer, [2], 1e-3, [1.0, 0.0, 0.0])
    middle = before.u[:4].T @ before.v[:4]
    torch.testing.assert_close(layer.u[:4].T @ layer.v[:4], middle, rtol=0, atol=1e-12)
    assert torch.equal(layer.u[4], before.u[4]) and not torch.equal(layer.u[3], before.u[3])
    assert loss_of(layer.u[:2], layer.v[:2], 0) < loss_of(before.u[:2], before.v[:2], 0) - 5


def test_equal_ranks_zeros_and_bfloat16() -> None:
    same = layer_of(ranks=[5, 5])
    before = copy.deepcopy(same)
    mixed(same, [5, 5], 0.1, [1.0, 1.0])
    assert torch.equal(same.u, before.u) and torch.equal(same.v, before.v)
    zero = layer_of(torch.float32)
    zero.u.data.zero_()
    zero.v.data.zero_()
    for rate in (0.1, 0.0):
        mixed(zero, [2, 4], rate, [1.0, 1.0, 1.0])
    assert not zero.u.any() and not zero.v.any()
    half, wide = layer_of(torch.bfloat16), layer_of(torch.bfloat16).to(torch.float32)
    mixed(half, [2], 0.02, [1.0, 1.0, 1.0])
    mixed(wide, [2], 0.02, [1.0, 1.0, 1.0])
    assert half.u.dtype == torch.bfloat16 and (wide.u - layer_of(torch.bfloat16).u.float()).abs().max() > 0.02
    torch.testing.assert_close(half.u.float(), wide.u, rtol=2**-6, atol=0.02)


def test_rounding_to_bfloat16_keeps_the_mean() -> None:
    """Between 1 and 1 + 2⁻⁷, an eighth of the way; a standard deviation of the share is .0033."""
    torch.manual_seed(0)
    rounded = stochastically_rounded(torch.full((10_000,), 1 + 2**-10)).double()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert float((rounded > 1).double().mean()) == pytest.approx(1 / 8, abs=0.015)


def test_small_sizes_learn_more_and_the_largest_no_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than without these steps, which the printed method never takes."""
    teacher, data = build("perceptron"), batches("perceptron")
    evaluate = distillation_evaluator(teacher, data, FeatureObjective())
    profiles = [SMALL, {"0": 5, "2": 6, "4": 3}, {"0": 8, "2": 9, "4": 5}]
    errors, printed = {}, []
    for rate in (16.0, 0.0):
        monkeypatch.setattr(mixing, "MIXING_RATE", rate)
        model, other = nest(build("perceptron")), nest(build("perceptron"))
        settings = {"steps": 240, "learning_rate": 2e-3, "objective": FeatureObjective()}
        distill_(model, teacher, data, profiles, **settings)
        errors[rate] = [error_at(model, profile, evaluate) for profile in profiles]
        distill_(other, teacher, data, profiles, method="paper", **(settings | {"steps": 5}))
        printed.append(nested_layers(other)["2"].u)
    small, _, large = zip(*errors.values(), strict=True)
    assert small[0] < 0.9 * small[1] and large[0] < 1.05 * large[1]
    assert torch.equal(*printed)


def test_gradients_are_those_of_the_size_that_the_model_is_set_to_for_them() -> None:
    layer, other = layer_of(), layer_of()

    @contextlib.contextmanager
    def at_two():
        layer.rank, before = 2, layer.rank
        yield
        layer.rank = before

    optimizer = torch.optim.AdamW([{"params": [layer.u, layer.v], "scale": 1e-20}], lr=1e-22, weight_decay=0.0)
    mixing.mix_after_steps_(optimizer, nn.Sequential(layer), lambda: [1.0] * 3, at_two)
    loss_of(layer.u[:2], layer.v[:2], 0).backward()
    optimizer.step()
    mixed(other, [2], 1e-2, [1.0] * 3)
    assert layer.rank == 5 and torch.equal(layer.u, other.u)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("largest", [{"0": 12, "2": 16, "4": 6}, {"0": 12, "2": 9, "4": 5}], ids=["full", "part full"])
def test_a_resumed_training_has_the_same_bits(largest: dict[str, int], kind: Any, tmp_path: Path) -> None:
    """Where the model or a layer of it is full: when it resumes, it is set to a rank above those of its factors."""
    profiles = [SMALL, {"0": 5, "2": 6, "4": 3}, largest]
    settings: dict[str, Any] = {"steps": 12, "learning_rate": 1e-2, "optimizer": kind}

    def train(path: Path | None, stop: int) -> nn.Module:
        def stopped(step: TrainingStep) -> None:
            if step.number == stop:
                raise KeyboardInterrupt

        model, place = nest(build("perceptron")), {"checkpoint": path, "checkpoint_every": 3}
        with contextlib.suppress(KeyboardInterrupt):
            distill_(model, build("perceptron"), batches("perceptron"), profiles, on_step=stopped, **place, **settings)
        return model

    whole, broken = train(None, -1), train(tmp_path / "state", 7)
    resumed = train(tmp_path / "state", -1)
    assert torch.equal(weights_of(whole), weights_of(resumed))
    assert not torch.equal(weights_of(whole), weights_of(broken))


def test_where_a_factor_is_frozen_nothing_mixes() -> None:
    model, teacher = nest(build("perceptron")), build("perceptron")
    for layer in nested_layers(model).values():
        layer.v.requires_grad_(False)
    before = [layer.v.clone() for layer in nested_layers(model).values()]
    distill_(model, teacher, batches("perceptron"), [SMALL, {"0": 5, "2": 6, "4": 3}], steps=4, learning_rate=1e-2)
    assert all(torch.equal(layer.v, old) for layer, old in zip(nested_layers(model).values(), before, strict=True))
