"""The configs of the paper's own models, their dry runs, and the verb that prints a dry run."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from flexrank.errors import FlexrankError
from flexrank.hf.meta import meta_model
from flexrank.run import runner
from flexrank.run.config import load_config
from flexrank.run.dry_run import dry_run
from flexrank.run.dry_run.architecture import build_architecture
from flexrank.run.tables import count
from tiny_dry_runs import config_of
from tiny_runs import invoke, refused

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "examples" / "paper"
#: What makes a run fit a smaller device: our method, in bfloat16.
SMALLER = [
    "dtype=bfloat16", "distillation.optimizer=adamw_8bit", "distillation.gradient_checkpointing=true",
    "distillation.method=balanced", "allocation.method=joint", "allocation.savings=parameters",
]  # fmt: skip
#: Parameters as their publishers have them, in millions.
PUBLISHED = {
    "gpt2": 124.4, "llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "llama-3.1-8b": 8030, "dinov3-vitl16": 303.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def paper_results() -> Iterator[tuple[dict[str, dict[str, Any]], float]]:
    """The dry run of each config, and the processor's seconds for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        start = time.process_time()
        results = {name: dry_run(load_config(PAPER / f"{name}.yaml")) for name in PUBLISHED}
        yield results, time.process_time() - start


def test_the_papers_models_have_their_published_sizes(paper_results: tuple[dict[str, Any], float]) -> None:
    results, seconds = paper_results
    assert {path.stem for path in PAPER.glob("*.yaml")} == set(PUBLISHED)
    for name, millions in PUBLISHED.items():
        assert results[name]["parameters"]["model"] == pytest.approx(millions * 1e6, rel=5e-4), name
    assert seconds < 20


def test_the_papers_models_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    architecture = build_architecture(load_config(PAPER / "llama-3.1-8b.yaml"))
    for model in (architecture.teacher, architecture.student):
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert len(architecture.shapes) == 32 * 7


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configs_have_the_papers_hyperparameters(name: str, paper_results: tuple[dict[str, Any], float]) -> None:
    config, result = load_config(PAPER / f"{name}.yaml"), paper_results[0][name]
    is_vision = name.startswith("dinov3")
    assert config.decomposition.method == config.allocation.method == config.distillation.method == "paper"
    assert config.allocation.savings == "ranks"
    settings = config.distillation
    assert settings.batch_size * settings.accumulation == (1024 if is_vision else 512) == result["samples_per_step"]
    assert settings.steps == (25_000 if is_vision else 10_000)
    assert (settings.learning_rate, settings.warmup_steps, config.probe.levels) == (1e-5, 715, 10)
    assert config.data.calibration == 1000 and config.name == name
    assert result["sample_tokens"] == (14 * 14 + 4 + 1 if is_vision else 1024)
    if not is_vision:
        assert config.data.is_stream and config.data.subset == "sample-10BT"
        assert result["tokens"] == pytest.approx(5e9, rel=0.05)  # "5B tokens"
    candidates = result["probe"]["layers"] * 10
    assert (result["probe"]["candidates"], result["probe"]["evaluations"]) == (candidates, candidates * 9 // 10 + 1)


def most_bytes(result: dict[str, Any]) -> int:
    return max(parts["all"] for parts in result["memory"].values())


def test_the_readme_shows_what_the_dry_run_prints(
    paper_results: tuple[dict[str, Any], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = (PAPER / "README.md").read_text(encoding="utf8")
    for name, result in paper_results[0].items():
        half = next(row for row in result["budgets"] if row["budget"] == 0.5)
        less = dry_run(load_config(PAPER / f"{name}.yaml", SMALLER))
        cells = [
            f"`{name}`", count(result["parameters"]["model"]), str(result["probe"]["layers"]),
            str(result["probe"]["evaluations"]), count(result["parameters"]["factors"]), count(half["params_model"]),
            f"{count(most_bytes(result))}B", f"{count(most_bytes(less))}B",
            f"{result['operations']['all'] / 1e18:.3g}E",
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in text
    assert all(f"--set {key}" in text for key in SMALLER)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config and its architecture, alone in the current directory."""
    config = config_of(tiny.llama_tied, tmp_path, architecture="architecture.json")
    (tmp_path / "config.json").rename(tmp_path / "architecture.json")
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tiny.json").write_text(json.dumps(config.model_dump(mode="json")))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny.json"


def test_of_a_model_on_the_hub_a_dry_run_downloads_its_config_alone(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, cache = set(), tmp_path / "hub" / "models--you--tiny"

    def download(repository: str, file: str, *, local_files_only: bool, **_: Any) -> None:
        assert not local_files_only
        asked.add((repository, file))
        for path, text in {"refs/main": "a" * 40, f"snapshots/{'a' * 40}/{file}": own}.items():
            (cache / path).parent.mkdir(parents=True, exist_ok=True)
            (cache / path).write_text(text)

    own, wanted = (tmp_path / "architecture.json").read_text(), dry_run(load_config(written))
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = dry_run(load_config(written, ["architecture=null", "model=you/tiny"]))
    assert found == wanted | {"model": "you/tiny", "architecture": None}
    assert asked == {("you/tiny", "config.json")}


def test_a_dry_run_prints_its_figures_and_writes_nothing(written: Path) -> None:
    before = {path: path.read_bytes() for path in written.parent.iterdir()}
    printed = invoke("run", written, "--dry-run")
    assert printed.exit_code == 0, printed.output
    assert {path: path.read_bytes() for path in written.parent.rglob("*")} == before
    result = json.loads(invoke("run", written, "--dry-run", "--json").stdout)
    assert result == json.loads(json.dumps(dry_run(load_config(written))))
    for part in ("--gpu local", "self_attn.q_proj", "weight tied to model.embed_tokens", *result["notes"]):
        assert part in printed.stdout
    for row in result["budgets"]:
        assert re.search(rf"^ +{row['budget']:g} .* {count(row['params_model'])} ", printed.stdout, re.MULTILINE)
    for stage, parts in result["memory"].items():
        assert re.search(rf"^ +{stage} .* {count(parts['all'])} ", printed.stdout, re.MULTILINE)
    for stage, number in result["operations"].items():
        assert re.search(rf"^ +{stage.replace('all', 'in all')} +{count(number)} *$", printed.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dry-run", "--set", "architecture=nowhere.json"], "architecture 'nowhere.json': no such file"),
        (["--dry-run", "--set", "architecture=null"], "model 'nobody/nothing': We couldn't connect to"),
        (["--dry-run", "--set", "architecture=null"], "a config.json here can be named with the key architecture"),
        (["--dry-run", "--set", "architecture=null", "--set", "model=./nowhere"], "'./nowhere': no such directory"),
        (["--dry-run", "--set", "architecture=wrong.json"], "hidden_size"),
        (["--dry-run", "--set", "architecture=empty.json"], "Should have a `model_type` key"),
        (["--dry-run", "--set", "architecture=deployed.json"], "already compressed"),
        (
            ["--dry-run", "--set", "model=./elastic", "--set", "architecture=null"],
            "an elastic artefact; name the dense model from which it was made",
        ),
        (["--dry-run", "--set", "architecture=encoder.json"], "AutoModelForCausalLM has no class for 'dinov3_vit'"),
        (["--dry-run", "--set", "data.max_tokens=65"], "data.max_tokens is 65; this model reads at most 64"),
        (["--dry-run", "--set", "allocation.budgets=[0.01]"], "allocation.budgets: 0.01 is too small"),
        (["--dry-run", "--set", "layers.exclude=[nothing]"], "layer pattern 'nothing' matches no module"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(arguments: list[str], part: str, written: Path) -> None:
    llama = json.loads((written.parent / "architecture.json").read_text())
    for name, value in {
        "wrong": llama | {"hidden_size": "wide"}, "empty": {}, "deployed": llama | {"quantization_config": {"bits": 4}},
        "encoder": {"model_type": "dinov3_vit"},
    }.items():  # fmt: skip
        (written.parent / f"{name}.json").write_text(json.dumps(value))
    (elastic := written.parent / "elastic").mkdir()
    (elastic / "config.json").write_text(json.dumps(llama))
    (elastic / "elastic.json").touch()
    assert part in refused("run", written, *arguments)


def test_the_architecture_makes_no_stage_run_again(tmp_path: Path) -> None:
    config = config_of(tiny.llama_tied, tmp_path)
    other = config.model_copy(update={"architecture": None})
    assert runner.fingerprints(config, str(tmp_path)) == runner.fingerprints(other, str(tmp_path))


def test_an_encoder_without_a_head_is_counted_and_noted(tmp_path: Path) -> None:
    result = dry_run(config_of(tiny.dinov3, tmp_path))
    assert result["class"] == "DINOv3ViTModel" and "its classification head is not counted" in result["notes"][-1]
    with pytest.raises(FlexrankError, match="AutoModelForImageClassification has no class for 'dinov3_vit'"):
        meta_model(tmp_path, "classification")
    assert "classification head" not in " ".join(dry_run(config_of(tiny.vit, tmp_path))["notes"])
