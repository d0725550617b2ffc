"""Python's documentation and its splits, against what is written into small sources and what Python says of itself."""

import argparse
import collections
import difflib
import inspect
import warnings
from pathlib import Path

import pytest

from flexrank.data import stdlib_docs as data
from flexrank.errors import FlexrankError


@pytest.fixture(scope="module")
def documents() -> list[data.Document]:
    return data.stdlib_documents()


@pytest.fixture(scope="module")
def corpus(documents: list[data.Document]) -> data.Corpus:
    return data.split_documents(documents)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of three modules, a test and an installed package."""
    sources = {
        "alpha.py": '"""The first\nmodule.\n\nIt has more.\n"""\nclass A:\n    """A class."""\n'
        '    async def go(self):\n        """Goes.\n\n        Far."""\n        def inner():\n            "Within."\n',
        "pack/__init__.py": 'import not_there\nx = "\\d"\ndef f():\n    "Function of a package."\n',
        "pack/deep.py": "def undocumented(): pass\n",
        "pack/tests/test_it.py": '"""Left out."""',
        "site-packages/other.py": '"""Left out."""',
        "test/bad.py": "this is not Python",
        "pydoc_data/topics.py": 'topics = {"with": "The with\\n********\\n\\nIt wraps a block of code.\\n\\nMore."}',
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_documents_are_every_docstring_in_order_and_nothing_is_imported(library: Path) -> None:
    assert data.stdlib_documents(library) == [
        data.Document("alpha", "", "The first module.", "It has more."),
        data.Document("alpha", "A", "A class.", ""),
        data.Document("alpha", "A.go", "Goes.", "Far."),
        data.Document("alpha", "A.go.inner", "Within.", ""),
        data.Document("pack", "f", "Function of a package.", ""),
        data.Document("pydoc_data.topics", "with", "The with", "It wraps a block of code.\n\nMore."),
    ]


def test_documents_agree_with_what_python_says_of_itself(documents: list[data.Document]) -> None:
    by_name = {(document.module, document.name): document for document in documents}
    for owner in (inspect.getdoc, warnings.catch_warnings, difflib.SequenceMatcher.ratio, argparse):
        module = owner.__name__ if inspect.ismodule(owner) else owner.__module__
        document = by_name[module, "" if inspect.ismodule(owner) else owner.__qualname__]
        whole = " ".join(f"{document.query} {document.remainder}".split())
        assert whole == " ".join((inspect.getdoc(owner) or "").split())


def test_splits_meet_in_no_module_and_no_text(documents: list[data.Document], corpus: data.Corpus) -> None:
    tops = collections.defaultdict(set)
    for document in documents:
        tops[document.module.partition(".")[0]].add(data.split_of(document.module))
    assert all(len(splits) == 1 for splits in tops.values())
    evaluation = {text for pair in corpus.evaluation for text in pair}
    assert not evaluation & {*corpus.calibration, *corpus.training}
    assert not set(corpus.calibration) & set(corpus.training)
    for text in corpus.evaluation[:50]:
        owners = {d.module for d in documents if d.query == text[0] and " ".join(d.remainder.split()) == text[1]}
        assert "evaluation" in {data.split_of(module) for module in owners}


def test_splits_are_the_same_on_every_machine() -> None:
    assert {name: data.split_of(name) for name in ("asyncio.events", "xml.dom", "difflib", "pydoc_data.topics")} == {
        "asyncio.events": "evaluation",
        "xml.dom": "calibration",
        "difflib": "training",
        "pydoc_data.topics": "training",
    }
    assert data.split_of("_pydecimal") == data.split_of("decimal") == data.split_of("_decimal")
    places = collections.Counter(data.split_of(f"module{number}") for number in range(4000))
    for name, share in data.SPLITS.items():
        assert places[name] / 4000 == pytest.approx(share / sum(data.SPLITS.values()), abs=0.02)


def test_corpus_is_enough_for_the_demo_and_for_a_retrieval_score(
    documents: list[data.Document], corpus: data.Corpus
) -> None:
    assert len(corpus.calibration) >= 1024 + 192
    assert len(corpus.training) >= 6000
    assert len(corpus.evaluation) >= 400
    assert len({query.lower() for query, _ in corpus.evaluation}) == len(corpus.evaluation)
    assert len({remainder for _, remainder in corpus.evaluation}) == len(corpus.evaluation)
    assert data.split_documents(documents, max_pairs=7).evaluation == corpus.evaluation[:7]


def test_passages_are_prose_each_once() -> None:
    remainder = "One paragraph over\n  two lines of words.\n\n>>> code(1)\n\na | b | c | 1 | 2 | 3 | 4\n\nToo short."
    document = data.Document("m", "f", "Return the thing that is asked.", remainder)
    assert data.passages([document, document]) == [document.query, "One paragraph over two lines of words."]


def test_retrieval_pairs_leave_out_the_short_and_the_repeated() -> None:
    long = "word " * 12
    documents = [
        data.Document("m", "a", "Find the thing now.", long),
        data.Document("m", "b", "find the thing now.", long + "other"),
        data.Document("m", "c", "Another query of words.", long),
        data.Document("m", "d", "Query without much after it.", "word"),
        data.Document("m", "e", "Short.", long + "more"),
    ]
    assert data.retrieval_pairs(documents) == [("Find the thing now.", long.strip())]


def test_a_folder_without_sources_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FlexrankError, match="no Python sources"):
        data.stdlib_documents(tmp_path)
