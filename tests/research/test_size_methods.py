"""Methods that make one model a size, each against its paper's definition by an oracle of its own."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexrank.calibrate import Hooks
from flexrank.data.batches import output_mask
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import select_layers
from flexrank.nn.switch import nested_layers
from research.baselines import SIZE_METHODS, pifa, slicegpt
from research.baselines.method import parameter_limit, with_settings
from research.baselines.pivoted import PivotedLinear, pivoted_order
from research.baselines.statistics import input_moments, next_token_loss
from tiny import VOCABULARY, build, outputs, relative, same_state, token_batch

FITTING = {
    "pifa": ("llama_tied", "llama_untied", "gpt2", "qwen3", "bert", "convnet"),
    "slicegpt": ("llama_tied", "llama_untied", "qwen3", "gpt2"),
    "a3": ("llama_tied", "llama_untied", "bert", "gpt2", "vit"),
}
PAIRS = [(name, kind) for name, kinds in FITTING.items() for kind in kinds]
BUDGETS = (0.9, 0.5, 0.3)


def calibration(kind: str) -> list[Any]:
    """Eight rows of twelve tokens, two batches, of which one row is padded; images for a network of them."""
    generator = torch.Generator().manual_seed(5)
    if kind == "convnet":
        return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(2)]
    if kind == "vit":
        return [{"pixel_values": torch.randn(4, 3, 16, 16, generator=generator)} for _ in range(2)]
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
        for kind in ("llama_tied", "gpt2", "bert", "qwen3", "phi3", "vit", "convnet"):
            model = build(kind)
            reason = method.obstacle(model, select_layers(model))
            assert (reason is None) == (kind in FITTING[name] or name == "pifa"), (name, kind)
    model = build("llama_tied")
    layers = select_layers(model, exclude=["*.1.mlp.down_proj"])
    for name in ("slicegpt", "a3"):
        assert "model.layers.1.mlp.down_proj is not among" in str(SIZE_METHODS[name].obstacle(model, layers))
        assert made(name, "llama_tied", 0.01) is None


# PIFA's reconstruction


def test_pifa_at_a_budget_takes_all_of_it_and_its_mix() -> None:
    """Oracle: what is left of the budget is less than one more rank of any layer; the same ranks and mix by layer."""
    model = build("llama_tied")
    layers, batches = select_layers(model), calibration("llama_tied")
    one = with_settings(pifa.PIFA, {"mix": 0.75}).make(model, batches, layers, next_token_loss, 0.3)
    assert one is not None
    ranks = {name: layer.rank for name, layer in nested_layers(one.model).items()}
    steps = [sum(layer.weight.shape) - 2 * ranks[name] - 1 for name, layer in layers.items()]
    assert 0 <= parameter_limit(model, layers, 0.3) - one.parameters < max(steps)
    same, other = (pifa.make_at(model, batches, layers, next_token_loss, ranks, mix) for mix in (0.75, 0.25))
    assert torch.equal(outputs(one.model, batches[0]), outputs(same.model, batches[0]))
    assert not torch.equal(outputs(one.model, batches[0]), outputs(other.model, batches[0]))
    settings = [one["mix"] for one in pifa.PIFA.trials]
    assert len(set(settings)) == 4 and settings[0] == pifa.MIX == 0.25


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
        hooks.on_forward({name: model.get_submodule(name)}, lambda _, inputs, __: rows.append(inputs))
        for batch in batches:
            model(**batch)
    masks = [b.get("attention_mask", torch.ones(one.shape[:2])) > 0 for one, b in zip(rows, batches, strict=True)]
    return torch.cat([one[mask] for one, mask in zip(rows, masks, strict=True)]).double()


@pytest.mark.parametrize("mix", [0.25, 0.75])
@pytest.mark.parametrize("kind", ["llama_tied", "bert"])
@torch.no_grad()
def test_layers_are_refitted_to_what_those_before_became(kind: str, mix: float) -> None:
    """Oracle: of the finished model whole forwards, whose layers before the one in question are those it was fitted to.

    Down projections of a first and a last block, and of BERT the pooler, which is outside the stack. The published mix
    at the method's own ranks, another one at ranks that differ by layer.
    """
    model, batches = build(kind), calibration(kind)
    layers = select_layers(model)
    if mix == 0.25:
        one = made("pifa", kind, 0.5, model)
    else:
        ranks = {name: 3 + place % 5 for place, name in enumerate(layers)}
        method = with_settings(pifa.PIFA, {"mix": mix})
        assert method.make_at
        one = method.make_at(model, batches, layers, next_token_loss, ranks)
        assert {name: layer.rank for name, layer in nested_layers(one.model).items()} == ranks
        kept = sum(rank * (sum(layers[name].weight.shape) - rank) for name, rank in ranks.items())
        dense = sum(layer.weight.numel() for layer in layers.values())
        assert one.parameters == sum(parameter.numel() for parameter in model.parameters()) - dense + kept
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
        u, v = pifa.refit(weight, start, (1 - mix) * now.T @ now + mix * base.T @ now, now.T @ now)
        # Behind a norm some directions hardly vary: there the matrix is known less well than what it gives.
        assert relative(elastic.matrix, u @ v) < 1e-2
        assert relative(now @ elastic.matrix.T.double(), now @ (u @ v).T) < 1e-4


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


def halves_of(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any], Any]:
    """The stream after the embeddings, what each half adds to a stream, and what makes logits of the last one."""
    rows, length = batch["input_ids"].shape
    places = torch.arange(length)[None]
    causal = torch.full((length, length), -torch.inf).triu(1)[None, None].expand(rows, 1, -1, -1)
    mask = causal.masked_fill(batch["attention_mask"][:, None, None] == 0, torch.finfo(torch.float32).min)
    if model.config.model_type == "gpt2":
        given = model.transformer
        hidden = given.wte(batch["input_ids"]) + given.wpe(places)
        attentions = [lambda h, b=b: b.attn(b.ln_1(h), attention_mask=mask)[0] for b in given.h]
        forwards = [lambda h, b=b: b.mlp(b.ln_2(h)) for b in given.h]
        return hidden, [*itertools.chain(*zip(attentions, forwards, strict=True))], given.ln_f
    given = model.model
    hidden = given.embed_tokens(batch["input_ids"])
    more = {"position_embeddings": given.rotary_emb(hidden, places), "attention_mask": mask}
    attentions = [lambda h, b=b: b.self_attn(b.input_layernorm(h), **more)[0] for b in given.layers]
    forwards = [lambda h, b=b: b.mlp(b.post_attention_layernorm(h)) for b in given.layers]
    return hidden, [*itertools.chain(*zip(attentions, forwards, strict=True))], given.norm


def projected(model: Any, batches: list[Any], k: int) -> Any:
    """By definition: the stream projected on its k principal components, where it is read, block after block.

    Its own forward, with the model's own modules and no rotation: h ← h P after the embedding, each attention, and each
    feed-forward but the last. One run finds P, from the signals so far, which are centred before a LayerNorm.
    """
    found: list[Tensor] = []

    def centred(hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(-1, keepdim=True) if model.config.model_type == "gpt2" else hidden

    def run(batch: dict[str, Tensor], known: list[Tensor]) -> Tensor:
        """The logits with these projections, or the first signal that has none yet."""
        hidden, halves, norm = halves_of(model, batch)
        for number, half in enumerate(halves):
            if number == len(known):
                return centred(hidden)
            hidden = centred(hidden) @ known[number]
            hidden = hidden + half(hidden)
        return model.lm_head(norm(hidden))

    with torch.no_grad():
        for _ in range(2 * model.config.num_hidden_layers):
            rows = torch.cat([run(batch, found)[batch["attention_mask"] > 0] for batch in batches])
            _, _, right = torch.linalg.svd(rows.double(), full_matrices=False)
            found.append((right[:k].T @ right[:k]).float())
    return lambda batch: run(batch, found)


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
    read = "transformer.h.0.mlp.c_fc" if kind == "gpt2" else "model.layers.0.mlp.up_proj"
    turned, own = (weight_matrix(one.get_submodule(read)).detach() for one in (rotated, model))
    assert relative(turned, own) > 0.5


def test_a_copy_of_a_made_model_is_one(tmp_path: Any) -> None:
    for name in SIZE_METHODS:
        one = made(name, "llama_tied", 0.5).model
        assert relative(real(copy.deepcopy(one), token_batch()), real(one, token_batch())) < 1e-6
