"""Training by a run's settings: one size alone before its export, and which sizes consolidation has cost."""

import logging
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank.artefacts.elastic import load_elastic, read_shapes
from flexrank.data.batches import call_model
from flexrank.distill import distill_
from flexrank.distill.objectives import LogitObjective
from flexrank.distill.step import Step
from flexrank.errors import FlexrankError
from flexrank.files import read_json
from flexrank.hf.models import hidden_states, load_model
from flexrank.nn.switch import full_profile, nested_layers, use_profile
from flexrank.profiles import RankProfile, SlackTable
from flexrank.refit import refit_
from flexrank.run import export_one, run_stages, sizes, training
from flexrank.run.config import load_config
from flexrank.run.directory import RunDirectory
from flexrank.run.sizes import Sizes
from flexrank.run.stages import read_chain
from flexrank.run.training import autocast_dtype, log_degraded_sizes, probe_losses
from flexrank.run.workspace import Workspace
from tiny import relative
from tiny_runs import rerun, summary_of

pytestmark = pytest.mark.usefixtures("verified_here")
#: Three steps: half as many as the run's six, so that its warm-up of one is none.
TUNE = 3


def tuned(directory: Path) -> dict[str, Any]:
    return export_one(run_stages(load_config(directory), "slack"), {"budget": 0.5}, tune=TUNE)


def test_a_size_is_trained_alone_from_the_shared_weights(copied: Path) -> None:
    """Oracle: the same steps of `distill_` on the artefact, at this size alone."""
    elastic = (copied / "elastic" / "elastic.safetensors").read_bytes()
    export = tuned(copied)
    assert (copied / "elastic" / "elastic.safetensors").read_bytes() == elastic and not (copied / "tuning").exists()
    work = run_stages(load_config(copied), "slack").workspace
    model, chain = load_elastic(copied / "elastic")
    profile = chain.at(0.5)
    with use_profile(model, profile):
        shared = work.measure_quality(model)["nats_per_token"]
    objective = LogitObjective(hidden_weight=4.0)
    settings = {"steps": TUNE, "learning_rate": 1e-3, "objective": objective, "seed": work.config.seed}
    settings["autocast"] = autocast_dtype("auto", torch.device("cpu"))
    with hidden_states(model, work.base):
        distill_(model, work.base, work.samples.training, [profile], **settings)
    small, batch = load_model(export["directory"], "language"), work.samples.example
    with torch.no_grad(), use_profile(model, profile):
        assert relative(call_model(small, batch).logits, call_model(model, batch).logits) < 1e-4
        assert export["quality"]["nats_per_token"] == pytest.approx(
            work.measure_quality(model)["nats_per_token"], rel=1e-4
        )
    assert export["shared"]["nats_per_token"] == pytest.approx(shared, rel=1e-4) != export["quality"]["nats_per_token"]


def test_interrupted_tuning_goes_on_to_the_same_bits(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tuned(copied)
    state = Path(whole["directory"], "model.safetensors")
    expected, take = state.read_bytes(), Step.take

    def stop(self: Step, items: Any, number: int, *mean_loss: Any) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return take(self, items, number, *mean_loss)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "take", stop)
        with pytest.raises(KeyboardInterrupt):
            tuned(copied)
    assert list((copied / "tuning").iterdir()) and state.read_bytes() == expected
    other = copied / "tuning" / "of another size"
    other.mkdir()
    assert tuned(copied) == whole and state.read_bytes() == expected
    assert list((copied / "tuning").iterdir()) == [other]


def test_a_tuned_size_keeps_its_limits(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may need more slack than the shared ones; training is not lost when a limit forbids that."""
    outcome, choose, trained = run_stages(load_config(copied), "slack"), sizes.choose_slack, []

    def choose_more(work: Any, model: Any, profiles: Any, known: Any = None) -> Any:
        table = choose(work, model, profiles, known)
        if not trained:
            return table
        return SlackTable(table.dtype, {name: {rank: rank for rank in ranks} for name, ranks in table.columns.items()})

    def train_(*arguments: Any) -> None:
        trained.append(arguments[-1])
        arguments[-1].mkdir()

    monkeypatch.setattr(sizes, "choose_slack", choose_more)
    monkeypatch.setattr(sizes, "train_", train_)
    limit = int(0.7 * sum(parameter.numel() for parameter in outcome.workspace.base.parameters()))
    with pytest.raises(FlexrankError, match=f"tuned, this size has .* out of max_params={limit}; ask for less"):
        export_one(outcome, {"max_params": limit}, tune=TUNE)
    assert trained[0].is_dir() and not (copied / "exports").exists()


def test_slack_is_chosen_for_a_size_of_known_ranks_that_was_not_requested(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vectors are its own: at the same ranks they may need more. It is chosen once."""
    work, chosen = run_stages(load_config(copied), "slack").workspace, []
    small, *_, large = (entry.profile for entry in read_chain(work).requested)
    first, choose = next(iter(small)), sizes.choose_slack
    mixed = RankProfile({**large, first: small[first]})
    monkeypatch.setattr(
        sizes, "choose_slack", lambda work, model, some, known: chosen.extend(some) or choose(work, model, some, known)
    )
    ours = Sizes(work)
    for profile in (small, large, mixed, mixed):
        ours.slack_for(profile)
    assert chosen == [mixed] and mixed not in (small, large)


def test_a_consolidated_model_ends_at_its_largest_trained_size(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Above it the base model is the better one; before consolidation all components are there."""
    work = run_stages(load_config(copied), "slack").workspace
    ours, (before, after) = Sizes(work), [load_elastic(copied / name)[0] for name in ("elastic_initial", "elastic")]
    largest = read_chain(work).requested[-1].profile
    assert ours.chain.entries[-1].profile == largest and len(ours.chain.entries) > len(ours.chain.requested)
    full = {name: min(layer.matrix_shape) for name, layer in nested_layers(before).items()}
    assert full_profile(after) == largest != full == full_profile(before)
    assert ours.within({"budget": 1.0}) == largest and "budget 1 is above the largest size here, 0.8" in caplog.text
    caplog.clear()
    assert ours.within({"budget": 0.8}) == largest and not caplog.text
    base = read_json(copied / "evaluation.json")["base"]
    assert base["mean_rank_fraction"] == base["relative_size"] == 1


@pytest.mark.parametrize(
    ("method", "budgets", "is_base"),
    [("balanced", "[1.0, 0.5]", True), ("paper", "[1.0, 0.5]", False), ("paper", "[1.0]", False)],
)
def test_the_full_size_is_deployed_as_it_was_trained(
    method: str, budgets: str, is_base: bool, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default that is the base model; by the printed method it is not. No other model is read.

    The base model has nothing to learn from itself, and is neither tuned nor fitted.
    """
    config = load_config(copied, [f"allocation.budgets={budgets}", f"distillation.method={method}"])
    run_stages(config, "distill")
    outcome = run_stages(config, "slack")
    for way, option in (("tune_", {"tune": TUNE}), ("refit_", {"refit": True})):
        monkeypatch.setattr(Sizes, way, lambda *_: 1 / 0)
        with pytest.raises(FlexrankError if is_base else ZeroDivisionError) as error:
            export_one(outcome, {"budget": 1.0}, **option)
        refusal = f"--{way[:-1]}: this size is the base model itself"
        assert str(error.value).startswith(refusal) == is_base
    work = outcome.workspace
    batch, elastic = work.samples.example, work.elastic("elastic")[0]
    monkeypatch.setattr(Workspace, "elastic", lambda *_: pytest.fail("the whole elastic model was read"))
    ours = Sizes(work)
    assert ours.within({"budget": 1.0}) == full_profile(elastic)
    small = ours.deployed(full_profile(elastic))
    with torch.no_grad(), use_profile(elastic, full_profile(elastic)):
        logits = [call_model(model, batch).logits for model in (small, elastic, work.base)]
    assert relative(logits[0], logits[1]) < 1e-5 and (relative(logits[0], logits[2]) < 1e-5) == is_base


@pytest.mark.parametrize(("steps", "wanted"), [(0, 0), (10, 100), (80, 50)])
def test_warm_up_takes_the_same_share_of_a_tuning_and_at_most_half(
    steps: int, wanted: int, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(copied, [f"distillation.steps={steps}", "distillation.warmup_steps=20"])
    warmups: list[int] = []

    def record(*_: Any, warmup_steps: int, **__: Any) -> None:
        warmups.append(warmup_steps)

    monkeypatch.setattr(training, "distill_", record)
    work = Workspace(config, RunDirectory(copied))
    training.train_(work, work.base, [], 200, 1e-3, copied / "x")
    assert warmups == [wanted]


def test_training_has_the_settings_of_the_run(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is the default. 30 of 200 steps warm up, so 3 of 20 do."""
    own = {
        "method": "paper", "weight_decay": 0.3, "accumulation": 2, "max_norm": 2.5,
        "optimizer": "adamw_8bit", "gradient_checkpointing": True, "checkpoint_every": 7,
    }  # fmt: skip
    others = {"steps": 200, "warmup_steps": 30, "autocast": "bfloat16"}
    others |= {"hidden_weight": 2, "temperature": 3, "top_k": 5}
    overrides = [f"distillation.{name}={value}" for name, value in (own | others).items()]
    work = Workspace(load_config(copied, ["seed=5", *overrides]), RunDirectory(copied))
    seen: list[Any] = []
    monkeypatch.setattr(training, "distill_", lambda *given, **settings: seen.extend([given, settings]))
    model, profiles, checkpoint, weights, on_step = work.load_base(), [{"a": 1}], copied / "x", [1.0, 2.0], print
    training.train_(work, model, profiles, 20, 0.25, checkpoint, weights, on_step)
    assert all(a is b for a, b in zip(seen[0], (model, work.base, work.samples.training, profiles), strict=True))
    assert seen[1] == own | {
        "objective": LogitObjective(3.0, top_k=5, hidden_weight=2.0), "steps": 20, "learning_rate": 0.25,
        "warmup_steps": 3, "autocast": torch.bfloat16, "seed": 5, "weights": weights, "checkpoint": checkpoint,
        "on_step": on_step,
    }  # fmt: skip


def test_a_run_says_which_sizes_are_worse_than_before(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flexrank"):
        log_degraded_sizes([0.3, 0.8, 0.9], [1.0, 0.5, 0.2], [0.9, 0.6, 0.3])
        log_degraded_sizes([0.3], [1.0], [1.0])
        log_degraded_sizes([0.3], [1.0], [math.nan])
        log_degraded_sizes([0.9, 1.0], [2e-3, -6.5e-9], [1e-3, 2.6e-9])  # a full model that rounding alone has changed
        log_degraded_sizes([0.9, 1.0], [1e-3, 0.0], [1.002e-3, 1.1e-6])
    worse, none, unknown, rounded, little = caplog.messages
    assert worse.endswith("than before, on the probe's samples: 0.8, 0.9") and unknown.endswith("samples: 0.3")
    assert little.endswith("samples: 0.9, 1")
    assert none == rounded and none.startswith("distill: no size is further")


def test_losses_are_those_of_each_profile(copied: Path) -> None:
    """Oracle: KL of the probe's samples by torch, batch by batch."""
    work = run_stages(load_config(copied), "slack").workspace
    model, chain = load_elastic(copied / "elastic")
    profiles = [entry.profile for entry in chain.requested]
    for profile, loss in zip(profiles, probe_losses(work, model, profiles), strict=True):
        total, rows = 0.0, 0
        with torch.no_grad(), use_profile(model, profile):
            for batch in work.samples.probe:
                own, wanted = (
                    call_model(one, batch).logits.log_softmax(-1).flatten(0, 1) for one in (model, work.base)
                )
                total += float((wanted.exp() * (wanted - own)).sum())
                rows += len(own)
        assert loss == pytest.approx(total / rows, rel=1e-4)


def test_what_is_trained_is_read_and_the_rest_is_the_base_models(copied: Path) -> None:
    """Oracle: the whole decomposed model, at every profile; layers that are full compute as the base's own."""
    work = Workspace(load_config(copied), RunDirectory(copied))
    whole, _ = work.elastic("elastic_initial")
    full, batch = full_profile(whole), work.samples.example
    names = list(full)
    small = {name: max(1, rank // 3) for name, rank in full.items()}
    large = {name: full[name] if place % 2 else small[name] + 2 for place, name in enumerate(names)}
    model = work.trained_part([small, large])
    for place, (name, layer) in enumerate(nested_layers(model).items()):
        matrix = work.base.get_submodule(name).weight
        assert len(layer.u) == len(layer.v) == (small[name] if place % 2 else large[name])
        assert (layer.dense is None) != (place % 2)
        assert layer.dense is None or layer.dense.data_ptr() == matrix.data_ptr()
    for profile in (small, large):
        with torch.no_grad(), use_profile(model, profile), use_profile(whole, profile):
            assert relative(call_model(model, batch).logits, call_model(whole, batch).logits) < 1e-5
    model = work.trained_part([large, full])  # which is to be the base in layers that both leave full, too
    for name, layer in nested_layers(model).items():
        assert layer.dense.data_ptr() == work.base.get_submodule(name).weight.data_ptr()
    with torch.no_grad(), use_profile(model, full):
        torch.testing.assert_close(call_model(model, batch).logits, call_model(work.base, batch).logits)
    assert model.model.norm.weight is work.base.model.norm.weight
    assert model.model.embed_tokens.weight is work.base.model.embed_tokens.weight


def test_a_run_consolidates_in_less_memory(finished: Path, tmp_path: Path) -> None:
    """Oracle: what the run gains in 6 steps in float32; in 24 in bfloat16, with states of 8 bits, a third at least."""
    config = load_config(
        finished,
        [f"output={tmp_path / 'run'}", "dtype=bfloat16", "distillation.optimizer=adamw_8bit"]
        + ["distillation.gradient_checkpointing=true", "distillation.steps=24", "evaluation.latency=false"],
    )
    run_stages(config)
    model, chain = load_elastic(tmp_path / "run" / "elastic")
    dtypes = {parameter.dtype for layer in nested_layers(model).values() for parameter in (layer.u, layer.v)}
    assert dtypes == {torch.bfloat16} and model.dtype == torch.bfloat16
    small, _ = load_elastic(tmp_path / "run" / "elastic", 0.5)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    rows, wanted = (
        [row["quality_before"]["nats_per_token"] - row["quality"]["nats_per_token"] for row in summary_of(run)["rows"]]
        for run in (tmp_path / "run", finished)
    )
    assert all(own > other / 3 > 0 for own, other in zip(rows, wanted, strict=True))  # ranks may differ


@pytest.mark.parametrize("keys", [["dtype=bfloat16"], ["distillation.optimizer=adamw_8bit"]])
def test_a_missing_library_is_told_before_the_work(
    keys: list[str], finished: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    config = load_config(finished, [f"output={tmp_path / 'run'}", *keys])
    with pytest.raises(ModuleNotFoundError, match="torchao"):
        run_stages(config)
    assert not (tmp_path / "run").exists()
    assert run_stages(config, "allocate").executed == ("decompose", "probe", "allocate")


def test_a_gpu_is_left_to_the_process_that_times(copied: Path) -> None:
    work = Workspace(load_config(copied), RunDirectory(copied))
    held = weakref.ref(work.base), weakref.ref(work.measure_quality)
    work.free_base()
    assert held[0]() is work.base  # on a CPU it stays
    work.__dict__["device"] = torch.device("cuda")
    work.free_base()
    assert held[0]() is None and held[1]() is None


def test_a_size_is_fitted_alone_from_the_decomposed_weights(copied: Path) -> None:
    """Oracle: `refit_` on the decomposed artefact, with the run's calibration; no step of training is taken."""
    elastic = (copied / "elastic" / "elastic.safetensors").read_bytes()
    outcome = run_stages(load_config(copied), "slack")
    export = export_one(outcome, {"budget": 0.5}, refit=True)
    assert Path(export["directory"]).name == "budget-0.5-refit"
    assert (copied / "elastic" / "elastic.safetensors").read_bytes() == elastic and not (copied / "tuning").exists()
    work = run_stages(load_config(copied), "slack").workspace
    (model, _), chain = load_elastic(copied / "elastic_initial"), read_chain(work)
    shared, _ = load_elastic(copied / "elastic")
    with use_profile(shared, chain.at(0.5)):
        assert export["shared"]["nats_per_token"] == pytest.approx(
            work.measure_quality(shared)["nats_per_token"], rel=1e-4
        )
    refit_(model, chain.at(0.5), work.base, work.samples.calibration)
    small, batch = load_model(export["directory"], "language"), work.samples.example
    with torch.no_grad():
        assert relative(call_model(small, batch).logits, call_model(model, batch).logits) < 1e-4
    assert export["quality"]["nats_per_token"] == pytest.approx(work.measure_quality(model)["nats_per_token"], rel=1e-4)


def test_ranks_of_the_papers_algorithm_are_trained_by_default(copied: Path) -> None:
    """Its chain has profiles between the trained ones, at ranks that a run does not load."""
    levels = "probe.levels=6"
    assert "distill" in rerun(copied, "allocation.method=paper", levels, "deployment.budgets=[0.5]")
    chain = read_chain(Workspace(load_config(copied), RunDirectory(copied)))
    _, kept = read_shapes(copied / "elastic")
    assert len(chain.entries) > len(kept.entries) and len(kept.requested) == 2
    assert [entry.profile for entry in kept.requested] == [entry.profile for entry in chain.requested]
    rows = read_json(copied / "evaluation.json")["rows"]
    assert [row["budget"] for row in rows] == [0.8, 0.5]


def test_where_models_are_kept_makes_no_stage_run_again(copied: Path) -> None:
    assert rerun(copied, "distillation.gradient_checkpointing=true", "distillation.sharded=true") == ()
    assert rerun(copied, "distillation.checkpoint_every=3") == ()
    assert rerun(copied, "distillation.steps=7", until="distill") == ("distill",)
