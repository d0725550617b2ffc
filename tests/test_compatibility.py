"""docs/compatibility.md says what each architecture does here, and no more."""

from pathlib import Path

import pytest

import tiny
from compatibility import NAMES, PAGE, line, page, row_of


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_what_the_architecture_does(name: str, tmp_path: Path) -> None:
    assert line(row_of(name, tmp_path)) in PAGE.read_text(encoding="utf8").splitlines()


def test_the_page_has_every_architecture_and_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf8")
    assert NAMES.keys() == tiny.ARCHITECTURES.keys()
    rows = [row[2:-2].split(" | ") for row in text.splitlines() if row.startswith("| ")][2:]
    assert [row[0] for row in rows] == list(NAMES.values()) and text == page(rows)
