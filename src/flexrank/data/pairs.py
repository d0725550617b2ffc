"""Pairs of sentences with human similarity scores, as in the STS benchmark."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexrank.data.text import decoded, encodable
from flexrank.errors import FlexrankError

Pair = tuple[str, str, float]  #: two sentences and their score
#: The keys of a line of JSON, as data sets on the hub name them.
KEYS = "sentence1", "sentence2", "score"
#: The columns of the STS benchmark's own files, from 0: the two sentences, and their score.
COLUMNS = 5, 6, 4


def read_pairs(path: str | Path) -> list[Pair]:
    """Reads scored pairs from a UTF-8 file: JSON lines (.jsonl) with `KEYS`, or the benchmark's tab-separated lines.

    Raises:
        FlexrankError: there is no such file, a line is not a pair with a finite score, or all scores are equal.
    """
    path = Path(path)
    if not path.is_file():
        raise FlexrankError(f"{path}: no such file of scored pairs")
    pairs = [_pair(path, number, fields) for number, fields in _fields(path)]
    if len({score for _, _, score in pairs}) < 2:
        raise FlexrankError(
            f"{path}: the scores of its {len(pairs)} pairs do not differ; a correlation needs two different ones"
        )
    return pairs


def _fields(path: Path) -> Iterator[tuple[int, list[Any]]]:
    """The number and three fields of each line that is not blank; fewer fields if the line is not a pair."""
    lines = decoded(path).split("\n")  # a sentence may contain other line separators
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix.lower() == ".jsonl":
            yield number, _values(line)
        else:
            cells = line.split("\t")
            yield number, [cells[column] for column in COLUMNS if column < len(cells)]


def _values(line: str) -> list[Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # an integer of thousands of digits too
        return []
    return [value[key] for key in KEYS if key in value] if isinstance(value, dict) else []


def _pair(path: Path, number: int, fields: list[Any]) -> Pair:
    try:
        first, second, score = fields
        is_text = isinstance(first, str) and isinstance(second, str) and bool(first.strip() and second.strip())
        if is_text and not isinstance(score, bool) and math.isfinite(float(score)):
            return encodable(first), encodable(second), float(score)
    except (TypeError, ValueError, OverflowError):
        pass
    right = f"{', '.join(KEYS)} in a .jsonl, or tabs with the score in column 5 and the sentences in 6 and 7"
    raise FlexrankError(f"{path}: line {number} is no pair of sentences with a score; expected {right}")
