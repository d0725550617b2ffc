"""Trained rivals as wholes: sizes within their limits, training that helps, and models that they do not know."""

import contextlib
import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from flexrank.calibrate import collect_moments
from flexrank.data.batches import call_model
from flexrank.decompose import decompose_
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective
from flexrank.distill.step import Step
from flexrank.nn.blocks import block_stack
from flexrank.nn.matrix import matrix_shape
from flexrank.nn.select import select_layers
from research.baselines.method import NotApplicable
from research.baselines.statistics import next_token_loss
from research.baselines.trained import TRAINED_METHODS, acip, layerskip, llm_pruner, lora
from research.baselines.trained.task import TrainingTask
from research.originals.acip import Labels
from tiny import batch_for, build, chain_of, outputs, same_state

BATCH = batch_for("llama_tied")
BUDGETS = (0.8, 0.5)


def training_task(name: str = "llama_tied", steps: int = 4, budgets: tuple[float, ...] = BUDGETS) -> TrainingTask:
    teacher, batch = build(name), batch_for(name)
    exclude = {"bert": ["pooler"], "vit": ["patch_embeddings"]}.get(name, [])
    layers = select_layers(teacher, exclude=exclude)

    def decomposed(method: str = "datasvd") -> nn.Module:
        model = copy.deepcopy(teacher)
        chosen = select_layers(model, exclude=exclude)
        loss = objective.fisher_loss if method == "fisher" else None
        decompose_(model, collect_moments(model, [batch], chosen, gradient_loss=loss), method=method)
        return model

    objective: Any = EmbeddingObjective() if name == "bert" else LogitObjective()
    return TrainingTask(
        teacher, [batch], [batch] * 2, budgets, steps, steps // len(budgets), objective, objective,
        None if name in ("bert", "vit") else next_token_loss, decomposed,
        lambda method, allocation: chain_of(decomposed(), budgets[::-1]), lambda model: contextlib.nullcontext(),
        {one: matrix_shape(layer) for one, layer in layers.items()}, 1e-2, None, 0,
    )  # fmt: skip


@torch.no_grad()
def test_the_task_is_the_models_own_loss() -> None:
    """Oracle: transformers' loss of labels; padded tokens are none."""
    model = build("llama_tied")
    labels = BATCH["input_ids"].masked_fill(BATCH["attention_mask"] == 0, -100)
    wanted = float(model(**BATCH, labels=labels).loss)
    objective = Labels()
    assert float(objective.loss(model(**BATCH), objective.target(None, BATCH), BATCH)) == pytest.approx(
        wanted, rel=1e-5
    )


@pytest.mark.parametrize("name", TRAINED_METHODS)
@pytest.mark.parametrize("kind", ["llama_tied", "bert"])
def test_every_method_gives_sizes_within_their_limits(name: str, kind: str) -> None:
    one, method = training_task(kind), TRAINED_METHODS[name]
    before = copy.deepcopy(one.teacher)
    found = []
    for budget, size in zip(BUDGETS, method.sizes(one, method.trials[-1]), strict=True):
        assert size is not None
        model, parameters = size
        assert parameters <= one.parameter_limit(budget)
        found.append(outputs(model, BATCH))
    assert same_state(one.teacher, before)
    wanted = outputs(one.teacher, BATCH)
    assert all(bool(torch.isfinite(one).all()) and not torch.equal(one, wanted) for one in found)


@pytest.mark.parametrize("name", ["llm-pruner", "matformer", "layerskip"])
@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_widths_and_depths_of_other_transformers(name: str, kind: str) -> None:
    one, method = training_task(kind, budgets=(0.6,)), TRAINED_METHODS[name]
    (size,) = method.sizes(one, method.trials[-1])
    assert size is not None and 0.5 * one.parameter_limit(0.6) < size[1] <= one.parameter_limit(0.6)
    found, wanted = (outputs(model, batch_for(kind)) for model in (size[0], one.teacher))
    assert found.shape == wanted.shape and not torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["llm-pruner", "matformer", "layerskip", "svd-llm + lora", "acip"])
def test_a_size_below_all_of_a_method_is_none(name: str) -> None:
    method = TRAINED_METHODS[name]
    assert list(method.sizes(training_task(budgets=(0.02, 0.01)), method.trials[-1])) == [None, None]


@pytest.mark.parametrize("name", TRAINED_METHODS)
def test_training_brings_sizes_nearer_to_the_base_model(name: str) -> None:
    method = TRAINED_METHODS[name]
    settings = {**method.trials[-1], **({"times_usual": 1.0} if "times_usual" in method.trials[-1] else {})}
    objective, means = LogitObjective(), []
    for steps in (4, 60):
        one = training_task(steps=steps)
        target = objective.target(call_model(one.teacher, BATCH), BATCH)
        losses = []
        for size in method.sizes(one, settings):
            assert size is not None
            with torch.no_grad():
                losses.append(float(objective.loss(call_model(size[0], BATCH), target, BATCH)))
        means.append(sum(losses))
    assert means[1] < 0.9 * means[0]


def test_limits_by_hand() -> None:
    one = training_task()
    dense = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48)
    whole = sum(parameter.numel() for parameter in one.teacher.parameters())
    assert one.parameter_limit(1.0) == whole and one.parameter_limit(0.5) == whole - dense + dense // 2
    assert layerskip.depth_within(one, dict(block_stack(one.teacher, one.layers)), one.parameter_limit(0.6)) == 1
    assert layerskip.depth_within(one, dict(block_stack(one.teacher, one.layers)), one.parameter_limit(0.1)) is None


def test_fast_parameters_learn_at_their_own_rate() -> None:
    """Oracle: AdamW's first step is the learning rate times the gradient's sign, but for its warm-up's share."""
    one, model = training_task(), build("llama_tied", seed=3)
    before = copy.deepcopy(model)
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    parameters = {name: dict(model.named_parameters())[name] for name in names}
    seen: list[int] = []
    one.train_(model, parameters, LogitObjective(), 1, 1e-3, seen.append, fast_parameters=names[1:], fast_factor=5.0)
    old = dict(before.named_parameters())
    steps = [float((parameters[name] - old[name]).detach().abs().max()) for name in names]
    assert steps == pytest.approx([1e-3, 5e-3], rel=1e-2) and seen == [0]
    assert all(torch.equal(value, old[name]) for name, value in model.named_parameters() if name not in names)


@pytest.mark.parametrize("decays", [False, True])
def test_a_rate_decays_or_stays(decays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 40 steps warms up; by hand, the last is then at (1 + cos(π 38 / 39)) / 2 of the rate."""
    one, model, rates = training_task(), build("llama_tied", seed=3), list[float]()
    optimizers: list[Any] = []

    def record(optimizer: Any, rate: float) -> None:
        optimizers.append(optimizer)
        rates.append(rate)

    monkeypatch.setattr("research.baselines.trained.task.set_rate", record)
    parameters = {"model.norm.weight": dict(model.named_parameters())["model.norm.weight"]}
    one.train_(model, parameters, LogitObjective(), 40, 1.0, decays=decays)
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(0.00162 if decays else 1.0, abs=1e-5)
    assert (rates[1:] == [1.0] * 39) != decays
    assert optimizers[0].defaults["fused"]  # as flexrank's own, whose seconds are compared


@pytest.mark.parametrize("name", ["acip", "svd-llm + lora"])
def test_a_second_phase_goes_on_in_the_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many batches as there are steps are each taken once."""
    one, taken, take = training_task(steps=10, budgets=(0.5,)), list[int | None](), Step.take

    def record(step: Step, batches: Any, number: int) -> Any:
        taken.extend(index for index, _ in batches)
        return take(step, batches, number)

    monkeypatch.setattr(Step, "take", record)
    method = TRAINED_METHODS[name]
    list(method.sizes(dataclasses.replace(one, batches=[BATCH] * 10), method.trials[0]))
    assert sorted(map(str, taken)) == sorted(map(str, range(10)))


@pytest.mark.parametrize(("name", "part"), [("svd-llm + lora", lora), ("llm-pruner", llm_pruner)])
def test_sizes_at_other_rates_start_from_what_was_prepared(
    name: str, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, method = list[Any](), TRAINED_METHODS[name]
    prepare = "_whitened" if part is lora else "taylor_widths"
    original = getattr(part, prepare)

    def counted(task: TrainingTask) -> Any:
        made.append(task.budgets)
        return original(task)

    monkeypatch.setattr(part, prepare, counted)
    (setting,) = method.trials[0]
    sizes = list(method.sizes_at(one := training_task(), {0.8: 1e-3, 0.5: 2e-3}))
    assert made == [[0.8]] and len(sizes) == 2
    alone = list(method.sizes(dataclasses.replace(one, budgets=(0.5,), kept={}), {setting: 2e-3}))
    assert sizes[1] is not None and alone[0] is not None and same_state(sizes[1][0], alone[0][0])


class Watched(acip.Pressure):
    """Keeps the distance from the line at each step."""

    def update(self, step: int) -> None:
        super().update(step)
        share = self.share({name: layer.score for name, layer in self.layers.items()})
        vars(self).setdefault("distances", []).append(share - self.wanted(step))


@pytest.mark.parametrize("steps", [96, 160])
def test_acip_follows_its_line_to_the_smallest_size(steps: int) -> None:
    """Within a tenth of the dense parameters at each step, and within .03 at the end."""
    one = training_task(budgets=(0.8, 0.3))
    model, layers = acip.scored(one)
    pressure = Watched(layers, 0.3, steps)
    acip.learn_order(one, model, pressure)
    distances = vars(pressure)["distances"]
    assert len(distances) == steps + 1 and max(map(abs, distances)) < 0.1 and abs(distances[-1]) < 0.03


def test_scores_and_adapters_learn_at_their_rates() -> None:
    """By hand: in one step AdamW takes scores by the whole rate 5 / 1, and adapters by .05 of it."""
    one = training_task()
    model, layers = acip.scored(one)
    before = {name: layer.down.detach().clone() for name, layer in layers.items()}
    for layer in layers.values():
        layer.up.data.fill_(0.1)  # so that what is before it has gradients
        layer.score.data.fill_(10.0)  # which all fall, as λ is 10 in the one step
    acip.learn_order(one, model, acip.Pressure(layers, 0.5, 1, 1e-7))
    scores = torch.cat([layer.score.detach() for layer in layers.values()])
    assert torch.allclose(scores, torch.tensor(5.0), atol=1e-2)
    steps = [float((layer.down - before[name]).detach().abs().max()) for name, layer in layers.items()]
    assert steps == pytest.approx([0.25] * len(layers), rel=5e-2)


def test_adapters_have_the_authors_share_of_a_layers_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs have 32 ranks in layers 4096 wide, or a little more."""
    assert acip.ADAPTER * 4096 == 32
    assert {len(one.down) for one in acip.scored(training_task())[1].values()} == {1}
    monkeypatch.setattr(acip, "ADAPTER", 1 / 8)
    layers = acip.scored(training_task())[1]
    assert {name.rsplit(".", 1)[1]: len(one.down) for name, one in layers.items()} == {
        "q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 4, "gate_proj": 4, "up_proj": 4, "down_proj": 4,
    }  # fmt: skip
    assert {len(one.down) for one in acip.scored(training_task(), 3)[1].values()} == {3}


#: By model, the methods that do not know it: fused queries of groups; no blocks to leave out, and no linear layers.
UNKNOWN = {
    "phi3": {"llm-pruner", "matformer"},
    "convnet": {"llm-pruner", "matformer", "layerskip", "svd-llm + lora", "svd-llm + lora, joint", "acip"},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in UNKNOWN.items() for name in sorted(names)])
def test_a_model_that_a_method_does_not_know_is_named(kind: str, name: str) -> None:
    one, method = training_task(kind), TRAINED_METHODS[name]
    with pytest.raises(NotApplicable, match="not known|no stack|convolution"):
        next(method.sizes(one, method.trials[-1]))
