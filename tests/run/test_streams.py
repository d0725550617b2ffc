"""Runs on streams of texts: the whole way, resumed to the same bits, and what is refused."""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from flexrank.data.stream import StreamedBatches
from flexrank.distill.step import Step
from flexrank.errors import FlexrankError
from flexrank.files import read_json
from flexrank.run import run_stages, stage_names, trials
from flexrank.run.config import load_config, parse_config
from flexrank.run.runner import fingerprints
from flexrank.run.samples import load_samples
from tiny_runs import TEXT, refused, rerun, settings, summary_of

pytestmark = pytest.mark.usefixtures("verified_here")
LINES = [f"{n} {line}" for n, line in enumerate(2 * TEXT.splitlines())]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files of JSON lines."""
    place = tmp_path / "corpus"
    place.mkdir()
    for name, lines in {"a": LINES[:500], "b": LINES[500:]}.items():
        (place / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return place


def streamed(model: Path, corpus: Path, output: Path, task: str = "language", **data: Any) -> dict[str, Any]:
    values = settings(model, corpus, output, task)
    values["data"] |= {"source": "jsonl", "shuffle_buffer": 40, **data}
    del values["data"]["training"]
    return values


def part(text: str) -> str:
    place = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % 100
    return "calibration" if place < 10 else "training" if place < 90 else "evaluation"


def test_a_stream_goes_all_the_way_and_resumes_to_the_same_bits(
    sources: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of forty texts, so that the interruption is in the middle of one. Only the second run is interrupted."""
    config = streamed(sources / "language", corpus, tmp_path / "whole") | {
        "evaluation": {"latency": False},
    }
    assert run_stages(parse_config(config)).executed == stage_names()
    assert [row["budget"] for row in summary_of(tmp_path / "whole")["rows"]] == [0.8, 0.5]
    assert rerun(tmp_path / "whole") == ()
    other, take, again = (
        shutil.copytree(tmp_path / "whole", tmp_path / "other"),
        Step.take,
        "distillation.warmup_steps=0",
    )
    rerun(tmp_path / "whole", again, until="distill")

    def fail(self: Step, items: Any, number: int, mean_loss: Any) -> float:
        if number == 5:
            raise KeyboardInterrupt
        return take(self, items, number, mean_loss)

    monkeypatch.setattr(Step, "take", fail)
    with pytest.raises(KeyboardInterrupt):
        rerun(other, again, until="distill")
    monkeypatch.undo()
    state = json.loads(next((other / "partial").glob("distill-*/state.json")).read_text())
    assert len(state["losses"]) == 4 and state["feed"]["loader"]["given"] > 0
    assert rerun(other, again, until="distill") == ("distill",)
    one, two = (place / "elastic" / "elastic.safetensors" for place in (tmp_path / "whole", other))
    assert one.read_bytes() == two.read_bytes()
    assert rerun(other, "data.shuffle_buffer=0", until="distill") == ("distill",)
    losses = [json.loads((place / "history.json").read_text())["losses"] for place in (tmp_path / "whole", other)]
    assert losses[0] != losses[1]


def test_trials_of_a_learning_rate_leave_a_stream_at_its_beginning(
    sources: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a run that is given the rate which trials found has the same losses and weights, to the bit."""
    monkeypatch.setattr(trials, "LEAST", 1)
    monkeypatch.setattr(trials, "SHARE", 2)
    values = streamed(sources / "language", corpus, tmp_path / "run")
    values["distillation"]["learning_rate"] = None
    run_stages(parse_config(values), "distill")
    weights = tmp_path / "run" / "elastic" / "elastic.safetensors"
    found, history = weights.read_bytes(), read_json(tmp_path / "run" / "history.json")
    values["distillation"]["learning_rate"] = history["learning_rate"]
    assert run_stages(parse_config(values), "distill").executed == ("distill",)
    assert weights.read_bytes() == found and read_json(tmp_path / "run" / "history.json") == history


@pytest.mark.parametrize("task", ["language", "embedding"])
def test_no_text_is_in_two_parts(task: str, sources: Path, corpus: Path) -> None:
    """Rows are found again in the texts that a hash by hand gives to each part; training is all of its own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / task)
    many = {"calibration": 30, "probe": 10, "evaluation": 30, "max_tokens": 100}
    values = streamed(sources / task, corpus, corpus, task, **many)
    values["evaluation"] |= {"latency_batch_size": 30}
    samples = load_samples(parse_config(values), tokenizer)
    assert isinstance(samples.training, StreamedBatches)
    few: list[Any] = [samples.calibration, samples.probe]
    first, other = ({str(row) for batch in one for row in batch["input_ids"].tolist()} for one in few)
    assert len(first) == 30 and len(other) == 10 and not first & other
    parts: dict[str, Any] = {"calibration": samples.calibration, "training": samples.training}
    parts["evaluation"] = [samples.example]
    for name, batches in parts.items():
        rows = [row for batch in batches for row in batch["input_ids"].tolist()]
        texts = [line for line in LINES if part(line) == name]
        ids = tokenizer(texts, add_special_tokens=task == "embedding")["input_ids"]
        if task == "embedding":
            found, wanted = {tuple(token for token in row if token) for row in rows}, {tuple(row) for row in ids}
            assert found == wanted if name == "training" else found < wanted and len(rows) == 30
        else:
            joined = [token for row in ids for token in [tokenizer.bos_token_id, *row]]
            blocks = [joined[start : start + 100] for start in range(0, len(joined) - 99, 100)]
            assert sorted(rows) == sorted(blocks) if name == "training" else all(row in blocks for row in rows)
            assert name == "training" or len(rows) == 30


def test_without_a_buffer_training_keeps_the_order_of_texts(sources: Path, corpus: Path) -> None:
    """Batches of four blocks in the order of the files; texts for embeddings are sorted within a batch alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "language")
    lines = [line for line in LINES if part(line) == "training"]
    for task in ("language", "embedding"):
        values = streamed(sources / task, corpus, corpus, task, shuffle_buffer=0, max_tokens=100)
        batches: list[Any] = list(load_samples(parse_config(values), tokenizer).training)
        assert [len(batch["input_ids"]) for batch in batches[:-1]] == [4] * (len(batches) - 1)
        rows = [[token for token in row if token] for batch in batches for row in batch["input_ids"].tolist()]
        ids = tokenizer(lines, add_special_tokens=False)["input_ids"]
        if task == "language":
            joined = [token for row in ids for token in [tokenizer.bos_token_id, *row]]
            assert rows == [joined[start : start + 100] for start in range(0, len(joined) - 99, 100)]
        else:
            groups = [[sorted(one[start : start + 4]) for start in range(0, len(lines), 4)] for one in (rows, ids)]
            assert groups[0] == groups[1]


def test_batches_of_texts_for_embeddings_are_full(sources: Path, corpus: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "embedding")
    values = streamed(sources / "embedding", corpus, corpus, "embedding", shuffle_buffer=37)
    batches: list[Any] = list(load_samples(parse_config(values), tokenizer).training)
    assert [len(batch["input_ids"]) for batch in batches].count(4) >= len(batches) - 1


def test_either_half_of_a_stream_has_as_many_samples_as_are_asked_for(sources: Path, corpus: Path) -> None:
    tokenizer, parts = transformers.AutoTokenizer.from_pretrained(sources / "embedding"), {}
    for half in ("tuning", "reporting"):
        values = streamed(sources / "embedding", corpus, corpus, "embedding", half=half, evaluation=20)
        values["evaluation"] |= {"latency_batch_size": 100}
        example: Any = load_samples(parse_config(values), tokenizer).example
        parts[half] = example["input_ids"].tolist()
    found = [{tuple(token for token in row if token) for row in rows} for rows in parts.values()]
    assert not found[0] & found[1] and min(map(len, found)) >= 15


def test_another_file_and_another_size_make_the_run_anew(sources: Path, corpus: Path) -> None:
    values = streamed(sources / "language", corpus, corpus)
    values["data"]["path"] = str(corpus / "*.jsonl")
    seen = [fingerprints(parse_config(values), values["model"])]
    (corpus / "other.txt").write_text("not of this corpus")
    assert fingerprints(parse_config(values), values["model"]) == seen[0]
    (corpus / "c.jsonl").write_text('{"text": "one"}\n')
    seen.append(fingerprints(parse_config(values), values["model"]))
    (corpus / "c.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    seen.append(fingerprints(parse_config(values), values["model"]))
    for key in ("column", "shuffle_buffer"):
        values["data"][key] = {"column": "text", "shuffle_buffer": 7}[key]
        seen.append(fingerprints(parse_config(values), values["model"]))
    assert len({one["distill"] for one in seen}) == 5
    assert len({one["decompose"] for one in seen}) == 4  # the order of training texts is not of its making


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": None}, "data.path is missing: data.source 'jsonl' reads a file"),
        ({"source": "hub", "path": None}, "data.path is missing: data.source 'hub' reads a data set"),
        ({"training": 64}, "data.training counts texts in memory"),
        ({"split": "test"}, "data.split belongs to data.source 'hub'; data.source is 'jsonl'"),
        ({"source": "text", "column": "x"}, "data.column belongs to data.source 'jsonl' or 'parquet' or 'hub'"),
        ({"separator": "\n"}, "data.separator belongs to data.source 'text'"),
        ({"streaming": True}, "data.streaming belongs to data.source 'text'"),
        ({"source": "text", "streaming": True, "separator": "; "}, "data.separator is '; '; with data.streaming it is"),
        ({"source": "text", "streaming": True, "held_out": "x.txt"}, "data.held_out is read whole"),
        ({"shuffle_buffer": -1}, "data.shuffle_buffer is -1"),
        ({"source": "stdlib-docs", "path": "x.txt"}, "data.path x.txt is not read by data.source 'stdlib-docs'"),
    ],
)
def test_keys_that_do_not_fit_are_one_line(data: dict[str, Any], message: str, sources: Path, corpus: Path) -> None:
    values = streamed(sources / "language", corpus, corpus)
    values["data"] |= data
    with pytest.raises(FlexrankError, match=message) as caught:
        parse_config(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.path=nowhere/*.jsonl"], ["data.path nowhere/*.jsonl", "no such file"]),
        (["data.column=body"], ["data.column", "no column 'body'", "it has text"]),
        (["data.batch_size=4096", "data.calibration=4096"], ["data.calibration", "shorter than one batch of 4096"]),
        (["data.max_tokens=60", "data.path=few"], ["few", "texts, none of them is for"]),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_half_result(
    overrides: list[str], parts: list[str], sources: Path, corpus: Path, tmp_path: Path
) -> None:
    values = streamed(sources / "language", corpus, tmp_path / "run")
    (corpus / "few").mkdir()
    (corpus / "few" / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    config = load_config(tmp_path / "run.yaml", [one.replace("=few", f"={corpus / 'few'}") for one in overrides])
    with pytest.raises(FlexrankError) as caught:
        run_stages(config)
    assert "\n" not in str(caught.value)
    for one in parts:
        assert one in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_where_the_library_is_missing_the_line_names_the_extra(
    sources: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "run.yaml").write_text(json.dumps(streamed(sources / "language", corpus, tmp_path / "run")))
    message = refused("run", tmp_path / "run.yaml")
    assert message == "error: datasets is not installed: pip install 'flexrank[data]'"


def test_calibration_does_not_depend_on_the_size_of_the_probe(sources: Path, corpus: Path) -> None:
    """A changed `data.probe` keeps the decomposition, which was calibrated on these blocks."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "language")
    found = []
    for probe in (4, 12):
        values = streamed(sources / "language", corpus, corpus, calibration=16, probe=probe, max_tokens=40)
        samples = load_samples(parse_config(values), tokenizer)
        rows = [[row for batch in part for row in batch["input_ids"].tolist()] for part in
                (samples.calibration, samples.probe)]  # fmt: skip
        assert [len(part) for part in rows] == [16, probe] and not any(row in rows[0] for row in rows[1])
        found.append(rows)
    assert found[0][0] == found[1][0] and found[0][1] == found[1][1][:4]
