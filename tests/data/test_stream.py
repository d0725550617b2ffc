"""Streams against the whole corpus in memory: order, parts, blocks, and the place that is resumed from."""

import gzip
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from flexrank.data.stream import (
    StreamedBatches,
    TextStream,
    block_maker,
    corpus_files,
    held_out_texts,
    open_texts,
    sentence_maker,
)
from flexrank.distill.schedule import Feed
from flexrank.errors import FlexrankError
from tiny import WordTokenizer

TOKENIZER = WordTokenizer()
TEXTS = [f"text {n} has " + " ".join(f"w{n * k % 17}" for k in range(n % 9)) + " words" for n in range(300)]


def part(text: str) -> str:
    """By hand: of 100 places the first ten are for calibration, the last ten for evaluation."""
    place = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % 100
    return "calibration" if place < 10 else "training" if place < 90 else "evaluation"


TRAINING = [text for text in TEXTS if part(text) == "training"]


def write_corpus(place: Path, source: str) -> Path:
    """Three files of a hundred texts, the last one in a folder, and a file of another kind."""
    (place / "z").mkdir(parents=True)
    for index, name in enumerate(("a", "b", "z/c")):
        some = TEXTS[100 * index : 100 * index + 100]
        if source == "parquet":
            table = pyarrow.table({"number": range(100), "text": some})
            parquet.write_table(table, place / f"{name}.parquet", row_group_size=30)
        elif source == "jsonl":
            # A column whose type changes, also from file to file, and a line that is blank.
            lines = [json.dumps({"meta": n if n < 50 * index else f"{n}", "text": one}) for n, one in enumerate(some)]
            (place / f"{name}.jsonl").write_text("\n\n".join(lines) + "\n")
        else:
            (place / f"{name}.txt").write_text("\n\n".join(some))
    (place / "other.csv").write_text("text\nnot this one\n")
    return place


class Rows:
    """Rows of texts that count how many were read."""

    def __init__(self, texts: list[str]):
        self.all, self.place = texts, 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        while self.place < len(self.all):
            self.place += 1
            yield {"text": self.all[self.place - 1]}

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def stream_of(texts: list[str]) -> TextStream:
    return TextStream(Rows(texts), lambda row: row["text"], "corpus")


def blocks_by_hand(length: int) -> list[list[int]]:
    """All training texts joined, each after token 1, and cut."""
    tokens = [token for text in TRAINING for token in [1, *(3 + sum(word.encode()) % 61 for word in text.split())]]
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


def rows_of(batches: Any) -> list[list[int]]:
    return [row for batch in batches for row in batch["input_ids"].tolist()]


@pytest.mark.parametrize("source", ["jsonl", "parquet", "text"])
def test_a_folder_is_read_in_order_and_from_any_place_in_it(source: str, tmp_path: Path) -> None:
    place = str(write_corpus(tmp_path / "corpus", source))
    stream = open_texts(source, place, TOKENIZER)
    assert list(stream.texts()) == list(stream.texts()) == TEXTS
    for count in (1, 30, 100, 101, 299, 300):
        assert list(itertools.islice(stream.texts(), count)) == TEXTS[:count]
        state = json.loads(json.dumps(stream.state()))
        assert list(open_texts(source, place, TOKENIZER).texts(state)) == TEXTS[count:]


def test_parquet_is_resumed_by_groups_of_rows(tmp_path: Path) -> None:
    """Three files of a hundred rows in groups of thirty: a group before the place is not read."""
    stream = open_texts("parquet", str(write_corpus(tmp_path / "corpus", "parquet")), TOKENIZER)
    assert stream._rows.num_shards == 12


def test_a_file_a_compressed_file_and_a_glob_are_read_too(tmp_path: Path) -> None:
    place = write_corpus(tmp_path / "corpus", "jsonl")
    assert list(open_texts("jsonl", str(place / "b.jsonl"), TOKENIZER).texts()) == TEXTS[100:200]
    assert list(open_texts("jsonl", str(place / "[ab].jsonl"), TOKENIZER).texts()) == TEXTS[:200]
    assert corpus_files("jsonl", str(place / "**" / "*.jsonl")) == [
        str(place / f"{n}.jsonl") for n in ("a", "b", "z/c")
    ]
    (place / "d.jsonl.gz").write_bytes(gzip.compress((place / "b.jsonl").read_bytes()))
    assert list(open_texts("jsonl", str(place / "d.jsonl.gz"), TOKENIZER).texts()) == TEXTS[100:200]


def test_text_is_divided_by_lines_or_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n \n\n\nfour\n")
    lines, paragraphs = (open_texts("text", str(tmp_path), TOKENIZER, separator=one).texts() for one in ("\n", "\n\n"))
    assert list(lines) == ["one", "two", "three", "four"]
    assert list(paragraphs) == ["one\ntwo", "three", "four"]


def test_a_data_set_of_the_hub_is_asked_for_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for; files of this machine are given for it."""
    import datasets

    files = corpus_files("parquet", str(write_corpus(tmp_path / "corpus", "parquet")))
    there = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    asked: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return there

    monkeypatch.setattr(datasets, "load_dataset", load)
    stream = open_texts("hub", "some/texts", TOKENIZER, subset="small", revision="abc")
    assert list(stream.texts()) == TEXTS
    open_texts("hub", "some/texts", TOKENIZER, split="test")
    first, second = asked
    assert first == (("some/texts", "small"), {"split": "train", "revision": "abc", "streaming": True})
    assert second == (("some/texts", None), {"split": "test", "revision": None, "streaming": True})


def test_a_folder_with_the_files_of_a_data_set_is_read_by_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, some in {"train-00000-of-00002": [0, 1], "train-00001-of-00002": [2], "test-00000-of-00001": [3]}.items():
        parquet.write_table(pyarrow.table({"text": [TEXTS[n] for n in some]}), tmp_path / "data" / f"{name}.parquet")
    assert list(open_texts("hub", str(tmp_path), TOKENIZER).texts()) == TEXTS[:3]
    assert list(open_texts("hub", str(tmp_path), TOKENIZER, split="test").texts()) == [TEXTS[3]]
    with pytest.raises(FlexrankError, match="nowhere.*train.*test"):
        open_texts("hub", str(tmp_path), TOKENIZER, split="nowhere")


def test_held_out_texts_are_the_first_of_their_parts_and_no_more_is_read() -> None:
    stream = stream_of(TEXTS)
    found = held_out_texts(stream, {"calibration": 12, "evaluation": 8}, lambda text: 4)
    wanted = {name: [text for text in TEXTS if part(text) == name] for name in ("calibration", "evaluation")}
    assert found == {"calibration": wanted["calibration"][:3], "evaluation": wanted["evaluation"][:2]}
    last = max(TEXTS.index(found["calibration"][-1]), TEXTS.index(found["evaluation"][-1]))
    assert stream.state() == {"place": last + 1}
    assert held_out_texts(stream, {"calibration": 10_000, "evaluation": 1}, len)["calibration"] == wanted["calibration"]
    with pytest.raises(FlexrankError, match="corpus: has 1 texts, none of them is for calibration"):
        held_out_texts(stream_of(TRAINING[:1]), {"calibration": 1}, len)


@pytest.mark.parametrize("window", [1, 7, 80, len(TRAINING), 1000])
def test_blocks_are_those_of_all_training_texts_joined(window: int) -> None:
    wanted = blocks_by_hand(16)
    stream = StreamedBatches(stream_of(TEXTS), block_maker(TOKENIZER, 16, 4, None), window)
    batches = list(stream)
    assert rows_of(batches) == wanted
    assert [len(batch["input_ids"]) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert all(bool(batch["attention_mask"].all()) for batch in batches)
    mixed = [StreamedBatches(stream_of(TEXTS), block_maker(TOKENIZER, 16, 4, seed), window) for seed in (0, 0, 1)]
    one, same, other = (rows_of(batches) for batches in mixed)
    assert one == same == rows_of(mixed[0])
    assert sorted(one) == sorted(other) == sorted(wanted)
    assert window < 7 or len({str(rows) for rows in (one, other, wanted)}) == 3


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["blocks", "sentences"])
def test_training_resumes_to_the_same_batches(kind: str, source: str, tmp_path: Path) -> None:
    """Over the ends of windows and passes, in new objects, with what a file of the state gives back."""
    place = str(write_corpus(tmp_path / "corpus", source))

    def feed() -> Feed:
        make = block_maker(TOKENIZER, 16, 4, 5) if kind == "blocks" else sentence_maker(TOKENIZER, 8, 4, 5)
        return Feed(StreamedBatches(open_texts(source, place, TOKENIZER), make, 80), seed=0)

    unbroken, states, batches = feed(), [], []
    length = len(list(feed()._batches))
    for _ in range(length + 9):
        states.append(unbroken.state())
        batches.append(unbroken.next()[1]["input_ids"])
    for count in (0, 1, 7, length // 2, length - 1, length, length + 3):
        resumed = feed()
        resumed.restore(states[count])
        for wanted in batches[count : count + 6]:
            assert torch.equal(resumed.next()[1]["input_ids"], wanted)


def test_a_window_is_read_at_a_time_and_again_on_resuming() -> None:
    rows = Rows(TRAINING)
    batches = StreamedBatches(TextStream(rows, lambda row: row["text"], "corpus"), block_maker(TOKENIZER, 16, 2, 0), 20)
    iterator = iter(batches)
    next(iterator)
    assert rows.place == 20
    while rows.place < 100:
        next(iterator)
    state = batches.state_dict()
    batches.load_state_dict(state)
    rows.all = [""] * 60 + TRAINING[60:]  # of windows before the last two nothing is needed
    assert torch.equal(next(iter(batches))["input_ids"], next(iterator)["input_ids"]) and rows.place == 100


def test_every_window_has_an_order_of_its_own() -> None:
    """Texts of one block each: windows of twenty blocks are not all mixed alike."""

    class Counting(WordTokenizer):
        """The token of a word is its number."""

        def __call__(self, text: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[int(word) for word in one.split()] for one in text]}

    texts = [text for n in range(200) if part(text := " ".join([f"{n}"] * 3)) == "training"]
    rows = rows_of(StreamedBatches(stream_of(texts), block_maker(Counting(), 4, 4, 0), 20))
    places = [texts.index(" ".join(map(str, row[1:]))) for row in rows]
    orders = [[place % 20 for place in places[start : start + 20]] for start in range(0, 120, 20)]
    assert all(sorted(order) == list(range(20)) for order in orders) and len(set(map(str, orders))) == 6


def test_another_iteration_begins_at_the_first_text() -> None:
    """One training takes nothing from what the last one, which stopped somewhere, has read."""
    batches = StreamedBatches(stream_of(TEXTS), block_maker(TOKENIZER, 16, 4, 0), 20)
    one = [batch["input_ids"] for batch in itertools.islice(batches, 9)]
    two = [batch["input_ids"] for batch in itertools.islice(batches, 9)]
    assert all(map(torch.equal, one, two))


def test_texts_for_embeddings_are_rows_each_once() -> None:
    batches = list(StreamedBatches(stream_of(TEXTS), sentence_maker(TOKENIZER, 100, 4, 0), 40))
    rows = [tuple(token for token in row if token) for row in rows_of(batches)]
    wanted = [tuple(row) for row in TOKENIZER(TRAINING)["input_ids"]]
    assert sorted(rows) == sorted(wanted) and rows != wanted
    assert all(len(batch["input_ids"]) == 4 for batch in batches[:-1])


def test_too_few_training_texts_for_a_block_are_one_line() -> None:
    few = r"\d+ tokens, fewer than one block of data.max_tokens"
    for texts, found, window in (([], "none; give more", 20), (TRAINING[:1], few, 20), (TRAINING[:3], few, 1)):
        with pytest.raises(FlexrankError, match=f"corpus: of texts for training it has {found}"):
            next(iter(StreamedBatches(stream_of(texts), block_maker(TOKENIZER, 64, 1, 0), window)))


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("jsonl", None, "data.path .*: no such file or directory"),
        ("jsonl", "", "data.path .*: the corpus is empty"),
        ("jsonl", "\n\n", "data.path .*: the corpus is empty"),
        ("text", "", "data.path .*: the corpus is empty"),
        ("jsonl", '{"text": "a"\n', "data.path .* is no JSON .*; jsonl has one object a line"),
        ("jsonl", "[1]\n", r"data.path .*: \[1\] is no object"),
        (
            "jsonl",
            '{"text": "a", "n": ' + "7" * 5000 + "}\n",
            "data.path .* is no JSON .*; jsonl has one object a line",
        ),
        ("jsonl", "[" * 100_000 + "\n", "data.path .* is no JSON .*; jsonl has one object a line"),
        ("jsonl", '{"body": "a", "n": 1}\n', "data.column: .* has no column 'text' or 'messages'; it has body, n"),
        ("parquet", "no parquet", "data.path .*: cannot be read: "),
    ],
)
def test_a_corpus_that_cannot_be_read_is_one_line(
    source: str, content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "corpus"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FlexrankError, match=message) as caught:
        open_texts(source, str(path), TOKENIZER)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut off", "overwritten"])
def test_a_damaged_compressed_file_is_one_line(damage: str, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": f"text {n} {n * n * 7919 % 10007}"}) for n in range(20_000))
    content = gzip.compress(lines.encode())
    half = len(content) // 2
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content[:half] if damage == "cut off" else content[:100] + b"\xff" * 50 + content[150:])
    with pytest.raises(FlexrankError, match="a.jsonl.gz: cannot be read: ") as caught:
        list(open_texts("jsonl", str(path), TOKENIZER).texts())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("second", [{"text": [{"a": 1}]}, {"text": [[1, 2]]}, {"body": ["c"]}, {"text": [b"\xff"]}])
def test_files_of_other_columns_or_types_than_the_first_are_one_line(second: dict[str, Any], tmp_path: Path) -> None:
    for name, columns in {"a": {"text": ["a", "b"]}, "b": second}.items():
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
    with pytest.raises(FlexrankError, match="cannot be read: ") as caught:
        list(open_texts("parquet", str(tmp_path), TOKENIZER).texts())
    assert "\n" not in str(caught.value)


def test_files_of_parquet_without_rows_or_with_other_columns_too_are_read(tmp_path: Path) -> None:
    for name, columns in {"a": [], "b": ["a", "b"], "c": ["c"]}.items():
        more = {"number": [1]} if name == "c" else {}
        parquet.write_table(
            pyarrow.table({"text": pyarrow.array(columns, "string")} | more), tmp_path / f"{name}.parquet"
        )
    assert list(open_texts("parquet", str(tmp_path), TOKENIZER).texts()) == ["a", "b", "c"]


def test_what_is_raised_is_not_logged_too(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no parquet")
    logger, seen = logging.getLogger("datasets"), BufferingHandler(100)
    logger.addHandler(seen)
    with pytest.raises(FlexrankError, match="cannot be read"):
        open_texts("parquet", str(tmp_path), TOKENIZER)
    logger.removeHandler(seen)
    assert not seen.buffer


def test_a_folder_without_files_of_its_kind_and_a_column_that_is_not_there(tmp_path: Path) -> None:
    place = str(write_corpus(tmp_path / "corpus", "parquet"))
    with pytest.raises(FlexrankError, match=r"corpus: no .jsonl or .jsonl.gz files in this directory"):
        open_texts("jsonl", place, TOKENIZER)
    with pytest.raises(FlexrankError, match=r"data.column: .* has no column 'body'; it has number, text"):
        open_texts("parquet", place, TOKENIZER, column="body")
    with pytest.raises(FlexrankError, match=r"data.column 'number' holds 0; expected text"):
        next(open_texts("parquet", place, TOKENIZER, column="number").texts())


def test_a_byte_order_mark_is_no_text_and_brackets_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"text": "one"}\n{"text": "two"}\n'.encode())
    (tmp_path / "a.txt").write_bytes("\ufeffone\ntwo\n".encode())
    (tmp_path / "a [1]").mkdir()  # brackets in a name are no pattern
    for source, name in (("jsonl", "a.jsonl"), ("text", "a.txt")):
        (tmp_path / name).rename(path := tmp_path / "a [1]" / name)
        assert list(open_texts(source, str(path), TOKENIZER).texts()) == ["one", "two"]
