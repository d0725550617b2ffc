"""Parts of trained rivals against their papers: smaller models built by hand, sums by hand, brute force."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from flexrank.data.batches import call_model, output_tensor
from flexrank.distill.objectives import LogitObjective
from flexrank.hf.models import hidden_states
from flexrank.nn.switch import nested_layers
from research.baselines.trained import layerskip, lora
from research.baselines.trained.acip import Pressure, ScoredLinear, masks_within
from tiny import batch_for, build, elastic, outputs, relative

BATCH = batch_for("llama_tied")


def scored_layer(m: int = 6, n: int = 9, adapter: int = 2) -> tuple[nn.Linear, ScoredLinear]:
    torch.manual_seed(0)
    layer = nn.Linear(n, m)
    return layer, ScoredLinear(layer, adapter, torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_scored_layer_is_its_truncated_svd() -> None:
    layer, scored = scored_layer()
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    assert relative(scored(x), layer(x)) < 1e-5
    left, values, right = torch.linalg.svd(layer.weight.double())
    chosen = [0, 2, 5]
    scored.mask = torch.zeros(6)
    scored.mask[chosen] = 1
    wanted = x.double() @ (left[:, chosen] * values[chosen] @ right[chosen]).T + layer.bias.double()
    assert relative(scored(x), wanted) < 1e-5
    scored.mask = None
    scored.score.data[[1, 3, 4]] = 0.0
    assert relative(scored(x), wanted) < 1e-5
    scored.up.data.normal_(generator=torch.Generator().manual_seed(2))
    assert relative(scored(x) - wanted, (x @ scored.down.T) @ scored.up.T) < 1e-3


def test_gradients_pass_straight_through_a_mask() -> None:
    """Oracle: the derivative with respect to a mask of any real values; 0 where a value is gone."""
    layer, scored = scored_layer()
    scored.score.data[1] = 0.0
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    scored(x).square().sum().backward()
    left, values, right = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    mask = torch.ones(6)
    mask[1] = 0
    mask.requires_grad_(True)
    (x @ (left * (values * mask) @ right).T + layer.bias.detach()).square().sum().backward()
    assert scored.score.grad is not None and mask.grad is not None
    kept = mask > 0
    assert relative(scored.score.grad[kept], mask.grad[kept]) < 1e-4
    assert float(scored.score.grad[1]) == 0.0 and float(mask.grad[1]) != 0.0


@torch.no_grad()
def test_what_stays_longer_comes_first() -> None:
    _, first = scored_layer()
    _, second = scored_layer(4, 4)
    pressure = Pressure({"a": first, "b": second}, 0.2, 10)
    first.score.data = torch.tensor([0.5, -0.1, 0.3, 0.2, 0.1, 0.6])
    second.score.data = torch.tensor([0.4, 0.05, 0.9, 0.0])
    pressure.update(0)
    first.score.data[5] = second.score.data[2] = 0.0
    pressure.update(1)
    order = pressure.order()
    # Kept at the last step: a0, b0, a2, a3, a4, b1 by their scores; gone since, by their last ones: b2, a5; never kept:
    # a1, b3.
    assert order["a"].tolist() == [0, 8, 2, 3, 4, 7] and order["b"].tolist() == [1, 5, 6, 9]
    assert float(first.score.detach().min()) == 0.0


@torch.no_grad()
def test_the_penalty_is_off_where_the_model_is_soon_below_its_line() -> None:
    """By hand: the line is ten steps on at 1 - .8 · 21 / 70 = .76 after step 30, at 1 - .8 · 37 / 70 = .58 after 46."""
    _, layer = scored_layer(8, 8, adapter=1)
    pressure, growth = Pressure({"a": layer}, 0.2, 100), 1e8**0.01
    assert pressure.share({"a": layer.score}) == 1.0
    pressure.update(0)
    assert pressure.is_on and pressure.weight == pytest.approx(1e-5 * growth)
    assert float(pressure.penalty()) == pytest.approx(1e-5 * growth * 8.0)
    layer.score.data = torch.tensor([0.95] * 2 + [0.9] * 6)  # which are at .45 and -.1 ten steps on
    pressure.update(30)  # two values and the adapter's one are then 3 · (16 - 3) / 64 = .61
    assert not pressure.is_on and float(pressure.penalty()) == 0.0
    assert pressure.weight == pytest.approx(1e-5 * growth)
    layer.score.data = torch.tensor([0.9] * 2 + [0.8] * 6)
    pressure.update(46)
    assert pressure.is_on and pressure.weight == pytest.approx(1e-5 * growth**2)
    assert float(pressure.penalty()) == pytest.approx(1e-5 * growth**2 * 6.6)
    layer.score.data[2:] = 0.0
    assert pressure.share({"a": layer.score}) == pytest.approx(39 / 64)
    assert [pressure.wanted(step) for step in (9, 54, 89, 99)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.95, 1.0])
def test_masks_take_the_longest_prefix(share: float) -> None:
    layers = {"a": scored_layer()[1], "b": scored_layer(5, 4)[1]}
    places = {"a": torch.tensor([0, 3, 4, 8, 1, 7]), "b": torch.tensor([2, 5, 6, 9])}
    limit = share * (54 + 20)

    def size(length: int) -> int:
        counts = {name: int((place < length).sum()) for name, place in places.items()}
        ranks = {"a": min(6, counts["a"] + 2), "b": min(4, counts["b"] + 2)}
        return min(54, ranks["a"] * (15 - ranks["a"])) + min(20, ranks["b"] * (9 - ranks["b"]))

    longest = max((length for length in range(11) if size(length) <= limit), default=0)
    masks = masks_within(layers, places, limit)
    assert {name: mask.bool().tolist() for name, mask in masks.items()} == {
        name: (place < longest).tolist() for name, place in places.items()
    }


@torch.no_grad()
@pytest.mark.parametrize("rank", [1, 5])
def test_adapters_merge_into_a_layers_factors(rank: int) -> None:
    model = elastic("perceptron")
    layer: Any = nested_layers(model)["0"]
    x = batch_for("perceptron")
    layer.rank = rank
    wanted, modules = layer(x), nn.Sequential(lora.pair(layer))
    assert relative(modules(x), wanted) < 1e-5
    lora.adapt_(modules, ["0.v", "0.u"], 0)
    assert relative(modules(x), wanted) < 1e-5  # B is zero at first
    state = dict(modules.named_parameters())
    for name, parameter in state.items():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    merged = {}
    for factor in ("u", "v"):
        base, low, high = (
            state[f"0.{factor}.{part}.weight"] for part in ("base_layer", "lora_A.default", "lora_B.default")
        )
        merged[factor] = base + 2 * high @ low
    assert merged["u"].shape == (24, rank) and merged["v"].shape == (rank, 12)
    by_hand = x @ merged["v"].T @ merged["u"].T + layer.bias
    assert relative(modules(x), by_hand) < 1e-5


def test_layerskip_by_hand() -> None:
    assert layerskip.dropout_rates(5) == pytest.approx([0.1 * (2 ** (place / 4) - 1) for place in range(5)])
    assert layerskip.exit_weights(4) == pytest.approx([0.0, 0.2, 0.6, 3 + 0.6])


def headless(name: str) -> Any:
    """A model by its name, without its head where "/" follows it."""
    model: Any = build(name.strip("/"))
    return model.base_model if name.endswith("/") else model


@pytest.mark.parametrize("name", ["llama_tied", "bert", "gpt2", "vit", "llama_tied/", "gpt2/"])
def test_first_blocks_are_a_shallower_model_and_an_exit_returns_its_output(name: str) -> None:
    """Oracle: the same class with one block, from its config."""
    model, batch = headless(name), batch_for(name.strip("/"))
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    shallow = type(model)(config).eval()
    shallow.load_state_dict(model.state_dict(), strict=False)
    whole = outputs(model, batch)
    with layerskip.first_blocks(model, 1) as size:
        assert relative(outputs(size, batch), outputs(shallow, batch)) < 1e-6
        assert sum(one.numel() for one in size.parameters()) == sum(one.numel() for one in shallow.parameters())
    assert torch.equal(outputs(model, batch), whole)
    with hidden_states(model):
        deep = call_model(model, batch)
    assert relative(output_tensor(layerskip.exit_output(model, deep, 0)), outputs(shallow, batch)) < 1e-5


def test_each_sample_skips_blocks_by_itself() -> None:
    """Of two blocks the second is skipped with probability .1; a sample that skips it has the output of the first."""
    model = build("llama_tied")
    deep, own = outputs(model, BATCH), [block.forward for block in model.model.layers]
    with layerskip.first_blocks(model, 1) as size:
        shallow = outputs(size, BATCH)
    skipped = list[list[bool]]()
    with layerskip.skipping(list(model.model.layers), random.Random("0")):
        for _ in range(200):
            found = outputs(model, BATCH)
            skipped.append([relative(row, first) < 1e-6 for row, first in zip(found, shallow, strict=True)])
            for row, first, both, was_skipped in zip(found, shallow, deep, skipped[-1], strict=True):
                assert relative(row, first if was_skipped else both) < 1e-6
    assert 0.07 < sum(map(sum, skipped)) / (200 * len(deep)) < 0.13
    assert any(any(rows) and not all(rows) for rows in skipped)
    assert [block.forward for block in model.model.layers] == own


@torch.no_grad()
def test_exits_are_weighted() -> None:
    model = build("llama_tied")
    inner = LogitObjective()
    objective = layerskip.ExitObjective(inner, model, 2)
    output = model(**BATCH, output_hidden_states=True)
    target = inner.target(build("llama_tied", seed=1)(**BATCH), BATCH)
    with layerskip.first_blocks(model, 1) as size:
        early = float(inner.loss(size(**BATCH), target, BATCH))
    late = float(inner.loss(output, target, BATCH))
    # e of the last of two is 1 + .2 · 0; the first one's is zero, and .2 in its place
    assert float(objective.loss(output, target, BATCH)) == pytest.approx((0.2 * early + late) / 1.2, rel=1e-5)
