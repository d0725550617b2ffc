"""Texts from Python's standard library or from the user, and batches of them.

Every order is fixed by the seed, so step i of a resumed run sees the batch that an uninterrupted run would see.
"""

import ast
import dataclasses
import hashlib
import itertools
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from flexrank.errors import FlexrankError

LEFT_OUT = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
TOPICS = Path("pydoc_data", "topics.py")
SPLITS = {"calibration": 10, "training": 65, "evaluation": 25}
#: Modules differ a hundredfold in size: with this salt not only the modules but also their texts are split by SPLITS.
SPLIT_SALT = "123:"
#: The minimum number of words in a passage, and in the query and the remainder of a retrieval pair.
PASSAGE_WORDS, QUERY_WORDS, REMAINDER_WORDS = 4, 3, 12
TEXT_SUFFIXES = (".txt", ".md", ".rst")
BYTE_ORDER_MARK = "\ufeff"  # Windows' editors begin files with it
#: Characters that are tokenised together; the tokenizer's own memory is a hundred times as much.
CHARACTERS = 1 << 20
#: Where a long text may be cut: tokenizers join the ends of lines with blanks around them.
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
#: What is tokenised before each piece of a text but the first, and then left out: some tokenizers begin a text
#: with a blank of their own.
LINE_BEFORE = "a\n"

Item = TypeVar("Item")


class Tokenizer(Protocol):
    """What batches need of a tokenizer; transformers' tokenizers have it. The id of a token that it lacks is None."""

    pad_token_id: Any
    bos_token_id: Any
    eos_token_id: Any

    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]:
        """Token ids under `input_ids`, one list per text."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One docstring: its first paragraph, on one line, is the query; `name` is empty for a module's docstring."""

    module: str
    name: str
    query: str
    remainder: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts by use, from three disjoint sets of modules, each in a fixed random order: a prefix is a fair sample.

    `evaluation` holds (query, remainder) pairs of docstrings, for retrieval.
    """

    calibration: tuple[str, ...]
    training: tuple[str, ...]
    evaluation: tuple[tuple[str, str], ...]


def stdlib_corpus(max_pairs: int | None = None) -> Corpus:
    """Documentation of Python's standard library, split by module: `split_documents` of `stdlib_documents`."""
    return split_documents(stdlib_documents(), max_pairs)


def split_documents(documents: Iterable[Document], max_pairs: int | None = None) -> Corpus:
    """Documents split by module, with at most `max_pairs` retrieval pairs.

    A text that was copied between modules stays in one split only: evaluation, or else calibration, or else training.
    """
    parts: dict[str, list[Document]] = {name: [] for name in SPLITS}
    for document in documents:
        parts[split_of(document.module)].append(document)
    pairs = retrieval_pairs(parts["evaluation"])
    held_out = set(passages(parts["evaluation"])).union(*pairs)
    calibration = [text for text in passages(parts["calibration"]) if text not in held_out]
    held_out.update(calibration)
    training = [text for text in passages(parts["training"]) if text not in held_out]
    return Corpus(_shuffled(calibration), _shuffled(training), _shuffled(pairs)[:max_pairs])


def stdlib_documents(root: str | Path | None = None) -> list[Document]:
    """Docstrings of the standard library and its `pydoc` topics, in the order of the sources; nothing is imported.

    Tests and installed packages are left out. Raises FlexrankError if there are no sources at `root`.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    documents: list[Document] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.isdisjoint(relative.parts):
            documents += _topics(path) if relative == TOPICS else _docstrings(path, _module_name(relative))
    if not documents:
        raise FlexrankError(f"{root}: no Python sources with docstrings; give a text file of your own as data instead")
    return documents


def split_of(module: str) -> str:
    """The split of a module, which depends only on the name of its top-level package.

    A module and its pure-Python twin (`decimal`, `_pydecimal`) share docstrings, and therefore a split. The topics of
    the language reference quote each other, and are all training texts.
    """
    top = module.partition(".")[0]
    if top == TOPICS.parts[0]:
        return "training"
    key = re.sub(r"^(_py|py_|_)", "", top)
    return part_by_hash(SPLIT_SALT + key, SPLITS)


def part_by_hash(text: str, shares: Mapping[str, int]) -> str:
    """The part of `shares` that a text falls into by its SHA-256: the same in every process, whatever else there is."""
    place = _stable_number(text) % sum(shares.values())
    limits = itertools.accumulate(shares.values())
    return next(name for name, limit in zip(shares, limits, strict=True) if place < limit)


def passages(documents: Iterable[Document]) -> list[str]:
    """Every query and every paragraph of prose, each once, in order; code, tables and fragments are left out."""
    texts = (text for document in documents for text in (document.query, *_paragraphs(document.remainder)))
    return list(dict.fromkeys(text for text in texts if len(text.split()) >= PASSAGE_WORDS and _is_prose(text)))


def retrieval_pairs(documents: Iterable[Document]) -> list[tuple[str, str]]:
    """(query, remainder) pairs of the docstrings that have both; one that repeats a query or remainder is left out."""
    queries, remainders, pairs = set(), set(), []
    for document in documents:
        query, remainder = document.query, " ".join(document.remainder.split())
        if len(query.split()) < QUERY_WORDS or len(remainder.split()) < REMAINDER_WORDS or not _is_prose(query):
            continue
        if query.lower() in queries or remainder in remainders:
            continue
        queries.add(query.lower())
        remainders.add(remainder)
        pairs.append((query, remainder))
    return pairs


def read_texts(path: str | Path, separator: str = "\n") -> list[str]:
    r"""The texts of a UTF-8 file, or of every .txt, .md and .rst file under a folder, in order.

    `separator` is between the texts of a file: a line end, "\n\n" for paragraphs, or a marker like "\n<|endoftext|>\n".
    """
    path = Path(path)
    if not path.exists():
        raise FlexrankError(f"{path}: no such file or folder of texts")
    if not separator:
        raise FlexrankError("the separator of texts is empty; give what divides them, such as a line end")
    texts = [text.strip() for file in text_files(path) for text in _decoded(file).split(separator) if text.strip()]
    if not texts:
        raise FlexrankError(f"{path}: holds no text; expected UTF-8 in {', '.join(TEXT_SUFFIXES)} files or in one file")
    return texts


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


def _docstrings(path: Path, module: str) -> Iterator[Document]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the standard library's sources have invalid escapes
        tree = ast.parse(path.read_bytes(), filename=str(path))
    for name, node in _documented(tree, ""):
        first, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
        if first:
            yield Document(module, name, " ".join(first.split()), rest.strip())


def _documented(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield prefix, node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _documented(child, f"{prefix}.{child.name}" if prefix else child.name)


def _topics(path: Path) -> Iterator[Document]:
    """The topics of `pydoc_data`: one dictionary of texts, each below an underlined title."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                title, _, rest = text.strip().partition("\n")
                yield Document(".".join(TOPICS.with_suffix("").parts), name, title, rest.lstrip("*=-~^ \n"))


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a docstring, each on one line."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield " ".join(paragraph.split())


def _is_prose(text: str) -> bool:
    """Whether a text is prose, not code or a table: at least 80 % of its characters are letters or spaces."""
    plain = sum(character.isalpha() or character == " " for character in text)
    return ">>>" not in text and "::=" not in text and plain >= 0.8 * len(text)


def _shuffled(items: Iterable[Item]) -> tuple[Item, ...]:
    """The items in a random order that is the same on every machine."""
    return tuple(sorted(items, key=lambda item: _stable_number(repr(item))))


def _stable_number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf8")).digest()[:8], "big")


def _decoded(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FlexrankError(f"{file}: not UTF-8 text (byte {error.start}); save it as that") from error
