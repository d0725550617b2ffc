"""Which texts calibrate, are probed, trained on and scored: no text is in two parts."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flexrank.data.text import SPLITS
from flexrank.errors import FlexrankError
from flexrank.hf.models import load_tokenizer
from flexrank.run.config import parse_config
from flexrank.run.samples import load_samples
from tiny_runs import TEXT, settings


def test_calibration_probe_training_and_evaluation_share_no_text(sources: Path, tmp_path: Path) -> None:
    """Every sample is known by its tokens; a fifth of the file is held out."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "embedding")
    values = settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding")
    values["data"] |= {"calibration": 25, "probe": 15, "training": 10_000, "evaluation": 10_000, "max_tokens": 100}
    seen: dict[str, set[tuple[int, ...]]] = {}
    samples = load_samples(parse_config(values), tokenizer)
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


def test_with_few_texts_the_probe_shares_some_with_calibration_and_says_so(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 400 lines 40 are for both: with 30 and 10 they are apart, and with 38 and 10 the last 8 of 38 serve twice."""
    tokenizer, line = load_tokenizer(sources / "embedding"), "data: 40 samples for calibration and probe, which take 48"
    values = settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding")
    for count, shared in ((30, 0), (38, 8)):
        values["data"] |= {"calibration": count, "probe": 10, "max_tokens": 100}
        with caplog.at_level(logging.INFO, "flexrank"):
            samples = load_samples(parse_config(values), tokenizer)
        own, probe = (
            {tuple(token for token in row if token) for batch in part for row in batch["input_ids"].tolist()}
            for part in (samples.calibration, samples.probe)
        )
        assert (len(own), len(probe), len(own & probe)) == (count, 10, shared)
        assert (line in caplog.text) == ("some serve both" in caplog.text) == bool(shared)


def test_texts_held_out_in_a_file_of_their_own_leave_the_other_to_training(sources: Path, tmp_path: Path) -> None:
    other = [f"these {n} words stand in another file" for n in range(40)]
    (tmp_path / "other.txt").write_text("\n".join(other))
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources / "embedding")
    values = settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding")
    values["data"] |= {"held_out": str(tmp_path / "other.txt"), "training": 10_000, "evaluation": 10_000}
    samples = load_samples(parse_config(values), tokenizer)
    lines = len(TEXT.splitlines())
    assert sum(len(batch["input_ids"]) for batch in samples.training) == lines - lines * SPLITS["calibration"] // 100
    wanted = {tuple(tokenizer(line, truncation=True, max_length=32)["input_ids"]) for line in other}
    assert {tuple(token for token in row if token) for row in samples.example["input_ids"].tolist()} <= wanted


@pytest.mark.parametrize("place", ["corpus/other.txt", "corpus/apart", "corpus/apart/../other.txt"])
def test_texts_are_not_trained_on_where_they_are_held_out_inside_the_folder(
    place: str, sources: Path, tmp_path: Path
) -> None:
    """A folder with 400 lines, and 40 others that are held out: no other sample has the words of these."""
    other = [f"lazy cats and dogs {n}" for n in range(40)]
    (tmp_path / "corpus" / "apart").mkdir(parents=True)
    shutil.copy(sources / "text.txt", tmp_path / "corpus" / "text.txt")
    file = tmp_path / place / "other.txt" if place.endswith("apart") else tmp_path / place
    file.write_text("\n".join(other))
    for task in ("language", "embedding"):
        tokenizer = load_tokenizer(sources / task)
        values = settings(sources / task, tmp_path / "corpus", tmp_path, task)
        values["data"] |= {"held_out": str(tmp_path / place), "training": 10_000, "evaluation": 10_000}
        samples = load_samples(parse_config(values), tokenizer)
        for part in (samples.calibration, samples.probe, samples.training):
            assert not [text for text in texts_of(part, tokenizer) if "lazycats" in text]
        assert all("cats" in text for text in texts_of([samples.example], tokenizer))
    values["data"] |= {"path": str(file)}
    with pytest.raises(FlexrankError, match="holds no text but that of"):
        load_samples(parse_config(values), tokenizer)


def texts_of(batches: Any, tokenizer: Any) -> list[str]:
    """The texts of all rows, without blanks, as a tokenizer of characters decodes them."""
    rows = [row for batch in batches for row in batch["input_ids"].tolist()]
    return [tokenizer.decode(row, skip_special_tokens=True).replace(" ", "") for row in rows]


@pytest.mark.parametrize(("first", "counts"), [(200, (80, 120, 200)), (40, (40, 160, 200))])
def test_a_repeated_text_is_in_one_part_alone(
    first: int, counts: tuple[int, int, int], sources: Path, tmp_path: Path
) -> None:
    """The file twice over, the second time with the 200 lines last that evaluation keeps; the first 80 calibrate."""
    tokenizer, lines = load_tokenizer(sources / "embedding"), TEXT.splitlines()
    held_out = slice(first, first + 200)
    others = [line for line in lines if line not in lines[held_out]]
    (tmp_path / "twice.txt").write_text("\n".join([*lines, *others, *lines[held_out]]))
    values = settings(sources / "embedding", tmp_path / "twice.txt", tmp_path, "embedding")
    most = {"calibration": 40, "probe": 40, "training": 10_000, "evaluation": 10_000, "max_tokens": 100}
    values["data"] |= most
    values["evaluation"] |= {"latency_batch_size": 10_000}
    samples = load_samples(parse_config(values), tokenizer)
    used, training, scored = (
        set(texts_of(part, tokenizer))
        for part in ([*samples.calibration, *samples.probe], samples.training, [samples.example])
    )
    assert (len(used), len(training), len(scored)) == counts
    assert not used & training and not (used | training) & scored


def test_each_file_of_a_folder_is_one_running_text(sources: Path, tmp_path: Path) -> None:
    """Ten files of forty lines: each begins with a bos token, and with a part of its own where it is divided."""
    tokenizer, lines = load_tokenizer(sources / "language"), TEXT.splitlines()
    (tmp_path / "corpus").mkdir()
    for number in range(10):
        (tmp_path / "corpus" / f"{number}.txt").write_text("\n".join(lines[40 * number : 40 * number + 40]) + "\n")
    values = settings(sources / "language", tmp_path / "corpus", tmp_path)
    values["data"] |= {"training": 10_000, "max_tokens": 16}
    samples = load_samples(parse_config(values), tokenizer)
    ids = torch.cat([batch["input_ids"].flatten() for batch in samples.training])
    assert int((ids == tokenizer.bos_token_id).sum()) == 7  # lines 40 to 300 are in files 1 to 7
    wanted = sum(len(tokenizer(line, add_special_tokens=False)["input_ids"]) for line in lines[40:300])
    assert wanted + 7 + 253 - 16 < ids.numel() <= wanted + 7 + 253  # line ends between the lines of a file


@pytest.mark.parametrize("lines", [1, 3])
def test_a_running_text_of_long_lines_is_divided_at_blanks(lines: int, sources: Path, tmp_path: Path) -> None:
    tokenizer, words = load_tokenizer(sources / "language"), " ".join(TEXT.splitlines() * 4).split(" ")
    size = -(-len(words) // lines)
    text = "\n".join(" ".join(words[start : start + size]) for start in range(0, len(words), size))
    (tmp_path / "long.txt").write_text(text)
    values = settings(sources / "language", tmp_path / "long.txt", tmp_path)
    values["data"] |= {"training": 10_000, "max_tokens": 16}
    samples = load_samples(parse_config(values), tokenizer)
    count = sum(batch["input_ids"].numel() for batch in samples.training)
    assert 0.55 * len(text) < count < 0.75 * len(text)  # 65 % by pieces of 4096 characters, each a token


@pytest.mark.parametrize("task", ["embedding", "language"])
def test_training_takes_all_of_its_part_unless_it_is_limited(task: str, sources: Path, tmp_path: Path) -> None:
    """65 % of 7,000 texts; of running text as many tokens, here letters, which are cut into blocks of 16."""
    lines = [f"text {number:010d}" for number in range(7000)]  # 15 letters, and the line's end or special tokens
    (tmp_path / "long.txt").write_text("\n".join(lines) + "\n")
    values = settings(sources / task, tmp_path / "long.txt", tmp_path, task)
    values["data"] |= {"max_tokens": 16, "training": None}
    samples = load_samples(parse_config(values), load_tokenizer(sources / task))
    assert sum(len(batch["input_ids"]) for batch in samples.training) == pytest.approx(4550, abs=2)
    values["data"] |= {"training": 5}
    limited = load_samples(parse_config(values), load_tokenizer(sources / task)).training
    assert sum(len(batch["input_ids"]) for batch in limited) == 5


def test_the_timed_batch_is_a_full_one(sources: Path, tmp_path: Path) -> None:
    for count, size in ((20, 16), (16, 16), (9, 16)):
        values = settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding")
        values["data"] |= {"evaluation": count}
        values["evaluation"] |= {"latency_batch_size": size}
        example: Any = load_samples(parse_config(values), load_tokenizer(sources / "embedding")).example
        assert len(example["input_ids"]) == min(count, size)


@pytest.mark.parametrize("task", ["language", "embedding"])
def test_the_held_out_samples_have_two_halves(task: str, sources: Path, tmp_path: Path) -> None:
    """The example of a batch as large as the held-out part is the whole of it."""
    tokenizer, parts = load_tokenizer(sources / task), {}
    for half in (None, "tuning", "reporting"):
        values = settings(sources / task, sources / "text.txt", tmp_path, task)
        values["data"] |= {"evaluation": 10_000, "half": half}
        values["evaluation"] |= {"latency_batch_size": 10_000}
        example = load_samples(parse_config(values), tokenizer).example
        parts[half] = {tuple(token for token in row if token) for row in example["input_ids"].tolist()}
    assert parts["tuning"] | parts["reporting"] == parts[None] and not parts["tuning"] & parts["reporting"]
    assert 0.3 * len(parts[None]) < len(parts["tuning"]) < 0.7 * len(parts[None])


@pytest.mark.parametrize(
    ("separator", "right"), [(None, "give more, or a separator"), ("ZZZ", "are they separated by 'ZZZ'\\?")]
)
def test_too_few_texts_say_what_divides_them(separator: str | None, right: str, sources: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a b c\n")
    values = settings(sources / "embedding", tmp_path / "one.txt", tmp_path, "embedding")
    values["data"] |= {"separator": separator}
    tokenizer = load_tokenizer(sources / "embedding")
    with pytest.raises(FlexrankError, match=rf"one.txt: the texts are too few \(1\), none is left for .*; {right}"):
        load_samples(parse_config(values), tokenizer)


def test_held_out_texts_belong_to_texts(sources: Path, tmp_path: Path) -> None:
    values = settings(sources / "embedding", sources / "text.txt", tmp_path, "embedding")
    values["data"] |= {"source": "stdlib-docs", "held_out": "x.txt"}
    with pytest.raises(FlexrankError, match="data.held_out belongs to data.source 'text'"):
        parse_config(values)
