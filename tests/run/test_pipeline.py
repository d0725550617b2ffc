"""The whole way on tiny models: what it writes and exports, for each task, and what it refuses."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from flexrank.artefacts.elastic import load_elastic
from flexrank.data.text import SPLITS
from flexrank.distill import distillation_evaluator
from flexrank.distill.objectives import objective_for
from flexrank.errors import FlexrankError
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.nn.switch import use_profile
from flexrank.profiles import ProfileChain
from flexrank.run import run_stages
from flexrank.run.config import load_config, parse_config
from flexrank.run.directory import RunDirectory
from flexrank.run.runner import fingerprints
from flexrank.run.samples import Samples, load_samples
from flexrank.run.sizes import Sizes
from flexrank.run.training import autocast_dtype
from flexrank.run.workspace import Workspace
from tiny_runs import TEXT, rerun, settings, summary_of

pytestmark = pytest.mark.usefixtures("verified_here")


@pytest.fixture
def original(finished: Path, sources: Path) -> tuple[torch.nn.Module, Samples]:
    """The whole run's base model and its samples."""
    model, tokenizer = load_model(sources / "language", "language"), load_tokenizer(sources / "language")
    return model, load_samples(load_config(finished), tokenizer)


def test_the_summary_has_the_promised_keys_and_keeps_to_the_budgets(finished: Path) -> None:
    summary = summary_of(finished)
    assert {"model", "base", "rows"} <= summary.keys()
    assert [row["budget"] for row in summary["rows"]] == [0.8, 0.5]
    dense = sum(m * n for m, n in (layer["shape"] for layer in summary["layers"].values()))
    assert summary["base"]["params_layers"] == dense
    for row in summary["rows"]:
        assert {"params_layers", "params_model", "bytes", "quality", "latency_ratio"} <= row.keys()
        assert row["params_layers"] <= row["budget"] * dense
        assert row["params_model"] - row["params_layers"] == summary["base"]["params_model"] - dense
        assert row["latency_ratio"] > 0
        assert row["mean_rank"] == sum(row["ranks"].values()) / len(row["ranks"])


def test_the_exported_model_is_the_row_of_its_budget(finished: Path, sources: Path) -> None:
    """Loaded as anybody would load it, it has the row's parameters, bytes and quality."""
    row = next(row for row in summary_of(finished)["rows"] if row["budget"] == 0.5)
    place = finished / "deployed" / "0.50"
    with safe_open(place / "model.safetensors", framework="pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == row["params_model"]
    assert json.loads((finished / "elastic" / "elastic.json").read_text())["deployed_dtype"] == "float32"
    added = {"flexrank.json", "tokenizer.json", "tokenizer_config.json", "README.md"}  # beside what a model saves
    files = [path for path in place.iterdir() if path.name not in added]
    assert sum(path.stat().st_size for path in files) == row["bytes"]
    small = transformers.AutoModelForCausalLM.from_pretrained(place)
    config = load_config(finished)
    samples = load_samples(config, transformers.AutoTokenizer.from_pretrained(place))
    assert samples.quality_function(small)(small)["nats_per_token"] == pytest.approx(
        row["quality"]["nats_per_token"], rel=1e-6
    )


@pytest.mark.parametrize("place", ["elastic", "deployed/0.50"])
def test_what_a_model_card_says_runs(finished: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code loads the size that it names, and its head is what the hub reads."""
    from huggingface_hub import ModelCard

    text, row = (finished / place / "README.md").read_text(), summary_of(finished)["rows"][1]
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.base_model) == ("transformers", "text-generation", None)
    assert data.license == "mit"  # of the base model's card
    monkeypatch.chdir((finished / place).parent)
    names: dict[str, Any] = {}
    exec(text.split("```python")[1].split("```")[0], names)
    found = sum(one.numel() for one in names["model"].parameters())
    assert found == pytest.approx(row["params_model"], rel=0.01)  # a run chooses slack on its own calibration
    assert f"| 0.5 | {row['mean_rank']:.0f} " in text and "| base |" in text
    assert "weighted by the loss's gradients, joint" in text


def test_the_base_row_is_the_original(finished: Path, original: tuple[torch.nn.Module, Samples]) -> None:
    (model, samples), base = original, summary_of(finished)["base"]
    assert base["quality"] == samples.quality_function(model)(model)
    assert base["params_model"] == sum(parameter.numel() for parameter in model.parameters())


def test_consolidation_lowers_the_loss_it_minimises(finished: Path, original: tuple[torch.nn.Module, Samples]) -> None:
    """The elastic model of the run is nearer to its teacher than the decomposed one, at the smallest size."""
    model, samples = original
    evaluate = distillation_evaluator(model, samples.training, objective_for("language"))
    (before, _), (after, chain) = (load_elastic(finished / name) for name in ("elastic_initial", "elastic"))
    with use_profile(before, chain.at(0.5)), use_profile(after, chain.at(0.5)):
        assert evaluate(after) < evaluate(before)


def test_without_consolidation_the_artefact_is_the_decomposed_network(copied: Path) -> None:
    rerun(copied, "distillation.steps=0")
    one, two = (copied / name / "elastic.safetensors" for name in ("elastic_initial", "elastic"))
    assert one.read_bytes() == two.read_bytes()
    assert all(row["quality_before"] is None for row in summary_of(copied)["rows"])


@pytest.mark.parametrize(("features", "expected"), [({"avx512_bf16": True}, torch.bfloat16), ({"avx2": True}, None)])
def test_autocast_takes_bfloat16_where_the_processor_has_it(
    features: dict[str, bool], expected: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert autocast_dtype("auto", torch.device("cpu")) is expected
    assert autocast_dtype("off", torch.device("cpu")) is None
    assert autocast_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16


def test_weights_go_from_the_largest_budget_to_the_smallest(copied: Path) -> None:
    """Where the second of two budgets, the smaller, has all the weight, no step trains the larger."""
    rerun(copied, "distillation.weights=[1e-9, 1]", until="distill")
    assert json.loads((copied / "history.json").read_text())["budgets"] == [0.5] * 6


def test_another_dtype_has_the_same_ranks_its_own_slack_and_fewer_bytes(finished: Path, copied: Path) -> None:
    again = ("slack", "evaluate_initial", "evaluate", "deploy", "report")
    assert rerun(copied, "deployment.dtype=bfloat16") == again
    summary, before = summary_of(copied), summary_of(finished)
    columns = json.loads((copied / "slack.json").read_text())["columns"]
    for row, old in zip(summary["rows"], before["rows"], strict=True):
        assert row["ranks"] == old["ranks"]
        count = 0
        for name, rank in row["ranks"].items():
            m, n = summary["layers"][name]["shape"]
            count += min(m * n, rank * (m + n - rank + columns[name][str(rank)]))
        assert row["params_layers"] == count
        assert row["bytes"] < 0.7 * old["bytes"]
    assert [entry["dtype"] for entry in summary["deployed"]] == ["bfloat16"]
    (half,) = [row for row in summary["rows"] if row["budget"] == 0.5]
    assert summary["deployed"][0]["quality"] == half["quality"] != half["quality_before"]


def test_qualities_before_training_are_in_the_dtype_of_those_after_it(copied: Path, sources: Path) -> None:
    """Oracle: the decomposed model, every tensor of its state rounded to bfloat16, and its rotary frequencies not."""
    rerun(copied, "deployment.dtype=bfloat16")
    base, tokenizer = load_model(sources / "language", "language"), load_tokenizer(sources / "language")
    score = load_samples(load_config(copied), tokenizer).quality_function(base)
    (model, _), (rounded, _) = (load_elastic(copied / "elastic_initial") for _ in range(2))
    frequencies = rounded.model.rotary_emb.inv_freq.clone()
    rounded.to(torch.bfloat16).model.rotary_emb.inv_freq = frequencies
    chain = ProfileChain.from_json(json.loads((copied / "chain.json").read_text()))
    for row in summary_of(copied)["rows"]:
        with use_profile(rounded, chain.at(row["budget"])), use_profile(model, chain.at(row["budget"])):
            found = row["quality_before"]["nats_per_token"]
            assert found == pytest.approx(score(rounded)["nats_per_token"], rel=1e-6)
            assert found != pytest.approx(score(model)["nats_per_token"], rel=1e-6)


def test_a_size_that_was_never_trained_is_named(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = "this size is below the smallest trained budget, 0.5: it was never trained"
    for budget, is_said in ((0.8, False), (0.6, False), (0.5, False), (0.4, True)):
        caplog.clear()
        rerun(copied, f"deployment.budgets=[{budget}]", until="deploy")
        assert (line in caplog.text) == is_said


def test_of_a_run_without_training_no_size_is_called_untrained(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = settings(sources / "language", sources / "text.txt", tmp_path / "run")
    values |= {"distillation": {"steps": 0}, "deployment": {"budgets": [0.9, 0.4]}, "probe": {"levels": 6}}
    run_stages(parse_config(values), "deploy")
    assert "trained" not in caplog.text and len(list((tmp_path / "run" / "deployed").iterdir())) == 2


def test_sizes_are_nested_and_those_that_were_trained(finished: Path) -> None:
    chain = ProfileChain.from_json(json.loads((finished / "chain.json").read_text()))
    large, small = summary_of(finished)["rows"]
    for row in (large, small):
        assert dict(chain.at(row["budget"])) == row["ranks"]
        for name, rank in row["ranks"].items():
            m, n = summary_of(finished)["layers"][name]["shape"]
            assert rank == min(m, n) or rank * (m + n - rank + -(-rank // 10)) <= 0.75 * m * n
    assert all(small["ranks"][name] <= rank for name, rank in large["ranks"].items())
    deployed = json.loads((finished / "deployed" / "0.50" / "flexrank.json").read_text())["layers"]
    assert deployed and all(spec["rank"] == small["ranks"][name] for name, spec in deployed.items())


def test_a_size_within_limits_is_the_largest_that_really_is(copied: Path) -> None:
    """By the deployed models themselves, every entry of the chain built; latency by ratios set by hand elsewhere."""
    sizes = Sizes(Workspace(load_config(copied), RunDirectory(copied)))
    counts = [sum(p.numel() for p in sizes.deployed(e.profile).parameters()) for e in sizes.chain.entries]
    for limit in (counts[0], counts[3], counts[3] + 5, counts[-1] - 1, counts[-1]):
        expected = max(i for i, count in enumerate(counts) if count <= limit)
        assert sizes.within({"max_params": limit}) == sizes.chain.entries[expected].profile
        assert sizes.within({"max_bytes": 4 * limit}) == sizes.chain.entries[expected].profile
    with pytest.raises(FlexrankError, match="too small"):
        sizes.within({"max_params": counts[0] - 1})


def test_an_encoder_goes_all_the_way(sources: Path, tmp_path: Path) -> None:
    """The row of a budget is what the exported model gives by hand: mean-pooled over real tokens, held-out texts."""
    config = settings(sources / "embedding", sources / "text.txt", tmp_path / "run", "embedding")
    config["layers"] = {"exclude": ["pooler"]}
    run_stages(parse_config(config))
    summary = summary_of(tmp_path / "run")
    assert summary["base"]["quality"]["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert not any("pooler" in name for name in summary["layers"])
    for place in ("elastic", "deployed/0.50"):  # sentence-transformers reads how texts are pooled
        modules = json.loads((tmp_path / "run" / place / "modules.json").read_text())
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        assert kinds == ["Transformer", "Pooling", "Normalize"]
        length = json.loads((tmp_path / "run" / place / "sentence_bert_config.json").read_text())
        assert length == {"max_seq_length": config["data"]["max_tokens"]}
    model, small = (
        transformers.AutoModel.from_pretrained(place).eval()
        for place in (sources / "embedding", tmp_path / "run" / "deployed" / "0.50")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "embedding", padding_side="right")
    held_out = TEXT.splitlines()[-len(TEXT.splitlines()) * SPLITS["evaluation"] // 100 :]
    random.Random(0).shuffle(held_out)
    batch = tokenizer(held_out[:16], padding=True, truncation=True, max_length=32, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        one, two = (
            (m(batch["input_ids"], batch["attention_mask"])[0] * mask).sum(1) / mask.sum(1) for m in (model, small)
        )
    cosine = torch.nn.functional.cosine_similarity(one, two).mean()
    row = next(row for row in summary["rows"] if row["budget"] == 0.5)
    assert row["quality"]["cosine"] == pytest.approx(float(cosine), abs=1e-6)
    assert cosine < 0.9999


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model=./nowhere"], ["./nowhere", "no such directory"]),
        (
            ["model=RUN/deployed/0.50"],
            ["deployed/0.50': already compressed; name the dense model from which it was made"],
        ),
        (["model=package:no_such_package/model"], ["no_such_package", "pip install"]),
        (["data.path=nowhere.txt"], ["nowhere.txt"]),
        (
            ["data.batch_size=4096", "data.calibration=4096"],
            ["data.calibration", "one batch of 4096", "a data.max_tokens below 32"],
        ),
        (["data.max_tokens=1000000"], ["data.max_tokens is 1000000", "reads at most 64"]),
        (["layers.include=[nothing]"], ["'nothing'", "matches no module"]),
        (["allocation.budgets=[0.001]"], ["0.001", "too small"]),
        (["deployment.budgets=[0.5, 0.001]"], ["deployment.budgets: 0.001", "with probe.levels 4 the least is"]),
        (["device=cuda"], ["device is 'cuda'", "no GPU"]),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_half_result(
    overrides: list[str], parts: list[str], finished: Path, tmp_path: Path
) -> None:
    if overrides == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    overrides = [one.replace("RUN", str(finished)) for one in overrides]
    config = load_config(finished, [*overrides, f"output={tmp_path / 'run'}"])
    with pytest.raises(FlexrankError) as caught:
        run_stages(config)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_changed_file_of_held_out_texts_makes_the_run_anew(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("one\ntwo\n")
    values = settings(sources / "language", sources / "text.txt", tmp_path / "run")
    values["data"] |= {"held_out": str(tmp_path / "other.txt")}
    before = fingerprints(parse_config(values), values["model"])
    (tmp_path / "other.txt").write_text("one\nthree\n")
    assert fingerprints(parse_config(values), values["model"]) != before


def test_an_exported_size_that_is_no_longer_wanted_is_removed(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flexrank")
    (copied / "deployed" / "mine.txt").write_text("not to be removed")
    (copied / "deployed" / ".0.50.killed00.aside").mkdir()
    (copied / "deployed" / "mine.old").mkdir()
    (copied / "deployed" / "notes.old").touch()
    shutil.copytree(copied / "deployed" / "0.50", copied / "deployed" / "mine")  # as by `deploy --output`
    rerun(copied, "deployment.budgets=[0.8]", until="deploy")
    assert sorted(path.name for path in (copied / "deployed").iterdir()) == [
        "0.80",
        "mine",
        "mine.old",
        "mine.txt",
        "notes.old",
    ]
    assert f"deploy: removed {copied}/deployed/0.50, as deployment.budgets has it no more" in caplog.text
    (copied / "deployed" / "mine.txt").write_text("and may change")
    assert rerun(copied, until="deploy") == ()
    rerun(copied, "deployment.budgets=[]", until="deploy")
    assert sorted(path.name for path in (copied / "deployed").iterdir()) == [
        "mine",
        "mine.old",
        "mine.txt",
        "notes.old",
    ]
