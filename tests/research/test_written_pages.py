"""The pages of results in docs/ are those that the saved results give."""

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
