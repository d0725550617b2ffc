"""The whole way on tiny models: resuming to the same bits, skipping what stands, and refusing what is wrong."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flexrank import deployment, distillation, sensitivity, verification
from flexrank.config import load_config, parse_config
from flexrank.data import SPLITS
from flexrank.distillation import distillation_evaluator
from flexrank.errors import FlexrankError
from flexrank.objectives import objective_for
from flexrank.pipeline import run_stages, stage_names
from flexrank.pipeline.rundir import RunDirectory
from flexrank.pipeline.samples import load_samples
from flexrank.pipeline.stages import autocast_dtype
from flexrank.surgery import use_profile

TEXT = "\n".join(
    f"the quick brown fox number {n} jumps over {n * 7 % 13} lazy dogs and {n % 5} cats" for n in range(400)
)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set(TEXT))
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(directory)


def write_model(directory: Path, task: str) -> Path:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common["initializer_range"] = 0.2  # large enough that truncation is felt
    if task == "language":
        config: Any = LlamaConfig(
            **common, intermediate_size=56, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0
        )
        model: Any = LlamaForCausalLM(config)
    else:
        model = BertModel(BertConfig(**common, intermediate_size=64, max_position_embeddings=128))
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def settings(model: Path, data: Path, output: Path, task: str = "language") -> dict[str, Any]:
    return {
        "name": "tiny",
        "task": task,
        "model": str(model),
        "device": "cpu",
        "output": str(output),
        "data": {
            "source": "text", "path": str(data), "calibration": 64, "probe": 16, "training": 64, "evaluation": 16,
            "max_tokens": 32, "batch_size": 8,
        },
        "probe": {"levels": 4},
        "allocation": {"budgets": [0.8, 0.5]},
        "distillation": {"steps": 6, "batch_size": 4, "checkpoint_every": 2, "warmup_steps": 1, "learning_rate": 1e-3},
        "deployment": {"budgets": [0.5]},
        "evaluation": {"latency_repeats": 3, "latency_batch_size": 4},
    }  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sources")
    (place / "text.txt").write_text(TEXT)
    for task in ("language", "embedding"):
        write_model(place / task, task)
    return place


@pytest.fixture(scope="module")
def finished(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole language run; not to be changed, copy it."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    outcome = run_stages(parse_config(settings(sources / "language", sources / "text.txt", output)))
    assert outcome.executed == stage_names()
    return output


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the whole run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def rerun(directory: Path, *overrides: str, until: str = "report") -> tuple[str, ...]:
    """The stages that run again."""
    return run_stages(load_config(directory, overrides), until).executed


def summary_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def test_a_second_run_does_nothing_and_touches_nothing(copied: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.name != "run.lock"}
    assert rerun(copied) == ()
    after = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.name != "run.lock"}
    assert {path for path in after if path.is_file()} == {path for path in before if path.is_file()}
    assert all(after[path] == before[path] for path in after if path.is_file())


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
    import transformers
    from safetensors import safe_open

    import flexrank  # noqa: F401

    row = next(row for row in summary_of(finished)["rows"] if row["budget"] == 0.5)
    place = finished / "deployed" / "0.50"
    with safe_open(place / "model.safetensors", framework="pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == row["params_model"]
    added = {"flexrank.json", "tokenizer.json", "tokenizer_config.json"}  # by the export, beside what a model saves
    files = [path for path in place.iterdir() if path.name not in added]
    assert sum(path.stat().st_size for path in files) == row["bytes"]
    small = transformers.AutoModelForCausalLM.from_pretrained(place)
    config = load_config(finished)
    samples = load_samples(config, str(sources / "language"), transformers.AutoTokenizer.from_pretrained(place))
    assert samples.judge(small)(small)["nats_per_token"] == pytest.approx(row["quality"]["nats_per_token"], rel=1e-6)


def test_the_base_row_is_the_original(finished: Path, sources: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(sources / "language").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "language")
    samples = load_samples(load_config(finished), str(sources / "language"), tokenizer)
    base = summary_of(finished)["base"]
    assert base["quality"] == samples.judge(model)(model)
    assert base["params_model"] == sum(parameter.numel() for parameter in model.parameters())


def test_consolidation_lowers_the_loss_it_minimises(finished: Path, sources: Path) -> None:
    """The elastic model of the run is nearer to its teacher than the decomposed one, at the smallest size."""
    import transformers

    from flexrank.checkpoint import load_elastic

    model = transformers.AutoModelForCausalLM.from_pretrained(sources / "language").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "language")
    samples = load_samples(load_config(finished), str(sources / "language"), tokenizer)
    evaluate = distillation_evaluator(model, samples.training, objective_for("language"))
    (before, _), (after, chain) = (load_elastic(finished / name) for name in ("elastic_initial", "elastic"))
    with use_profile(before, chain.at(0.5)), use_profile(after, chain.at(0.5)):
        assert evaluate(after) < evaluate(before)


class Stop:
    """Counts calls of a function, and at one of them acts as Ctrl-C does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, at: int | None):
        self.calls, original = 0, getattr(where, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise KeyboardInterrupt
            return original(*arguments, **options)

        monkeypatch.setattr(where, name, counted)


@pytest.mark.parametrize(
    ("stage", "where", "name", "at", "left", "result"),
    [
        # 15 layers of 4 ranks, the last of them for nothing: the 22nd call is in the sixth layer, so five are kept.
        # The first call of the resumed one sees that the checkpoint is of the same probe.
        ("probe", sensitivity, "_probe", 22, 1 + 4 * 10, "sensitivity.json"),
        # 6 steps, a checkpoint every 2: stopped in the fifth, four are kept.
        ("distill", distillation, "_backward", 5, 2, "elastic/elastic.safetensors"),
    ],
)
def test_an_interrupted_stage_goes_on_to_the_same_bits(
    stage: str, where: Any, name: str, at: int, left: int, result: str,
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = load_config(finished).model_copy(update={"output": str(tmp_path / "run")})
    with monkeypatch.context() as patch:
        Stop(patch, where, name, at)
        with pytest.raises(KeyboardInterrupt):
            run_stages(config, stage)
    partial = tmp_path / "run" / "partial"
    (kept,) = partial.iterdir()
    (partial / f".{kept.name}.0.aside").write_text("what a killed process was writing")
    with monkeypatch.context() as patch:
        resumed = Stop(patch, where, name, None)
        assert stage in run_stages(config, stage).executed
    assert resumed.calls == left
    assert (tmp_path / "run" / result).read_bytes() == (finished / result).read_bytes()
    assert not list(partial.iterdir())


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("deployment.budgets=[0.8]", ("deploy", "report")),
        ("evaluation.latency=false", ("evaluate", "report")),
        ("distillation.steps=4", ("evaluate_initial", "distill", "evaluate", "deploy", "report")),
        ("allocation.budgets=[0.6]", ("allocate", "evaluate_initial", "distill", "evaluate", "deploy", "report")),
        ("data.probe=8", ("probe", "allocate", "evaluate_initial", "distill", "evaluate", "deploy", "report")),
    ],
)
def test_a_changed_key_runs_its_stage_and_those_below(
    override: str, again: tuple[str, ...], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_run_verification", _verify_here)
    assert rerun(copied, override) == again
    assert rerun(copied) == ()


def _verify_here(artefact: Path, scratch: Path, timeout: float) -> None:
    """The verification, without the seconds that a fresh process takes; other tests have one."""
    del timeout
    threads = torch.get_num_threads()
    verification.verify(artefact, scratch)
    torch.set_num_threads(threads)


def test_changed_texts_run_everything_again(sources: Path, copied: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT)
    assert rerun(copied, f"data.path={other}", until="decompose") == ("decompose",)
    other.write_text(TEXT.replace("fox", "cat"))
    assert rerun(copied, until="decompose") == ("decompose",)
    assert rerun(copied, until="decompose") == ()


def test_a_missing_result_is_made_again_and_an_edited_one_refused(copied: Path) -> None:
    (copied / "chain.json").unlink()
    assert rerun(copied, until="allocate") == ("allocate",)
    text = (copied / "chain.json").read_text()
    (copied / "chain.json").write_text(text.replace('"joint"', '"jOint"'))
    with pytest.raises(FlexrankError, match="chain.json: was edited after `allocate` wrote it"):
        rerun(copied)


def test_a_directory_that_lost_a_file_is_made_again_and_a_truncated_one_refused(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_run_verification", _verify_here)
    (copied / "deployed" / "0.50" / "model.safetensors").unlink()
    (copied / "figures" / "ranks.png").unlink()
    assert rerun(copied) == ("deploy", "report")
    assert rerun(copied) == ()
    state = copied / "elastic_initial" / "elastic.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(FlexrankError, match="was edited after `decompose` wrote it; delete .*/elastic_initial to make"):
        rerun(copied)
    shutil.rmtree(copied / "elastic_initial")
    assert rerun(copied) == ("decompose",)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.path=./nowhere.txt", "nowhere.txt"),
        ("distillation.learning_rate=1e30", "at step"),
        ("model=./nowhere", "nowhere"),
        ("deployment.budgets=[0.8, 0.001]", "too small"),
        ("dtype=bfloat16", "dtype 'bfloat16' cannot be consolidated; keep float32"),
    ],
)
def test_a_wrong_input_leaves_a_finished_run_as_it_was(override: str, part: str, copied: Path) -> None:
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and "partial" not in path.parts}
    with pytest.raises(FlexrankError, match=part):
        rerun(copied, override)
    assert not [path for path in copied.rglob("*") if path.name.endswith((".was", ".aside", ".old"))]
    after = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and "partial" not in path.parts}
    assert after == before
    assert rerun(copied) == ()


def test_a_wrong_input_leaves_no_directory(sources: Path, tmp_path: Path) -> None:
    config = settings(sources / "language", tmp_path / "nowhere.txt", tmp_path / "run")
    with pytest.raises(FlexrankError, match="nowhere.txt"):
        run_stages(parse_config(config))
    assert list(tmp_path.iterdir()) == []


def test_a_budget_out_of_reach_is_refused_before_anything_is_probed(sources: Path, tmp_path: Path) -> None:
    config = settings(sources / "language", sources / "text.txt", tmp_path / "run")
    config["deployment"]["budgets"] = [0.5, 0.001]
    with pytest.raises(
        FlexrankError, match=r"deployment.budgets: 0.001 is too small; with probe.levels 4 the least is"
    ):
        run_stages(parse_config(config))
    assert [path.stem for path in (tmp_path / "run" / "stages").iterdir()] == ["decompose"]


def test_a_configuration_that_cannot_be_read_is_not_written_over(copied: Path) -> None:
    config = load_config(copied)
    (copied / "config.yaml").write_text("name: tiny\nkey_of_the_future: 1\n")
    with pytest.raises(FlexrankError, match="unknown key 'key_of_the_future'"):
        run_stages(config)
    assert (copied / "config.yaml").read_text() == "name: tiny\nkey_of_the_future: 1\n"


def test_an_exported_size_that_is_no_longer_wanted_is_removed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_run_verification", _verify_here)
    (copied / "deployed" / "mine.txt").write_text("not to be removed")
    (copied / "deployed" / ".0.50.killed.aside").mkdir()
    rerun(copied, "deployment.budgets=[0.8]", until="deploy")
    assert sorted(path.name for path in (copied / "deployed").iterdir()) == ["0.80", "mine.txt"]
    (copied / "deployed" / "mine.txt").write_text("and may change")
    assert rerun(copied, until="deploy") == ()
    rerun(copied, "deployment.budgets=[]", until="deploy")
    assert [path.name for path in (copied / "deployed").iterdir()] == ["mine.txt"]


def test_without_consolidation_the_artefact_is_the_decomposed_network(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_run_verification", _verify_here)
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


def test_a_budget_holds_with_its_slack_and_bytes_follow_the_dtype(
    finished: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_run_verification", _verify_here)
    rerun(copied, "deployment.slack=4", "deployment.dtype=bfloat16")
    summary, before = summary_of(copied), summary_of(finished)
    for row, old in zip(summary["rows"], before["rows"], strict=True):
        assert row["params_layers"] <= row["budget"] * summary["base"]["params_layers"]
        assert row["mean_rank"] < old["mean_rank"]  # the slack's parameters come out of the same budget
        assert row["bytes"] < 0.7 * old["bytes"]
    assert [entry["dtype"] for entry in summary["deployed"]] == ["bfloat16"]
    (half,) = [row for row in summary["rows"] if row["budget"] == 0.5]
    assert summary["deployed"][0]["quality"] == half["quality"] != half["quality_before"]


def test_one_process_at_a_time_writes_to_a_run(copied: Path) -> None:
    with RunDirectory(copied).locked(), pytest.raises(FlexrankError, match=f"process {os.getpid()} writes to this run"):
        rerun(copied)


def test_the_lock_of_a_dead_process_does_not_count(copied: Path) -> None:
    (copied / "run.lock").write_text("999999")
    assert rerun(copied) == ()


def test_a_run_of_another_name_is_not_written_over(copied: Path) -> None:
    with pytest.raises(FlexrankError, match="holds the run 'tiny', not 'other'"):
        rerun(copied, "name=other")


def test_an_encoder_goes_all_the_way(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a budget is what the exported model gives by hand: mean-pooled over real tokens, held-out texts."""
    import transformers

    monkeypatch.setattr(deployment, "_run_verification", _verify_here)
    config = settings(sources / "embedding", sources / "text.txt", tmp_path / "run", "embedding")
    config["layers"] = {"exclude": ["pooler"]}
    run_stages(parse_config(config))
    summary = summary_of(tmp_path / "run")
    assert summary["base"]["quality"]["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert not any("pooler" in name for name in summary["layers"])
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
        (["model=package:no_such_package/model"], ["no_such_package", "pip install"]),
        (["data.path=nowhere.txt"], ["nowhere.txt"]),
        (["data.batch_size=4096"], ["data.calibration", "shorter than one batch of 4096"]),
        (["data.max_tokens=1000000"], ["data.max_tokens is 1000000", "reads at most 64"]),
        (["layers.include=[nothing]"], ["'nothing'", "matches no module"]),
        (["allocation.budgets=[0.001]"], ["0.001", "too small"]),
        (["device=cuda"], ["device is 'cuda'", "no GPU"]),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_half_result(
    overrides: list[str], parts: list[str], finished: Path, tmp_path: Path
) -> None:
    if overrides == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = load_config(finished, [*overrides, f"output={tmp_path / 'run'}"])
    with pytest.raises(FlexrankError) as caught:
        run_stages(config)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    assert not list(tmp_path.glob("**/*.aside"))


def test_calibration_probe_training_and_evaluation_share_no_text(sources: Path, tmp_path: Path) -> None:
    """Every sample is told by its tokens; a fifth of the file is held out."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "embedding")
    values = settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding")
    values["data"] |= {"calibration": 25, "probe": 15, "training": 10_000, "evaluation": 10_000, "max_tokens": 100}
    seen: dict[str, set[tuple[int, ...]]] = {}
    config = parse_config(values)
    samples = load_samples(config, "", tokenizer)
    for name in ("calibration", "probe", "training"):
        rows = [row for batch in getattr(samples, name) for row in batch["input_ids"].tolist()]
        seen[name] = {tuple(token for token in row if token) for row in rows}
    shares, lines = SPLITS, TEXT.splitlines()
    held_out_at = len(lines) * (shares["calibration"] + shares["training"]) // 100
    assert [len(seen[name]) for name in ("calibration", "probe")] == [25, 15]
    assert len(seen["training"]) == len(lines) * shares["training"] // 100
    assert not seen["calibration"] & seen["probe"]
    assert not (seen["calibration"] | seen["probe"]) & seen["training"]
    held_out = {tuple(tokenizer(line)["input_ids"]) for line in lines[held_out_at:]}
    assert not held_out & (seen["calibration"] | seen["probe"] | seen["training"])
