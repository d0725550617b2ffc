"""The probe against a plain loop that truncates by hand."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from flexrank.calibrate import Moments, collect_moments
from flexrank.data.batches import call_model, output_tensor
from flexrank.decompose import decompose_
from flexrank.distill import distillation_evaluator
from flexrank.distill.objectives import FeatureObjective, LogitObjective
from flexrank.errors import FlexrankError
from flexrank.nn.elastic import NestedLayer
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_matrices, full_profile, nested_layers, use_profile
from flexrank.probe import Evaluate, curvature_sensitivity, probe_sensitivity
from flexrank.profiles import SensitivityTable
from flexrank.profiles.costs import rank_block
from tiny import batch_for, build, nest, with_sizes


def assert_is_a_plain_loop(table: SensitivityTable, model: nn.Module, evaluate: Evaluate) -> None:
    """Every error is that of a whole evaluation, bit for bit."""
    full = full_profile(model)
    with full_matrices(model, 2**32):
        assert table.baseline == evaluate(model)
        for layer in full:
            for rank, error in zip(table.ranks[layer], table.errors[layer], strict=True):
                with use_profile(model, full | {layer: rank}):
                    assert error == evaluate(model) - table.baseline


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_tied", "dinov3", "convnet", "perceptron", "tied_blocks"])
def test_probe_equals_a_plain_loop(name: str) -> None:
    teacher, model = build(name), nest(build(name))
    evaluate = distillation_evaluator(teacher, [batch_for(name)] * 2, FeatureObjective())
    table = probe_sensitivity(model, evaluate, num_levels=3)
    assert table.baseline == pytest.approx(evaluate(model), rel=1e-4, abs=1e-9)
    assert_is_a_plain_loop(table, model, evaluate)
    assert full_profile(model) == {n: layer.rank for n, layer in nested_layers(model).items()}
    assert not any("forward" in vars(module) for module in model.modules())


def test_full_layers_multiply_by_a_matrix_that_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = nest(build("bert")), batch_for("bert")
    layers = nested_layers(model)
    wanted = output_tensor(call_model(model, batch))
    seen: list[str] = []
    names = {id(layer): name for name, layer in layers.items()}
    active = NestedLayer.active.fget
    monkeypatch.setattr(NestedLayer, "active", property(lambda layer: seen.append(names[id(layer)]) or active(layer)))
    with full_matrices(model, 2**30):
        seen.clear()  # of what made the matrices
        torch.testing.assert_close(output_tensor(call_model(model, batch)), wanted, rtol=1e-5, atol=1e-6)
        assert not seen
        name, layer = next(iter(layers.items()))
        with use_profile(model, {**full_profile(model), name: 1}):
            call_model(model, batch)
        assert seen == [name] and layer.matrix.shape == layer.matrix_shape
    assert all(layer.full_matrix is None for layer in layers.values())
    last = layers[list(layers)[-1]]
    with full_matrices(model, last.matrix.nbytes):  # room for one
        assert [name for name, layer in layers.items() if layer.full_matrix is not None] == [list(layers)[-1]]


def test_what_runs_before_the_probed_layer_does_not_run() -> None:
    model = nest(build("bert"))
    runs: dict[str, list[int]] = {"attention": [0, 0], "query": [0, 0]}

    def count(module: nn.Module, seen: list[int], index: int) -> None:
        own = module.forward

        def forward(*args: object, **kwargs: object) -> object:
            seen[index] += 1
            return own(*args, **kwargs)

        module.forward = forward

    for index, block in enumerate(model.encoder.layer):
        count(block.attention.self, runs["attention"], index)
        count(block.attention.self.query, runs["query"], index)
    evaluate = distillation_evaluator(build("bert"), [batch_for("bert")], FeatureObjective())
    probe_sensitivity(model, evaluate, num_levels=3)
    # Baseline and survey; a recording of each block, which runs the block before; a check of block 0 and one of block 1
    # without what is before it; 2 ranks of 6 layers of block 0. In its own block attention runs for its three
    # projections alone.
    assert runs["attention"] == [2 + 1 + 3 * 2 + 1, 2 + 1 + 1 + 6 * 2 + 1 + 1 + 3 * 2]
    assert runs["query"] == [2 + 1 + 1 * 2 + 1, 2 + 1 + 1 + 6 * 2 + 1 + 1 + 1 * 2]


class Added(nn.Module):
    """An operation in place on what an elastic layer returned: its output cannot be replayed, its block's can."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y += x
        return self.b(y)


class AddedTo(nn.Module):
    """A block that changes its input, which the block before returned, in place: no block can be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.linear(x))


class Stack(nn.Module):
    """Blocks run in this order: where it is not the listed one, at full rank a replay would not be noticed."""

    def __init__(self, block: Callable[[], nn.Module], order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList([block() for _ in range(3)]), order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for index in self.order:
            x = self.blocks[index](x)
        return x


def layer_and_tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


@pytest.mark.parametrize(
    ("block", "order", "message"),
    [
        (Added, (0, 1, 2), "cannot reuse all modules in the block of layer blocks.0.a"),
        (AddedTo, (0, 1, 2), "cannot reuse the blocks before layer blocks.2.linear"),
        (layer_and_tanh, (2, 1, 0), ""), (layer_and_tanh, (0, 1, 2, 0, 1, 2), ""), (layer_and_tanh, (0, 1, 0, 2), ""),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_run(
    block: Callable[[], nn.Module], order: tuple[int, ...], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = Stack(block, order)
    model = nest(copy.deepcopy(teacher))
    evaluate = distillation_evaluator(teacher, [torch.randn(4, 6)] * 2, FeatureObjective())
    with caplog.at_level("INFO", "flexrank"):
        table = probe_sensitivity(model, evaluate, num_levels=3)
    assert message in caplog.text
    assert_is_a_plain_loop(table, model, evaluate)
    assert all(errors[0] > 0 for errors in table.errors.values())


@pytest.mark.parametrize(("min_saving", "slack_share"), [(0.25, 0.1), (0.5, 0.1), (0.25, 0.75), (0.0, 0.0)])
def test_probed_ranks_are_those_worth_having(min_saving: float, slack_share: float) -> None:
    """By hand: r·(m + n − r + p) multiply-adds with p = ⌈share·r⌉ are at most the dense ones less the saving."""
    model, x = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 50)), torch.randn(64, 40)
    rule = {"spacing": "parameters", "min_saving": min_saving, "slack_share": slack_share}
    moments = moments_for_curvature(model, [x])
    decompose_(model, moments)
    probed = probe_sensitivity(model, lambda m: float(m(x).square().mean()), 5, **rule)
    assert probed.ranks == curvature_sensitivity(model, moments, 64, 5, **rule).ranks
    for name, (m, n) in {"0": (30, 40), "2": (50, 30)}.items():
        costs = {r: r * (m + n - r + min(r, math.ceil(slack_share * r))) for r in range(1, 31)}
        worth_it = [rank for rank, cost in costs.items() if cost <= (1 - min_saving) * m * n]
        *below, full = probed.ranks[name]
        assert full == 30 and len(below) == 4 and set(below) <= set(worth_it)
        assert below[-1] == worth_it[-1] or min_saving == 0


@pytest.mark.parametrize(
    "full, block", [(4096, 32), (512, 32), (511, 16), (384, 16), (256, 16), (64, 4), (31, 1), (3, 1)]
)
def test_a_block_is_a_power_of_two_that_leaves_sixteen(full: int, block: int) -> None:
    assert rank_block((full, 2 * full)) == rank_block((full + 7, full)) == block


def test_an_interrupted_probe_resumes_to_the_same_bits(tmp_path: Path) -> None:
    teacher, path = build("bert"), tmp_path / "probe.json"
    evaluate = distillation_evaluator(teacher, [batch_for("bert")], FeatureObjective())
    expected = probe_sensitivity(nest(build("bert")), evaluate, num_levels=3)
    calls = 0

    def stopping(model: nn.Module) -> float:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt
        return evaluate(model)

    model = nest(build("bert"))
    with pytest.raises(KeyboardInterrupt):
        probe_sensitivity(model, stopping, num_levels=3, checkpoint=path)
    assert all(layer.rank == layer.max_rank for layer in nested_layers(model).values())
    calls = 100
    assert probe_sensitivity(model, stopping, num_levels=3, checkpoint=path) == expected
    assert calls - 100 < 2 + 6 + 2 * 13  # baseline and survey, two recordings, four checks, and all probes
    with pytest.raises(FlexrankError, match="belongs to another probe"):
        probe_sensitivity(model, evaluate, num_levels=4, checkpoint=path)
    with pytest.raises(FlexrankError, match="belongs to another probe"):  # the full model gives nearly the same
        probe_sensitivity(model, lambda m: 1.1 * evaluate(m), num_levels=3, checkpoint=path)
    # Another number of threads rounds otherwise.
    assert probe_sensitivity(model, lambda m: evaluate(m) * (1 + 1e-6), num_levels=3, checkpoint=path) == expected


def test_wrong_uses_are_named() -> None:
    model = nest(build("perceptron"))
    with pytest.raises(FlexrankError, match="num_levels is 1"):
        probe_sensitivity(model, lambda m: 0.0, num_levels=1)
    with pytest.raises(FlexrankError, match="evaluate is 3; it is a function of a model, as distillation_evaluator"):
        probe_sensitivity(model, 3)
    for value in (None, "1", torch.zeros(2)):
        with pytest.raises(FlexrankError, match=f"the full model gave a {type(value).__name__}; it must be one number"):
            probe_sensitivity(model, lambda m, value=value: value)
    assert probe_sensitivity(model, lambda m: torch.tensor([1.0])).baseline == 1
    with pytest.raises(FlexrankError, match="evaluating layer '0' at rank .* gave nan"):
        full = full_profile(model)["0"]
        probe_sensitivity(model, lambda m: 1.0 if m[0].rank == full else float("nan"), num_levels=2)


def moments_for_curvature(model: nn.Module, batches: list[torch.Tensor]) -> Moments:
    loss = LogitObjective().fisher_loss
    return collect_moments(model, batches, select_layers(model), side="input", gradient_loss=loss)


def test_curvature_is_the_trace_formula_at_every_rank() -> None:
    """½ tr(G ΔW Σ ΔWᵀ) by plain products, layer by layer and rank by rank, in float64."""
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).double()
    moments = moments_for_curvature(model, [torch.randn(32, 6, dtype=torch.float64) for _ in range(3)])
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in moments}
    decompose_(model, moments)
    table = curvature_sensitivity(model, moments, rows=96, num_levels=4, spacing="ranks")
    for name, layer in nested_layers(model).items():
        moment = moments[name]
        for rank, error in zip(table.ranks[name], table.errors[name], strict=True):
            change = weights[name] - (layer.u[:rank].T @ layer.v[:rank]).detach()
            expected = torch.trace(moment.gradient_moment / 96 @ change @ (moment.moment / 96) @ change.T) / 2
            assert error == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
        assert table.errors[name][-1] == 0


def test_curvature_of_a_consolidated_model_reads_factors_through_its_vectors() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).double()
    moments = moments_for_curvature(model, [torch.randn(32, 6, dtype=torch.float64)])
    decompose_(model, moments)
    plain = curvature_sensitivity(model, moments, 32, 4, spacing="ranks")
    for layer in nested_layers(model).values():
        layer.set_sizes_([layer.max_rank])
        assert layer.sizes is not None
        layer.sizes.outputs.detach().mul_(3)
    scaled = curvature_sensitivity(model, moments, 32, 4, spacing="ranks")
    for name, errors in plain.errors.items():  # a quadratic form of the matrix that is lost
        assert scaled.errors[name] == pytest.approx([9 * error for error in errors], rel=1e-9)


def test_curvature_predicts_a_small_divergence() -> None:
    """One linear layer that loses little: the divergence is its curvature, where inputs tell nothing of gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8)).double()
    with torch.no_grad():
        model[1].weight.mul_(0.05)
    batches = [torch.randn(4000, 12, dtype=torch.float64)]
    moments = moments_for_curvature(model, batches)
    teacher = copy.deepcopy(model)
    decompose_(model, moments)
    evaluate = distillation_evaluator(teacher, batches, LogitObjective())
    probed = probe_sensitivity(model, evaluate, 4, spacing="ranks")
    curved = curvature_sensitivity(model, moments, 4000, 4, spacing="ranks")
    assert curved.errors["1"][:-1] == pytest.approx(probed.errors["1"][:-1], rel=0.1)


def test_curvature_names_what_it_lacks() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    moments = collect_moments(model, [torch.randn(8, 6)], select_layers(model), side="input")
    decompose_(model, moments)
    with pytest.raises(
        FlexrankError, match="layer '0': its matrix at full rank is not the product of its factors; probe before"
    ):
        curvature_sensitivity(with_sizes(copy.deepcopy(model), dense=True), moments, 8)
    with pytest.raises(
        FlexrankError, match="layer '0': its matrix at full rank is not the product of its factors; probe before"
    ):
        probe_sensitivity(with_sizes(copy.deepcopy(model), dense=True), lambda _: 0.0, 4)
    read = copy.deepcopy(model)  # as a budget of an artefact is
    read[2].u, read[2].v = (nn.Parameter(factor[:2]) for factor in (read[2].u, read[2].v))
    read[2].rank = 2
    with pytest.raises(
        FlexrankError, match="layer '2': its matrix at full rank is not the product of its factors; probe before"
    ):
        probe_sensitivity(read, lambda _: 0.0, 4)
    with pytest.raises(FlexrankError, match="layer '0': curvature needs"):
        curvature_sensitivity(model, moments, 8)
    with pytest.raises(FlexrankError, match="rows is 0"):
        curvature_sensitivity(model, moments, 0)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 6), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.trunk(x))
        return self.a(hidden), self.b(hidden)


def test_layers_that_the_evaluation_does_not_reach_are_named(caplog: pytest.LogCaptureFixture) -> None:
    teacher = TwoHeads()
    model = nest(copy.deepcopy(teacher))
    probe_sensitivity(model, distillation_evaluator(teacher, [torch.randn(8, 12)]), num_levels=3)
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [
        "probe: no rank of b changes the evaluation, so they get the smallest; if nothing reads them, exclude them "
        "(in a run `layers.exclude`), and otherwise change the evaluation"
    ]


def test_an_evaluation_that_gives_another_value_is_refused() -> None:
    model, values = nest(build("perceptron")), iter([4.0, 0.0])
    with pytest.raises(FlexrankError, match="evaluate gave 4 for the full model, and then 0; it must read the same"):
        probe_sensitivity(model, lambda _: next(values), num_levels=3)
