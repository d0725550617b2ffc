"""The site of documentation: its pages name all that they should, and its parts from outside docs/ are found."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexrank.run.config import RunConfig, parse_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DESCRIBED = re.compile(r"^::: (\S+)$", re.MULTILINE)
STUB = re.compile(r"from \.([\w.]*) import (\w+) as")


@pytest.fixture
def errors_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS / "site")
    yield importlib.import_module("errors_page")
    del sys.modules["errors_page"]


@pytest.fixture
def configuration_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS / "site")
    yield importlib.import_module("configuration_page")
    del sys.modules["configuration_page"]


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf8")


def test_the_reference_has_every_public_name_once() -> None:
    stub = (ROOT / "src/flexrank/__init__.pyi").read_text(encoding="utf8")
    public = sorted(f"flexrank.{module}.{name}" for module, name in STUB.findall(stub) if module)
    named, _, parts = text_of("api.md").partition("## Parts")
    assert sorted(DESCRIBED.findall(named)) == public
    described = set(DESCRIBED.findall(parts))
    for page in DOCS.rglob("*.md"):
        for module, names in re.findall(
            r"^from (flexrank[.\w]*) import ([\w, ]+)", page.read_text(encoding="utf8"), re.M
        ):
            for name in names.split(","):
                path = f"{module}.{name.split()[0]}"
                is_module = importlib.util.find_spec(path) is not None if module == "flexrank.data" else False
                assert is_module or path in described or path in public, f"{page.name} imports {path}"


def test_the_page_of_errors_has_every_module_that_raises_them_once(errors_page: Any) -> None:
    named = [name for found in re.findall(r"<!-- messages: (.+?) -->", text_of("errors.md")) for name in found.split()]
    assert sorted(named) == errors_page.modules()


def test_messages_are_shown_as_they_are_written(errors_page: Any) -> None:
    listed = errors_page.messages_of(errors_page.modules()).splitlines()
    assert "- `rank RANK is out of range; this layer has RANKS`" in listed
    assert "- `--OPTION belongs to --dry-run`" in listed
    assert any("lower the learning rate" in line for line in listed)
    assert all(re.search("[a-z]", line) for line in listed) and len(set(listed)) == len(listed) > 20


def test_messages_are_found_wherever_they_are_made(errors_page: Any) -> None:
    """A name for a text, two forms of one, what a helper returns or yields, other errors, and not what is logged."""
    source = """
def check(value):
    problem = f"{value} is wrong"
    if value:
        raise FlexrankError(f"key: {problem}; {_mend(value)}")
    raise ValueError("none " + "at all") if value else ProcessLost("a `process` is gone" if value else "two are")

def _mend(value):
    log.info("nothing to see")
    return "mend it" if value else f"leave {value}"

def _conflicts(self):
    yield f"{self.a} and b disagree"

def unused():
    return "not an error"
"""
    found = sorted(errors_page.messages_in(ast.parse(source)))
    wanted = ["A and b disagree", "a 'process' is gone", "key: VALUE is wrong; …", "leave VALUE", "mend it", "two are"]
    assert found == wanted
    listed = errors_page.messages_of(["run", "cli", "processes"])
    assert "- `sharded needs optimizer: adamw, whose states are divided, not OPTIMIZER`" in listed
    assert "- `data.source SOURCE does not fit task TASK: only classification reads images`" in listed
    assert "- `PACKAGE is not installed: pip install 'flexrank[…]'`" in listed and "unknown key" in listed


def test_the_page_of_keys_has_each_with_its_default_and_a_meaning(configuration_page: Any) -> None:
    text = configuration_page.configuration_tables()
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `")]
    found = {row[0].strip("`"): row[1:] for row in rows}
    config = RunConfig(name="n", task="language", model="m").model_dump(mode="json")
    keys = [key for key, value in config.items() if not isinstance(value, dict)]
    keys += [f"{one}.{key}" for one, value in config.items() if isinstance(value, dict) for key in value]
    assert list(found) == [row[0].strip("`") for row in rows] and sorted(found) == sorted(keys)
    for key, (values, default, meaning) in found.items():
        assert values and len(meaning) > 8, key
        section, _, last = key.rpartition(".")
        value = (config[section] if section else config)[last]
        assert default == "must be given" or yaml.safe_load(default.strip("`")) == value, key
    assert found["probe.levels"][0] == "whole number ≥ 2" and found["allocation.budgets"][0].endswith("> 0, ≤ 1")
    assert found["distillation.steps"][2] == "Of the optimiser; 0 leaves the decomposed network as it is"
    assert "`null` means equal chances, and with" in found["distillation.weights"][2]  # lines above are joined


def test_every_page_is_in_the_navigation_and_on_disk() -> None:
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf8"), re.MULTILINE)
    outside = {"index.md", "changelog.md", "contributing.md"}
    assert set(navigation) - outside == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", ["coming-from.md", "tutorials/language.md"])
def test_configurations_on_pages_are_right(page: str) -> None:
    (config,) = re.findall(r"^```yaml.*?\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    assert parse_config(yaml.safe_load(config)).name == "mine"
