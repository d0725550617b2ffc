"""What all studies share: the ledger, cells as text, the driver, the page, and their verb."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexrank import cli
from flexrank.errors import FlexrankError
from research.findings import claim, shown, spread, table
from research.findings.figures import save_figure
from research.studies import NAMES, driver, find_study, page
from research.studies.study import Ledger, Request, Study, count_seeds

FOUND = {
    "settings": {"steps": 3, "rate": 1e-3, "levels": [1, 2], "by": {"a": 0.5}},
    "tables": [
        table("What it took", ["way", "loss", "share"], [["a|b", 1.23456, None], ["c", spread([1.0, 3.0]), 7]], [2, 1])
    ],
    "claims": [claim("it holds", ".9", "0.95", True), claim("it does not", "2 %", "3.0 %", False, "too few steps")],
    "data": {"points": [1, 2, 4]},
}  # fmt: skip


def draw(data: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 2))
    figure.subplots().plot(data["points"])
    return figure


def study(**changes: Any) -> Study:
    described = {"name": "ranking", "title": "A title", "shows": "a thing", "paper": "says so", "minutes": 2}
    return Study(**{**described, "run": lambda request: dict(FOUND), "draw": draw, **changes})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, in which every study is the one above."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "find_study", lambda name: study(name=name))
    return tmp_path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_a_ledger_computes_a_unit_once_and_keeps_settings_apart(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> dict[str, float]:
        calls.append(1)
        return {"value": 0.1 + 0.2}

    first = Ledger(tmp_path, {"steps": 3}).take("seed 0", compute)
    again = Ledger(tmp_path, {"steps": 3})
    assert again.take("seed 0", compute) == first == {"value": 0.1 + 0.2} and len(calls) == 1
    Ledger(tmp_path, {"steps": 4}).take("seed 0", compute)
    assert len(calls) == 2


def test_an_interrupted_unit_leaves_the_finished_ones(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, {})
    ledger.take("first", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        ledger.take("second", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert Ledger(tmp_path, {}).take("first", lambda: 2) == 1
    assert Ledger(tmp_path, {}).take("second", lambda: 3) == 3


@pytest.mark.parametrize(
    ("cell", "digits", "text"),
    [
        (None, 3, "–"), ("plain", 3, "plain"), (7, 3, "7"), (1.23456, 2, "1.23"), (0.0, 2, "0.00"),
        (3.2e-8, 3, "3.2e-08"),
        (spread([1.0, 3.0]), 1, "2.0 ± 1.4"), (spread([2.0]), 1, "2.0"), (spread([1e-9, 3e-9]), 3, "2.0e-09 ± 1e-09"),
    ],
)  # fmt: skip
def test_a_cell_as_text(cell: Any, digits: int, text: str) -> None:
    assert shown(cell, digits) == text


def test_seeds_are_counted() -> None:
    assert [count_seeds(Request(Path()), 3, 5), count_seeds(Request(Path(), full=True), 3, 5)] == [3, 5]
    assert count_seeds(Request(Path(), seeds=2), 3, 5) == 2
    with pytest.raises(FlexrankError, match="--seeds is 0"):
        count_seeds(Request(Path(), seeds=0), 3, 5)


def test_every_study_can_be_found_and_is_described() -> None:
    for name in NAMES:
        one = find_study(name)
        assert one.name == name and one.title and one.shows and one.paper and one.minutes > 0
        assert one.takes_model == (one.settings is not None)
    with pytest.raises(FlexrankError, match="study 'fig99' is unknown; it is one of theory, ranking"):
        find_study("fig99")


def test_the_verb_writes_result_and_figures_and_prints_json_last(here: Path) -> None:
    done = invoke("reproduce", "theory", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed == json.loads((here / "results/theory/result.json").read_text())
    assert printed["claims"] == FOUND["claims"] and printed["form"] == "quick" and printed["machine"]["torch"]
    for ending in ("png", "svg"):
        assert (here / f"results/theory/theory.{ending}").stat().st_size > 500
    told = invoke("reproduce", "theory")
    assert "What it took" in told.stdout and "2.00 ± 1.41" in told.stdout
    assert "it does not: paper 2 %, here 3.0 % (differs); too few steps" in told.stdout


def test_the_same_result_gives_the_same_figure(here: Path) -> None:
    pictures = []
    for place in ("a", "b"):
        save_figure(lambda: study().draw(FOUND["data"]), here / place / "ranking")
        pictures.append((here / place / "ranking.svg").read_bytes())
    assert pictures[0] == pictures[1]


def test_a_full_form_goes_to_a_place_of_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "find_study", lambda name: study(name=name, full_minutes=60))
    assert invoke("reproduce", "front", "--full").exit_code == 0
    assert json.loads((here / "results/front-full/result.json").read_text())["form"] == "full"


def test_another_model_or_setting_never_writes_over_the_studys_own_result(
    here: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_runs import settings

    own = settings(sources / "language", sources / "text.txt", here / "unused")
    monkeypatch.setattr(
        driver, "find_study", lambda name: study(name=name, takes_model=True, settings=lambda full: own)
    )
    invoke("reproduce", "theory")
    before = (here / "results/theory/result.json").read_bytes()
    for options in (["--model", "org/big-1b"], ["--set", "distillation.steps=9"], ["--seeds", "1"]):
        assert invoke("reproduce", "theory", *options).exit_code == 0
    assert (here / "results/theory/result.json").read_bytes() == before
    assert sorted(path.name for path in (here / "results").iterdir()) == [
        "theory", "theory-big-1b", "theory-seeds-1", "theory-tiny",
    ]  # fmt: skip
    found = json.loads((here / "results/theory-big-1b/result.json").read_text())
    assert found["command"] == "flexrank reproduce theory --model org/big-1b"
    page.write_page(Path("results"), Path("docs/results.md"))
    assert "big-1b" not in (here / "docs/results.md").read_text()


def test_two_processes_do_not_run_one_study(here: Path) -> None:
    from flexrank.run.directory import RunDirectory

    with RunDirectory(Path("runs/reproduce/theory")).locked():
        done = invoke("reproduce", "theory")
    assert done.exit_code == 2 and "runs/reproduce/theory" in done.stderr


def test_all_runs_every_study_and_the_page_holds_their_numbers(here: Path) -> None:
    done = invoke("reproduce", "--all", "--page", "docs/results.md", "--json")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)) == list(NAMES)
    text = (here / "docs/results.md").read_text()
    assert text.count("\n## ") == len(NAMES)
    assert "| a\\|b | 1.23 | – |" in text and "| c | 2.00 ± 1.41 | 7 |" in text
    assert "| it does not | 2 % | 3.0 % | differs | too few steps |" in text
    assert "steps 3; rate 0.001; levels 1, 2; by a 0.5" in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (here / "docs" / line.partition("](")[2].rstrip(")")).is_file(), line


def test_the_page_follows_the_json(here: Path) -> None:
    invoke("reproduce", "theory")
    path = here / "results/theory/result.json"
    changed = json.loads(path.read_text())
    changed["tables"][0]["rows"][0][1] = 9.87
    path.write_text(json.dumps(changed))
    page.write_page(Path("results"), Path("docs/results.md"))
    assert "9.87" in (here / "docs/results.md").read_text()


def test_list_tells_cost_and_the_papers_figure(here: Path) -> None:
    done = invoke("reproduce", "--list", "--json")
    assert [one["name"] for one in json.loads(done.stdout)] == list(NAMES)
    told = invoke("reproduce", "--list").stdout
    assert "says so" in told and "lm-profiles" in told


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["reproduce"], "takes one study's NAME, or --all, or --list"),
        (["reproduce", "theory", "--all"], "takes one study's NAME, or --all, or --list"),
        (["reproduce", "--all", "--full"], "--all runs the quick forms"),
        (
            ["reproduce", "theory", "--model", "gpt2"],
            "has a network of its own; --model, --config and --set do not apply",
        ),
        (["reproduce", "theory", "--full"], "has one form"),
        (["reproduce", "theory", "--domain", "x.txt"], "--domain belongs to adaptation"),
        (["reproduce", "adaptation", "--domain", "x.txt"], "--domain x.txt: no such file or folder"),
        (["reproduce", "theory", "--seeds", "0"], "--seeds is 0"),
        (["reproduce", "theory", "--list"], "--list tells all studies"),
        (["reproduce", "--page", "docs/results.md"], "results: holds no results"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(here: Path, arguments: list[str], part: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and part in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(here.iterdir())


def test_model_config_and_set_are_laid_together(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    from tiny_runs import settings

    own = settings(sources / "language", sources / "text.txt", tmp_path / "unused")
    one = study(takes_model=True, settings=lambda full: own)
    asked = driver.request_of(one, driver.Wishes(model="org/other-1b", overrides=("distillation.steps=7",)))
    assert asked.config is not None
    assert (asked.config.model, asked.config.name, asked.config.distillation.steps) == ("org/other-1b", "other-1b", 7)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**own, "name": "mine"}))
    asked = driver.request_of(one, driver.Wishes(config=tmp_path / "mine.yaml"))
    assert asked.config is not None and asked.config.name == "mine"
    asked = driver.request_of(one, driver.Wishes(model=".", overrides=("name=mine",)))
    assert asked.config is not None and asked.config.name == "mine"
    with pytest.raises(FlexrankError, match="with --config, the config tells the size"):
        driver.request_of(study(takes_model=True, settings=lambda full: own, full_minutes=1),
                          driver.Wishes(full=True, config=tmp_path / "mine.yaml"))  # fmt: skip
    with pytest.raises(FlexrankError, match="did you mean 'distillation'"):
        driver.request_of(one, driver.Wishes(overrides=("distilation.steps=7",)))


def test_a_study_without_its_assets_names_what_is_missing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "find_study", find_study)
    monkeypatch.setenv("FLEXRANK_ASSETS", str(here / "assets"))
    done = invoke("reproduce", "equal-budget")
    assert done.exit_code == 2 and "stories260k: missing; set FLEXRANK_ASSETS" in done.stderr
    done = invoke("reproduce", "equal-budget", "--model", "org/other")
    assert "tinystories_train_v2.txt: missing; set FLEXRANK_ASSETS to the folder that holds it, or give data.path" in (
        done.stderr
    )
    assert not list(here.iterdir())


def test_an_interrupted_study_says_how_to_go_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: Request) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "find_study", lambda name: study(name=name, run=stop))
    done = invoke("reproduce", "theory")
    assert done.exit_code == 130 and "goes on from the last finished unit" in done.stderr
    assert not (here / "results").exists()
