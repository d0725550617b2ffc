"""The site of documentation: its pages name all that they should, and its parts from outside docs/ are found."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexrank.run.config import parse_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STUB = re.compile(r"from \.([\w.]*) import (\w+) as")


@pytest.fixture
def errors_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS / "site")
    import errors_page

    yield errors_page
    del sys.modules["errors_page"]


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf8")


def test_the_reference_has_every_public_name_once() -> None:
    stub = (ROOT / "src/flexrank/__init__.pyi").read_text(encoding="utf8")
    public = sorted(f"flexrank.{module}.{name}" for module, name in STUB.findall(stub) if module)
    assert sorted(re.findall(r"^::: (\S+)$", text_of("api.md"), re.MULTILINE)) == public


def test_the_page_of_errors_has_every_module_that_raises_them_once(errors_page: Any) -> None:
    named = [room for found in re.findall(r"<!-- messages: (.+?) -->", text_of("errors.md")) for room in found.split()]
    assert sorted(named) == errors_page.rooms()


def test_messages_are_shown_as_they_are_written(errors_page: Any) -> None:
    listed = errors_page.messages_of(errors_page.rooms()).splitlines()
    assert "- `rank … is out of range; this layer has …`" in listed
    assert "- `--… belongs to --dry-run`" in listed
    assert all(re.search("[a-z]", line) for line in listed) and len(set(listed)) == len(listed) > 20


def test_every_page_is_in_the_navigation_and_on_disk() -> None:
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf8"), re.MULTILINE)
    outside = {"index.md", "changelog.md", "contributing.md"}
    assert set(navigation) - outside == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", ["coming-from.md", "tutorials/language.md"])
def test_configurations_on_pages_are_right(page: str) -> None:
    (config,) = re.findall(r"^```yaml.*?\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    assert parse_config(yaml.safe_load(config)).name == "mine"
