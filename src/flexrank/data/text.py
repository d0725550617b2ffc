"""Texts of files, and batches of them.

Every order is fixed by the seed, so step i of a resumed run sees the batch that an uninterrupted run would see.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flexrank.errors import FlexrankError

SPLITS = {"calibration": 10, "training": 65, "evaluation": 25}
TEXT_SUFFIXES = (".txt", ".md", ".rst")
BYTE_ORDER_MARK = "\ufeff"  # Windows' editors begin files with it
#: Characters that are tokenised together; the tokenizer's own memory is a hundred times as much.
CHARACTERS = 1 << 20
#: Where a long text may be cut: tokenizers join the ends of lines with blanks around them.
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
#: What is tokenised before each piece of a text but the first, and then left out: some tokenizers begin a text
#: with a blank of their own.
LINE_BEFORE = "a\n"


class Tokenizer(Protocol):
    """What batches need of a tokenizer; transformers' tokenizers have it. The id of a token that it lacks is None."""

    pad_token_id: Any
    bos_token_id: Any
    eos_token_id: Any

    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]:
        """Token ids under `input_ids`, one list per text."""


def part_by_hash(text: str, shares: Mapping[str, int]) -> str:
    """The part of `shares` that a text falls into by its SHA-256: the same in every process, whatever else there is."""
    place = stable_number(text) % sum(shares.values())
    limits = itertools.accumulate(shares.values())
    return next(name for name, limit in zip(shares, limits, strict=True) if place < limit)


def read_texts(path: str | Path, separator: str = "\n", apart: str | Path | None = None) -> list[str]:
    r"""The texts of a UTF-8 file, or of every .txt, .md and .rst file under a folder, in order.

    `separator` is between the texts of a file: a line end, "\n\n" for paragraphs, or a marker like "\n<|endoftext|>\n".
    The file `apart`, or those under the folder `apart`, are left out.
    """
    path = Path(path)
    if not path.exists():
        raise FlexrankError(f"{path}: no such file or folder of texts")
    if path.suffix == ".jsonl":
        raise FlexrankError(f"{path}: JSON lines, where plain text is expected; a run reads them as data.source jsonl")
    if not separator:
        raise FlexrankError("the separator of texts is empty; give what divides them, such as a line end")
    files = [file for file in text_files(path) if apart is None or not _is_below(file, Path(apart))]
    texts = [text.strip() for file in files for text in decoded(file).split(separator) if text.strip()]
    if not texts:
        but = "" if apart is None else f" but that of {apart}"
        wanted = f"expected UTF-8 in {', '.join(TEXT_SUFFIXES)} files or in one file"
        raise FlexrankError(f"{path}: holds no text{but}; {wanted}")
    return texts


def _is_below(file: Path, place: Path) -> bool:
    """Whether it is the file `place` itself, or anywhere under this folder."""
    return file.resolve().is_relative_to(place.resolve())


def text_files(path: Path) -> list[Path]:
    """The files that `read_texts` reads: the file itself, or those of texts under a folder, sorted."""
    inside = (file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    return sorted(inside) if path.is_dir() else [path]


def token_blocks(
    tokenizer: Tokenizer, texts: Sequence[str], length: int, batch_size: int = 1
) -> list[dict[str, Tensor]]:
    """Batches of full blocks for language modelling: all texts joined, each after the bos token, or else eos token.

    Each batch has `input_ids` and `attention_mask`, (batch_size, length) int64; the last one may have fewer rows. A
    shorter block at the end is dropped.
    """
    _require_positive(length=length, batch_size=batch_size)
    tokens = joined_tokens(tokenizer, texts)
    count = len(tokens) // length
    if not count:
        raise FlexrankError(f"the texts hold {len(tokens)} tokens; one block needs {length}, so give more")
    return block_batches(tokens[: count * length].view(count, length), batch_size)


def joined_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """The tokens (N,) of all texts, each after `bos_token_id`, or else `eos_token_id`, in int64.

    A text of many lines is tokenised in pieces, which bounds the tokenizer's memory; the tokens are the same.

    Raises:
        FlexrankError: there are no texts, or both tokens are None.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise FlexrankError("the tokenizer has no bos or eos token to put between texts; set tokenizer.eos_token")
    _require_texts(texts)
    is_cut = any(len(text) > CHARACTERS for text in texts)
    before = len(_token_ids(tokenizer, [LINE_BEFORE], add_special_tokens=False)[0]) if is_cut else 0
    tokens = []
    for group in _groups_of_pieces(texts):
        pieces = [piece if is_first else LINE_BEFORE + piece for piece, is_first in group]
        rows = _token_ids(tokenizer, pieces, add_special_tokens=False)
        parts = ([start, *row] if is_first else row[before:] for row, (_, is_first) in zip(rows, group, strict=True))
        tokens.append(torch.tensor([*itertools.chain(*parts)], dtype=torch.long))
    return torch.cat(tokens)


def _groups_of_pieces(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of texts, with whether each begins a text, in groups of at least `CHARACTERS` but for the last."""
    group: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        for number, piece in enumerate(_pieces(text)):
            group.append((piece, number == 0))
            size += len(piece)
            if size >= CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _pieces(text: str) -> Iterator[str]:
    """Cuts a text at the first line end between characters that are no blanks after every `CHARACTERS`."""
    start = 0
    while cut := LINE_END.search(text, start + CHARACTERS):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def block_batches(blocks: Tensor, batch_size: int) -> list[dict[str, Tensor]]:
    """Blocks of tokens (N, T) as batches, without padding; the last may have fewer rows."""
    return [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in blocks.split(batch_size)]


def encodable(text: str) -> str:
    """Replaces each lone surrogate in a text, which JSON can hold and UTF-8 cannot, by "?"."""
    return text.encode("utf8", "replace").decode("utf8")


class SentenceBatches(Sequence[dict[str, Tensor]]):
    """Padded batches of texts, each made when it is read; `order` (N,) is the index of each row's text."""

    def __init__(self, rows: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], pad: int):
        self._rows, self._groups, self._pad = rows, groups, pad
        self.order = torch.tensor([index for group in groups for index in group])

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SentenceBatches(self._rows, self._groups[index], self._pad)
        rows = [self._rows[place] for place in self._groups[index]]
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        ids = torch.tensor([[*row, *[self._pad] * (width - len(row))] for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(width) < lengths.unsqueeze(1)).long()}


def sentence_batches(
    tokenizer: Tokenizer, texts: Sequence[str], batch_size: int, max_tokens: int, seed: int | None = None
) -> SentenceBatches:
    """Batches of texts of similar length: `input_ids`, `attention_mask` (≤ batch_size, T) int64, padded on the right.

    Each text is one row with the tokenizer's special tokens, truncated to `max_tokens`. `seed` shuffles texts and
    batches; None sorts all texts by length.
    """
    _require_positive(batch_size=batch_size, max_tokens=max_tokens)
    rows = _token_ids(tokenizer, texts, truncation=True, max_length=max_tokens)
    for index, row in enumerate(rows):
        if not row:
            raise FlexrankError(f"text {index} has no tokens: {texts[index]!r}; leave it out")
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    return SentenceBatches(rows, _groups_of_like_length([len(row) for row in rows], batch_size, seed), pad)


def _groups_of_like_length(lengths: Sequence[int], batch_size: int, seed: int | None) -> list[list[int]]:
    """Groups of `batch_size` indices of similar lengths: sorted within windows of a shuffled order."""
    order = list(range(len(lengths)))
    window = len(order)
    if seed is not None:
        random.Random(seed).shuffle(order)
        window = 32 * batch_size
    groups = []
    for start in range(0, len(order), window):
        near = sorted(order[start : start + window], key=lambda index: lengths[index])
        groups += [near[at : at + batch_size] for at in range(0, len(near), batch_size)]
    if seed is not None:
        random.Random(seed + 1).shuffle(groups)
    return groups


def _require_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str) or not len(texts):
        raise FlexrankError("no texts; expected a list with at least one")


def _token_ids(tokenizer: Tokenizer, texts: Sequence[str], **options: Any) -> list[list[int]]:
    _require_texts(texts)
    # Not verbose: the length warning is about a single forward pass, but joined texts are cut into blocks.
    return tokenizer(list(texts), verbose=False, **options)["input_ids"]


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise FlexrankError(f"{name} is {value}; it must be at least 1")


def stable_number(text: str) -> int:
    """A number of 64 bits from a text's SHA-256, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf8")).digest()[:8], "big")


def decoded(file: Path) -> str:
    """The file's text; raises FlexrankError if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FlexrankError(f"{file}: not UTF-8 text (byte {error.start}); save it as that") from error
