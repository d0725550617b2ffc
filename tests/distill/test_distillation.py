"""Consolidation: it learns, every profile is served, and its settings do what they say."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from trainings import SETTINGS, SMALL, batches, error_at, weights_of

from flexrank import processes
from flexrank.distill import distill_, distillation_evaluator
from flexrank.distill.objectives import EmbeddingObjective, FeatureObjective, LogitObjective
from flexrank.errors import FlexrankError
from flexrank.nn.switch import full_profile, nested_layers, submodel, uniform_profile, use_profile
from tiny import build, chain_of, nest

RATES = (60, 1e-2, 3)


@pytest.mark.parametrize(
    ("name", "objective", "autocast"),
    [("perceptron", FeatureObjective(), None), ("perceptron", FeatureObjective(), torch.bfloat16),
     ("convnet", FeatureObjective(), None), ("gpt2", LogitObjective(), None), ("bert", EmbeddingObjective(0.5), None),
     ("vit", LogitObjective(2.0), None)],
)  # fmt: skip
def test_every_profile_comes_nearer_to_the_teacher(name: str, objective, autocast: torch.dtype | None) -> None:
    teacher, model = build(name), nest(build(name))
    evaluate = distillation_evaluator(teacher, batches(name), objective)
    profiles = [entry.profile for entry in chain_of(model, (0.3, 0.6)).entries]

    def errors() -> list[float]:
        return [error_at(model, profile, evaluate) for profile in profiles]

    before = errors()
    history = distill_(model, teacher, batches(name), profiles, objective=objective, autocast=autocast, **SETTINGS)
    assert all(after < 0.8 * start for after, start in zip(errors(), before, strict=True))
    assert history.steps == len(history.losses) == 60
    assert full_profile(model) == {n: layer.rank for n, layer in nested_layers(model).items()}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_processes_sum_gradients_of_the_active_prefix_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, summed = nest(build("perceptron")), list[list[tuple[int, ...]]]()
    monkeypatch.setattr(processes, "sum_", lambda tensors: summed.append([tuple(one.shape) for one in tensors]))
    settings = {"method": "paper", "steps": 3, "accumulation": 2, "objective": FeatureObjective()}
    distill_(
        model, build("perceptron"), batches("perceptron"), [SMALL, full_profile(model)], weights=[1, 1e-9], **settings
    )
    ranks = [shape[0] for shape in summed[0] if len(shape) == 2]
    assert ranks == [rank for rank in SMALL.values() for _ in "uv"]
    assert summed == [summed[0]] * 3


def test_one_step_is_adamw_on_the_gradient_of_the_drawn_profile() -> None:
    """Oracle: the same step by hand, two accumulated batches, clipped."""
    teacher, model = build("perceptron"), nest(build("perceptron"))
    twin, data, profile = copy.deepcopy(model), batches("perceptron")[:2], SMALL
    settings = {"steps": 1, "learning_rate": 1e-2, "accumulation": 2, "max_norm": 0.1, "weight_decay": 0.3}
    settings["method"] = "paper"
    distill_(model, teacher, data, [profile], objective=FeatureObjective(), **settings)
    matrices = [p for p in twin.parameters() if p.ndim > 1]
    vectors = [p for p in twin.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
    )
    targets = [teacher(batch).detach() for batch in data]
    squares = sum(target.square().sum() for target in targets)
    with use_profile(twin, profile):
        for batch, target in zip(data, targets, strict=True):
            ((twin(batch) - target).square().sum() / squares).backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    before = copy.deepcopy(twin)
    optimizer.step()
    for name, rank in profile.items():  # what no profile uses does not even decay
        for factor in ("u", "v"):
            untouched = before.get_submodule(name).get_parameter(factor)[rank:]
            twin.get_submodule(name).get_parameter(factor).data[rank:] = untouched
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_both_models_run_under_autocast(autocast: torch.dtype | None) -> None:
    teacher, model, seen = build("perceptron"), nest(build("perceptron")), set()
    for network in (teacher, model):
        network[2].register_forward_hook(lambda layer, _, output: seen.add((type(layer).__name__, output.dtype)))
    distill_(model, teacher, batches("perceptron"), [SMALL], steps=1, autocast=autocast)
    dtype = autocast or torch.float32
    assert seen == {("Linear", dtype), ("NestedLinear", dtype)}


def test_the_evaluator_weights_batches_by_their_rows() -> None:
    """Oracle: all rows in one batch, by the mean over rows of a loss that is one."""
    teacher, model = build("perceptron"), nest(build("perceptron"))
    rows = torch.randn(9, 12)
    with use_profile(model, SMALL):
        parts = distillation_evaluator(teacher, [rows[:2], rows[2:]], EmbeddingObjective())(model)
        whole = 1 - functional.cosine_similarity(model(rows), teacher(rows)).mean().detach()
    assert parts == pytest.approx(float(whole), rel=1e-5)


def test_a_batch_without_a_real_token_is_one_line() -> None:
    teacher, model = build("gpt2"), nest(build("gpt2"))
    data = [{"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.zeros(2, 3, dtype=torch.long)}]
    with pytest.raises(FlexrankError, match="a batch has no real token"):
        distillation_evaluator(teacher, data)
    with pytest.raises(FlexrankError, match="a batch has no real token"):
        distill_(model, teacher, data, [uniform_profile(model, 0.5)], steps=1)


def test_what_is_not_trained_does_not_move() -> None:
    teacher, model = build("llama_tied"), nest(build("llama_tied"))
    model.model.norm.weight.requires_grad_(False)
    model.model.layers[0].mlp.down_proj.v.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outside = {name: value.clone() for name, value in teacher.state_dict().items()}
    distill_(model, teacher, batches("llama_tied"), [full_profile(model) | {"model.layers.0.mlp.up_proj": 2}],
             objective=LogitObjective(), steps=3, learning_rate=1e-2)  # fmt: skip
    after = model.state_dict()
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert torch.equal(after["model.layers.0.mlp.down_proj.v"], before["model.layers.0.mlp.down_proj.v"])
    assert not torch.equal(after["model.layers.0.mlp.down_proj.u"], before["model.layers.0.mlp.down_proj.u"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(after["model.layers.0.mlp.up_proj.u"], before["model.layers.0.mlp.up_proj.u"])
    assert all(torch.equal(value, outside[name]) for name, value in teacher.state_dict().items())
    assert not model.model.norm.weight.requires_grad and model.model.embed_tokens.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_teacher_runs_once_for_each_batch_of_a_sequence() -> None:
    """What is kept gives the same weights as what is computed anew. Three of the six targets fit into 600 bytes."""
    trained, calls = [], []
    for cache, expected in ((2**20, 6), (0, 60), (600, 6 + 9 * 3)):
        teacher, model, count = build("perceptron"), nest(build("perceptron")), [0]
        teacher.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        distill_(model, teacher, batches("perceptron"), [SMALL], teacher_cache=cache, **SETTINGS)
        trained.append(weights_of(model))
        calls.append((count[0], expected))
    assert all(torch.equal(weights, trained[0]) for weights in trained)
    assert all(count == expected for count, expected in calls), calls


@pytest.mark.parametrize(("name", "objective"), [("gpt2", LogitObjective()), ("perceptron", FeatureObjective())])
def test_the_default_objective_is_that_of_the_teachers_output(name: str, objective) -> None:
    teacher, errors = build(name), []
    for given in (None, objective):
        model = nest(build(name))
        profile = {layer: max(1, rank // 2) for layer, rank in full_profile(model).items()}
        evaluate = distillation_evaluator(teacher, batches(name), given)
        before = error_at(model, profile, evaluate)
        distill_(model, teacher, batches(name), [profile], objective=given, steps=3)
        errors.append((before, error_at(model, profile, evaluate)))
    assert errors[0] == errors[1]


def test_the_evaluator_leaves_dropout_out_and_the_modes_alone() -> None:
    teacher = build("bert").train()
    evaluate = distillation_evaluator(teacher, batches("bert"), EmbeddingObjective(0.5))
    model = nest(build("bert")).train()
    assert evaluate(model) < 1e-9 and model.training and teacher.training


def test_components_that_no_profile_uses_stay_and_are_no_work(tmp_path: Path) -> None:
    """The optimiser's state, in the checkpoint, is of used components alone; the model is whole again afterwards."""
    teacher, model = build("convnet"), nest(build("convnet"))
    before, whole = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    large, small = {"0": 2, "3": 9, "6": 6}, {"0": 5, "3": 4, "6": 6}
    settings = {"steps": 4, "learning_rate": 1e-2, "weight_decay": 0.5, "checkpoint": tmp_path / "a"}
    distill_(model, teacher, batches("convnet"), [small, large], **settings)
    saved = safetensors.torch.load_file(tmp_path / "a" / "state.safetensors")
    assert all(model.get_parameter(name) is parameter for name, parameter in whole.items())
    for name, used in {"0": 5, "3": 9, "6": 6}.items():
        layer = model.get_submodule(name)
        assert layer.rank == layer.max_rank
        for factor in ("u", "v"):
            key, now = f"{name}.{factor}", layer.get_parameter(factor)
            assert torch.equal(now[used:], before[key][used:])
            assert all(not torch.equal(a, b) for a, b in zip(now[:used], before[key][:used], strict=True))
            assert torch.equal(saved[key], now[:used])
            assert saved[f"{key}//exp_avg"].shape == saved[f"{key}//exp_avg_sq"].shape == saved[key].shape


def test_the_model_is_whole_after_an_error_too() -> None:
    teacher, model = build("perceptron"), nest(build("perceptron"))
    before = full_profile(model)
    for layer in nested_layers(model).values():
        layer.rank = layer.max_rank - 1
    with pytest.raises(FlexrankError, match="the loss is nan at step 0"):
        distill_(model, teacher, [torch.full((2, 12), float("nan"))], [SMALL], steps=1)
    assert full_profile(model) == before
    assert all(layer.rank == layer.max_rank - 1 for layer in nested_layers(model).values())


def test_gradients_within_the_limit_are_not_touched() -> None:
    """A limit just above the gradient's length trains to the same bits as none."""
    teacher, trained = build("perceptron"), []
    for limit in (1e9, 1e4):
        model = nest(build("perceptron"))
        distill_(model, teacher, batches("perceptron"), [SMALL], max_norm=limit, **SETTINGS)
        trained.append(weights_of(model))
    assert torch.equal(*trained)


def test_likeliest_classes_train_and_more_of_their_targets_are_kept() -> None:
    teacher, calls = build("gpt2"), []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for top_k in (None, 4):
        model, objective = nest(build("gpt2")), LogitObjective(top_k=top_k)
        profile = chain_of(model, (0.4,)).entries[0].profile
        evaluate = distillation_evaluator(teacher, batches("gpt2"))
        before = error_at(model, profile, evaluate)
        calls.clear()
        distill_(model, teacher, batches("gpt2"), [profile], objective=objective, teacher_cache=6000, **SETTINGS)
        counts.append(len(calls))
        assert error_at(model, profile, evaluate) < 0.8 * before
    assert counts[0] > counts[1] == 3


def test_what_cannot_be_trained_is_refused() -> None:
    teacher, model = build("perceptron"), nest(build("perceptron"))
    profile = uniform_profile(model, 0.5)
    with pytest.raises(FlexrankError, match="every parameter has requires_grad=False"):
        distill_(copy.deepcopy(model).requires_grad_(False), teacher, batches("perceptron"), [profile], steps=1)

    class Exploding(FeatureObjective):
        def loss(self, output, target, batch):
            return (output - output.detach()).abs().sqrt().sum()  # zero, with an infinite slope

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FlexrankError, match="the gradient's length is (nan|inf) at step 0"):
        distill_(model, teacher, batches("perceptron"), [profile], objective=Exploding(), steps=1)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_numbers_of_numpy_are_kept_in_a_checkpoint(tmp_path: Path) -> None:
    settings = {"learning_rate": np.float32(1e-3), "weights": np.array([1.0, 2.0]), "weight_decay": np.float32(0.1)}
    settings |= {"steps": np.int64(2), "accumulation": np.int32(1), "seed": np.int64(3)}
    model = nest(build("perceptron"))
    profiles = [SMALL, {name: rank + 1 for name, rank in SMALL.items()}]
    distill_(model, build("perceptron"), batches("perceptron"), profiles, checkpoint=tmp_path / "a", **settings)
    written = json.loads((tmp_path / "a" / "state.json").read_text())["settings"]
    assert written["learning_rate"] == float(np.float32(1e-3)) and written["weights"] == [1.0, 2.0]
    assert (written["steps"], written["accumulation"], written["seed"]) == (2, 1, 3)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    teacher, profile = build("perceptron"), SMALL
    distill_(nest(build("perceptron")), teacher, batches("perceptron"), [profile], steps=2, checkpoint=tmp_path / "a")
    frozen = nest(build("perceptron"))
    frozen[2].v.requires_grad_(False)
    with pytest.raises(FlexrankError, match=r"holds a parameter not trained here, '2.v'; it belongs to another run"):
        distill_(frozen, teacher, batches("perceptron"), [profile], steps=2, checkpoint=tmp_path / "a")
    with pytest.raises(FlexrankError, match="was written with teacher="):
        model, other = (build("perceptron", seed=1) for _ in range(2))
        distill_(nest(model), other, batches("perceptron"), [profile], steps=2, checkpoint=tmp_path / "a")
    with pytest.raises(FlexrankError, match="was written with batches="):  # a pass would be shuffled otherwise
        fewer = list(batches("perceptron"))[:-1]
        distill_(nest(build("perceptron")), teacher, fewer, [profile], steps=2, checkpoint=tmp_path / "a")


def test_batch_norm_statistics_and_dropout_rest() -> None:
    teacher, model = build("convnet"), nest(build("convnet")).train()
    statistics = model[1].running_mean.clone()
    distill_(model, teacher, batches("convnet"), [uniform_profile(model, 0.5)], objective=FeatureObjective(), steps=2)
    assert torch.equal(model[1].running_mean, statistics) and model.training and not teacher.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": []}, "distillation got no batches"),
        ({"batches": iter([])}, "distillation got no batches"),
        ({"chain": []}, "distillation got no profiles"),
        ({"chain": [{"0": 3, "4": 2}]}, "layer '2' is not in the profile"),
        ({"chain": [SMALL | {"0": 99}]}, "layer '0': rank 99 is out of range"),
        ({"chain": [SMALL, {"a": 1}]}, "layer '0' is not in the profile"),
        ({"chain": [SMALL, SMALL | {"0": 2}]}, "give them cheapest first"),
        ({"chain": SMALL}, r"neither a ProfileChain nor a list of profiles, such as \[chain.at\(0.5\)\]"),
        ({"chain": [0.5, 0.8]}, "neither a ProfileChain nor a list of profiles"),
        ({"steps": 0}, "steps is 0"),
        ({"weights": [1, 2]}, "give 1 positive numbers"),
        ({"model": nn.Identity()}, "no elastic layers"),
    ],
)
def test_wrong_uses_are_named(change: dict, message: str) -> None:
    good = {"model": nest(build("perceptron")), "batches": batches("perceptron"), "chain": [SMALL], "steps": 1}
    with pytest.raises(FlexrankError, match=message):
        distill_(teacher=build("perceptron"), **good | change)
    assert all(layer.sizes is None for layer in nested_layers(good["model"]).values() if "batches" not in change)
    with pytest.raises(FlexrankError, match="model and teacher are one network; the teacher is a copy from before"):
        distill_(teacher=good["model"], **good)
    with pytest.raises(FlexrankError, match="model and teacher are one network; the teacher is a copy from before"):
        distill_(teacher=submodel(good["model"], full_profile(good["model"])), **good)


class Remembering(nn.Module):
    """Keeps what its first forward makes, as a table of positions is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(12, 6), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.full((6,), 2.0) * 0.5
        return self.layer(x) * self.kept


def test_what_a_model_keeps_of_an_evaluation_is_used_in_training() -> None:
    torch.manual_seed(0)
    teacher = Remembering().eval()
    model = nest(copy.deepcopy(teacher))
    distillation_evaluator(teacher, batches("perceptron"), FeatureObjective())(model)
    assert distill_(model, teacher, batches("perceptron"), [{"layer": 3}], steps=2).steps == 2


def test_it_trains_where_gradients_are_off() -> None:
    models = [nest(build("perceptron")) for _ in range(2)]
    for model, is_on in zip(models, (True, False), strict=True):
        with torch.set_grad_enabled(is_on):
            distill_(model, build("perceptron"), batches("perceptron"), [SMALL], steps=2)
            assert torch.is_grad_enabled() == is_on
    assert torch.equal(*map(weights_of, models))
