"""Each rank method against its paper's definition, by oracles of least squares, sums of squares and counts by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexrank.data.batches import call_model, output_mask, output_tensor
from flexrank.nn.linalg import Factors
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_profile, nested_layers, use_profile
from research.baselines import RANK_METHODS, asvd, drone, fwsvd, plain, svd_llm, svd_llm_v2
from research.baselines.method import Measures, RankMethod, filled_ranks, grown_ranks, uniform_ranks, with_settings
from research.baselines.statistics import input_importance, mean_loss, mean_magnitudes, next_token_loss
from tiny import batch_for, build

SHAPES = [(5, 9), (9, 5), (6, 6)]
NONE = Measures(lambda _: math.nan, lambda _: math.nan)  # for ranks that no evaluation chooses
DATA_AWARE = {"drone": drone.factors, "svd-llm": svd_llm.factors, "svd-llm-v2": svd_llm_v2.factors}


def drawn(m: int, n: int, *, dead: int | None = None) -> tuple[Tensor, Tensor]:
    """A weight (m, n), and inputs (n, 40) of uneven energy, of which one may always be zero."""
    generator = torch.Generator().manual_seed(10 * m + n)
    weight = torch.randn(m, n, generator=generator, dtype=torch.float64)
    mixing = torch.randn(n, n, generator=generator, dtype=torch.float64) * torch.linspace(2, 0.2, n).double()
    inputs = mixing @ torch.randn(n, 40, generator=generator, dtype=torch.float64)
    if dead is not None:
        inputs[dead] = 0
    return weight, inputs


def prefix(factors: Factors, rank: int) -> Tensor:
    return factors.u[:rank].T @ factors.v[:rank]


def least_loss(weight: Tensor, inputs: Tensor, rank: int) -> float:
    """The least ‖W X − M X‖² of any M of this rank: by alternating least squares over the data, from many starts."""
    target, best = weight @ inputs, math.inf
    for start in range(6):
        left = torch.randn(len(weight), rank, generator=torch.Generator().manual_seed(start), dtype=torch.float64)
        for _ in range(400):
            latent = torch.linalg.lstsq(left, target).solution  # of rank r, and any such is V X where X has full rank
            left = torch.linalg.lstsq(latent.T, target.T).solution.T
        best = min(best, float((target - left @ latent).square().sum()))
    return best


@pytest.mark.parametrize("name", DATA_AWARE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3])
def test_a_data_aware_prefix_is_the_best_of_its_rank(name: str, shape: tuple[int, int], rank: int) -> None:
    """Oracle: alternating least squares over the data."""
    weight, inputs = drawn(*shape)
    factors = DATA_AWARE[name](weight, inputs @ inputs.T)
    loss = float(((weight - prefix(factors, rank)) @ inputs).square().sum())
    assert loss == pytest.approx(least_loss(weight, inputs, rank), rel=1e-4)


@pytest.mark.parametrize("name", DATA_AWARE)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_truncation_loss_is_the_sum_of_the_squared_singular_values_left_out(
    name: str, shape: tuple[int, int]
) -> None:
    """Wang et al., 2025, corollary 3.4; oracle: the loss over the data."""
    weight, inputs = drawn(*shape)
    factors = DATA_AWARE[name](weight, inputs @ inputs.T)
    total = float((weight @ inputs).square().sum())
    for rank in range(1, min(shape) + 1):
        loss = float(((weight - prefix(factors, rank)) @ inputs).square().sum())
        assert loss == pytest.approx(float(factors.energies[rank:].sum()), abs=1e-5 * total)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3])
def test_fwsvd_is_the_best_by_weighted_squares(shape: tuple[int, int], rank: int) -> None:
    """Oracle: least squares on W with columns weighted by the root of their importance, as if they were data."""
    weight, _ = drawn(*shape)
    importance = torch.linspace(0.1, 3, shape[1]).double() ** 2
    factors = fwsvd.factors(weight, importance)
    lost = ((weight - prefix(factors, rank)).square() * importance).sum()
    assert float(lost) == pytest.approx(least_loss(weight, importance.sqrt().diag(), rank), rel=1e-4)


def test_asvd_scales_by_the_root_of_magnitudes_and_without_it_is_svd() -> None:
    """Oracle: least squares weighted by |x|, the square of |x|^{1/2}; Eckart and Young for α = 0."""
    weight, inputs = drawn(6, 8)
    magnitudes = inputs.abs().mean(1)
    lost = ((weight - prefix(asvd.factors(weight, magnitudes), 2)).square() * magnitudes).sum()
    assert float(lost) == pytest.approx(least_loss(weight, magnitudes.sqrt().diag(), 2), rel=1e-4)
    plainly, without = plain.factors(weight, torch.empty(0)), asvd.factors(weight, magnitudes, alpha=0.0)
    for rank in range(1, 7):
        assert torch.allclose(prefix(without, rank), prefix(plainly, rank))
        squares = torch.linalg.svdvals(weight)[rank:].square().sum()
        assert torch.allclose((weight - prefix(plainly, rank)).square().sum(), squares)
    assert not torch.allclose(prefix(asvd.factors(weight, magnitudes), 2), prefix(plainly, 2), atol=1e-3)


def statistic_of(name: str, inputs: Tensor, outputs: int = 0) -> Any:
    if name == "lems":
        return inputs @ inputs.T, torch.arange(1.0, outputs + 1).double().diag()
    return {"svd": inputs, "fwsvd": inputs.square().mean(1), "asvd": inputs.abs().mean(1)}.get(name, inputs @ inputs.T)


@pytest.mark.parametrize("name", RANK_METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_components_give_the_weight_in_falling_order(name: str, shape: tuple[int, int]) -> None:
    weight, inputs = drawn(*shape)
    factors = RANK_METHODS[name].factors(weight, statistic_of(name, inputs, len(weight)))
    assert factors.u.shape == (min(shape), shape[0]) and factors.v.shape == (min(shape), shape[1])
    assert torch.allclose(prefix(factors, min(shape)), weight, atol=1e-8)
    assert bool((factors.energies.diff() <= 1e-12).all())


@pytest.mark.parametrize("name", RANK_METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_input_that_is_always_zero_spoils_nothing(name: str, shape: tuple[int, int]) -> None:
    """Outputs at full rank stay; of what the data never visited, DRONE alone keeps nothing."""
    weight, inputs = drawn(*shape, dead=2)
    factors = RANK_METHODS[name].factors(weight, statistic_of(name, inputs, len(weight)))
    whole = prefix(factors, min(shape))
    assert all(bool(torch.isfinite(part).all()) for part in factors)
    assert torch.allclose(whole @ inputs, weight @ inputs, atol=1e-6)
    assert torch.allclose(whole[:, 2], torch.zeros(shape[0]).double() if name == "drone" else weight[:, 2], atol=1e-4)
    if name in DATA_AWARE:
        loss = float(((weight - prefix(factors, 2)) @ inputs).square().sum())
        assert loss == pytest.approx(least_loss(weight, inputs, 2), rel=1e-3)


@pytest.mark.parametrize("name", RANK_METHODS)
@pytest.mark.parametrize("weight", [torch.zeros(4, 6).double(), torch.ones(4, 6).double()])
def test_data_of_zeros_and_weights_of_low_rank_give_finite_factors(name: str, weight: Tensor) -> None:
    inputs = torch.zeros(6, 3, dtype=torch.float64)
    for data in (inputs, inputs + 1):
        factors = RANK_METHODS[name].factors(weight, statistic_of(name, data, len(weight)))
        assert all(bool(torch.isfinite(part).all()) for part in factors)
        assert torch.allclose(prefix(factors, 1) @ data, weight @ data, atol=1e-6)


def test_ratios_of_svd_llm_v2_by_hand() -> None:
    """Losses e, e² and e⁴ have inverse logarithms 1, 1/2 and 1/4: shares 4/7, 2/7 and 1/7 of three times R."""
    losses = {name: math.exp(power) for name, power in (("a", 1), ("b", 2), ("c", 4))}
    shares = svd_llm_v2.removed_shares(losses, 0.35)
    assert shares == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.15})


class Blocks(nn.Module):
    """Two layers of one type, 8 × 12."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 8, bias=False)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


def test_ranks_of_svd_llm_v2_by_hand() -> None:
    """Of half of 96 numbers rank 2 fits (2 · 18 = 36; 3 · 17 = 51): losses are of components from the third on."""
    model = Blocks()
    RANK_METHODS["svd"].decompose_(model, [], select_layers(model), lambda *_: torch.zeros(()))
    names = list(nested_layers(model))
    powers = {names[0]: 4.0, names[1]: 2.0}  # of the losses: e² and e
    energies = {name: torch.tensor([0.0, 0.0, math.exp(power), 0, 0, 0, 0, 0]) for name, power in powers.items()}
    # Inverse logarithms 1/2 and 1, so that 1/3 and 2/3 of twice .5 go: 64 and 32 of 96 numbers stay.
    (ranks,) = RANK_METHODS["svd-llm-v2"].ranks(model, energies, [0.5], NONE)
    # 4 · 16 = 64; 1 · 19 = 19, 2 · 18 = 36. Of the 13 that are left the second layer's next rank takes 17, so the
    # first one has 5 · 15 = 75.
    assert dict(ranks) == {names[0]: 5, names[1]: 1}


def test_uniform_ranks_fill_the_budget_in_the_order_of_what_layers_lack() -> None:
    """Two layers of 96 numbers, r · (20 − r) at rank r: 19, 36, 51, 64, 75, 84, 91, and 96 at rank 8."""
    model = Blocks()
    RANK_METHODS["svd"].decompose_(model, [], select_layers(model), lambda *_: torch.zeros(()))
    # Of .5, 48 each, rank 2 leaves 24 of 96: one layer gets 15 more. Of .35, 33.6 each, 29 are left: 17, then none.
    for budget, expected in ((0.2, [1, 1]), (0.5, [3, 2]), (0.35, [2, 1]), (0.9, [6, 6]), (0.925, [7, 6]), (1, [8, 8])):
        (ranks,) = RANK_METHODS["svd"].ranks(model, {}, [budget], NONE)
        assert list(ranks.values()) == expected
    assert list(uniform_ranks(model, {}, [0.05], NONE)[0].values()) == [1, 1]  # 38 of 192, which is more than 9


def test_what_rounding_leaves_goes_to_who_lacks_most_and_what_fits() -> None:
    """Of .5 of 5 × 5, 25, 8 × 8, 64, and 9 × 12, 108, ranks 1, 2 and 3 have 9, 28 and 54: they lack 3.5, 4 and 0.

    Of 98 numbers 91 are taken. Of 64's the next rank has 11 more, which do not fit in 7; of 25's it has 7, which do.
    """
    shapes = {"a": (9, 12), "b": (5, 5), "c": (8, 8)}
    assert dict(filled_ranks(shapes, dict.fromkeys(shapes, 0.5), 0.5)) == {"a": 3, "b": 2, "c": 2}
    assert dict(filled_ranks(shapes, {"a": 0.5, "b": 1.0, "c": 0.5}, 0.5)) == {"a": 3, "b": 5, "c": 2}
    assert dict(filled_ranks(shapes, {"a": 0.5, "b": 1.0, "c": 0.5}, 0.9)) == {"a": 4, "b": 5, "c": 3}
    # Of three like layers with the shares .4, .5 and .6 of 64, 25.6, 32 and 38.4, ranks 1, 2 and 2 lack 10.6, 4, 10.4.
    like = {"a": (8, 8), "b": (8, 8), "c": (8, 8)}
    assert dict(filled_ranks(like, {"a": 0.4, "b": 0.5, "c": 0.6}, 0.5)) == {"a": 2, "b": 2, "c": 3}


def test_ranks_below_a_budget_grow_by_one_factor() -> None:
    """Ranks 1, 2 and 4 of 8 × 8 take 15, 28 and 48 of 64; of .6 of 192, 115, these are 19, 35.4 and 60.8: 1, 2 and 6.

    Then 12 are left, and rank 3 of the second takes 11. At .9 the last two are whole, which leaves 44.8: rank 3, of 39.
    """
    shapes, ranks = {"a": (8, 8), "b": (8, 8), "c": (8, 8)}, {"a": 1, "b": 2, "c": 4}
    assert dict(grown_ranks(shapes, ranks, 0.6)) == {"a": 1, "b": 3, "c": 6}
    assert dict(grown_ranks(shapes, ranks, 0.9)) == {"a": 3, "b": 8, "c": 8}
    assert dict(grown_ranks(shapes, ranks, 91 / 192)) == ranks


@pytest.mark.parametrize("name", [name for name, one in RANK_METHODS.items() if one.trials])
def test_four_settings_are_tried_and_the_first_is_the_default(name: str) -> None:
    method, shape = RANK_METHODS[name], (6, 8)
    weight, inputs = drawn(*shape)
    statistic = statistic_of(name, inputs, len(weight))
    if name == "lems":  # with gradients that are not each by itself
        statistic = statistic[0], inputs[:6] @ inputs[:6].T
    model = Blocks()
    energies = RANK_METHODS["svd"].decompose_(model, [], select_layers(model), lambda *_: torch.zeros(()))

    def found(one: RankMethod) -> Any:
        factors = one.factors(weight, statistic)
        ranks = one.ranks(model, energies, [0.4], NONE) if "ranks" in method.tuned else None
        return prefix(factors, 3).sum(), ranks

    results = [found(with_settings(method, settings)) for settings in method.trials]
    assert len(results) == 4 and results[0] == found(method)
    if name != "svd-llm-v2":  # whose settings are of ranks alone
        assert len({float(total) for total, _ in results}) == 4


def batches_of(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Rows of these lengths, padded on the right."""
    ids = torch.arange(len(lengths) * max(lengths)).reshape(len(lengths), -1) % 60 + 1
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def test_the_mean_loss_is_of_each_sample() -> None:
    """Oracle: one row at a time, without its padding."""
    model, losses = build("llama_tied"), []
    batches = [batches_of((7, 4)), batches_of((5,))]
    with torch.no_grad():
        for batch, lengths in zip(batches, ((7, 4), (5,)), strict=True):
            for row, length in zip(batch["input_ids"], lengths, strict=True):
                logits = model(row[None, :length]).logits[0, :-1]
                losses.append(nn.functional.cross_entropy(logits, row[1:length], reduction="sum"))
    assert mean_loss(next_token_loss, batches)(model) == pytest.approx(float(sum(losses)) / 3, rel=1e-5)


def test_magnitudes_are_of_real_tokens() -> None:
    """Oracle: each row alone, without its padding."""
    model, batch = build("llama_tied"), batches_of((7, 4))
    layers, seen = select_layers(model), dict[str, list[Tensor]]()
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[0][0]))
    with torch.no_grad():
        for row, length in zip(batch["input_ids"], (7, 4), strict=True):
            model(input_ids=row[None, :length])
    expected = {name: torch.cat(rows).abs().double().mean(0) for name, rows in seen.items()}
    found = mean_magnitudes(model, [batch, batch], layers, next_token_loss)
    for name in layers:
        assert torch.allclose(found[name], expected[name], rtol=1e-4)


def test_importance_is_of_each_samples_own_gradient() -> None:
    """Oracle: autograd of one row at a time, without its padding."""
    model, batch = build("llama_tied"), batches_of((7, 4))
    layers, sums = select_layers(model), dict[str, Any]()
    for row, length in zip(batch["input_ids"], (7, 4), strict=True):
        model.zero_grad()
        logits = model(input_ids=row[None, :length]).logits[0, :-1]
        nn.functional.cross_entropy(logits, row[1:length], reduction="sum").backward()
        for name, layer in layers.items():
            sums[name] = sums.get(name, 0) + layer.weight.grad.double().square().sum(0) / 2
    found = input_importance(model, [batch], layers, next_token_loss)
    for name in layers:
        assert torch.allclose(found[name], sums[name], rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama_tied", "convnet", "gpt2"])
@pytest.mark.parametrize("name", RANK_METHODS)
def test_a_whole_model_of_any_layers_stays_what_it_was(kind: str, name: str) -> None:
    model, batch = build(kind), batch_for(kind)
    with torch.no_grad():
        before = output_tensor(call_model(model, batch))
    loss: Callable[..., Tensor] = lambda output, _: output_tensor(output).square().sum()  # noqa: E731
    energies = RANK_METHODS[name].decompose_(model, [batch], select_layers(model), loss)
    with torch.no_grad(), use_profile(model, full_profile(model)):
        after = output_tensor(call_model(model, batch))
    mask = output_mask(batch)
    if mask is not None:  # DRONE keeps nothing of what padding alone has
        before, after = before[mask], after[mask]
    assert torch.allclose(after, before, atol=5e-3 * float(before.abs().max()))
    assert {name: len(one) for name, one in energies.items()} == full_profile(model)
