"""docs/results.md from the saved results: every number in it is read from a result.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.files import write_aside
from research.findings import RESULT, Result, read_result
from research.findings.pages import beside, markdown, section, told
from research.studies import NAMES, find_study
from research.studies.study import KEYS, Study

_HEAD = """# The paper's evidence, reproduced

Made by `flexrank reproduce --page docs/results.md`, the last step of `make results`, from `results/*/result.json`;
nothing in it is written by hand. Each study is one command; the figures are drawn from the same files. ± is the
standard deviation over seeds. *agrees* and *differs* are computed from the numbers beside them.
"""


def write_page(results: Path, page: Path) -> list[str]:
    """Writes the page of all results under `results`; returns the studies that have none.

    Raises:
        FlexrankError: there is no result at all, or one is not whole.
    """
    sections, missing, overview = [], [], []
    for name in NAMES:
        study = find_study(name)
        directories = [path for path in (results / name, results / f"{name}-full") if (path / RESULT).is_file()]
        for path in directories:
            result = read_result(path / RESULT, KEYS)
            sections.append(_section(study, result, path, page))
            overview += [[_label(name, result), *told(one)] for one in result["claims"]]
        missing += [] if directories else [name]
    if not sections:
        raise FlexrankError(f"{results}: holds no results; run flexrank reproduce NAME first")
    with write_aside(page) as aside:
        table = markdown(["study", "claim", "paper", "here", ""], overview)
        aside.write_text("\n".join([_HEAD, table, "", *sections]), encoding="utf8")
    return missing


def _label(name: str, result: Mapping[str, Any]) -> str:
    return name + (" --full" if result["form"] == "full" else "")


def _section(study: Study, result: Result, directory: Path, page: Path) -> str:
    title = study.title + (" (full)" if result["form"] == "full" else "")
    figure = beside(page, directory / f"{study.name}.png")
    return section(title, f"Shows {study.shows}. The paper: {study.paper}.", result, figure, ("claim", "paper"))
