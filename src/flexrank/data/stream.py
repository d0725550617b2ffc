"""Corpora of any size: texts are streamed in order by the `datasets` library, split by hash, and batched as needed."""

import bz2
import contextlib
import functools
import glob
import gzip
import itertools
import json
import lzma
import os
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexrank import processes
from flexrank.data.chats import text_of
from flexrank.data.text import (
    BYTE_ORDER_MARK,
    TEXT_SUFFIXES,
    Tokenizer,
    block_batches,
    joined_tokens,
    part_by_hash,
    sentence_batches,
)
from flexrank.errors import FlexrankError, first_line, short_repr

#: The relative size of each part. Equal texts have equal hashes, so a text that a corpus repeats is never in two parts.
SHARES = {"calibration": 10, "training": 80, "evaluation": 10}
SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz"), "parquet": (".parquet",), "text": TEXT_SUFFIXES}
#: The columns that are tried, in this order, if none is named.
COLUMNS = ("text", "messages")
#: How compressed files are opened, by the end of their names.
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
#: How the reader of text files splits them, by the separator between texts.
DIVISIONS = {"\n": "line", "\n\n": "paragraph"}
#: The first objects of a file of JSON lines, whose keys are its columns.
OBJECTS = 1000
#: The most rows of a parquet file that are read at a time.
ROWS = 1000
#: The number of texts that are tokenised together.
TEXTS = 64

Batches = Sequence[dict[str, Tensor]]
#: Maps a window's texts, the tokens left over from the previous window, the window's number, and whether it is the last
#: of the corpus, to batches and the tokens that are left over.
WindowBatcher = Callable[[list[str], Tensor, int, bool], tuple[Batches, Tensor]]


def corpus_files(source: str, path: str) -> list[str]:
    """The files of a corpus, sorted: `path` itself, the matches of a glob, or the files anywhere below a directory.

    A `hub` data set has none, unless its path is a local directory. Other sources without files raise FlexrankError.
    """
    if source == "hub":
        return sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
    if Path(path).is_dir():
        files = [str(file) for file in Path(path).rglob("*") if file.name.endswith(SUFFIXES[source])]
        wanted = f"no {' or '.join(SUFFIXES[source])} files in this directory"
    else:
        files = [path] if Path(path).is_file() else list(filter(os.path.isfile, glob.glob(path, recursive=True)))
        wanted = "no such file or directory, and no file that matches it as a glob"
    if not files:
        raise FlexrankError(f"data.path {path}: {wanted}")
    for file in files:
        if "::" in file:
            raise FlexrankError(f"data.path {file}: '::' divides the parts of an address; rename the file")
    return sorted(files)


class TextStream:
    """The texts of a corpus in order, read as they are consumed; rows without text are skipped.

    Args:
        rows: an iterable of mappings with `state_dict` and `load_state_dict`, such as a streamed data set.
        read: returns the text of a row.
    """

    def __init__(self, rows: Any, read: Callable[[Any], str], name: str):
        self.name, self._rows, self._read, self._start = name, rows, read, rows.state_dict()

    def texts(self, state: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Iterates over the texts, from the first or from after a `state`; only one iteration may run at a time.

        Raises:
            FlexrankError: the corpus cannot be read, or a row holds no text.
        """
        self._rows.load_state_dict(self._start if state is None else state)
        return (text for text in map(self._read, readable(self._rows, self.name)) if text)

    def state(self) -> dict[str, Any]:
        """The position after the last text that was consumed, as a JSON object."""
        return self._rows.state_dict()


def open_texts(
    source: str,
    path: str,
    tokenizer: Tokenizer,
    *,
    column: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    separator: str = "\n",
) -> TextStream:
    r"""Opens a corpus as a stream of texts; it is never in memory as a whole.

    Args:
        source: `jsonl`, `parquet` or `text` for files that `corpus_files` finds; or `hub` for a data set by its name.
        tokenizer: its chat template formats chats as text.
        column: holds texts, or chats: lists of messages with `role` and `content`. By default the first of COLUMNS.
        subset: of a data set on the hub, like `split` (`train` by default) and `revision`.
        separator: what separates the texts of a `text` file: "\n" or "\n\n".

    Raises:
        FlexrankError: the corpus is missing or empty, or has no such column.
    """
    version = subset, split, revision
    rows = _open_rows(source, path, version, separator)
    parse: Callable[[Any], dict[str, Any]] = functools.partial(_json_object, path) if source == "jsonl" else dict
    # Rows of a table have the same columns; objects of JSON may lack some.
    first = itertools.islice(filter(None, map(parse, readable(rows, path))), OBJECTS if source == "jsonl" else 1)
    columns = list(dict.fromkeys(itertools.chain.from_iterable(first)))
    if not columns:
        raise FlexrankError(f"data.path {path}: the corpus is empty; give one with texts")
    chosen = _column(column, columns, path)
    # Both are new data sets, whose state is still at the first row. Of parquet only the column is read, as files may
    # differ in others.
    if source == "parquet":
        selected = _open_rows(source, path, version, separator, [chosen])
    else:
        selected = rows.select_columns(["text" if source == "jsonl" else chosen])
    return TextStream(selected, lambda row: text_of(parse(row).get(chosen), chosen, tokenizer), path)


def _open_rows(
    source: str,
    path: str,
    version: tuple[str | None, str | None, str | None],
    separator: str,
    columns: list[str] | None = None,
) -> Any:
    """The rows of a corpus; `version` is the subset, split and revision of a data set on the hub.

    `columns` of a parquet corpus are read, by default all.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also raises every error that it logs
    with clear_errors(path):
        if source == "hub":
            subset, split, revision = version
            return datasets.load_dataset(path, subset, split=split or "train", revision=revision, streaming=True)
        # JSON lines are read as text lines: the JSON reader infers one type for each column, and fails at the first row
        # of another type, even in a column that is not used.
        reader = "parquet" if source == "parquet" else "text"
        options: dict[str, dict[str, Any]] = {
            "text": {"sample_by": DIVISIONS[separator]},
            "parquet": {"columns": columns, "batch_size": ROWS},  # by default as many as the first group, maybe none
        }
        files = list(map(glob.escape, corpus_files(source, path)))  # `datasets` takes brackets in a name for a pattern
        rows = datasets.load_dataset(reader, data_files=files, split="train", streaming=True, **options.get(source, {}))
        # By row group: otherwise everything read from a file stays in memory until the end of the file.
        return rows.reshard() if source == "parquet" else rows


def held_out_texts(stream: TextStream, needs: Mapping[str, int], size: Callable[[str], int]) -> dict[str, list[str]]:
    """The first texts of each part of SHARES in `needs`: until their sizes add up to its need, or all there are.

    Raises:
        FlexrankError: a part has no texts.
    """
    parts: dict[str, list[str]] = {name: [] for name in needs}
    missing, count = dict(needs), 0
    for text in stream.texts():
        count, name = count + 1, part_by_hash(text, SHARES)
        if missing.get(name, 0) > 0:
            parts[name].append(text)
            missing[name] -= size(text)
            if all(need <= 0 for need in missing.values()):
                break
    for name, texts in parts.items():
        if not texts:
            raise FlexrankError(f"data.path {stream.name}: has {count} texts, none of them is for {name}; give more")
    return parts


class StreamedBatches:
    """Batches of a stream's training texts; every pass is the same, and resumes bit for bit from a `state_dict`.

    One window of texts is in memory at a time. The state has the stream's position at the beginning of the window, so
    that resuming reads one window again.
    """

    def __init__(self, stream: TextStream, make: WindowBatcher, window: int):
        self._stream, self._make, self._window = stream, make, window
        self._state: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        none: dict[str, Any] = {"place": None, "number": 0, "given": 0, "rest": torch.tensor([], dtype=torch.long)}
        state, self._resumed = self._resumed or none, None
        texts = (one for one in self._stream.texts(state["place"]) if part_by_hash(one, SHARES) == "training")
        is_last = False
        while not is_last:
            window = list(itertools.islice(texts, self._window))
            is_last, place = len(window) < self._window, self._stream.state()
            batches, rest = self._make(window, state["rest"], state["number"], is_last)
            if is_last and not batches and self._state is None:
                found = f"{len(rest)} tokens, fewer than one block of data.max_tokens" if len(rest) else "none"
                raise FlexrankError(f"data.path {self._stream.name}: of texts for training it has {found}; give more")
            for given in range(state["given"], len(batches)):
                self._state = {**state, "given": given + 1}
                yield batches[given]
            state = {"place": place, "number": state["number"] + 1, "given": 0, "rest": rest}

    def state_dict(self) -> dict[str, Any] | None:
        """The position after the last batch yielded, as a JSON object except for one tensor; None before the first."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration begin after the batch at which the state was taken."""
        self._state = self._resumed = state


def block_maker(tokenizer: Tokenizer, length: int, batch_size: int, seed: int | None) -> WindowBatcher:
    """Makes full blocks of tokens, as `token_blocks` does, shuffled by the seed within a window; None does not shuffle.

    With several processes, all ask for every window, and each tokenises its share of the window's texts.
    """

    def make(texts: list[str], rest: Tensor, number: int, is_last: bool) -> tuple[Batches, Tensor]:
        tokens = torch.cat([rest, *_tokens_of(tokenizer, texts)])
        count = len(tokens) // length
        count -= 0 if is_last else count % batch_size  # blocks beyond the last full batch go to the next window
        order = list(range(count))
        if seed is not None:
            random.Random(f"{seed} window {number}").shuffle(order)
        blocks = tokens[: count * length].view(count, length)[torch.tensor(order, dtype=torch.long)]
        return block_batches(blocks, batch_size) if count else [], tokens[count * length :].clone()

    return make


def _tokens_of(tokenizer: Tokenizer, texts: list[str]) -> list[Tensor]:
    """The tokens of the texts in order, one tensor for every `TEXTS` texts."""
    pieces = [texts[start : start + TEXTS] for start in range(0, len(texts), TEXTS)]
    own = {number: joined_tokens(tokenizer, pieces[number]) for number in processes.share(len(pieces))}
    lengths = processes.sums(*(float(len(own.get(number, ()))) for number in range(len(pieces))))
    missing = functools.partial(torch.zeros, dtype=torch.long)
    tokens = [own[number] if number in own else missing(int(length)) for number, length in enumerate(lengths)]
    processes.sum_(tokens)
    return tokens


def sentence_maker(tokenizer: Tokenizer, max_tokens: int, batch_size: int, seed: int) -> WindowBatcher:
    """Makes batches of padded texts, as `sentence_batches` does, shuffled by the seed within a window."""

    def make(texts: list[str], rest: Tensor, number: int, is_last: bool) -> tuple[Batches, Tensor]:
        if not texts:
            return [], rest
        return sentence_batches(tokenizer, texts, batch_size, max_tokens, seed + 2 * number), rest

    return make


def readable(rows: Any, name: str) -> Iterator[Any]:
    """Yields the rows; the library's errors for a corpus that it cannot read become a FlexrankError of one line."""
    with clear_errors(name):  # errors of the code that consumes the rows are not raised here
        yield from rows


@contextlib.contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Turns the library's errors for a corpus that it cannot find or read into a FlexrankError of one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except FlexrankError:
        raise
    except UnicodeDecodeError as error:
        raise FlexrankError(f"data.path {_undecodable_file(name)}: not UTF-8 text; save it as that") from error
    except (DatasetsError, OSError, ValueError, TypeError, RuntimeError, EOFError, zlib.error) as error:
        raise FlexrankError(f"data.path {name}: cannot be read: {first_line(error)}") from error


def _undecodable_file(path: str) -> str:
    """The first file of text or JSON lines in a corpus that is not UTF-8; without such a file, the path."""
    found = Path(path).rglob("*") if Path(path).is_dir() else map(Path, glob.glob(path, recursive=True))
    files = sorted(str(file) for file in found if file.name.endswith(SUFFIXES["jsonl"] + SUFFIXES["text"]))
    return next(itertools.filterfalse(_is_utf8, files), path)


def _is_utf8(file: str) -> bool:
    with OPENERS.get(Path(file).suffix, open)(file, "rt", encoding="utf8") as lines:
        try:
            return all(True for _ in lines)
        except UnicodeDecodeError:
            return False


def _column(column: str | None, columns: Sequence[str], path: str) -> str:
    chosen = column or next((name for name in COLUMNS if name in columns), None)
    if chosen is None or chosen not in columns:
        wanted = repr(column) if column else " or ".join(map(repr, COLUMNS))
        raise FlexrankError(f"data.column: {path} has no column {wanted}; it has {', '.join(columns)}")
    return chosen


def _json_object(path: str, row: Mapping[str, str]) -> dict[str, Any]:
    """Parses the object in a line of JSON; a blank line gives an empty object."""
    try:
        text = row["text"].removeprefix(BYTE_ORDER_MARK)
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:  # also an integer of too many digits, or too deep a nesting
        place, line = _place_of(path, row["text"]), f"{short_repr(row['text'])} is no JSON ({error})"
        raise FlexrankError(f"data.path {place}: {line}; jsonl has one object a line") from error
    if not isinstance(value, dict):
        place, line = _place_of(path, row["text"]), f"{short_repr(value)} is no object"
        raise FlexrankError(f"data.path {place}: {line}; jsonl has one object a line")
    return value


def _place_of(path: str, text: str) -> str:
    """The file and the line of this text in a corpus of JSON lines."""
    for file in corpus_files("jsonl", path):
        with OPENERS.get(Path(file).suffix, open)(file, "rt", encoding="utf8") as lines:
            for number, line in enumerate(lines, 1):
                if line.rstrip("\n") == text:
                    return f"{file}, line {number}"
    return path
