"""Consolidation by transformers' Trainer, against `distill_` and the plain formula."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional

import flexrank as fr
from flexrank.distill.schedule import Schedule
from flexrank.distill.step import loss_scale
from flexrank.distill.trainer import DistillationTrainer
from flexrank.errors import FlexrankError
from flexrank.nn.select import drop_autocast_
from flexrank.nn.switch import layer_shapes, nested_layers
from flexrank.profiles.costs import full_ranks
from launched import ended, started
from tiny import batch_for, build, chain_of, elastic, relative

BUDGETS = (0.25, 0.8)
TOGETHER = {"max_steps": 6, "lr_scheduler_type": "cosine"}
#: What torchrun's processes run: half of the rows each; where to write, and where to import from.
TWO = """
import json, os, sys
from pathlib import Path
place, *imported = map(Path, sys.argv[1:])
sys.path[:0] = map(str, imported)
from safetensors.torch import save_file
from test_trainer import TOGETHER, trainer, weights
ours, *_ = trainer(place, **TOGETHER)
ours.train()
save_file({"weights": weights(ours.model)}, place / f"{os.environ['RANK']}.safetensors")
if os.environ["RANK"] == "0":
    (place / "logs.json").write_text(json.dumps(ours.state.log_history))
"""


def rows() -> list[dict[str, torch.Tensor]]:
    """Eight rows of ten tokens, without padding."""
    ids = torch.randint(3, 64, (8, 10), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]


def trainer(
    place: Path, own: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Any, Any, Any]:
    """A trainer of a tiny Llama with a constant rate, its teacher and its chain; `own` are the Trainer's options."""
    teacher, model = build("llama_untied").to(dtype), elastic("llama_untied").to(dtype)
    for layer in (*model.model.layers, *teacher.model.layers):
        layer.self_attn.attention_dropout = 0.5  # which is to be off
    teacher.register_forward_pre_hook(_refuse_labels, with_kwargs=True)
    chain = chain_of(model, BUDGETS)
    values = {
        "per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "report_to": [], "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(place), **(values | settings))
    return DistillationTrainer(model, teacher, chain, args, train_dataset=rows(), **(own or {})), teacher, chain


def _refuse_labels(_: torch.nn.Module, __: object, names: dict[str, Any]) -> None:
    assert names.keys() == {"input_ids", "attention_mask"}  # for a loss from labels would be in vain


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_are_those_of_distill(accumulation: int, tmp_path: Path) -> None:
    """All eight rows are in each step: the order that the Trainer takes them in changes nothing.

    A profile's first loss is divided by its own root, in halves by each half's: steps are then only near each other.
    """
    bound = 1e-3 if accumulation == 1 else 0.2
    settings = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    ours, teacher, chain = trainer(tmp_path, **TOGETHER, weight_decay=0.3, **settings)
    model, start = copy.deepcopy(ours.model), weights(ours.model)
    batch = {key: torch.stack([row[key] for row in rows()]) for key in ("input_ids", "attention_mask")}
    losses, lengths = [], []
    clip = torch.nn.utils.get_total_norm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "get_total_norm", lambda some: lengths.append(clip(some)) or lengths[-1])
        settings = {"steps": 6, "learning_rate": 1e-3, "weight_decay": 0.3}
        fr.distill_(model, teacher, [batch], chain, on_step=losses.append, **settings)
    ours.train()
    logs = [log for log in ours.state.log_history if "loss" in log]
    assert [log["loss"] for log in logs] == pytest.approx([step.loss for step in losses], rel=bound)
    assert [log["learning_rate"] for log in logs] == pytest.approx([step.learning_rate for step in losses])
    assert [log["grad_norm"] for log in logs] == pytest.approx(list(map(float, lengths)), rel=bound)
    assert relative(weights(ours.model) - start, weights(model) - start) < bound
    assert (weights(ours.model) - start).norm() > 0


def test_in_bfloat16_the_teacher_computes_as_the_student_does(tmp_path: Path) -> None:
    ours, teacher, _ = trainer(tmp_path, bf16=True)
    seen = set()
    for network in (teacher, ours.model):
        network.model.layers[0].mlp.up_proj.register_forward_hook(
            lambda layer, _, output: seen.add((type(layer).__name__, output.dtype))
        )
    for _ in range(2):  # also where the first call has put everything back
        seen.clear()
        ours.train()
        assert seen == {("Linear", torch.bfloat16), ("NestedLinear", torch.bfloat16)}


def test_in_bfloat16_an_evaluation_after_training_is_as_before_it(tmp_path: Path) -> None:
    """The rate is nothing, so the weights stay; both networks compute in bfloat16, and afterwards in float32."""
    ours, *_ = trainer(tmp_path, {"eval_dataset": rows()}, bf16=True, learning_rate=0.0, weight_decay=0.0)
    before = ours.evaluate()["eval_loss"]
    assert ours.model(rows()[0]["input_ids"][None]).logits.dtype == torch.float32
    assert "forward" not in vars(ours.model)
    ours.train()
    assert ours.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-6)


def test_what_a_model_had_before_accelerate_comes_back() -> None:
    layer = torch.nn.Linear(4, 3)
    original = torch.nn.Linear.forward
    layer.forward = lambda x: 2 * original(layer, x)
    expected, accelerator = layer(torch.ones(1, 4)), accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.prepare(layer)._is_accelerate_prepared and drop_autocast_(layer)
    assert torch.equal(layer(torch.ones(1, 4)), expected) and not hasattr(layer, "_is_accelerate_prepared")


def test_after_training_in_bfloat16_the_model_computes_in_its_own_dtype(tmp_path: Path) -> None:
    """accelerate leaves a `forward` with autocast on a model, which copies of it would have."""
    ours, _, chain = trainer(tmp_path, bf16=True)
    ours.train()
    dtypes, batch = [], batch_for("llama_untied")
    for network in (ours.model, fr.deploy(ours.model, chain.at(0.25))):
        network.model.layers[0].mlp.up_proj.register_forward_hook(lambda *parts: dtypes.append(parts[-1].dtype))
        network(**batch)
    assert dtypes == [torch.float32, torch.float32]


def test_a_size_that_accelerate_has_prepared_is_deployed_and_exported_without_autocast(
    tmp_path: Path, verified_here: None
) -> None:
    model = elastic("llama_untied")
    profile, batch = chain_of(model, BUDGETS).at(0.25), batch_for("llama_untied")
    small = fr.deploy(model, profile)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    again = fr.deploy(accelerator.prepare(model), profile)
    assert torch.equal(again(**batch).logits, small(**batch).logits)
    base, full = build("llama_untied"), full_ranks(layer_shapes(model))
    whole = fr.deploy(model, full, base=accelerator.prepare(base))
    assert torch.equal(whole(**batch).logits, build("llama_untied")(**batch).logits)
    tuned = accelerator.prepare(small)
    in_bfloat16 = tuned(**batch).logits
    assert not torch.equal(in_bfloat16, again(**batch).logits)
    fr.export(tuned, tmp_path / "tuned", batch)
    assert torch.equal(tuned(**batch).logits, in_bfloat16)  # training may go on


@pytest.mark.slow
def test_two_processes_train_as_one_does_on_the_rows_of_both(tmp_path: Path) -> None:
    ours, *_ = trainer(tmp_path, **TOGETHER, per_device_train_batch_size=8)
    ours.train()
    (script := tmp_path / "two.py").write_text(TWO)
    tests = Path(__file__).parents[1]
    with started(2, script, tmp_path, tests.parent, tests, tests / "distill") as run:
        _, errors = ended(run)
    assert run.returncode == 0, errors
    first, second = (load_file(tmp_path / f"{number}.safetensors")["weights"] for number in "01")
    assert torch.equal(first, second) and relative(first, weights(ours.model)) < 1e-6
    logs, wanted = json.loads((tmp_path / "logs.json").read_text()), ours.state.log_history
    for log, other in zip(logs, wanted, strict=True):
        assert log == pytest.approx(other, rel=1e-4) or "train_runtime" in log


def test_each_log_has_the_divergence_at_the_profile_of_its_step(tmp_path: Path) -> None:
    """A rate of nothing: the model stays, so that the plain formula gives every loss."""
    settings = {"per_device_train_batch_size": 8, "max_steps": 6, "learning_rate": 1e-30, "seed": 3}
    ours, teacher, chain = trainer(tmp_path, **settings)
    model, ids = copy.deepcopy(ours.model), torch.stack([row["input_ids"] for row in rows()])
    with torch.no_grad():
        wanted, losses = teacher(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1), {}
        for budget in chain.budgets:
            with fr.use_profile(model, chain.at(budget)):
                found = model(ids).logits.log_softmax(-1)
            losses[budget] = float(functional.kl_div(found, wanted, log_target=True, reduction="sum")) / ids.numel()
    ours.train()
    draws, other = ([chain.budgets[Schedule([1.0, 2.0], s, 6, 0, 0).draw(step)] for step in range(6)] for s in (3, 0))
    assert draws != other
    logs = [log for log in ours.state.log_history if "loss" in log]
    for log, budget in zip(logs, draws, strict=True):
        assert log["loss"] == pytest.approx(losses[budget], rel=1e-3)
        assert log[f"loss_at_{budget:g}"] == pytest.approx(losses[budget], rel=1e-4)
        assert sum(key.startswith("loss_at_") for key in log) == 1
    assert len(set(draws)) == 2


def test_losses_fall_at_every_size_and_the_rest_of_the_model_stays(tmp_path: Path) -> None:
    ours, teacher, chain = trainer(tmp_path, max_steps=20, learning_rate=3e-3, gradient_accumulation_steps=2)
    evaluate = fr.distillation_evaluator(teacher, [batch_for("llama_untied")])
    kept = ours.model.model.embed_tokens.weight.clone()

    def errors() -> list[float]:
        found = []
        for budget in BUDGETS:
            with fr.use_profile(ours.model, chain.at(budget)):
                found.append(evaluate(ours.model))
        return found

    before = errors()
    ours.train()
    assert all(new < old for new, old in zip(errors(), before, strict=True)), (before, errors())
    assert torch.equal(ours.model.model.embed_tokens.weight, kept) and ours.model.model.norm.weight.requires_grad
    assert all(len(layer.u) == min(layer.matrix_shape) for layer in nested_layers(ours.model).values())
    assert {module.training for module in ours.model.modules()} == {False}


def test_evaluation_is_at_the_profile_that_the_model_is_set_to(tmp_path: Path) -> None:
    ours, teacher, chain = trainer(tmp_path, per_device_eval_batch_size=8)
    batch = {key: torch.stack([row[key] for row in rows()]) for key in ("input_ids", "attention_mask")}
    wanted = fr.distillation_evaluator(teacher, [batch])
    with fr.use_profile(ours.model, chain.at(0.25)):
        assert ours.evaluate(rows())["eval_loss"] == pytest.approx(wanted(ours.model), rel=1e-4)


def test_while_it_trains_too_and_of_rows_without_labels(tmp_path: Path) -> None:
    unlabelled = [{key: value for key, value in row.items() if key != "labels"} for row in rows()]
    settings = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-30, "per_device_eval_batch_size": 8}
    ours, teacher, chain = trainer(tmp_path, {"eval_dataset": unlabelled}, **settings)
    batch = {key: torch.stack([row[key] for row in unlabelled]) for key in unlabelled[0]}
    with fr.use_profile(ours.model, chain.at(0.25)):
        wanted = fr.distillation_evaluator(teacher, [batch])(ours.model)
        ours.train()
        found = ours.predict(unlabelled)
        logits = ours.model(**batch).logits
    (log,) = [log for log in ours.state.log_history if "eval_loss" in log]
    assert log["eval_loss"] == pytest.approx(wanted, rel=1e-4) == found.metrics["test_loss"]
    torch.testing.assert_close(torch.from_numpy(found.predictions), logits, rtol=1e-4, atol=1e-5)


def test_a_second_call_trains_as_a_new_trainer_does(tmp_path: Path) -> None:
    adam = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
    ours, teacher, chain = trainer(tmp_path, **TOGETHER | {"per_device_train_batch_size": 8, "max_steps": 3} | adam)
    ours.train()
    between, model = weights(ours.model), copy.deepcopy(ours.model)
    other = DistillationTrainer(model, teacher, chain, ours.args, train_dataset=rows())
    for one in (ours, other):
        one.train()
    moved = weights(ours.model) - between
    assert moved.norm() > 0 and relative(moved, weights(other.model) - between) < 1e-3
    assert ours.optimizer.param_groups[0]["betas"] == (0.5, 0.6) and ours.optimizer.param_groups[0]["eps"] == 1e-3


def test_a_wrong_setting_and_a_loss_that_is_not_finite_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(FlexrankError, match="activation_checkpointing"):
        trainer(tmp_path, activation_checkpointing=True)
    with pytest.raises(FlexrankError, match="optim is 'adafactor'; the AdamW of consolidation is adamw_torch or adamw"):
        trainer(tmp_path, optim="adafactor")
    with pytest.raises(FlexrankError, match="fp16 of the Trainer loses small gradients; use bf16=True, or neither"):
        trainer(tmp_path, fp16=True)
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(FlexrankError, match="was given an optimiser or a scheduler, of parameters not trained here"):
        trainer(tmp_path, {"optimizers": (adam, None)})
    ours, teacher, _ = trainer(tmp_path)
    teacher.lm_head.weight.data[3] = math.nan
    with pytest.raises(FlexrankError, match="the loss is nan at step 0"):
        ours.train()


def test_a_loss_that_rounding_takes_below_zero_is_followed_as_it_is(tmp_path: Path) -> None:
    """As a size's is that equals the teacher: it has no root to be divided by."""
    assert [loss_scale(*pair) for pair in [(-1e-9, None), (4.0, None), (4.0, 9.0), (4.0, 0.0)]] == [1, 2, 3, 1]
    ours, _, _ = trainer(tmp_path)
    ours._choice = 0
    assert float(ours._scaled(torch.tensor(-1e-9))) == pytest.approx(-1e-9)


@pytest.mark.parametrize("saved", ["decomposed", "loaded", "by the trainer"])
def test_what_save_pretrained_writes_of_an_elastic_model_is_refused(saved: str, tmp_path: Path) -> None:
    """It has no place for factors, and would draw new layers."""
    ours, teacher, chain = trainer(tmp_path / "out")
    if saved == "by the trainer":
        ours.save_model(str(tmp_path / "final"))
    else:
        fr.save_elastic(ours.model, chain, tmp_path / "first")
        base = type(teacher)(teacher.config)  # of one config with the model that is decomposed
        fr.decompose_(teacher, list(fr.select_layers(teacher)), method="svd")
        base.save_pretrained(tmp_path / "base")
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert base.config is base.model.config is not teacher.config is teacher.model.config
        model = teacher if saved == "decomposed" else fr.load_elastic(tmp_path / "first")[0]
        model.save_pretrained(tmp_path / "final")
        fr.deploy(model, chain.at(0.8)).save_pretrained(tmp_path / "small")
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with pytest.raises(
        FlexrankError, match="save_pretrained wrote these factors of an elastic model; save it with fr.save_elastic"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    fr.save_elastic(ours.model, chain, tmp_path / "elastic")
    assert "quantization_config" not in json.loads((tmp_path / "elastic" / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_resumes_to_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    whole, _, _ = trainer(tmp_path / "whole", dtype=dtype, **settings)
    again, _, _ = trainer(tmp_path / "again", dtype=dtype, **settings)
    with torch.compiler.set_stance("force_eager"):  # torchao's steps, for which a CPU would need a compiler
        whole.train()
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.model.lm_head.u.dtype == dtype
    assert torch.equal(weights(again.model), weights(whole.model))


def test_the_teacher_drops_nothing_outside_training_either(tmp_path: Path) -> None:
    """It comes in training mode, as the user's own fine-tuning leaves it."""
    teacher, model = build("llama_untied").train(), elastic("llama_untied")
    for layer in teacher.model.layers:
        layer.self_attn.attention_dropout = 0.5
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    ours = DistillationTrainer(model, teacher, chain_of(model, BUDGETS), args, eval_dataset=rows())
    assert ours.evaluate()["eval_loss"] == pytest.approx(0, abs=1e-6)
    with pytest.raises(FlexrankError, match="model and teacher are one network"):
        DistillationTrainer(model, model, chain_of(model, BUDGETS), args)
