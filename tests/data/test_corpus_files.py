"""Which files a corpus has, and what cannot be one."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from flexrank.data.stream import corpus_files, open_texts
from flexrank.errors import FlexrankError

TOKENIZER: Any = None  # only chats need one


def test_a_glob_matches_files_alone(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    assert corpus_files("jsonl", str(tmp_path / "*")) == [str(tmp_path / "a.jsonl")]


def test_a_name_that_reads_as_an_address_is_refused(tmp_path: Path) -> None:
    """Its parts would be looked for one inside the other, and nothing found."""
    (tmp_path / "a::b.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(FlexrankError, match="a::b.jsonl: '::' divides the parts of an address; rename the file"):
        open_texts("jsonl", str(tmp_path), TOKENIZER)


@pytest.mark.parametrize("place", ["", "*", "b.txt"])
def test_a_file_that_is_not_utf8_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_bytes("the café\n".encode("latin-1"))
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("two\n")
    with pytest.raises(FlexrankError, match=r"data.path \S*b.txt: not UTF-8 text; save it as that"):
        list(open_texts("text", str(tmp_path / place), TOKENIZER).texts())


def test_a_data_set_that_is_a_program_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.mkdir()
    (script / "script.py").write_text("import datasets\n")
    with pytest.raises(FlexrankError, match="cannot be read: Dataset scripts are no longer supported"):
        open_texts("hub", str(script), TOKENIZER)
