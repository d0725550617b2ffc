"""Each method's own search of ranks: by hand on tiny tables, and against all profiles that there are."""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from test_baselines import batches_of, drawn, least_loss, prefix
from torch import Tensor, nn

from flexrank import collect_moments
from flexrank.nn.linalg import data_svd
from flexrank.nn.select import select_layers
from flexrank.nn.switch import layer_shapes, nested_layers
from flexrank.profiles import Footprint, SensitivityTable
from research.baselines import RANK_METHODS, asvd, kfac_svd, lems, svd_llm_v2
from research.baselines.method import Measures, with_settings
from research.baselines.statistics import next_token_loss
from tiny import build


class Blocks(nn.Module):
    """Three layers of one type in blocks of their own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(inputs, outputs, bias=False)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


def elastic(inputs: int = 12, outputs: int = 8) -> tuple[nn.Module, Mapping[str, Tensor]]:
    model = Blocks(inputs, outputs)
    return model, RANK_METHODS["svd"].decompose_(model, [], select_layers(model), lambda *_: torch.zeros(()))


def parameters(shape: tuple[int, int], rank: int) -> int:
    """r · (m + n − r), of the full rank all."""
    return min(math.prod(shape), rank * (sum(shape) - rank))


def costing(weights: Mapping[str, float]) -> Measures:
    """A loss and a distance that rise by a layer's weight for each lost rank, more than in proportion."""

    def evaluate(model: nn.Module) -> float:
        layers = nested_layers(model).items()
        return sum(weights[name] * (layer.max_rank - layer.rank) ** 2 for name, layer in layers)

    return Measures(evaluate, evaluate)


def table_of(errors: Mapping[str, tuple[float, ...]]) -> SensitivityTable:
    """Layers of 4 × 4 with ranks 1, 2 and 4: 7, 12 and 16 parameters."""
    return SensitivityTable(
        dict.fromkeys(errors, (4, 4)), dict.fromkeys(errors, (1, 2, 4)), errors, 0.0, Footprint(0, 0, 4)
    )


def test_asvd_ranks_by_hand() -> None:
    """Layer b is the safer one, and its rank 1 is better than its rank 2, which a threshold does not mind."""
    table = table_of({"a": (0.9, 0.5, 0.0), "b": (0.2, 0.3, 0.0)})
    assert dict(asvd.within(table, 0.1)) == {"a": 4, "b": 4}
    assert dict(asvd.within(table, 0.2)) == {"a": 4, "b": 1}
    assert dict(asvd.within(table, 0.5)) == {"a": 2, "b": 1}
    # Of 32 parameters: at .2 there are 16 + 7 = 23, at .5 12 + 7 = 19, at .9 7 + 7 = 14.
    for most, expected in ((31, (4, 1)), (23, (4, 1)), (22, (2, 1)), (19, (2, 1)), (18, (1, 1)), (14, (1, 1))):
        assert tuple((asvd.searched(table, most / 32) or {}).values()) == expected
    assert asvd.searched(table, 13 / 32) is None


def test_asvd_measures_each_layer_alone_at_tenths_of_its_parameters() -> None:
    model, energies = elastic()
    names, shape = list(nested_layers(model)), (8, 12)
    weights = dict(zip(names, (1.0, 2.0, 9.0), strict=True))
    tenths = [max(r for r in range(1, 9) if r == 1 or parameters(shape, r) <= 9.6 * j) for j in range(1, 10)]
    losses = {name: {rank: weights[name] * (8 - rank) ** 2 for rank in {*tenths, 8}} for name in names}
    for budget in (0.9, 0.6, 0.4):
        best = None  # of all thresholds, written out
        for threshold in sorted(loss for one in losses.values() for loss in one.values()):
            chosen = {name: min(r for r, loss in one.items() if loss <= threshold) for name, one in losses.items()}
            if sum(parameters(shape, rank) for rank in chosen.values()) <= budget * 3 * 96:
                best = chosen
                break
        assert asvd.ranks(model, energies, [budget], costing(weights)) == [best]


def test_relative_shares_by_hand() -> None:
    """Losses 1, e and e³ and offset 1 have inverses 1, 1/2 and 1/4: 4/7, 2/7 and 1/7 of three times R."""
    losses = {"a": math.exp(1), "b": 1.0, "c": math.exp(3)}
    expected = {"b": 0.6, "a": 0.3, "c": 0.15}
    for unit in (1.0, 1e-9, 1e9):
        found = svd_llm_v2.relative_shares({n: unit * one for n, one in losses.items()}, 0.35, 0.95, offset=1.0)
        assert found == pytest.approx(expected)
    # At R = .7 the first has 1.2 of .9: the other two share 2.1 − .9 as 2 to 1; at .8 the second is at the bound too.
    assert svd_llm_v2.relative_shares(losses, 0.7, 0.9, offset=1.0) == pytest.approx({"b": 0.9, "a": 0.8, "c": 0.4})
    assert svd_llm_v2.relative_shares(losses, 0.8, 0.9, offset=1.0) == pytest.approx({"b": 0.9, "a": 0.9, "c": 0.6})
    assert svd_llm_v2.relative_shares(dict.fromkeys("ab", 0.0), 0.3, 0.9) == {"a": 0.3, "b": 0.3}
    assert svd_llm_v2.relative_shares({"a": 0.0, "b": 1.0}, 0.3, 0.9)["a"] > 0.3


def test_published_shares_stay_where_they_are_sound() -> None:
    """Losses e and e² have shares 4/3 and 2/3 of R; R = .6 gives .8 and .4."""
    losses = {"a": math.e, "b": math.e**2}
    assert svd_llm_v2.sound_shares(losses, 0.6, 0.81) == pytest.approx({"a": 0.8, "b": 0.4})
    for others, most in ((losses, 0.79), ({"a": 1.0, "b": math.e}, 0.9)):
        assert svd_llm_v2.sound_shares(others, 0.6, most) == svd_llm_v2.relative_shares(others, 0.6, most)
    # Of offset 1 losses 1 and e have inverses 1 and 1/2, so .8 and .4; of 3 they have 1/3 and 1/4, so 24/35 and 18/35.
    for offset, expected in ((1.0, (0.8, 0.4)), (3.0, (24 / 35, 18 / 35))):
        found = svd_llm_v2.relative_shares({"a": 1.0, "b": math.e}, 0.6, 0.9, offset)
        assert tuple(found.values()) == pytest.approx(expected)


def test_ranks_of_svd_llm_v2_follow_the_offset() -> None:
    """Three layers whose losses beyond rank 4, which .7 of 96 numbers have room for, are 1, e and e³."""
    model, _ = elastic()
    names = list(nested_layers(model))
    energies = {name: torch.tensor([0.0] * 7 + [1.0]) for name in names}
    for name, power in zip(names, (0.0, 2.0, 6.0), strict=True):
        energies[name][-1] = math.exp(power)
    # Of offset 1 inverses are 1, 1/2 and 1/4, and .3 is removed on average: .9 times 4/7, 2/7 and 1/7 leave 46.6, 71.3
    # and 83.7 of 96: ranks 2, 4 and 5 (36, 64, 75) take 175 of 201; the first lacks most and has 51 at rank 3, then the
    # third 84 at rank 6.
    method = RANK_METHODS["svd-llm-v2"]
    (ranks,) = with_settings(method, {"offset": 1.0}).ranks(model, energies, [0.7], costing({}))
    assert list(ranks.values()) == [3, 4, 6]
    # With an offset beyond all losses shares are alike: 67.2 of 96 for each is rank 4, and 9 of 201 are left.
    (ranks,) = with_settings(method, {"offset": 1e9}).ranks(model, energies, [0.7], costing({}))
    assert list(ranks.values()) == [4, 4, 4]
    # Times e the losses' logarithms are 1, 2 and 4, and the published ratios are those of offset 1.
    energies = {name: math.e**2 * one for name, one in energies.items()}
    for settings, expected in (
        ({"offset": svd_llm_v2.PUBLISHED}, [3, 4, 6]),
        ({}, [3, 4, 6]),
        ({"offset": 1e9}, [4, 4, 4]),
    ):
        (ranks,) = with_settings(method, settings).ranks(model, energies, [0.7], costing({}))
        assert list(ranks.values()) == expected
    assert method.trials[0] == {"offset": svd_llm_v2.PUBLISHED}


@pytest.mark.parametrize("budget", [0.8, 0.5, 0.3])
def test_the_program_finds_the_least_error_of_all_profiles(budget: float) -> None:
    """Oracle: every profile whose layers have at least .3 of their parameters (.1 below half), or are dense."""
    generator = np.random.default_rng(7)
    shapes = {"a": (8, 12), "b": (12, 6), "c": (7, 7)}
    errors = {n: np.append(np.sort(generator.exponential(size=min(s)))[::-1], 0.0) for n, s in shapes.items()}
    floor = 0.3 if budget >= 0.5 else 0.1
    allowed = {
        name: [r for r in range(1, min(s)) if floor <= parameters(s, r) / math.prod(s) <= 0.95] + [min(s)]
        for name, s in shapes.items()
    }
    cap = budget * sum(map(math.prod, shapes.values()))
    best = math.inf
    for ranks in itertools.product(*allowed.values()):
        profile = dict(zip(shapes, ranks, strict=True))
        if sum(parameters(shapes[name], rank) for name, rank in profile.items()) <= cap:
            best = min(best, sum(errors[name][rank] for name, rank in profile.items()))
    found = lems.solved(shapes, errors, budget, floor)
    assert found is not None
    assert all(found[name] in allowed[name] for name in shapes)
    assert sum(parameters(shapes[name], rank) for name, rank in found.items()) <= cap
    assert sum(errors[name][rank] for name, rank in found.items()) == pytest.approx(best, rel=1e-4)


def test_a_budget_below_all_profiles_has_none() -> None:
    assert lems.solved({"a": (8, 8)}, {"a": np.linspace(1, 0, 9)}, 0.05, 0.1) is None


def test_biases_of_blocks_by_hand() -> None:
    """Three blocks: h is 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3 at α = 1, and 3, 2, 1 at α = 0."""
    names = ["stem", "blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.2.a"]
    assert list(lems.biases(names, 0.0, 5.0).values()) == pytest.approx([1, 6, 6, 3.5, 1])
    assert list(lems.biases(names, 1.0, 3.0).values()) == pytest.approx([1, 4, 4, 2, 1])
    assert set(lems.biases(names, 2.0, 0.0).values()) == {1.0}
    assert lems.biases(["blocks.0.a", "head"], 1.0, 3.0) == {"blocks.0.a": 1.0, "head": 1.0}


def test_lems_errors_are_distances_spread_by_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Energies 4, 2, 1, 1, 0 …; a tenth of 4096 parameters has rank 3 (375; 4 has 496), beyond which is an eighth."""
    model, _ = elastic(64, 64)
    names, seen = list(nested_layers(model)), dict[str, np.ndarray]()
    energies = {name: torch.tensor([4.0, 2, 1, 1] + [0] * 60) for name in names}
    monkeypatch.setattr(lems, "_best", lambda _, errors, *rest: seen.update(errors))
    lems.ranks(model, energies, [0.5], costing(dict(zip(names, (1.0, 2.0, 3.0), strict=True))))
    for name, weight in zip(names, (1.0, 2.0, 3.0), strict=True):
        assert seen[name] == pytest.approx(weight * 61**2 * np.array([8, 4, 2, 1] + [0] * 61))


def test_large_layers_have_multiples_of_eight_and_small_ones_every_rank() -> None:
    for size, step in ((40, 1), (100, 2), (400, 8), (1000, 8)):
        ranks = lems._curve("a", (size, size), np.zeros(size + 1), 0.1).ranks
        assert set(np.diff(ranks[:-1])) == {step} and not (ranks[:-1] % step).any() and ranks[-1] == size


def test_lems_takes_the_trial_that_is_nearest_to_the_base_model() -> None:
    """Layers alike in energy: without bias any order will do, and the measure wants the last block whole."""
    model, _ = elastic()
    names = list(nested_layers(model))
    energies = {name: torch.linspace(8, 1, 8) for name in names}
    asked = list[dict[str, int]]()

    def distance(model: nn.Module) -> float:
        ranks = {name: layer.rank for name, layer in nested_layers(model).items()}
        if sum(rank < 8 for rank in ranks.values()) > 1:
            asked.append(ranks)
        return sum(place * (8 - rank) for place, rank in enumerate(reversed(ranks.values()), 1)) / 100

    model.main_input_name = "input_ids"
    (found,) = lems.ranks(model, energies, [0.6], Measures(distance, distance))
    assert len({tuple(ranks.values()) for ranks in asked}) == len(asked) > 1
    tried = {tuple(ranks.values()): sum((3 - i) * (8 - r) for i, r in enumerate(ranks.values())) for ranks in asked}
    assert tried[tuple(found.values())] == min(tried.values())
    assert sum(parameters(shape, found[name]) for name, shape in layer_shapes(model).items()) <= 0.6 * 288


@pytest.mark.parametrize(
    ("reads", "budget", "floor"), [("input_ids", 0.5, 0.3), ("input_ids", 0.4, 0.1), ("pixel_values", 0.9, 0.1)]
)
def test_layers_of_a_language_model_keep_more(
    reads: str, budget: float, floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authors': a tenth of a layer below .5 and for images, otherwise three."""
    (model, _), floors = elastic(), list[float]()
    model.main_input_name = reads
    monkeypatch.setattr(lems, "solved", lambda *arguments: floors.append(arguments[-1]))
    names = list(nested_layers(model))
    found = lems.ranks(model, dict.fromkeys(names, torch.ones(8)), [budget], costing(dict.fromkeys(names, 1.0)))
    assert found == [None]
    assert floors == [floor]


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("settings", lems.SETTINGS)
def test_kfac_svd_is_the_best_under_both_moments(
    shape: tuple[int, int], rank: int, settings: Mapping[str, float]
) -> None:
    """Oracle: the trace itself, and alternating least squares between roots of the moments shrunk by hand.

    As coded L_Gᵀ L_G stands for G = L_G L_Gᵀ.
    """
    weight, inputs = drawn(*shape)
    gradients = drawn(shape[1], shape[0])[1]
    pair = inputs @ inputs.T, gradients @ gradients.T
    factors = with_settings(lems.LEMS, settings).factors(weight, pair)
    weights = []
    for moment, part in zip(pair, (0.1, settings["gradient_shrinkage"]), strict=True):
        weights.append((1 - part) * moment + part * moment.trace() / len(moment) * torch.eye(len(moment)).double())
    if settings["as_coded"]:
        root = torch.linalg.cholesky(weights[1])
        weights[1] = root.T @ root
    inside, outside = weights
    lost = weight - prefix(factors, rank)
    loss = float((outside @ lost @ inside @ lost.T).trace())
    roots = [vectors * values.sqrt() @ vectors.T for values, vectors in map(torch.linalg.eigh, weights)]
    assert loss == pytest.approx(least_loss(roots[1] @ weight, roots[0], rank), rel=1e-4)
    assert loss == pytest.approx(float(factors.energies[rank:].sum()), rel=1e-6)


def test_kfac_svd_without_what_tames_it_is_fisher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the moments of `collect_moments`, and the layers that `data_svd` makes of them."""
    for name in ("EDGE", "SHORTEST", "INPUT_SHRINKAGE", "ROUNDING"):
        monkeypatch.setattr(kfac_svd, name, 0.0)
    monkeypatch.setattr(kfac_svd, "LONGEST", math.inf)
    model, batch = build("llama_tied"), batches_of((17, 7))
    layers = select_layers(model)
    expected = collect_moments(model, [batch], layers, side="input", gradient_loss=next_token_loss)
    for name, (inputs, gradients) in kfac_svd.moments(model, [batch], layers, next_token_loss).items():
        assert torch.allclose(inputs, expected[name].moment, rtol=1e-5)
        other = expected[name].gradient_moment
        assert other is not None and torch.allclose(gradients, other, rtol=1e-4, atol=1e-6 * float(other.abs().max()))
    weight, rows = drawn(6, 9)
    pair = rows @ rows.T, torch.arange(1.0, 7).double().diag()
    ours, theirs = kfac_svd.factors(weight, pair, 0.0), data_svd(weight, input_moment=pair[0], gradient_moment=pair[1])
    for rank in (1, 3, 5):
        assert torch.allclose(prefix(ours, rank), prefix(theirs, rank), atol=1e-4)


def test_gradients_lengths_are_bounded_by_hand() -> None:
    """Lengths 0, 1, 2 and 97 of which the mean is 100/3: the bounds are 10/3 and 1000/3; a zero stays."""
    gradients = torch.tensor([[0.0, 0.0], [0.0, 1.0], [2.0, 0.0], [97.0, 0.0]])
    expected = torch.tensor([[0.0, 0.0], [0.0, 10 / 3], [10 / 3, 0.0], [97.0, 0.0]])
    assert torch.allclose(kfac_svd.bounded(gradients), expected)
    long = torch.cat((torch.ones(99, 1), torch.tensor([[901.0]])))  # of mean 10
    assert torch.allclose(kfac_svd.bounded(long)[-1], torch.tensor([100.0]))
    assert torch.equal(kfac_svd.bounded(gradients[:1]), gradients[:1])
    noisy = torch.tensor([[3.0], [1e-6]])
    assert torch.equal(kfac_svd.bounded(noisy), noisy)


@pytest.mark.parametrize(("reads", "edges"), [("input_ids", (2, 0)), ("pixel_values", (0, 0))])
def test_kfac_moments_are_of_each_samples_middle_tokens(reads: str, edges: tuple[int, int]) -> None:
    """Oracle: autograd of one row at a time, without its padding; of 17 tokens 2 go at either end, of 7 none."""
    model, batch = build("llama_tied"), batches_of((17, 7))
    model.main_input_name = reads
    layers, inputs, gradients = select_layers(model), dict[str, Tensor](), dict[str, Tensor]()
    sums = {name: [0.0, 0.0] for name in layers}
    handles = []
    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0][0]})))
        handles.append(
            layer.register_full_backward_hook(lambda *args, name=name: gradients.update({name: args[2][0][0]}))
        )
    for row, length, edge in zip(batch["input_ids"], (17, 7), edges, strict=True):
        logits = model(input_ids=row[None, :length]).logits[0, :-1]
        nn.functional.cross_entropy(logits, row[1:length], reduction="sum").backward()
        for name in layers:
            x, g = inputs[name].detach().double(), gradients[name].double()[edge : length - edge]
            lengths = g.norm(dim=1)
            real = lengths > 1e-5 * lengths.max()
            mean = lengths[real].mean()
            bounded = [one * min(max(one.norm(), mean / 10), 10 * mean) / one.norm() for one in g[real]]
            sums[name][0] += x.T @ x
            sums[name][1] += sum(one[:, None] * one for one in bounded)
    for handle in handles:
        handle.remove()
    found = kfac_svd.moments(model, [batch], layers, next_token_loss)
    for name in layers:
        for ours, theirs in zip(found[name], sums[name], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
