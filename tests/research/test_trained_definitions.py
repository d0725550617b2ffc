"""What each trained rival trains, for how many steps and in which order, as its paper has it."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from test_trained import BATCH, BUDGETS, training_task
from torch import nn

from flexrank.nn.matrix import matrix_shape
from flexrank.nn.select import select_layers
from flexrank.nn.switch import use_profile
from research.baselines.trained import TRAINED_METHODS, layerskip, ranks
from research.baselines.trained.llm_pruner import taylor_widths
from research.baselines.trained.task import TrainingTask
from tiny import outputs, relative


def record_training(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """In place of training: what was to be trained, and the model's outputs at each step."""
    calls: list[dict[str, Any]] = []

    def recorded(
        task: TrainingTask,
        model: nn.Module,
        parameters: Any,
        objective: Any,
        steps: int,
        rate: float,
        *rest: Any,
        first_batch: int = 0,
    ) -> None:
        before_step = rest[0] if rest else lambda step: None
        seen, places = [], []
        for step in range(steps):
            before_step(step)
            seen.append(outputs(model, BATCH))
            places.append(getattr(objective, "place", None))
        what = {"names": set(parameters), "steps": steps, "rate": rate, "objective": objective}
        calls.append({**what, "seen": seen, "places": places})

    monkeypatch.setattr(TrainingTask, "train_", recorded)
    return calls


def sizes(name: str, steps: int = 40) -> list[tuple[nn.Module, int]]:
    one = training_task(steps=steps)
    found = [
        (copy.deepcopy(size[0]), size[1]) for size in TRAINED_METHODS[name].sizes(one, {"learning_rate": 0.5}) if size
    ]
    assert len(found) == len(BUDGETS)
    return found


@pytest.mark.parametrize("name", ["svd-llm + lora", "svd-llm + lora, joint"])
def test_svd_llm_adapts_one_factor_and_then_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, layers = record_training(monkeypatch), training_task().layers
    sizes(name)
    assert [call["steps"] for call in calls] == [10] * 4 and {call["rate"] for call in calls} == {0.5}
    for call, factor in zip(calls, "uvuv", strict=True):
        assert call["names"] == {f"{name}.{factor}.lora_{part}.default.weight" for name in layers for part in "AB"}


def test_svd_llm_with_joint_ranks_starts_from_the_sizes_of_datasvd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors have the same optimum; a layer of full rank is deployed dense."""
    calls, whole, asked = record_training(monkeypatch), training_task(steps=40), list[Any]()
    chain, model = whole.chain("datasvd", "joint"), whole.decompose("datasvd")
    one = dataclasses.replace(whole, chain=lambda *names: asked.append(names) or chain)
    found = list(TRAINED_METHODS["svd-llm + lora, joint"].sizes(one, {"learning_rate": 0.5}))
    for budget, size, call in zip(BUDGETS, found, calls[::2], strict=True):
        ((elastic, parameters),) = ranks.at(model, chain.at(budget))
        assert size is not None and size[1] == parameters
        with use_profile(elastic, chain.at(budget)):
            assert relative(call["seen"][0], outputs(elastic, BATCH)) < 1e-3  # SVD-LLM has a ridge
    assert asked == [("datasvd", "joint")] and TRAINED_METHODS["svd-llm + lora, joint"].table == "datasvd"


def test_llm_pruner_adapts_what_is_left_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any step the model is the base model without the units that Taylor importance puts last."""
    calls, one = record_training(monkeypatch), training_task()
    sizes("llm-pruner")
    widths = taylor_widths(one)
    units = sum(part.parameters(part.count) for part in widths.units.values())
    dense = sum(m * n for m, n in one.layers.values())
    for call, budget in zip(calls, BUDGETS, strict=True):
        assert call["steps"] == 20
        assert call["names"] == {f"{name}.lora_{part}.default.weight" for name in one.layers for part in "AB"}
        kept = widths.at(int(budget * dense) - (dense - units), 0.8)
        assert kept is not None
        with widths.use(one.teacher, kept) as smaller:
            assert torch.allclose(call["seen"][0], outputs(smaller, BATCH), atol=1e-6)


def test_matformer_trains_all_weights_at_one_width_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_training(monkeypatch)
    one = training_task(steps=40)
    made = []
    for size in TRAINED_METHODS["matformer"].sizes(one, {"learning_rate": 0.5}):
        assert size is not None
        made.append((size[0], outputs(size[0], BATCH)))
    assert made[0][0] is made[1][0]  # one set of weights
    (call,) = calls
    assert call["steps"] == 40 and call["names"] == set(one.weights(made[0][0]))
    drawn = [[torch.equal(seen, wanted) for _, wanted in made] for seen in call["seen"]]
    assert all(sum(row) == 1 for row in drawn) and 10 < sum(row[0] for row in drawn) < 30


def test_layerskip_takes_exits_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three blocks the last is always an exit, and the others in turn."""
    calls, two = record_training(monkeypatch), training_task(steps=40)
    config: Any = copy.deepcopy(two.teacher.config)
    config.num_hidden_layers = 3
    teacher = type(two.teacher)(config).eval()
    layers = {name: matrix_shape(layer) for name, layer in select_layers(teacher).items()}
    one = dataclasses.replace(two, teacher=teacher, layers=layers)
    assert any(TRAINED_METHODS["layerskip"].sizes(one, {"learning_rate": 0.5}))
    (call,) = calls
    assert call["steps"] == 40 and isinstance(call["objective"], layerskip.ExitObjective)
    assert call["places"] == [0, 1] * 20
    assert not all(torch.equal(seen, call["seen"][0]) for seen in call["seen"])  # samples skip blocks


@pytest.mark.parametrize(
    ("name", "decomposition", "allocation", "method", "steps"),
    [
        ("flexrank", "fisher", "joint", "balanced", [40]),
        ("flexrank, printed", "datasvd", "paper", "paper", [40]),
        ("independent", "fisher", "joint", "balanced", [20, 20]),
    ],
)
def test_flexranks_own_forms(
    name: str, decomposition: str, allocation: str, method: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    asked: list[tuple[str, ...]] = []

    def recorded(model: Any, teacher: Any, batches: Any, profiles: Any, **options: Any) -> None:
        calls.append({"profiles": profiles, **options})

    monkeypatch.setattr(ranks, "distill_", recorded)
    whole = training_task(steps=40)
    outer = object()
    one = dataclasses.replace(
        whole,
        output_objective=outer,
        decompose=lambda method: asked.append((method,)) or whole.decompose(method),
        chain=lambda *names: asked.append(names) or whole.chain(*names),
    )
    assert len(list(TRAINED_METHODS[name].sizes(one, {"times_usual": 3.0}))) == len(BUDGETS)
    assert set(asked) == {(decomposition,), (decomposition, allocation)}
    assert [call["steps"] for call in calls] == steps and {call["method"] for call in calls} == {method}
    assert {call["learning_rate"] for call in calls} == {3 * one.default_rate}
    assert all((call["objective"] is outer) == (name == "flexrank, printed") for call in calls)
    if name == "independent":
        wanted = whole.chain("fisher", "joint")
        assert [call["profiles"] for call in calls] == [[wanted.at(budget)] for budget in BUDGETS]
