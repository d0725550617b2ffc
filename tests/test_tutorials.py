"""Each tutorial runs as it is written: its Python blocks, its files, and its `flexrank` commands, in their order."""

import re
import sys
from pathlib import Path

import pytest

from tiny_runs import invoke

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
BLOCK = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run_page(path: Path) -> None:
    """Runs a page's blocks in the current directory; those with a title are files."""
    names: dict[str, object] = {"__name__": path.stem}
    for language, title, content in BLOCK.findall(path.read_text(encoding="utf8")):
        if title:
            Path(title).write_text(content, encoding="utf8")
        elif language == "python":
            exec(compile(content, path.name, "exec"), names)
        elif language == "sh":
            for line in re.findall(r"^flexrank (.+?)(?: +#.*)?$", content, re.MULTILINE):
                result = invoke(*line.split())
                assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("page", ["module", "vision", "embeddings", "language"])
def test_a_tutorial_runs_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_page(TUTORIALS / f"{page}.md")
    monkeypatch.delitem(sys.modules, "network", raising=False)
