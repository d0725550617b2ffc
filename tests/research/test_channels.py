"""Heads and channels that can be left out: against smaller models built by hand, zeroed rows, and sums by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flexrank.data.batches import call_model
from flexrank.errors import FlexrankError
from flexrank.nn.blocks import block_stack
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.select import select_layers
from research.baselines.statistics import next_token_loss
from research.baselines.trained.channels import Units, Widths, find_units, importances, ordered
from tiny import IMAGE, batch_for, build, outputs, relative

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


def gated_dinov3() -> Any:
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    torch.manual_seed(0)
    return DINOv3ViTModel(DINOv3ViTConfig(**IMAGE, use_gated_mlp=True)).eval()


@pytest.mark.parametrize(
    ("kind", "value", "channel", "reader"),
    [
        ("vit", "attention.v_proj", "mlp.fc1", "mlp.fc2"),
        ("dinov3", "attention.v_proj", "mlp.up_proj", "mlp.down_proj"),
        ("gpt2", "attn.c_attn", "mlp.c_fc", "mlp.c_proj"),
        ("dinov3, gated", "attention.v_proj", "mlp.up_proj", "mlp.down_proj"),
    ],
)
def test_units_of_other_transformers(kind: str, value: str, channel: str, reader: str) -> None:
    """Oracle: zeroed rows of what writes the last head's values and the last channel; GPT-2's matrices are turned."""
    model, batch = gated_dinov3() if "gated" in kind else build(kind), batch_for(kind.split(",")[0])
    names = [name for name, _ in block_stack(model, select_layers(model))]
    units = find_units(model, names)
    widths = Widths(units, {name: torch.arange(one.count) for name, one in units.items()})
    kept = {name: one.count - 1 for name, one in units.items()}
    zeroed = copy.deepcopy(model)
    for name in names:
        block: Any = zeroed.get_submodule(name)
        for part in (value, channel):
            layer = block.get_submodule(part)
            rows = slice(-8, None) if part == value else slice(-1, None)
            (layer.weight.data.T if kind == "gpt2" else layer.weight.data)[rows] = 0
            if layer.bias is not None:
                layer.bias.data[rows] = 0
    with widths.use(model, kept):
        assert relative(outputs(model, batch), outputs(zeroed, batch)) < 1e-6
    channels = matrix_shape(model.get_submodule(f"{names[0]}.{reader}"))[1]
    cost = (3 if "gated" in kind else 2) * 32
    assert [(one.count, one.cost) for one in units.values()] == 2 * [(4, 4 * 32 * 8), (channels, cost)]


def test_importance_of_fused_matrices() -> None:
    """GPT-2's third head: its columns of queries, keys and values, and its rows of what reads it."""
    model, batch = build("gpt2"), batch_for("gpt2")
    units = find_units(model, ["transformer.h.0", "transformer.h.1"])
    found = importances(model, units, [batch], next_token_loss)
    next_token_loss(call_model(model, batch), batch).backward()
    attention = model.transformer.h[1].attn
    written, read = ((one.weight * one.weight.grad).abs().detach() for one in (attention.c_attn, attention.c_proj))
    third = sum(written[:, 32 * part + 16 : 32 * part + 24].sum() for part in range(3)) + read[16:24].sum()
    assert float(found["transformer.h.1.attn.c_proj"][2]) == pytest.approx(float(third), rel=1e-4)
    written, read = (
        (one.weight * one.weight.grad).abs().detach()
        for one in (model.transformer.h[1].mlp.c_fc, model.transformer.h[1].mlp.c_proj)
    )
    fourth = written[:, 3].sum() + read[3].sum()
    assert float(found["transformer.h.1.mlp.c_proj"][3]) == pytest.approx(float(fourth), rel=1e-4)


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
        kept = widths.at(share * whole, 0.5)
        assert kept is not None and widths.parameters(kept) <= share * whole
        one_more = {name: count + (widths.units[name].count == 48) for name, count in kept.items()}
        assert widths.parameters(one_more) > share * whole
        for name, count in kept.items():
            mask = widths.mask(name, count)
            assert int(mask.sum()) == count and bool(
                (previous is None or mask <= previous[name]).all() if previous else True
            )
        previous = {name: widths.mask(name, count) for name, count in kept.items()}
    assert widths.at(whole, 0.5) == {name: one.count for name, one in widths.units.items()}
    assert widths.at(0.02 * whole, 0.5) is None


def test_heads_go_where_channels_would_have_too_small_a_share() -> None:
    """A block's heads have 3072 parameters, 2560 and 1536 where 3 and 2 of 4 are left; its channels have 4608.

    Half of both blocks' channels and all heads are 10752; one less, and with 3 heads 5631 of 9216 are left for 29 of 48
    channels. Of 7680, 4 heads leave .17 of the channels, 3 leave .28 and 2 leave .5.
    """
    widths = widths_of(build("llama_tied"))

    def kept(limit: int, least: float = 0.5) -> set[tuple[int, int]]:
        found = widths.at(limit, least)
        assert found is not None
        return {
            tuple(found[f"model.layers.{at}.{one}"] for one in ("self_attn.o_proj", "mlp.down_proj")) for at in "01"
        }

    assert kept(10752) == {(4, 24)} and kept(10751) == {(3, 29)} and kept(7680) == {(2, 24)}
    assert kept(7680, 0.1) == {(4, 8)} and kept(7680, 0.8) == {(2, 24)}


def test_blocks_of_another_kind_are_refused() -> None:
    with pytest.raises(FlexrankError, match="heads and channels are not known"):
        find_units(build("phi3"), ["model.layers.0"])
