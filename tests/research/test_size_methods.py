"""Methods that make one model a size, each against its paper's definition by an oracle of its own."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flexrank.calibrate import Hooks
from flexrank.data.batches import output_mask
from flexrank.errors import FlexrankError
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from research.baselines import SIZE_METHODS, a3, pifa, slicegpt
from research.baselines.method import parameter_limit
from research.baselines.pivoted import PivotedLinear, pivoted_order
from research.baselines.statistics import input_moments, next_token_loss, output_moments
from research.machine import random_llama
from tiny import DECODER, VOCABULARY, build, outputs, relative, same_state, token_batch

FITTING = {
    "pifa": ("llama_tied", "llama_untied", "gpt2", "qwen3", "bert", "convnet"),
    "slicegpt": ("llama_tied", "llama_untied", "qwen3"),
    "a3": ("llama_tied", "llama_untied", "bert"),
}
PAIRS = [(name, kind) for name, kinds in FITTING.items() for kind in kinds]
BUDGETS = (0.9, 0.5, 0.3)


def calibration(kind: str) -> list[Any]:
    """Eight rows of twelve tokens, two batches, of which one row is padded; images for a network of them."""
    generator = torch.Generator().manual_seed(5)
    if kind == "convnet":
        return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(2)]
    ids = torch.randint(3, VOCABULARY, (2, 4, 12), generator=generator)
    masks = torch.ones_like(ids)
    masks[1, -1, -5:] = 0
    return [{"input_ids": a, "attention_mask": b} for a, b in zip(ids, masks, strict=True)]


def made(name: str, kind: str, budget: float, model: nn.Module | None = None) -> Any:
    model = build(kind) if model is None else model
    return SIZE_METHODS[name].make(model, calibration(kind), select_layers(model), next_token_loss, budget)


def real(model: nn.Module, batch: Any) -> Tensor:
    """The outputs of real tokens."""
    found, mask = outputs(model, batch), output_mask(batch)
    return found if mask is None or found.shape[:2] != mask.shape else found[mask]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_size_is_within_its_limit_and_the_base_stays(name: str, kind: str) -> None:
    model, before = build(kind), build(kind)
    layers, batch = select_layers(model), calibration(kind)[1]
    wanted, sizes = real(model, batch), []
    for budget in BUDGETS:
        one = made(name, kind, budget, model)
        assert one.parameters <= parameter_limit(model, layers, budget)
        assert 0 < relative(real(one.model, batch), wanted) < 2
        sizes.append(one.parameters)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0.8 * parameter_limit(model, layers, 0.9)
    assert same_state(model, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_at_the_full_budget_outputs_are_the_base_models(name: str, kind: str) -> None:
    model, batch = build(kind), calibration(kind)[1]
    one = made(name, kind, 1.0, model)
    assert one.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert relative(real(one.model, batch), real(model, batch)) < 1e-4


def test_where_a_method_does_not_apply() -> None:
    for name, method in SIZE_METHODS.items():
        for kind in ("llama_tied", "gpt2", "bert", "qwen3", "phi3", "convnet"):
            model = build(kind)
            reason = method.obstacle(model, select_layers(model))
            assert (reason is None) == (kind in FITTING[name] or name == "pifa"), (name, kind)
    model = build("llama_tied")
    layers = select_layers(model, exclude=["*.1.mlp.down_proj"])
    for name in ("slicegpt", "a3"):
        assert "model.layers.1.mlp.down_proj is not among" in str(SIZE_METHODS[name].obstacle(model, layers))
        with pytest.raises(FlexrankError, match="does not apply"):
            SIZE_METHODS[name].make(model, calibration("llama_tied"), layers, next_token_loss, 0.5)
        assert made(name, "llama_tied", 0.01) is None


# PIFA's reconstruction


def drawn(m: int, n: int, tokens: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """A weight (m, n), inputs of a compressed model (tokens, n), and those of the base, near them."""
    generator = torch.Generator().manual_seed(10 * m + n)
    weight = torch.randn(m, n, generator=generator, dtype=torch.float64)
    base = torch.randn(tokens, n, generator=generator, dtype=torch.float64) * torch.linspace(2, 0.2, n).double()
    return weight, base + 0.3 * torch.randn(tokens, n, generator=generator, dtype=torch.float64), base


@pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
def test_a_refit_is_of_least_squares_over_both_flows(shape: tuple[int, int]) -> None:
    """Oracle: least squares on the tokens, with rows of √ρ for the pull of V's fit towards the old matrix."""
    weight, now, base = drawn(*shape)
    v = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = 0.75 * now @ weight.T + 0.25 * base @ weight.T
    first = torch.linalg.lstsq(now @ v.T, targets).solution.T
    root = pifa.PRIOR**0.5
    rows = torch.cat((now, root * torch.eye(shape[1]).double())), torch.cat((targets, root * weight.T))
    second = torch.linalg.lstsq(first, torch.linalg.lstsq(*rows).solution.T).solution
    u, found = pifa.refit(weight, v, pifa.mixed(now.T @ now, base.T @ now), now.T @ now)
    assert torch.allclose(u, first, rtol=1e-4, atol=1e-4)
    assert torch.allclose(found, second, rtol=1e-4, atol=1e-4)


def test_a_refit_of_no_or_few_tokens_is_finite() -> None:
    weight, now, base = drawn(5, 9, tokens=4)
    v = torch.eye(9).double()[:3]
    for x in (now, 0 * now):
        for one in pifa.refit(weight, v, pifa.mixed(x.T @ x, base.T @ x), x.T @ x):
            assert bool(torch.isfinite(one).all())


def rows_of(model: nn.Module, batches: list[Any], name: str) -> Tensor:
    """What a layer of a whole model reads, of real tokens, in float64."""
    rows: list[Tensor] = []
    with Hooks() as hooks, torch.no_grad():
        hooks.watch(model.get_submodule(name), lambda inputs, _: rows.append(inputs))
        for batch in batches:
            model(**batch)
    return torch.cat([one[b["attention_mask"] > 0] for one, b in zip(rows, batches, strict=True)]).double()


@pytest.mark.parametrize("kind", ["llama_tied", "bert"])
@torch.no_grad()
def test_layers_are_refitted_to_what_those_before_became(kind: str) -> None:
    """Oracle: of the finished model whole forwards, whose layers before the one in question are those it was fitted to.

    Down projections of a first and a last block, and of BERT the pooler, which is outside the stack.
    """
    model, batches = build(kind), calibration(kind)
    layers = select_layers(model)
    one = made("pifa", kind, 0.5, model)
    moments = input_moments(model, batches, layers, next_token_loss)
    ends = ("down_proj",) if kind == "llama_tied" else ("output.dense", "pooler.dense")
    for name in (name for name in layers if name.endswith(ends)):
        elastic = nested_layers(one.model)[name]
        if name.startswith("pooler"):  # it reads the first token of each row
            now, base = (
                torch.cat([one_batch[:, 0] for one_batch in hidden_of(m, batches)]) for m in (one.model, model)
            )
        else:
            now, base = (rows_of(m, batches, name) for m in (one.model, model))
        weight = layers[name].weight.double()
        start = pifa.svd_llm.factors(weight, moments[name]).v[: elastic.rank]
        u, v = pifa.refit(weight, start, 0.75 * now.T @ now + 0.25 * base.T @ now, now.T @ now)
        assert relative(elastic.matrix, u @ v) < 1e-3


def test_a_flow_reads_what_whole_forwards_read_whichever_blocks_are_asked_for() -> None:
    """Oracle: whole forwards of four blocks; another layer changes on the way, before the one that reads on."""
    model, batches = random_llama(**DECODER | {"num_hidden_layers": 4}), calibration("llama_tied")
    flow = pifa.Flow(model, batches, list(select_layers(model)))
    for place, name in ((0, "mlp.up_proj"), (2, "self_attn.q_proj"), (2, "mlp.down_proj"), (3, "self_attn.o_proj")):
        layer = f"model.layers.{place}.{name}"
        assert relative(torch.cat([one.detach() for one in flow.inputs(layer)]), rows_of(model, batches, layer)) < 1e-6
        with torch.no_grad():
            model.get_submodule(layer).weight.mul_(2)


def hidden_of(model: nn.Module, batches: list[Any]) -> list[Tensor]:
    with torch.no_grad():
        return [model(**batch).last_hidden_state.double() for batch in batches]


def test_the_pivoted_form_gives_what_the_factors_give_and_stores_what_is_counted() -> None:
    model = build("llama_tied")
    one = made("pifa", "llama_tied", 0.5, model)
    stored = sum(
        p.numel() for n, p in model.named_parameters() if n not in {f"{x}.weight" for x in select_layers(model)}
    )
    for layer in nested_layers(one.model).values():
        u, v = layer.u.detach().T.double(), layer.v.detach().double()
        order, rank = pivoted_order(u), layer.rank
        pivoted = PivotedLinear(v.shape[1], rank, order, dtype=torch.float64)
        with torch.no_grad():
            pivoted.latent.weight.copy_(u[order[:rank]] @ v)
            pivoted.expand.weight.copy_(torch.linalg.solve(u[order[:rank]], u[order[rank:]], left=False))
            x = torch.randn(4, v.shape[1], generator=torch.Generator().manual_seed(0)).double()
            assert torch.allclose(pivoted(x), x @ v.T @ u.T, atol=1e-9)
        stored += sum(parameter.numel() for parameter in pivoted.parameters())
    assert one.parameters == stored


# SliceGPT


def projected(model: Any, batches: list[Any], k: int) -> Any:
    """By definition: the stream projected on its k principal components, where it is read, block after block.

    Its own forward, with the model's own modules and no rotation: h ← h P after the embedding, each attention, and each
    feed-forward but the last. One run finds P, from the signals so far.
    """
    found: list[Tensor] = []

    def run(batch: dict[str, Tensor], known: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The logits with these projections, or the first signal that has none yet."""
        given, left = model.model, list(known)
        hidden = given.embed_tokens(batch["input_ids"])
        length = hidden.shape[1]
        places = torch.arange(length)[None]
        causal = torch.full((length, length), -torch.inf).triu(1)[None, None].expand(len(hidden), 1, -1, -1)
        mask = causal.masked_fill(batch["attention_mask"][:, None, None] == 0, torch.finfo(torch.float32).min)
        turns = given.rotary_emb(hidden, places)
        steps = list(itertools.product(given.layers, range(2)))
        for number in range(len(steps) + 1):
            if number < len(steps):
                if not left:
                    return hidden, hidden
                hidden = hidden @ left.pop(0)
                block, half = steps[number]
                if half == 0:
                    read = block.input_layernorm(hidden)
                    hidden = hidden + block.self_attn(read, position_embeddings=turns, attention_mask=mask)[0]
                else:
                    hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return model.lm_head(given.norm(hidden)), hidden

    with torch.no_grad():
        for _ in range(2 * len(model.model.layers)):
            rows = torch.cat([run(batch, found)[1][batch["attention_mask"] > 0] for batch in batches])
            _, _, right = torch.linalg.svd(rows.double(), full_matrices=False)
            found.append((right[:k].T @ right[:k]).float())
        return lambda batch: run(batch, found)[0]


@pytest.mark.parametrize("kind", FITTING["slicegpt"])
def test_a_sliced_model_is_the_base_with_a_projected_stream(kind: str) -> None:
    model, batches = build(kind), calibration(kind)
    for k in (30, 20):
        sliced, oracle = slicegpt.sliced(model, batches, k), projected(model, batches, k)
        for batch in (*batches, token_batch()):
            with torch.no_grad():
                wanted = oracle(batch)[batch["attention_mask"] > 0]
            assert relative(real(sliced, batch), wanted) < 1e-3
        assert slicegpt.sliced_parameters(model, k) == sum(parameter.numel() for parameter in sliced.parameters())


@pytest.mark.parametrize("kind", FITTING["slicegpt"])
def test_rotations_alone_change_nothing(kind: str) -> None:
    """The paper's computational invariance: turns of full width."""
    model, batches = build(kind), calibration(kind)
    rotated = slicegpt.sliced(model, batches, 32)
    assert relative(real(rotated, batches[1]), real(model, batches[1])) < 1e-5
    turned, own = (one.model.layers[0].mlp.up_proj.weight.detach() for one in (rotated, model))
    assert relative(turned, own) > 0.5


# A³


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
    room = int(0.63 * (dense + 32 * 32)) - (dense + 32 * 32) + removed
    assert 0 <= room < 2 * (32 + 1 + 32)  # no channel more fits
    assert a3.sizes_of(model, layers, a3.shape_of(model, layers), 1.0) == a3.Sizes(8, 8, 48)


@pytest.mark.parametrize("kind", ["llama_tied", "bert"])
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
        query, key = (given_by(model, batches, f"{block}.{name}") for name in (names.query, names.key))
        read = rows_of(model, batches, f"{block}.{names.output}")
        for group in range(shape.groups):
            heads = [slice(h * d, (h + 1) * d) for h in range(group * share, (group + 1) * share)]
            own = slice(group * d, (group + 1) * d)
            w_v, v = (m.get_submodule(names.value).weight[own].double() for m in (old, new))
            joint = torch.cat([old.get_submodule(names.output).weight[:, h].double() for h in heads])
            got = torch.cat([new.get_submodule(names.output).weight[:, h].double() for h in heads])
            z = torch.cat([read[:, h] for h in heads])
            best = torch.linalg.svd(z @ joint.T, full_matrices=False)
            wanted = (best.U[:, : sizes.value] * best.S[: sizes.value]) @ best.Vh[: sizes.value]
            assert relative(got @ v, torch.linalg.lstsq(z, wanted).solution.T @ w_v) < 1e-3
            if names.is_rotary:
                powers = sum(query[:, h].square().sum(0) for h in heads), key[:, own].square().sum(0)
                first, second = (one[: d // 2] + one[d // 2 :] for one in powers)
                kept = sorted(sorted(range(d // 2), key=lambda i: -float(first[i] * second[i]))[: sizes.score // 2])
                rows = [*kept, *(i + d // 2 for i in kept)]
                for name, parts in ((names.query, heads), (names.key, [own])):
                    for part in parts:
                        before, after = (m.get_submodule(name).weight[part] for m in (old, new))
                        wanted = torch.zeros_like(before)
                        wanted[rows] = before[rows]
                        assert torch.equal(after, wanted)
            else:
                after = [new.get_submodule(one) for one in (names.query, names.key)]
                best = torch.linalg.svd(query[:, own] @ key[:, own].T, full_matrices=False)
                wanted = (best.U[:, : sizes.score] * best.S[: sizes.score]) @ best.Vh[: sizes.score]
                x, found = rows_of(model, batches, f"{block}.{names.query}"), []
                for layer in after:
                    found.append(functional.linear(x, layer.weight[own].double(), layer.bias[own].double()))
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


def test_a_copy_of_a_made_model_is_one(tmp_path: Any) -> None:
    for name in SIZE_METHODS:
        one = made(name, "llama_tied", 0.5).model
        assert relative(real(copy.deepcopy(one), token_batch()), real(one, token_batch())) < 1e-6
