"""Image classification goes the whole way from a config, and wrong images are refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flexrank as fr
import tiny
from flexrank.errors import FlexrankError
from flexrank.hf.models import load_model
from flexrank.run import run_stages
from flexrank.run.config import parse_config
from flexrank.run.directory import RunDirectory
from flexrank.run.workspace import Workspace
from tiny_runs import here, invoke


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vit")
    tiny.build("vit").save_pretrained(directory)
    scaling = {"rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (directory / "preprocessor_config.json").write_text(json.dumps(scaling))
    return directory


def settings(model: Path, images: Path, output: Path) -> dict[str, Any]:
    return {
        "name": "images", "task": "classification", "model": str(model), "device": "cpu", "output": str(output),
        "data": {"source": "images", "path": str(images), "calibration": 32, "probe": 16, "training": 64,
                 "evaluation": 32, "batch_size": 8},
        "probe": {"levels": 3}, "allocation": {"budgets": [0.8, 0.5]},
        "distillation": {"steps": 40, "batch_size": 16, "learning_rate": 3e-4, "warmup_steps": 2},
        "deployment": {"budgets": [0.5]}, "evaluation": {"latency": False},
    }  # fmt: skip


def write_images(path: Path, size: int = 16) -> Path:
    random = np.random.default_rng(0)
    np.savez(path, x=random.integers(0, 256, (400, size, size, 3)).astype("uint8"), y=random.integers(0, 5, 400))
    return path


@pytest.mark.usefixtures("verified_here")
def test_a_network_in_bfloat16_that_does_not_convert_its_images(tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=5, layer_type="basic")
    ResNetForImageClassification(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    scaling = {"rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(scaling))
    values = settings(tmp_path / "model", write_images(tmp_path / "images.npz"), tmp_path / "run")
    values["distillation"] |= {"steps": 2}
    run_stages(parse_config(values))
    small = AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "deployed" / "0.50")
    assert small.dtype == torch.bfloat16 and small(torch.zeros(1, 3, 16, 16, dtype=small.dtype)).logits.isfinite().all()


def test_a_whole_run(model: Path, tmp_path: Path, verified_here: None) -> None:
    images = write_images(tmp_path / "images.npz")
    run_stages(parse_config(settings(model, images, tmp_path / "run")))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["base"]["quality"]["agreement"] == 1
    for row in summary["rows"]:
        assert row["params_model"] < summary["base"]["params_model"]
        assert row["quality_before"]["agreement"] <= row["quality"]["agreement"] + 0.1
    assert (tmp_path / "run" / "deployed" / "0.50" / "model.safetensors").is_file()
    done = invoke("evaluate", tmp_path / "run", "--budgets", ".5,.65", "--json")  # one of them is not the run's
    assert done.exit_code == 0, done.output
    base, between, least = json.loads(done.stdout)["rows"]
    assert (base["quality"], least["quality"]) == (summary["base"]["quality"], summary["rows"][1]["quality"])
    assert between["budget"] == 0.65 and between["quality"] == qualities(model, images, tmp_path / "run", 0.65)


def test_a_model_of_the_hub_is_named_as_there(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scaling of images too comes from the hub's cache; a repository without one is named."""
    place = tmp_path / "hub" / "models--you--vit"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    snapshot = shutil.copytree(model, place / "snapshots" / ("a" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    values = settings(model, write_images(tmp_path / "images.npz"), tmp_path / "run")

    def samples(name: str) -> Any:
        return Workspace(parse_config({**values, "model": name}), RunDirectory(tmp_path / "run")).samples

    found, wanted = samples("you/vit"), samples(str(model))
    assert torch.equal(found.example["pixel_values"], wanted.example["pixel_values"])
    (snapshot / "preprocessor_config.json").unlink()
    with pytest.raises(FlexrankError, match="model 'you/vit': no preprocessor_config.json, here or on the hub"):
        samples("you/vit")


def test_held_out_images_have_two_halves(model: Path, tmp_path: Path) -> None:
    values = settings(model, write_images(tmp_path / "images.npz"), tmp_path / "run")
    values["evaluation"] |= {"latency_batch_size": 1000}
    parts = {}
    for half in (None, "tuning", "reporting"):
        values["data"] |= {"evaluation": 1000, "half": half}
        images = Workspace(parse_config(values), RunDirectory(tmp_path / "run")).samples.example["pixel_values"]
        parts[half] = {tuple(one.flatten().tolist()) for one in images}
    assert len(parts[None]) == 100 and parts["tuning"] | parts["reporting"] == parts[None]
    assert not parts["tuning"] & parts["reporting"] and 30 < len(parts["tuning"]) < 70


def test_the_base_of_a_model_in_bfloat16_is_measured_in_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teachers of images have the run's dtype, also where they are judged; what sizes are held against has theirs."""
    bits = property(lambda _: lambda one: {"bits": torch.finfo(one.dtype).bits})
    monkeypatch.setattr(Workspace, "measure_quality", bits)
    half = shutil.copytree(model, tmp_path / "half")
    load_model(model, "classification").bfloat16().save_pretrained(half)
    images = write_images(tmp_path / "images.npz")
    values = settings(half, images, tmp_path / "run") | {"distillation": {"steps": 0}, "deployment": {"budgets": []}}
    outcome = run_stages(parse_config(values), "evaluate")
    assert outcome.workspace.deployed_dtype is outcome.workspace.deployed_base.dtype is torch.bfloat16
    assert outcome.workspace.base.dtype is torch.float32
    fresh = Workspace(outcome.workspace.config, outcome.workspace.directory)
    assert fresh.deployed_base.dtype is torch.bfloat16 and "base" not in vars(fresh)  # which would be in memory too
    files = [(half / "model.safetensors").stat().st_size, (half / "config.json").stat().st_size]
    measured = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert [row["quality"]["bits"] for row in (measured["base"], *measured["rows"])] == [32, 16, 16]
    assert measured["base"]["bytes"] == pytest.approx(sum(files), abs=300)


def test_images_are_counted_in_images(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEAST_SECONDS": 0.0, "REPEATS": 1, "in_fresh_process": here}.items():
        monkeypatch.setattr(f"flexrank.run.measure.{name}", value)
    values = settings(model, write_images(tmp_path / "images.npz"), tmp_path / "run")
    run_stages(parse_config(values | {"distillation": {"steps": 0}, "deployment": {"budgets": []}}))
    result = invoke("measure", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    workloads = json.loads(result.stdout)["workloads"]
    assert [(one["name"], one["tokens"], one["unit"]) for one in workloads] == [
        ("1 image", 1, "images"), ("16 images", 16, "images"),
    ]  # fmt: skip
    assert "images/s" in result.stderr and "tokens/s" not in result.stderr


def qualities(base: Path, images: Path, run: Path, budget: float) -> dict[str, float]:
    """Of the elastic model at this budget, on the first 32 of the last quarter of the images, shuffled by seed 0."""
    arrays, elastic = np.load(images), fr.load_elastic(run / "elastic", budget=budget)[0]
    held_out = torch.randperm(400, generator=torch.Generator().manual_seed(0))[-100:][:32]
    pixels = (torch.from_numpy(arrays["x"])[held_out].float() / 255 - 0.5) / 0.25
    with torch.no_grad():
        found, wanted = (
            one(pixels.permute(0, 3, 1, 2)).logits.argmax(-1) for one in (elastic, load_model(base, "classification"))
        )
    labels = torch.from_numpy(arrays["y"])[held_out]
    return {"accuracy": int((found == labels).sum()) / 32, "agreement": int((found == wanted).sum()) / 32}


def test_wrong_images_are_refused(model: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "absent.npz", "no such file of images"),
        (write_images(tmp_path / "large.npz", size=20), "image"),
    ):
        with pytest.raises(FlexrankError, match=message) as error:
            run_stages(parse_config(settings(model, path, tmp_path / "run")))
        assert "\n" not in str(error.value)
