"""The pages of results in docs/ are those that the saved results give."""

import json
from pathlib import Path

import pytest

from research.page import PAGES, write_pages

ROOT = Path(__file__).parents[2]


def test_pages_are_what_saved_results_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    write_pages(Path("results"))
    for page in PAGES.values():
        assert page.path.read_text(encoding="utf8") == (ROOT / page.path).read_text(encoding="utf8")


def test_each_comparison_has_its_own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    machine = {"processor": "p", "threads": 1, "torch": "2"}
    for name, kind in (("compare-tiny", "compare"), ("compare-trained-tiny", "compare-trained")):
        directory = tmp_path / "results" / name
        directory.mkdir(parents=True)
        facts = {
            "name": kind,
            "title": kind,
            "form": "quick",
            "command": name,
            "settings": {},
            "tables": [],
            "seconds": 1,
        }
        (directory / "result.json").write_text(json.dumps({**facts, "claims": [], "data": {}, "machine": machine}))
    write_pages(Path("results"))
    page = (tmp_path / "docs" / "comparison.md").read_text()
    assert page.count("`compare-tiny`") == page.count("`compare-trained-tiny`") == 1
