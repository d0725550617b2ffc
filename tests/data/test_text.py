"""Texts of files and their batches, against what is written into small files and against plain loops."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import tiny
from flexrank.data import text as data
from flexrank.data.stream import open_texts
from flexrank.errors import FlexrankError
from flexrank.hf.models import load_tokenizer

TOKENIZER = tiny.WordTokenizer()


def test_read_texts_splits_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("third\n\n  fourth \n")
    (tmp_path / "a.md").write_text("first\nsecond\n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    assert data.read_texts(tmp_path) == ["first", "second", "third", "fourth"]
    assert data.read_texts(tmp_path / "a.md", "\n\n") == ["first\nsecond"]
    (tmp_path / "stories.txt").write_text("One.\nStill one.\n<|endoftext|>\nTwo.")
    assert data.read_texts(tmp_path / "stories.txt", "\n<|endoftext|>\n") == ["One.\nStill one.", "Two."]


def test_wrong_texts_are_one_line_naming_them(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"good \xff")
    (tmp_path / "blank").write_text(" \n\n")
    for path, words in (("missing", "no such file"), ("broken", "byte 5"), ("blank", "no text")):
        with pytest.raises(FlexrankError, match=f"{path}.*{words}"):
            data.read_texts(tmp_path / path)
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(FlexrankError, match="lines.jsonl: JSON lines, where plain text is expected"):
        data.read_texts(tmp_path / "lines.jsonl")
    with pytest.raises(FlexrankError, match="separator"):
        data.read_texts(tmp_path / "blank", "")


def test_token_blocks_hold_every_token_once_in_order() -> None:
    texts = ["a b c", "d", "e f g h i", "j k"]
    expected = [id for text in texts for id in (1, *TOKENIZER([text], add_special_tokens=False)["input_ids"][0])]
    batches = data.token_blocks(TOKENIZER, texts, length=4, batch_size=2)
    flat = torch.cat([batch["input_ids"].flatten() for batch in batches]).tolist()
    assert flat == expected[: len(expected) // 4 * 4]
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 4), (1, 4)]
    assert all(bool(batch["attention_mask"].all()) for batch in batches)


def byte_pairs(text: str) -> Any:
    """A tokenizer of GPT-2's kind, which takes blanks at the end of a text for one word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], show_progress=False)
    tokenizer.train_from_iterator([text, "a\n\n"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("name", ["pycode5m", "stories260k", "babyllama", "byte pairs"])
@pytest.mark.parametrize("characters", [1, 40, 10**6])
def test_a_text_of_many_lines_is_tokenised_in_pieces(
    characters: int, name: str, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: each whole text in one call. Code has indented and blank lines; two tokenizers begin with a blank."""
    monkeypatch.setattr("flexrank.data.text.CHARACTERS", characters)
    code = (assets / "pycode5m" / "val.txt").read_text()[:20_000]
    tokenizer = byte_pairs(code) if name == "byte pairs" else load_tokenizer(assets / name)
    texts = ["one line", code, "x" * 100, "two\n\n\nlines"]
    wanted = [[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
    calls: list[list[str]] = []

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: list[str], **options: Any) -> Any:
            calls.append(texts)
            return super().__call__(texts, **options)

    tokenizer.__class__ = Counting
    found = data.joined_tokens(tokenizer, texts)
    assert found.dtype == torch.int64 and found.tolist() == [token for row in wanted for token in row]
    assert (len(calls) > 10) == (characters < 100)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\ntwo".encode())
    assert data.read_texts(tmp_path) == ["one", "two"]


def test_token_blocks_begin_texts_with_eos_where_there_is_no_bos() -> None:
    class OnlyEnd(tiny.WordTokenizer):
        bos_token_id = None

    class Neither(OnlyEnd):
        eos_token_id = None

    assert data.token_blocks(OnlyEnd(), ["a b"], 3)[0]["input_ids"][0, 0] == 2
    with pytest.raises(FlexrankError, match="bos or eos"):
        data.token_blocks(Neither(), ["a b"], 3)
    with pytest.raises(FlexrankError, match="3 tokens; one block needs 4"):
        data.token_blocks(TOKENIZER, ["a b"], 4)


@pytest.mark.parametrize("seed", [None, 3])
def test_sentence_batches_hold_every_text_once_where_order_says(seed: int | None) -> None:
    texts = ["word " * (1 + 7 * number % 11) + f"x{number}" for number in range(37)]
    batches = data.sentence_batches(TOKENIZER, texts, batch_size=5, max_tokens=8, seed=seed)
    rows = []
    for batch in batches:
        assert batch["attention_mask"].sum(1).max() == batch["input_ids"].shape[1] <= 8  # no column of padding alone
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            assert not ids[mask == 0].any()
            rows.append(ids[mask == 1].tolist())
    expected = TOKENIZER(texts, truncation=True, max_length=8)["input_ids"]
    assert sorted(batches.order.tolist()) == list(range(37))
    assert rows == [expected[index] for index in batches.order.tolist()]


def test_sentence_batches_group_like_lengths_and_repeat_themselves() -> None:
    texts = ["word " * (1 + 7 * number % 40) for number in range(320)]
    batches = data.sentence_batches(TOKENIZER, texts, 8, 64, seed=1)
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    held = sum(batch["attention_mask"].numel() for batch in batches)
    assert real > 0.9 * held
    again = data.sentence_batches(TOKENIZER, texts, 8, 64, seed=1)
    assert len(batches) == 40
    assert all(torch.equal(batches[i]["input_ids"], again[i]["input_ids"]) for i in reversed(range(40)))
    other = data.sentence_batches(TOKENIZER, texts, 8, 64, seed=2)
    assert not torch.equal(batches.order, other.order)
    assert torch.equal(batches[3:6][1]["input_ids"], batches[4]["input_ids"])
    assert batches[3:6].order.tolist() == batches.order.tolist()[24:48]


def test_wrong_batches_are_one_line() -> None:
    with pytest.raises(FlexrankError, match="no texts"):
        data.sentence_batches(TOKENIZER, [], 2, 8)
    with pytest.raises(FlexrankError, match="no texts"):
        data.sentence_batches(TOKENIZER, "a text", 2, 8)
    with pytest.raises(FlexrankError, match="batch_size is 0"):
        data.sentence_batches(TOKENIZER, ["a"], 0, 8)
    with pytest.raises(FlexrankError, match="length is 0"):
        data.token_blocks(TOKENIZER, ["a"], 0)


def test_lines_of_json_end_at_line_feeds_alone(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\x0bd", "e\x85f", "g\rh"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_bytes(lines.encode())
    assert list(open_texts("jsonl", str(tmp_path), TOKENIZER).texts()) == texts
