"""Parts of trained rivals against their papers: smaller models built by hand, sums by hand, brute force."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flexrank.data.batches import call_model, output_tensor
from flexrank.distill.objectives import LogitObjective
from flexrank.errors import FlexrankError
from flexrank.nn.blocks import block_stack, replaced_forwards
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from research.baselines.statistics import next_token_loss
from research.baselines.trained import layerskip, lora
from research.baselines.trained.acip import Pressure, ScoredLinear, masks_within
from research.baselines.trained.channels import Units, Widths, find_units, importances, ordered
from tiny import batch_for, build, elastic, outputs, relative

BATCH = batch_for("llama_tied")


def widths_of(model: nn.Module, seed: int = 0) -> Widths:
    units = find_units(model, [name for name, _ in block_stack(model, select_layers(model))])
    generator = torch.Generator().manual_seed(seed)
    importance = {name: torch.rand(one.count, generator=generator) for name, one in units.items()}
    return Widths(units, ordered(units, importance))


def sliced_llama(model: Any, widths: Widths, groups: int, width: int) -> Any:
    """A smaller Llama with copies of the rows and columns that are kept, heads in their old order."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = copy.deepcopy(model.config).to_dict()
    config |= {"num_key_value_heads": groups, "num_attention_heads": 2 * groups, "head_dim": 8}
    small = LlamaForCausalLM(LlamaConfig(**(config | {"intermediate_size": width}))).eval()
    small.load_state_dict({k: v for k, v in model.state_dict().items() if "_proj" not in k}, strict=False)
    for block, theirs in enumerate(model.model.layers):
        own, prefix = small.model.layers[block], f"model.layers.{block}."
        heads = widths.orders[prefix + "self_attn.o_proj"][: 2 * groups : 2].sort().values // 2
        queries = torch.cat([torch.arange(16 * g, 16 * g + 16) for g in heads])
        keys = torch.cat([torch.arange(8 * g, 8 * g + 8) for g in heads])
        inner = widths.orders[prefix + "mlp.down_proj"][:width].sort().values
        for attention, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            getattr(own.self_attn, attention).weight.data = getattr(theirs.self_attn, attention).weight.data[rows]
        own.self_attn.o_proj.weight.data = theirs.self_attn.o_proj.weight.data[:, queries]
        own.mlp.gate_proj.weight.data = theirs.mlp.gate_proj.weight.data[inner]
        own.mlp.up_proj.weight.data = theirs.mlp.up_proj.weight.data[inner]
        own.mlp.down_proj.weight.data = theirs.mlp.down_proj.weight.data[:, inner]
    return small


def test_units_left_out_are_those_of_a_smaller_model() -> None:
    """Oracle: a Llama of fewer heads and channels, built from its config; grouped queries."""
    model = build("llama_tied")
    widths = widths_of(model)
    kept = {name: 2 if name.endswith("o_proj") else 20 for name in widths.units}
    small = sliced_llama(model, widths, 1, 20)
    with widths.use(model, kept):
        assert relative(outputs(model, BATCH), outputs(small, BATCH)) < 1e-5
        removed = sum(one.numel() for one in model.parameters()) - sum(one.numel() for one in small.parameters())
    layers = select_layers(model, exclude=["lm_head"]).values()
    assert widths.parameters(kept) == sum(layer.weight.numel() for layer in layers) - removed
    assert not model.model.layers[0].mlp.down_proj._forward_pre_hooks


def test_keys_and_values_go_with_the_last_head_that_reads_them() -> None:
    """Four heads of queries on two of keys and values, each of 8 × 32 numbers; oracle: columns of zeros."""
    model = build("llama_tied")
    units = find_units(model, ["model.layers.1"])
    (attention, reader), _ = ((one, name) for name, one in units.items())
    assert [attention.parameters(kept) for kept in range(5)] == [0, 4 * 256, 6 * 256, 10 * 256, 12 * 256]
    widths = Widths(units, ordered(units, {name: torch.arange(one.count) * 1.0 for name, one in units.items()}))
    assert widths.orders[reader].tolist() == [3, 2, 1, 0]
    zeroed = copy.deepcopy(model)
    zeroed.model.layers[1].self_attn.o_proj.weight.data[:, :8] = 0
    with widths.use(model, {name: 3 if name == reader else one.count for name, one in units.items()}):
        assert relative(outputs(model, BATCH), outputs(zeroed, BATCH)) < 1e-6


def test_heads_of_a_group_lie_side_by_side() -> None:
    """By hand: groups have 5, 6 and 4.5; inside each the more important head is first."""
    units = {"a": Units(("q",), 6, 1, ("k",), 2, 1), "b": Units(("up",), 3, 1)}
    orders = ordered(units, {"a": torch.tensor([4.0, 1.0, 2.9, 3.1, 0.5, 4.0]), "b": torch.tensor([1.0, 3.0, 2.0])})
    assert orders["a"].tolist() == [3, 2, 0, 1, 5, 4] and orders["b"].tolist() == [1, 2, 0]


def test_units_of_an_encoder() -> None:
    """Oracle: zeroed rows of the weights that write a head and a channel, biases too."""
    model, batch = build("bert"), batch_for("bert")
    names = [name for name, _ in block_stack(model, select_layers(model, exclude=["pooler"]))]
    units = find_units(model, names)
    widths = Widths(units, {name: torch.arange(one.count) for name, one in units.items()})
    kept = {name: 3 if one.count == 4 else 47 for name, one in units.items()}
    zeroed = copy.deepcopy(model)
    for name in names:
        block: Any = zeroed.get_submodule(name)
        for part, rows in ((block.attention.self.value, slice(24, 32)), (block.intermediate.dense, slice(47, 48))):
            part.weight.data[rows], part.bias.data[rows] = 0, 0
        block.output.dense.weight.data[:, 47] = 0  # gelu(0) is 0 too
    with widths.use(model, kept):
        assert relative(outputs(model, batch), outputs(zeroed, batch)) < 1e-6
    assert {one.cost for one in units.values()} == {4 * 32 * 8, 2 * 32}


def test_importance_is_that_of_weights_times_gradients() -> None:
    model = build("llama_tied")
    units = find_units(model, ["model.layers.0", "model.layers.1"])
    found = importances(model, units, [BATCH, BATCH], next_token_loss)
    next_token_loss(call_model(model, BATCH), BATCH).backward()
    attention, feedforward = model.model.layers[1].self_attn, model.model.layers[1].mlp
    salience = {name: (one.weight * one.weight.grad).abs().detach() for name, one in attention.named_children()}
    third_head = salience["q_proj"][16:24].sum() + salience["o_proj"][:, 16:24].sum()
    third_head += sum(salience[name][8:16].sum() for name in ("k_proj", "v_proj")) / 2  # which two heads share
    assert float(found["model.layers.1.self_attn.o_proj"][2]) == pytest.approx(2 * float(third_head), rel=1e-4)
    gate, up, down = (
        (one.weight * one.weight.grad).abs().detach() for _, one in list(feedforward.named_children())[:3]
    )
    third = gate[3].sum() + up[3].sum() + down[:, 3].sum()
    assert float(found["model.layers.1.mlp.down_proj"][3]) == pytest.approx(2 * float(third), rel=1e-4)


def test_widths_fill_a_limit_and_are_nested() -> None:
    widths = widths_of(build("llama_tied"))
    whole = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48)
    previous = None
    for share in (1.0, 0.9, 0.7, 0.5, 0.3):
        kept = widths.at(share * whole)
        assert kept is not None and widths.parameters(kept) <= share * whole
        one_more = {name: count + (widths.units[name].count == 48) for name, count in kept.items()}
        assert widths.parameters(one_more) > share * whole
        for name, count in kept.items():
            mask = widths.mask(name, count)
            assert int(mask.sum()) == count and bool(
                (previous is None or mask <= previous[name]).all() if previous else True
            )
        previous = {name: widths.mask(name, count) for name, count in kept.items()}
    assert widths.at(whole) == {name: one.count for name, one in widths.units.items()}
    assert widths.at(0.02 * whole) is None


def test_blocks_of_another_kind_are_refused() -> None:
    with pytest.raises(FlexrankError, match="heads and channels are not known"):
        find_units(build("gpt2"), ["transformer.h.0"])


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


@pytest.mark.parametrize("name", ["llama_tied", "bert"])
def test_first_blocks_are_a_shallower_model_and_an_exit_returns_its_output(name: str) -> None:
    """Oracle: the same class with one block, from its config."""
    model, batch = build(name), batch_for(name)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    shallow = type(model)(config).eval()
    shallow.load_state_dict(model.state_dict(), strict=False)
    whole = outputs(model, batch)
    with layerskip.first_blocks(model, 1) as size:
        assert relative(outputs(size, batch), outputs(shallow, batch)) < 1e-6
        assert sum(one.numel() for one in size.parameters()) == sum(one.numel() for one in shallow.parameters())
    assert torch.equal(outputs(model, batch), whole)
    deep = model(**batch, output_hidden_states=True)
    assert relative(output_tensor(layerskip.exit_output(model, deep, 0)), outputs(shallow, batch)) < 1e-5


def test_a_block_that_is_left_out_changes_nothing() -> None:
    model = build("llama_tied")
    with layerskip.first_blocks(model, 1) as size:
        wanted = outputs(size, BATCH)
    with replaced_forwards({model.model.layers[1]: layerskip._left_out}):
        assert relative(outputs(model, BATCH), wanted) < 1e-6


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
