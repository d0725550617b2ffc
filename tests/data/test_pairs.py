"""Files of scored pairs: what is read is what a person would read."""

import json
import math
from pathlib import Path

import pytest

from flexrank.data.pairs import read_pairs
from flexrank.errors import FlexrankError

LINE = "main\tMSR\t2012\t0001\t{score}\tA cat.\tA dog."


def test_both_forms_give_sentences_and_score(tmp_path: Path) -> None:
    (tmp_path / "sts.csv").write_text(f"{LINE.format(score=2.5)}\n{LINE.format(score='0')}\tmore\n")
    assert read_pairs(tmp_path / "sts.csv") == [("A cat.", "A dog.", 2.5), ("A cat.", "A dog.", 0.0)]
    lines = [{"score": 3, "sentence2": "Zwei\tSätze", "sentence1": "Eins\u2028", "split": "dev"}]
    lines += [{"score": 0.5, "sentence1": "a", "sentence2": "b"}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "sts.JSONL").write_text(f"\ufeff{text}\n\n")
    assert read_pairs(tmp_path / "sts.JSONL") == [("Eins\u2028", "Zwei\tSätze", 3.0), ("a", "b", 0.5)]
    cut = r'{"sentence1": "a \ud83d", "sentence2": "\ude00 b", "score": 1}'  # halves of a character
    (tmp_path / "sts.jsonl").write_text(f'{cut}\n{{"sentence1": "a", "sentence2": "b", "score": 2}}')
    assert read_pairs(tmp_path / "sts.jsonl")[0] == ("a ?", "? b", 1.0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.tsv", f"{LINE.format(score=1)}\nbroken\tline", "a.tsv: line 2 is no pair of sentences with a score"),
        ("a.tsv", LINE.format(score="much"), "line 1 is no pair"),
        ("a.tsv", LINE.format(score="nan"), "line 1 is no pair"),
        ("a.tsv", LINE.format(score="-inf"), "line 1 is no pair"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": "b"}', "expected sentence1, sentence2, score in a .jsonl"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": 7, "score": 1}', "line 1 is no pair"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": "b", "score": null}', "line 1 is no pair"),
        ("a.jsonl", "[1, 2, 3]", "line 1 is no pair"),
        ("a.jsonl", "not json", "line 1 is no pair"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": "b", "score": true}', "line 1 is no pair"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": " ", "score": 1}', "line 1 is no pair"),
        ("a.jsonl", f'{{"sentence1": "a", "sentence2": "b", "score": {10**400}}}', "line 1 is no pair"),
        ("a.jsonl", f'{{"sentence1": "a", "sentence2": "b", "score": {"9" * 5000}}}', "line 1 is no pair"),
        ("a.jsonl", "\n" + "[" * 100_000, "line 2 is no pair"),
        ("a.jsonl", "", "scores of its 0 pairs do not differ; a correlation needs two different ones"),
        ("a.tsv", f"{LINE.format(score=1)}\n" * 2, "scores of its 2 pairs do not differ"),
    ],
)
def test_a_wrong_file_is_one_line(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FlexrankError, match=words):
        read_pairs(tmp_path / name)


def test_a_missing_file_and_one_of_other_bytes_are_named(tmp_path: Path) -> None:
    with pytest.raises(FlexrankError, match="nowhere.csv: no such file of scored pairs"):
        read_pairs(tmp_path / "nowhere.csv")
    (tmp_path / "a.csv").write_bytes(b"\xff")
    with pytest.raises(FlexrankError, match=r"a.csv: not UTF-8 text \(byte 0\)"):
        read_pairs(tmp_path / "a.csv")


def test_the_benchmarks_own_file_is_read_whole(assets: Path) -> None:
    path = assets / "stsb" / "sts-dev.csv"
    pairs = read_pairs(path)
    assert len(pairs) == len(path.read_text().splitlines()) == 1500
    assert all(0 <= score <= 5 for _, _, score in pairs) and math.fsum(pair[2] for pair in pairs) > 0
