"""A³'s parts against their definitions, by the outputs of all tokens, by hand, and by really smaller matrices."""

from typing import Any

import pytest
import torch
from test_size_methods import calibration, made, rows_of
from torch import Tensor, nn
from torch.nn import functional

from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import select_layers
from research.baselines import a3
from research.baselines.statistics import output_moments
from tiny import build, relative


def moments_of(*shape: int) -> tuple[Tensor, Tensor]:
    """Rows (t, d) of uneven energy and their second moment."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(*shape, generator=generator, dtype=torch.float64) @ torch.randn(
        shape[1], shape[1], generator=generator, dtype=torch.float64
    )
    return rows, rows.T @ rows


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_score_maps_are_the_best_of_their_rank(rank: int) -> None:
    """Oracle: the scores of all pairs as a matrix, whose best approximation is its truncated SVD."""
    (queries, c_q), (keys, c_k) = moments_of(40, 6), moments_of(50, 6)
    scores = queries @ keys.T
    a, b = a3.score_maps(c_q, c_k, rank)
    left = torch.linalg.svdvals(scores)[rank:6].square().sum()
    error = (scores - queries @ a.T @ b @ keys.T).square().sum()
    assert float(error) == pytest.approx(float(left), rel=1e-3, abs=1e-6 * float(scores.square().sum()))


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_value_maps_are_the_best_of_their_rank(rank: int) -> None:
    """Oracle: the outputs of all tokens as a matrix, whose best approximation is its truncated SVD."""
    rows, moment = moments_of(40, 6)
    weights = torch.randn(10, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = rows @ weights.T
    u, v = a3.value_maps(weights, moment, rank)
    left = torch.linalg.svdvals(wanted)[rank:6].square().sum()
    error = (wanted - rows @ v.T @ u.T).square().sum()
    assert float(error) == pytest.approx(float(left), rel=1e-3, abs=1e-6 * float(wanted.square().sum()))


def test_values_follow_the_papers_second_moment_of_mean_inputs() -> None:
    """Oracle: attention by hand, P = E p pᵀ of p = Σ_t a_t x_t, and the SVD of P^½ W_v W_o of one head."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(30, 12, generator=generator, dtype=torch.float64)
    attention = torch.randn(30, 30, generator=generator, dtype=torch.float64).softmax(-1)
    w_v = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    w_o = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    means = attention @ x
    values, directions = torch.linalg.eigh(means.T @ means)
    root = directions * values.sqrt() @ directions.T
    p, s, q = torch.linalg.svd(root @ w_v.T @ w_o.T)
    wanted = torch.linalg.solve(root, p[:, :2] * s[:2]) @ q[:2]
    read = attention @ x @ w_v.T
    u, v = a3.value_maps(w_o, read.T @ read, 2)
    assert torch.allclose(w_v.T @ v.T @ u.T, wanted, atol=1e-4 * float(wanted.abs().max()))


def test_pairs_are_those_of_the_largest_products() -> None:
    queries, keys = torch.diag(torch.tensor([4.0, 1, 9, 0, 0, 2])), torch.diag(torch.tensor([1.0, 8, 0, 0, 2, 0.1]))
    # pairs (0, 3), (1, 4), (2, 5): 4 · 1, 1 · 10, 11 · .1
    for rank, kept in ((2, [0, 1, 0]), (4, [1, 1, 0]), (6, [1, 1, 1])):
        for one in a3.score_pairs(queries, keys, rank):
            assert torch.equal(one, torch.tensor([*kept, *kept]).float().diag())


def test_channels_are_the_largest_and_down_is_refitted_to_them() -> None:
    rows, moment = moments_of(40, 6)
    down = torch.randn(5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    down[:, moment.diagonal().argmax()] *= 1e-3
    down[:, moment.diagonal().argmin()] *= 1e3
    weights = [float(rows[:, i].norm() * down[:, i].norm()) for i in range(6)]
    kept = a3.channels(down, moment, 4)
    assert kept.tolist() == sorted(sorted(range(6), key=lambda i: -weights[i])[:4])
    wanted = torch.linalg.lstsq(rows[:, kept], rows @ down.T).solution.T
    assert torch.allclose(a3.refitted(down, moment, kept), wanted, atol=1e-4)


def small_attention(new: nn.Module, shape: a3.Shape, sizes: a3.Sizes, x: Tensor, turns: Any) -> Tensor:
    """Causal attention of the really smaller matrices: zeros left out, pairs at their own angles."""
    d, share, result = shape.head_size, shape.heads // shape.groups, 0
    cos, sin = (one[0] for one in turns)
    count = 0
    for head in range(shape.heads):
        own, group = slice(head * d, (head + 1) * d), slice(head // share * d, (head // share + 1) * d)
        w_q, w_k, w_v = new.q_proj.weight[own], new.k_proj.weight[group], new.v_proj.weight[group][: sizes.value]
        kept = (w_k.abs().sum(1) > 0).nonzero()[:, 0]
        assert len(kept) == sizes.score and torch.equal(kept[: len(kept) // 2] + d // 2, kept[len(kept) // 2 :])
        w_q, w_k, w_o = w_q[kept], w_k[kept], new.o_proj.weight[:, own][:, : sizes.value]
        count += w_q.numel() + w_o.numel() + (w_k.numel() + w_v.numel() if head % share == 0 else 0)

        def turned(one: Tensor, kept: Tensor = kept) -> Tensor:
            first, second = one.chunk(2, -1)
            return one * cos[:, kept] + torch.cat((-second, first), -1) * sin[:, kept]

        query, key = turned(x @ w_q.T), turned(x @ w_k.T)
        scores = query @ key.T / d**0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
        result = result + scores.softmax(-1) @ (x @ w_v.T) @ w_o.T
    assert count == sum(x.shape[1] * n for n in (
        shape.heads * sizes.score, shape.groups * sizes.score, shape.groups * sizes.value, shape.heads * sizes.value
    ))  # fmt: skip
    return result


@pytest.mark.parametrize("budget", [0.8, 0.4])
def test_smaller_matrices_give_what_zeros_in_the_old_shapes_give(budget: float) -> None:
    model = build("llama_tied")
    layers = select_layers(model)
    shape = a3.shape_of(model, layers)
    sizes = a3.sizes_of(model, layers, shape, budget)
    one = made("a3", "llama_tied", budget, model)
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    turns = model.model.rotary_emb(x, torch.arange(9)[None])
    stored = sum(p.numel() for n, p in model.named_parameters() if n not in {f"{x}.weight" for x in layers})
    for block in one.model.model.layers:
        with torch.no_grad():
            found, _ = block.self_attn(x, position_embeddings=turns, attention_mask=None)
            wanted = small_attention(block.self_attn, shape, sizes, x[0], turns)
        assert torch.allclose(found[0], wanted, atol=1e-5)
        stored += 32 * (4 + 2) * (sizes.score + sizes.value) + 3 * 32 * sizes.channels
        assert {p.numel() for p in block.mlp.parameters()} == {32 * sizes.channels}
    assert one.parameters == stored


def test_sizes_and_what_they_store_by_hand() -> None:
    """Of BERT's two blocks of 32 columns, four heads of 8 and 48 channels; the pooler (32 × 32) stays as it is."""
    model = build("bert")
    dense, layers = 2 * (4 * 32 * 32 + 2 * 32 * 48), select_layers(model)
    # .63 of all is .604 of the blocks: 5 of 8 dimensions, rounded up, of q, k, v and o.
    sizes = a3.sizes_of(model, layers, a3.shape_of(model, layers), 0.63)
    assert sizes is not None and (sizes.score, sizes.value) == (5, 5)
    removed = 2 * (3 * (4 * 3) * (32 + 1) + (4 * 3) * 32 + (48 - sizes.channels) * (32 + 1 + 32))
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert made("a3", "bert", 0.63, model).parameters == whole - removed
    spare = int(0.63 * (dense + 32 * 32)) - (dense + 32 * 32) + removed
    assert 0 <= spare < 2 * (32 + 1 + 32)  # no channel more fits
    assert a3.sizes_of(model, layers, a3.shape_of(model, layers), 1.0) == a3.Sizes(8, 8, 48)


def attention_parts(block: nn.Module, names: a3.Names) -> list[tuple[Tensor, Tensor]]:
    """The matrices of q, k and v with their biases, in float64."""
    layers = [block.get_submodule(one) for one in dict.fromkeys((names.query, names.key, names.value))]
    matrices = torch.cat([weight_matrix(one).double() for one in layers])
    biases = torch.cat([torch.zeros(len(weight_matrix(one))) if one.bias is None else one.bias for one in layers])
    heads = [len(weight_matrix(one)) for one in layers] if len(layers) == 3 else [len(matrices) // 3] * 3
    return list(zip(matrices.split(heads), biases.double().split(heads), strict=True))


@pytest.mark.parametrize("kind", ["llama_tied", "bert", "gpt2", "vit"])
@torch.no_grad()
def test_each_part_of_a_whole_model_is_its_own_optimum(kind: str) -> None:
    """Oracle: the parts by hand from activations of the base model that hooks record."""
    model, batches = build(kind), calibration(kind)
    layers = select_layers(model)
    shape = a3.shape_of(model, layers)
    sizes = a3.sizes_of(model, layers, shape, 0.5)
    one, names, d = made("a3", kind, 0.5, model).model, shape.names, shape.head_size
    share = shape.heads // shape.groups
    for block in shape.blocks:
        old, new = (m.get_submodule(block) for m in (model, one))
        parts, changed = attention_parts(old, names), attention_parts(new, names)
        x = rows_of(model, batches, f"{block}.{names.query}")
        query, key = (functional.linear(x, *one) for one in parts[:2])
        read = rows_of(model, batches, f"{block}.{names.output}")
        for group in range(shape.groups):
            heads = [slice(h * d, (h + 1) * d) for h in range(group * share, (group + 1) * share)]
            own = slice(group * d, (group + 1) * d)
            w_v, v = parts[2][0][own], changed[2][0][own]
            outputs = [weight_matrix(m.get_submodule(names.output)).double() for m in (old, new)]
            joint, got = (torch.cat([one[:, h] for h in heads]) for one in outputs)
            z = torch.cat([read[:, h] for h in heads])
            best = torch.linalg.svd(z @ joint.T, full_matrices=False)
            wanted = (best.U[:, : sizes.value] * best.S[: sizes.value]) @ best.Vh[: sizes.value]
            assert relative(got @ v, torch.linalg.lstsq(z, wanted).solution.T @ w_v) < 1e-3
            if names.is_rotary:
                powers = sum(query[:, h].square().sum(0) for h in heads), key[:, own].square().sum(0)
                first, second = (one[: d // 2] + one[d // 2 :] for one in powers)
                kept = sorted(sorted(range(d // 2), key=lambda i: -float(first[i] * second[i]))[: sizes.score // 2])
                rows = [*kept, *(i + d // 2 for i in kept)]
                for number, slices in enumerate((heads, [own])):
                    for part in slices:
                        before, after = (some[number][0][part] for some in (parts, changed))
                        wanted = torch.zeros_like(before)
                        wanted[rows] = before[rows]
                        assert torch.equal(after, wanted)
            else:
                best = torch.linalg.svd(query[:, own] @ key[:, own].T, full_matrices=False)
                wanted = (best.U[:, : sizes.score] * best.S[: sizes.score]) @ best.Vh[: sizes.score]
                found = [functional.linear(x, matrix[own], bias[own]) for matrix, bias in changed[:2]]
                assert relative(found[0] @ found[1].T, wanted) < 1e-3


def given_by(model: nn.Module, batches: list[Any], name: str) -> Tensor:
    """What a layer gives, with its bias, of real tokens, in float64."""
    layer = model.get_submodule(name)
    return (
        rows_of(model, batches, name) @ layer.weight.double().T + (0 if layer.bias is None else layer.bias)
    ).detach()


def test_output_moments_are_of_real_tokens_with_bias() -> None:
    model, batches = build("bert"), calibration("bert")
    layers = {"encoder.layer.1.attention.self.key": model.get_submodule("encoder.layer.1.attention.self.key")}
    (name,) = layers
    rows = given_by(model, batches, name)
    assert relative(output_moments(model, batches, layers)[name], rows.T @ rows) < 1e-5
