"""Files of JSON lines: their columns, and where a wrong line is."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from flexrank.data.stream import (
    open_texts,
)
from flexrank.errors import FlexrankError

TOKENIZER: Any = None  # only chats need one


def test_a_line_that_is_no_json_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"text": "two"}\n\n{oops\n')
    with pytest.raises(FlexrankError, match=r"data.path .*b.jsonl.gz, line 3: '\{oops' is no JSON"):
        list(open_texts("jsonl", str(tmp_path), TOKENIZER).texts())
    for module, name in ((bz2, "d.jsonl.bz2"), (lzma, "e.jsonl.xz")):
        with module.open(tmp_path / name, "wt") as packed:
            packed.write('{"text": "two"}\n{oops\n')
        with pytest.raises(FlexrankError, match=rf"data.path .*{name}, line 2: '\{{oops' is no JSON"):
            list(open_texts("jsonl", str(tmp_path / name), TOKENIZER).texts())
    (tmp_path / "c.jsonl").write_text("[1]\n")
    with pytest.raises(FlexrankError, match=r"data.path .*c.jsonl, line 1: \[1\] is no object"):
        list(open_texts("jsonl", str(tmp_path / "c.jsonl"), TOKENIZER).texts())


def test_columns_are_those_of_the_first_thousand_objects(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for before, is_found in ((0, True), (999, True), (1000, False)):
        rows = [*(json.dumps({"meta": n}) for n in range(before)), '{"text": "one"}', '{"other": 2}', '{"text": "two"}']
        file.write_text("\n".join(rows))
        for column in (None, "text"):
            if is_found:
                assert list(open_texts("jsonl", str(file), TOKENIZER, column=column).texts()) == ["one", "two"]
            else:
                with pytest.raises(FlexrankError, match=r"a.jsonl has no column 'text'.*; it has meta$"):
                    open_texts("jsonl", str(file), TOKENIZER, column=column)
