"""docs/compatibility.md says what each architecture does here, and no more."""

from pathlib import Path

import pytest

import tiny
from compatibility import NAMES, PAGE, TITLE, line, page, programs_of, programs_part, row_of, written_programs
from flexrank.deployment.runtimes import RUNTIMES


def rows_of(text: str) -> list[list[str]]:
    """The rows of the table in a text."""
    return [row[2:-2].split(" | ") for row in text.splitlines() if row.startswith("| ")][2:]


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_what_the_architecture_does(name: str, tmp_path: Path) -> None:
    assert line(row_of(name, tmp_path)) in PAGE.read_text(encoding="utf8").splitlines()


@pytest.mark.programs
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_what_each_runtime_does(name: str, tmp_path: Path) -> None:
    assert line(programs_of(name, tmp_path)) in written_programs().splitlines()


@pytest.mark.parametrize("name", tiny.TWO_SIDED)
def test_programs_of_encoder_decoders_are_refused(name: str, tmp_path: Path) -> None:
    """The rows that take no time; `test_formats` has cells of the others."""
    assert line(programs_of(name, tmp_path)) in written_programs().splitlines()


def test_the_page_has_every_architecture_and_nothing_else() -> None:
    """`test_formats` shows the programs of `tiny.PROGRAMS`; the page may not deny what it shows."""
    stages, title, programs = (text := PAGE.read_text(encoding="utf8")).partition(TITLE)
    assert NAMES.keys() == tiny.ARCHITECTURES.keys()
    rows, cells = rows_of(stages), rows_of(programs)
    assert [row[0] for row in rows] == [row[0] for row in cells] == list(NAMES.values())
    assert title + programs == programs_part(cells) and text == page(rows, programs_part(cells))
    found = {row[0]: dict(zip(RUNTIMES, row[1:], strict=True)) for row in cells}
    assert {found[NAMES[name]][to] for to, names in tiny.PROGRAMS.items() for name in names} == {"yes"}
    assert all(cell in ("yes", "refused") for row in cells for cell in row[1:])
