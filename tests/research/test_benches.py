"""The benches' frame: what `flexrank bench` takes, writes, prints and refuses. Each bench has its own test file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flexrank.cli import app
from flexrank.errors import FlexrankError
from research.benches import NAMES, driver, find_bench
from research.benches.bench import Bench
from research.findings import goal, table


def draw(data: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot(data["seconds"])
    return figure


FOUND = {
    "settings": {"size": 3},
    "tables": [table("times", ["form", "ratio"], [["ours", 0.5]])],
    "claims": [
        goal("it is fast", "at most 0.4", "0.5", False, "two cores"),
        goal("on a GPU", "at most 1", "no GPU", None),
    ],
    "data": {"seconds": [1.0, 2.0]},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    bench = Bench("gar", "The layer", "a layer", 1, lambda _: FOUND, draw)
    monkeypatch.setattr(driver, "find_bench", lambda name: bench if name == "gar" else find_bench(name))
    return tmp_path


def invoke(*args: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_a_bench_writes_its_result_and_figure_and_prints_json_last(here: Path) -> None:
    done = invoke("gar", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed == json.loads((here / "results/bench/gar/result.json").read_text())
    assert printed["claims"] == FOUND["claims"] and printed["machine"]["torch"] == torch.__version__
    assert printed["command"] == "flexrank bench gar"
    for ending in ("png", "svg"):
        assert (here / f"results/bench/gar/gar.{ending}").stat().st_size > 500
    told = invoke("gar").stdout
    assert "0.500" in told
    assert "it is fast: goal at most 0.4, here 0.5 (missed); two cores" in told
    assert "on a GPU: goal at most 1, here no GPU (not measured here)" in told


def test_the_page_is_made_of_the_results_alone(here: Path) -> None:
    assert "holds no results" in invoke("--page", "docs/performance.md").stderr
    (here / "docs").mkdir()
    assert invoke("gar", "--page", "docs/performance.md").exit_code == 0
    page = (here / "docs/performance.md").read_text()
    assert "## The layer" in page and "| gar | it is fast | at most 0.4 | 0.5 | missed |" in page
    assert "![The layer](../results/bench/gar/gar.png)" in page and "| ours | 0.500 |" in page


def test_every_bench_tells_what_it_measures() -> None:
    listed = json.loads(invoke("--list", "--json").stdout)
    assert [one["name"] for one in listed] == list(NAMES)
    assert all(one["measures"] and one["minutes"] for one in listed)
    assert all(find_bench(name).name == name for name in NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "bench 'nothing' is unknown; it is one of gar, model"),
        ((), "bench takes one benchmark's NAME, or --list, or --page alone"),
        (("gar", "--list"), "bench takes one benchmark's NAME, or --list, or --page alone"),
        (("gar", "runs"), "bench 'gar' takes no directory"),
        (("model",), "bench 'model' needs DIR"),
    ],
)
def test_what_does_not_fit_is_one_line(here: Path, arguments: tuple[str, ...], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_unknown_bench_is_refused() -> None:
    with pytest.raises(FlexrankError, match="unknown"):
        find_bench("x")
