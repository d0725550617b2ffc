"""Documentation of Python's standard library as texts: `data.source: stdlib-docs`."""

import ast
import dataclasses
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from flexrank.data.text import SPLITS, part_by_hash, stable_number
from flexrank.errors import FlexrankError

LEFT_OUT = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
TOPICS = Path("pydoc_data", "topics.py")
#: Modules differ a hundredfold in size: with this salt not only the modules but also their texts are split by SPLITS.
SPLIT_SALT = "123:"
#: The minimum number of words in a passage, and in the query and the remainder of a retrieval pair.
PASSAGE_WORDS, QUERY_WORDS, REMAINDER_WORDS = 4, 3, 12

Item = TypeVar("Item")


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
    return tuple(sorted(items, key=lambda item: stable_number(repr(item))))
