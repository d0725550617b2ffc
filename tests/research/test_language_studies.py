"""The studies on language models, each whole, on a tiny random model and few steps."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flexrank.allocate import allocate_ranks
from flexrank.calibrate import Hooks, collect_moments
from flexrank.data.batches import call_model
from flexrank.data.metrics import nats_per_token
from flexrank.decompose import decompose_
from flexrank.deployment import deploy
from flexrank.distill import distill_, distillation_evaluator
from flexrank.distill.objectives import LogitObjective
from flexrank.errors import FlexrankError
from flexrank.hf.models import hidden_states
from flexrank.nn.select import select_layers
from flexrank.nn.switch import full_profile, use_profile
from flexrank.probe import probe_sensitivity
from flexrank.run.candidates import rank_constraints
from flexrank.run.config import parse_config
from research.experiment import Request, find_experiment
from research.studies import adaptation, calibration_size, equal_budget, joint_vs_single, layerwise, lm_profiles
from research.studies.language import TRAINED, LanguageBench, identity_of
from tiny import batch_for, build, nest
from tiny_runs import TEXT, settings

BUDGETS = [0.8, 0.5]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all studies of this module keep their units, so that they share one decomposition."""
    return tmp_path_factory.mktemp("studies")


@pytest.fixture
def request_for(sources: Path, work: Path) -> Any:
    """A request of a study on the tiny language model."""
    config = parse_config(settings(sources / "language", sources / "text.txt", work / "unused"))

    return lambda name, **options: Request(work / name, seeds=2, config=config, **options)


def rows_of(result: dict[str, Any]) -> dict[str, list[Any]]:
    return {row[0]: row[1:] for row in result["tables"][0]["rows"]}


@pytest.mark.parametrize("name", ["lm-profiles", "joint-vs-single", "equal-budget", "layerwise", "calibration-size"])
def test_a_study_runs_whole_and_again_from_its_units(
    name: str, request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_size, "SIZES", (8, 16))
    study = find_experiment(name)
    first = study.run(request_for(name))
    assert study.draw(first["data"]).axes and first["tables"][0]["rows"]
    monkeypatch.setattr("research.studies.language.train_", None)  # all parts are finished: nothing is trained again
    assert study.run(request_for(name)) == first


def test_untrained_and_single_figures_are_those_of_a_plain_loop(request_for: Any) -> None:
    request = request_for("joint-vs-single")
    rows = rows_of(find_experiment("joint-vs-single").run(request))
    bench = LanguageBench(request)
    model = bench.decomposed()
    held_out = bench.nats_by_budget(model)
    assert [cell["mean"] for cell in rows["untrained"]] == pytest.approx(held_out)
    plain, batches = copy.deepcopy(bench.base), list(bench.space.samples.calibration)
    decompose_(plain, collect_moments(plain, batches, select_layers(plain)), method="svd")
    evaluate = distillation_evaluator(bench.base, bench.space.samples.probe, LogitObjective())
    probe = request.config.probe
    errors = probe_sensitivity(plain, evaluate, probe.levels, spacing=probe.spacing, **rank_constraints(request.config))
    chain = allocate_ranks(errors, BUDGETS, **rank_constraints(request.config))
    expected = [bench.nats(plain, chain.at(budget)) for budget in BUDGETS]
    assert [cell["mean"] for cell in rows["SVD, untrained"]] == pytest.approx(expected, rel=1e-5) != held_out
    options = request.config.distillation
    with hidden_states(model, bench.base):
        distill_(
            model, bench.base, list(bench.space.samples.training), [bench.profiles[1]],
            objective=LogitObjective(hidden_weight=4.0), steps=options.steps,
            learning_rate=options.learning_rate, warmup_steps=options.warmup_steps, seed=0, autocast=bench.autocast,
        )  # fmt: skip
    single = bench.ledger.take("trained at 0.5 only, seed 0", lambda: None)
    assert single == bench.nats_by_budget(model) != held_out
    assert rows["trained at 0.5 only"][1]["n"] == 2


def test_a_study_trains_by_the_methods_of_its_configuration(request_for: Any) -> None:
    """Oracle: `distill_` with every setting written out."""
    request = request_for("joint-vs-single")
    changed = request.config.distillation.model_copy(update={"method": "paper", "weight_decay": 0.3})
    bench = LanguageBench(
        dataclasses.replace(request, config=request.config.model_copy(update={"distillation": changed}))
    )
    profiles, options = bench.profiles[::-1], bench.config.distillation
    trained = bench.trained(profiles, steps=4, seed=3, name="one")
    model = bench.decomposed()
    distill_(
        model, bench.base, list(bench.space.samples.training), profiles, method="paper", weight_decay=0.3, steps=4,
        objective=LogitObjective(), learning_rate=options.learning_rate, seed=3, autocast=bench.autocast,
        warmup_steps=round(4 * options.warmup_steps / options.steps),
    )  # fmt: skip
    assert bench.nats_by_budget(trained) == bench.nats_by_budget(model)
    assert bench.facts()["method"] == "paper"


def test_each_block_is_trained_on_the_originals_inputs_alone(request_for: Any) -> None:
    bench = LanguageBench(request_for("layerwise"))
    model, batch = bench.decomposed(), bench.space.samples.training[0]
    names = [name for name, _ in model.named_modules() if name.endswith(("layers.0", "layers.1"))]
    with layerwise.teacher_forced_blocks(bench.base, model) as objective, use_profile(model, bench.profiles[1]):
        with torch.no_grad():
            target = objective.target(call_model(bench.base, batch), batch)
        assert target.shape[0] == len(names) == 2
        loss = objective.loss(call_model(model, batch), target, batch)
        objective.outputs[names[1]].square().sum().backward(retain_graph=True)
        # The second block's output reaches no parameter of the first; the loss reaches both.
        first = [p.grad for name, p in model.named_parameters() if name.startswith(names[0])]
        assert all(gradient is None or not gradient.any() for gradient in first)
        model.zero_grad()
        loss.backward()
    gradients = [dict(model.named_parameters())[f"{name}.mlp.down_proj.u"].grad for name in names]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    assert not model._forward_hooks and not model.get_submodule(names[0])._forward_pre_hooks


def test_concentration_is_that_of_the_rows_that_a_layer_writes(request_for: Any) -> None:
    bench = LanguageBench(request_for("lm-profiles"))
    name = next(name for name in bench.profiles[0] if name.endswith("o_proj"))
    layer, rows = bench.base.get_submodule(name), []
    with Hooks() as hooks, torch.no_grad():
        hooks.on_forward({name: layer}, lambda _, read, __: rows.append(read.flatten(0, -2).double()))
        for batch in bench.space.samples.calibration:
            call_model(bench.base, batch)
    inputs = torch.cat(rows)
    energies = torch.linalg.svdvals(inputs @ layer.weight.detach().double().T).square()
    width = len(energies)
    needed = next(count for count in range(1, width + 1) if energies[:count].sum() >= 0.99 * energies.sum())
    assert lm_profiles._concentration(bench, [name]) == [needed / width]


# peft asks transformers for a name that it has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adaptation_trains_adapters_alone_on_a_deployed_model(
    request_for: Any, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptation, "HELD_OUT", 8)
    monkeypatch.setattr(adaptation, "STEPS", 4)
    request = request_for("adaptation", domain=sources / "text.txt")
    result = adaptation.run(request)
    rows = rows_of(result)
    assert list(rows) == ["base", "0.8", "0.5"] and adaptation.draw(result["data"]).axes
    bench = LanguageBench(request)
    _, held_out = adaptation._domain_blocks(bench, [TEXT], "text.txt")
    assert rows["base"][3] == pytest.approx(nats_per_token(bench.base, held_out))
    assert all(row[4]["mean"] < row[3] for row in rows.values())  # it did adapt
    assert rows["0.5"][0] < rows["0.8"][0] < rows["base"][0]
    small = deploy(bench.decomposed(), bench.chain.at(0.5))
    model = adaptation.adapted(small, 0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert any("latent" in name for name in trained)  # the deployed layers' factors are adapted by name
    assert any("expand" in name for name in trained)


def test_the_largest_trained_size_is_compared_with_the_base_which_budget_1_is() -> None:
    """.9 is 1 % above the base after adaptation, or with another seed 3 %; 1 is the base itself."""
    sizes = {"base": [4.0, 5.0], "1": [4.0, 5.0], "0.9": [4.04, 5.05], "0.5": [4.4, 5.5]}
    for name, second in (("agrees", 5.05), ("differs", 5.15)):
        sizes["0.9"][1] = second
        first, _ = adaptation._claims({size: {"nats": 6.0, "after": after} for size, after in sizes.items()})
        assert first["holds"] == (name == "agrees") and "trained size, 0.9," in first["what"]
        assert first["here"].startswith("over it +1.00%" if name == "agrees" else "over it +2.00%")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama_tied"])
def test_adapters_are_on_every_layer_of_a_block_and_not_on_the_head(name: str) -> None:
    base = build(name)
    wanted = {layer for layer in select_layers(base) if layer != "lm_head"}
    model = adaptation.adapted(build(name), 0)
    adapted = {
        n.partition("base_model.model.")[2].partition(".lora_")[0] for n, _ in model.named_parameters() if "lora_A" in n
    }
    assert adapted == wanted


@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "phi3"])
def test_blocks_of_any_architecture_can_be_trained_alone(name: str) -> None:
    teacher, model = build(name), nest(build(name))
    with layerwise.teacher_forced_blocks(teacher, model) as objective, torch.no_grad():
        target = objective.target(call_model(teacher, batch_for(name)), batch_for(name))
        assert float(objective.loss(call_model(model, batch_for(name)), target, batch_for(name))) < 1e-8
        with use_profile(model, {layer: 1 for layer in full_profile(model)}):
            assert float(objective.loss(call_model(model, batch_for(name)), target, batch_for(name))) > 1e-3


def test_units_of_other_settings_models_or_data_are_not_taken(request_for: Any, sources: Path, tmp_path: Path) -> None:
    request = request_for("any")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def key(**changes: Any) -> str:
        values = settings(sources / "language", text, tmp_path)
        for section, keys in changes.items():
            values[section] = {**values[section], **keys} if isinstance(keys, dict) else keys
        return json.dumps(identity_of(parse_config(values), TRAINED), sort_keys=True)

    first = key()
    assert key() == first and request.config is not None
    changed = [key(probe={"levels": 5}), key(data={"training": 48}), key(distillation={"max_norm": 2.0}), key(seed=1)]
    text.write_text(TEXT + "more")
    changed.append(key())
    assert len({first, *changed}) == 6


def test_more_calibration_is_the_whole_of_it(request_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments merged from parts decompose as moments of all samples at once do."""
    monkeypatch.setattr(calibration_size, "SIZES", (8, 16))
    request = request_for("calibration-size")
    space = calibration_size.datasvd_space(request)
    pool = torch.cat([batch["input_ids"] for batch in space.samples.training])
    nats = functools.partial(calibration_size._one_seed, space, pool, budgets=BUDGETS, seed=0)
    assert nats([8, 16])[1] == pytest.approx(nats([16])[0], rel=1e-5)


def test_another_task_and_another_decomposition_are_named(tmp_path: Path, sources: Path) -> None:
    config = parse_config(settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding"))
    with pytest.raises(FlexrankError, match="task is 'embedding'; this study runs on causal language models"):
        calibration_size.run(Request(tmp_path, config=config))
    values = settings(sources / "language", sources / "text.txt", tmp_path) | {"decomposition": {"method": "svd"}}
    with pytest.raises(FlexrankError, match="decomposition.method is 'svd'; this study is of 'datasvd' only"):
        calibration_size.run(Request(tmp_path, config=parse_config(values)))


def test_a_model_without_blocks_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    decompose_(model, ["1"], method="svd")
    with (
        pytest.raises(FlexrankError, match="no stack of blocks"),
        layerwise.teacher_forced_blocks(model, nn.ModuleDict({"a": model})),
    ):
        pass


def test_one_elastic_model_is_compared_with_the_best_single_one_and_the_next_best_with_it() -> None:
    """By hand, one seed, two budgets: the elastic loses 1 % and 3 % to the best; others 10 % and 1 % to those."""
    elastic, singles = [[1.01, 2.06]], [[[1.0, 2.02]], [[1.1, 2.0]]]
    matches, degrade = joint_vs_single._claims([0.8, 0.4], elastic, singles, [1.0, 2.2])
    assert (matches["here"], matches["holds"]) == ("0.8 +1.0%, 0.4 +3.0%", False)
    assert "0.8 +0.0%, 0.4 +10.0%" in matches["why"]
    assert degrade["here"].endswith("0.8 +10.0%, 0.4 +1.0%") and not degrade["holds"]
    better = joint_vs_single._claims([0.8, 0.4], [[1.01, 2.0]], [[[1.0, 2.2]], [[1.1, 2.0]]], [1.0, 2.0])
    assert [claim["holds"] for claim in better] == [True, True]


def test_verdicts_follow_their_numbers() -> None:
    """By hand; blocks alone win back .2 and all together .6 of what DataSVD lost, and the other way."""
    for alone, together, holds in ((1.8, 1.4, True), (1.4, 1.8, False)):
        assert layerwise._claim([0.5], [2.0], [[alone]], [[together]], 1.0)["holds"] is holds
    assert layerwise._claim([0.5], [1.0], [[1.0]], [[1.0]], 1.0)["holds"] is None  # nothing was lost
    for at_128, holds in ((1.009, True), (1.02, False)):
        assert calibration_size._claims([8, 128, 512], [0.5], [[[2.0], [at_128], [1.0]]])[0]["holds"] is holds
    for others, holds in ([0.2, 0.3], [False, True]), ([0.2, 0.95], [True, False]):
        kept = {"o_proj": [0.1, 0.9, 0.1], "down_proj": [others[1]] * 3}
        assert [one["holds"] for one in lm_profiles._claims(0.4, others, kept, others)] == holds
    assert adaptation._rises([[1.0, 2.0], [1.1, 2.1]]) and not adaptation._rises([[1.0, 2.0], [1.1, 1.9]])


def test_separate_models_are_compared_by_the_mean_over_budgets_of_each_seed() -> None:
    """By hand: +10 % and −20 % in one seed, +1 % and +1 % in another."""
    separate, elastic = [[1.0, 2.0], [1.0, 1.0]], [[1.1, 1.6], [1.01, 1.01]]
    claim = equal_budget._claim([0.8, 0.4], separate, elastic)
    assert claim["here"].startswith("-2.0% (-5.0% to +1.0%); by budget 0.8 +5.5%") and not claim["holds"]
    assert equal_budget._claim([0.8, 0.4], separate[:1], elastic[:1])["holds"]
