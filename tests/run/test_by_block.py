"""A run of a model that is larger than memory: curvature in place of the probe, bfloat16 files, and its peak."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flexrank.artefacts.elastic import load_elastic
from flexrank.calibrate import collect_moments
from flexrank.decompose import decompose_
from flexrank.distill.objectives import EmbeddingObjective, LogitObjective
from flexrank.hf.models import load_model
from flexrank.nn.select import select_layers
from flexrank.probe import curvature_sensitivity
from flexrank.profiles import SensitivityTable
from flexrank.run import run_stages
from flexrank.run.config import load_config, parse_config
from flexrank.run.directory import RunDirectory
from flexrank.run.dry_run import dry_run
from flexrank.run.dry_run.architecture import build_architecture
from flexrank.run.dry_run.memory import decomposed_bytes, elastic_bytes, matrix_bytes, tensor_bytes, trained_part
from flexrank.run.dry_run.table import PARTS
from flexrank.run.samples import loss_rows
from flexrank.run.stages import evaluate_initial
from flexrank.run.workspace import Workspace
from research.peaks import peaks_of
from tiny_runs import settings


@pytest.mark.parametrize("task", ["language", "embedding"])
def test_curvature_takes_the_place_of_the_probe(task: str, sources: Path, tmp_path: Path) -> None:
    """Oracle: the table of the whole model, in memory at once."""
    values = settings(sources / task, sources / "text.txt", tmp_path / "run", task)
    values |= {"probe": {"method": "curvature", "levels": 4}}
    values["layers"] = {"exclude": ["pooler"] if task == "embedding" else ["lm_head"]}
    values["data"] |= {"calibration": 24, "probe": 8}
    outcome = run_stages(parse_config(values), "allocate")
    table = SensitivityTable.from_json(json.loads((tmp_path / "run" / "sensitivity.json").read_text()))
    model, batches = load_model(sources / task, task), outcome.workspace.samples.calibration
    layers = select_layers(model, exclude=values["layers"]["exclude"])
    loss = LogitObjective() if task == "language" else EmbeddingObjective()
    moments = collect_moments(model, batches, layers, side="input", gradient_loss=loss.fisher_loss)
    decompose_(model, moments)
    rows = 24 * (32 if task == "language" else 1)  # blocks of 32 tokens; sentences
    assert loss_rows(task, batches) == rows
    wanted = curvature_sensitivity(model, moments, rows, 4)
    assert table.ranks == wanted.ranks and table.shapes == wanted.shapes and table.footprint == wanted.footprint
    for name, errors in wanted.errors.items():
        assert table.errors[name] == pytest.approx(errors, rel=1e-6, abs=1e-12)
    assert run_stages(parse_config(values), "allocate").executed == ()
    values["probe"] = {"levels": 4}
    assert run_stages(parse_config(values), "probe").executed == ("decompose", "probe")
    assert not (tmp_path / "run" / "curvature.safetensors").exists()


def test_a_model_in_bfloat16_is_decomposed_in_float32(sources: Path, tmp_path: Path) -> None:
    load_model(sources / "language", "language").bfloat16().save_pretrained(tmp_path / "half")
    for file in (sources / "language").glob("tok*"):
        (tmp_path / "half" / file.name).write_bytes(file.read_bytes())
    values = settings(tmp_path / "half", sources / "text.txt", tmp_path / "run")
    values["data"] |= {"calibration": 24, "probe": 8}
    outcome = run_stages(parse_config(values), "distill")
    assert outcome.workspace.base.dtype is torch.bfloat16  # the teacher stays as its files are, and so do exports
    assert outcome.workspace.deployed_dtype is torch.bfloat16
    whole = load_model(tmp_path / "half", "language")
    layers = select_layers(whole)
    loss = LogitObjective().fisher_loss
    decompose_(whole, collect_moments(whole, outcome.workspace.samples.calibration, layers, gradient_loss=loss))
    loaded, _ = load_elastic(tmp_path / "run" / "elastic_initial")
    assert loaded.dtype is torch.float32
    for key, value in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    trained, _ = load_elastic(tmp_path / "run" / "elastic")
    assert trained.dtype is torch.float32 and not torch.equal(
        trained.state_dict()["model.layers.0.mlp.up_proj.u"][:4],
        loaded.state_dict()["model.layers.0.mlp.up_proj.u"][:4],
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_decomposition_takes_what_the_dry_run_counts_and_a_fraction_of_the_model(sources: Path, tmp_path: Path) -> None:
    """At most 15 % off, without the block's weights, which are mapped here and would be copied to a GPU.

    From files to factors and the curvature of all layers, a model of many blocks takes less than half of its bytes.
    """
    deep = write_llama(tmp_path / "deep", sources / "language", 256, 704, 28)
    model = write_llama(tmp_path / "model", sources / "language", 512, 1408, 2)
    configs = [
        by_curvature(one, sources / "text.txt", tmp_path / name)
        for name, one in (("small", sources / "language"), ("large", deep))
    ]
    methods = ("paper", "fisher")
    for method in methods:
        changes = {"decomposition": {"method": method, "buffer_bytes": 2**22}, "probe": {"levels": 4}}
        configs.append(by_curvature(model, sources / "text.txt", tmp_path / method, **changes))
    fraction, *peaks = peaks_of("decompose", *configs)
    assert fraction < (deep / "model.safetensors").stat().st_size / 2
    assert len(list((tmp_path / "large" / "elastic_initial").glob("*.safetensors"))) > 44
    for method, config, peak in zip(methods, configs[2:], peaks, strict=True):
        counted = dry_run(load_config(config))["memory"]["decomposition"]
        assert peak == pytest.approx(counted["all"] - counted["student"], rel=0.15), method


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_probe_takes_what_the_dry_run_counts(sources: Path, tmp_path: Path) -> None:
    """At most 15 % off: the teacher, the student, dense matrices of layers, and what is replayed."""
    model = write_llama(tmp_path / "model", sources / "language", 512, 1408, 2)
    changes = {"probe": {"levels": 2}, "allocation": {"budgets": [0.8]}, "data": {"probe": 4}}
    configs = [
        by_curvature(one, sources / "text.txt", tmp_path / name, **changes)
        for name, one in (("small", sources / "language"), ("large", model))
    ]
    (peak,) = peaks_of("probe", *configs)
    counted = dry_run(load_config(configs[1]))["memory"]["probe"]
    assert peak == pytest.approx(counted["all"], rel=0.15)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_consolidation_takes_what_the_dry_run_counts(sources: Path, tmp_path: Path) -> None:
    """At most 15 % off, the teacher included, at a size whose factors are as large whatever ranks are allocated."""
    model = write_llama(tmp_path / "model", sources / "language", 448, 1232, 4, torch.bfloat16)
    configs = [by_curvature(sources / "language", sources / "text.txt", tmp_path / "small")]
    for name, repeats in (("kept", False), ("repeated", True)):
        training = {"steps": 2, "batch_size": 16, "autocast": "off", "gradient_checkpointing": repeats}
        changes = {"distillation": training, "allocation": {"budgets": [0.6, 0.5]}}
        configs.append(by_curvature(model, sources / "text.txt", tmp_path / name, **changes))
    for config, peak in zip(configs[1:], peaks_of("distill", *configs), strict=True):
        counted = dry_run(load_config(config))["memory"]["consolidation"]["all"]
        assert peak == pytest.approx(counted, rel=0.15), config


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_sharded_consolidation_takes_what_the_dry_run_counts(sources: Path, tmp_path: Path) -> None:
    """At most 15 % off in each of two processes, without what is in no layer, which is mapped here."""
    model = write_llama(tmp_path / "model", sources / "language", 512, 1408, 4)
    small = by_curvature(sources / "language", sources / "text.txt", tmp_path / "small")
    training = {"steps": 2, "batch_size": 4, "autocast": "off", "sharded": True, "gradient_checkpointing": True}
    changes = {"distillation": training, "allocation": {"budgets": [0.6, 0.5]}}
    config = by_curvature(model, sources / "text.txt", tmp_path / "large", **changes)
    counts = [dry_run(load_config(config), devices=count)["memory"]["consolidation"] for count in (1, 2)]
    (peak,) = peaks_of("distill", small, config, processes=2)
    assert peak == pytest.approx(counts[1]["all"], rel=0.15)
    assert counts[1]["all"] < 0.65 * counts[0]["all"]
    assert counts[1].keys() <= set(PARTS) and counts[1]["gathered"] > 0  # the table has a column for each


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_deployment_takes_what_the_dry_run_counts(sources: Path, tmp_path: Path) -> None:
    """At most 15 % off: one size at a time, which the process that verifies it maps from its files."""
    model = write_llama(tmp_path / "model", sources / "language", 384, 1056, 4)
    configs = []
    for name, one, budgets in (("small", sources / "language", []), ("large", model, [0.8, 0.5])):
        changes = {"deployment": {"budgets": budgets, "slack": 16}}
        configs.append(by_curvature(one, sources / "text.txt", tmp_path / name, **changes))
    (peak,) = peaks_of("deploy", *configs)
    counted = dry_run(load_config(configs[1]))["memory"]["deployment"]
    assert peak == pytest.approx(counted["all"], rel=0.15)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_evaluation_takes_what_the_dry_run_counts(sources: Path, tmp_path: Path) -> None:
    """At most 15 % off: the model before consolidation beside the teacher."""
    model = write_llama(tmp_path / "model", sources / "language", 384, 1056, 4)
    changes = {
        "evaluation": {"latency": False}, "distillation": {"steps": 1, "batch_size": 2, "autocast": "off"},
        "deployment": {"budgets": [], "slack": 0},
    }  # fmt: skip
    configs = [
        by_curvature(one, sources / "text.txt", tmp_path / name, **changes)
        for name, one in (("small", sources / "language"), ("large", model))
    ]
    (peak,) = peaks_of("evaluate", *configs)
    counted = dry_run(load_config(configs[1]))["memory"]["evaluation"]
    assert peak == pytest.approx(counted["all"], rel=0.15)


def test_a_run_that_has_allocated_ranks_counts_them(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the model that it then trains; before, and for other budgets, ranks are uniform."""
    path = by_curvature(sources / "language", sources / "text.txt", tmp_path / "run")
    config = load_config(path, ["distillation.steps=1"])

    def written(budget: float = 0.8) -> int:
        one = load_config(path, ["distillation.steps=1", f"allocation.budgets=[{budget}, 0.5, 0.3]"])
        architecture = build_architecture(one)
        return elastic_bytes(architecture, trained_part(architecture, one), one) + matrix_bytes(architecture, one)

    uniform, others = written(), written(0.75)
    run_stages(config, "distill")
    trained, _ = load_elastic(tmp_path / "run" / "elastic")
    assert written() == tensor_bytes(trained) != uniform
    judged: list[int] = []
    monkeypatch.setattr(
        Workspace, "measure_quality", property(lambda _: lambda model: judged.append(tensor_bytes(model)))
    )
    evaluate_initial(Workspace(config, RunDirectory(config.directory)), "")
    assert judged == [decomposed_bytes(build_architecture(config), config)] * 3
    assert written(0.75) == others


def by_curvature(model: Path, data: Path, output: Path, /, **changes: Any) -> str:
    """A configuration file; `changes` are sections in the place of its own, of `data` some keys."""
    values: dict[str, Any] = settings(model, data, output)
    values |= {"probe": {"method": "curvature", "levels": 4}, "layers": {"exclude": ["lm_head"]}}
    values |= {"decomposition": {"method": "datasvd", "buffer_bytes": 2**22}, "distillation": {"steps": 0}}
    values |= {"allocation": {"budgets": [0.8, 0.5, 0.3]}, "deployment": {"budgets": []}}
    values["data"] |= {"calibration": 8, "batch_size": 4, **changes.pop("data", {})}
    values |= changes
    (path := output.with_suffix(".yaml")).write_text(yaml.safe_dump(values))
    return str(path)


def write_llama(
    place: Path, tokenizer: Path, width: int, inner: int, layers: int, dtype: torch.dtype = torch.float32
) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).to(dtype).save_pretrained(place)
    for file in tokenizer.glob("tok*"):
        (place / file.name).write_bytes(file.read_bytes())
    return place
