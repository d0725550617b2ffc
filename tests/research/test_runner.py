"""What all experiments share: the ledger, cells as text, the runner, the pages, and the command line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from flexrank.errors import FlexrankError
from flexrank.run.directory import RunDirectory, files_digest
from research import experiment, figures, page, runner
from research.__main__ import app
from research.assets import assets_directory
from research.experiment import BENCHES, COMPARISONS, STUDIES, Experiment, Ledger, Request, find_experiment
from research.result import behind, between, claim, goal, shown, spread, spreads, table
from tiny_runs import settings

ROOT = Path(__file__).parents[2]
MEASURED = {
    "settings": {"steps": 3, "rate": 1e-3, "levels": [1, 2], "by": {"a": 0.5}},
    "tables": [
        table("What it took", ["way", "loss", "share"], [["a|b", 1.23456, None], ["c", spread([1.0, 3.0]), 7]], [2, 1])
    ],
    "claims": [
        claim("it holds", ".9", "0.95", True, "no reason"),
        claim("it does not", "2 %", "3.0 %", False, "too few steps"),
        goal("it is fast", "at most 0.4", "0.5", False, "two cores"),
        goal("on a GPU", "at most 1", "no GPU", None),
    ],
    "data": {"points": [1, 2, 4]},
}  # fmt: skip


def draw(data: Mapping[str, Any]) -> Any:
    figure, (axes,) = figures.panels(size=(2, 2))
    axes.plot(data["points"])
    return figure


def made(name: str, **changes: Any) -> Experiment:
    """An experiment of this name that measures nothing."""
    described: dict[str, Any] = {"title": f"A title of {name}", "shows": "a thing", "minutes": 2, "draw": draw}
    if name in STUDIES:
        described |= {"paper": "says so", "seeds": None if name == "lm-profiles" else (3, 5)}
    return Experiment(**{"name": name, **described, "run": lambda request: dict(MEASURED), **changes})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, in which no experiment takes time."""
    monkeypatch.chdir(tmp_path)
    replace(monkeypatch)
    return tmp_path


def replace(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    for module in (experiment, page):
        monkeypatch.setattr(module, "find_experiment", lambda name: made(name, **changes))


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_ledger_computes_a_unit_once_and_keeps_settings_apart(tmp_path: Path) -> None:
    assert Ledger(tmp_path, {"steps": 3}).take("unit", lambda value: {"value": value}, 0.1 + 0.2) == {
        "value": 0.1 + 0.2
    }
    again = Ledger(tmp_path, {"steps": 3})
    assert again.take("unit", lambda: pytest.fail("computed again")) == {"value": 0.1 + 0.2}
    assert Ledger(tmp_path, {"steps": 4}).take("unit", lambda: 5) == 5
    assert again.take_seeds("all", 2, lambda base, seed: base + seed, 10) == [10, 11]
    assert again.take("all, seed 1", lambda: None) == 11


def test_units_of_other_code_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "one.py"
    source.write_text('"""A module."""\nx = 1\n')
    digests = [files_digest([source])]
    for text in ('"""Another docstring."""\n\nx = 1  # and a comment\n', "x = 2\n"):
        source.write_text(text)
        digests.append(files_digest([source]))
    assert digests[0] == digests[1] != digests[2]
    assert experiment._own_code() == files_digest(
        path for root in ("src/flexrank", "research") for path in sorted((ROOT / root).rglob("*.py"))
    )
    monkeypatch.setattr("research.experiment._own_code", lambda: digests[0])
    assert Ledger(tmp_path, {}).take("unit", lambda: 1) == 1
    monkeypatch.setattr("research.experiment._own_code", lambda: digests[2])
    assert Ledger(tmp_path, {}).take("unit", lambda: 2) == 2


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


def test_spreads_are_by_place_and_ranges_are_of_seeds() -> None:
    assert [cell["mean"] for cell in spreads([[1.0, 2.0], [3.0, 6.0]])] == [2.0, 4.0]
    assert between([0.1, 0.3]) == "20.0% (10.0% to 30.0%)" and between([2.0], ".1f") == "2.0"


def test_every_experiment_can_be_found_and_is_described() -> None:
    for name in STUDIES + BENCHES + COMPARISONS:
        one = find_experiment(name)
        assert one.name == name and one.title and one.shows and one.minutes > 0
        assert one.kind == ("study" if name in STUDIES else "bench" if name in BENCHES else "comparison")
    with pytest.raises(FlexrankError, match="experiment 'fig99' is unknown; it is one of theory, ranking"):
        find_experiment("fig99")


@pytest.mark.parametrize("name", ["theory", "search"])
def test_an_experiment_writes_result_and_figures_and_prints_json_last(here: Path, name: str) -> None:
    done = invoke(name, "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed == read(here / f"results/{name}/result.json")
    assert printed["claims"] == MEASURED["claims"] and printed["form"] == "quick"
    assert printed["command"] == f"python -m research {name}" and printed["machine"]["torch"] == torch.__version__
    for ending in ("png", "svg"):
        assert (here / f"results/{name}/{name}.{ending}").stat().st_size > 500
    lines = invoke(name).stdout
    assert "What it took" in lines and "2.00 ± 1.41" in lines
    assert "it holds: paper .9, here 0.95 (agrees)\n" in lines
    assert "it does not: paper 2 %, here 3.0 % (differs); too few steps" in lines
    assert "it is fast: goal at most 0.4, here 0.5 (missed); two cores" in lines
    assert "on a GPU: goal at most 1, here no GPU (not measured here)" in lines


def test_the_same_data_gives_the_same_figure(tmp_path: Path) -> None:
    pictures = []
    for place in ("a", "b"):
        figures.save_figure(draw, {"points": [1, 2, 4]}, tmp_path / place / "ranking")
        pictures.append((tmp_path / place / "ranking.svg").read_bytes())
    assert pictures[0] == pictures[1]


def test_a_full_form_goes_to_a_place_of_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Request] = []
    replace(monkeypatch, full_minutes=60, run=lambda request: requests.append(request) or dict(MEASURED))
    for options in ([], ["--full"], ["--full", "--seeds", "2"], ["--full", "--seeds", "7"]):
        assert invoke("front", *options).exit_code == 0
    assert read(here / "results/front-full/result.json")["form"] == "full"
    assert not (here / "results/front-full-seeds-7").exists() and (here / "results/front-full-seeds-2").exists()
    assert [one.seeds for one in requests] == [3, 5, 2, 7] and [one.full for one in requests] == [
        False,
        True,
        True,
        True,
    ]


def test_another_model_or_setting_never_writes_over_the_studys_own_result(
    here: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = settings(sources / "language", sources / "text.txt", here / "unused")
    replace(monkeypatch, settings=lambda full: own)
    invoke("theory", "--seeds", "4")  # more than its own 3
    before = (here / "results/theory/result.json").read_bytes()
    for options in (["--model", "org/big-1b"], ["--set", "distillation.steps=9"], ["--seeds", "1"]):
        assert invoke("theory", *options).exit_code == 0
    assert (here / "results/theory/result.json").read_bytes() == before
    assert sorted(path.name for path in (here / "results").iterdir()) == [
        "theory", "theory-big-1b", "theory-seeds-1", "theory-tiny",
    ]  # fmt: skip
    assert read(here / "results/theory-big-1b/result.json")["command"] == (
        "python -m research theory --model org/big-1b"
    )
    assert invoke("theory", "--half", "tuning", "--output", "results/theory-full").exit_code == 0
    command = read(here / "results/theory-full/result.json")["command"]
    assert command == "python -m research theory --half tuning --output results/theory-full"
    assert invoke("--page").exit_code == 0
    assert "big-1b" not in (page := (here / "docs/results.md").read_text())
    assert "--seeds 4" in page and "tuning" not in page


def test_two_processes_do_not_run_one_experiment(here: Path) -> None:
    with RunDirectory(Path("runs/reproduce/theory")).locked():
        done = invoke("theory")
    assert done.exit_code == 2 and "runs/reproduce/theory" in done.stderr


@pytest.mark.parametrize(
    ("option", "names", "place"), [("--all", STUDIES, "results.md"), ("--benches", BENCHES, "performance.md")]
)
def test_all_of_a_kind_run_and_their_page_holds_the_numbers(
    here: Path, option: str, names: tuple[str, ...], place: str
) -> None:
    done = invoke(option, "--page", "--json")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)) == list(names)
    assert [path.name for path in (here / "docs").iterdir()] == [place]
    text = (here / "docs" / place).read_text()
    assert text.count("\n## ") == len(names) and f"## A title of {names[0]}" in text
    assert "| a\\|b | 1.23 | – |" in text and "| c | 2.00 ± 1.41 | 7 |" in text
    assert f"| {names[0]} | it is fast | at most 0.4 | 0.5 | missed |" in text
    assert "| it does not | 2 % | 3.0 % | differs | too few steps |" in text
    assert "steps 3; rate 0.001; levels 1, 2; by a 0.5" in text
    pictures = [line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == len(names) and all((here / "docs" / picture).is_file() for picture in pictures)


def test_a_comparison_is_called_by_its_models(here: Path) -> None:
    invoke("compare")
    assert invoke("--page").exit_code == 0
    assert "\n## A title of compare: points\n" in (here / "docs/comparison.md").read_text()


def test_an_experiment_is_left_out_where_what_it_needs_is_missing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, needs="A_THING")
    done = invoke("--benches", "--json")
    assert json.loads(done.stdout) == {} and "bench train is left out: it needs A_THING" in done.stderr
    monkeypatch.setenv("A_THING", "here")
    assert list(json.loads(invoke("--benches", "--json").stdout)) == list(BENCHES)


def test_the_page_follows_the_json_and_says_what_is_missing(here: Path) -> None:
    invoke("theory")
    path = here / "results/theory/result.json"
    changed = read(path)
    changed["tables"][0]["rows"][0][1] = 9.87
    path.write_text(json.dumps(changed))
    assert "docs/results.md written; no results yet of ranking, front" in invoke("--page").stderr
    assert "9.87" in (here / "docs/results.md").read_text()
    path.write_text(json.dumps({key: value for key, value in changed.items() if key != "claims"}))
    done = invoke("--page")
    assert done.exit_code == 2 and str(Path("results/theory/result.json")) in done.stderr and "claims" in done.stderr


def test_the_list_tells_cost_and_what_is_shown(here: Path) -> None:
    listed = json.loads(invoke("--list", "--json").stdout)
    assert [one["name"] for one in listed] == [*STUDIES, *BENCHES, *COMPARISONS]
    assert listed[0]["minutes"] == 2 and listed[0]["kind"] == "study" and listed[-1]["kind"] == "bench"
    lines = invoke("--list").stdout
    assert "says so" in lines and "lm-profiles" in lines and "search" in lines


CHOICE = "give one experiment's NAME, or --all, or --benches, or --list, or --page alone"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], CHOICE),
        (["theory", "--all"], CHOICE),
        (["--all", "--benches"], CHOICE),
        (["--all", "--full"], "only --seeds, --page and --json can be added"),
        (["theory", "--model", "gpt2"], "has models of its own; --model, --config and --set do not apply"),
        (["theory", "--full"], "has one form"),
        (["theory", "--domain", "x.txt"], "--domain belongs to adaptation"),
        (["adaptation", "--domain", "x.txt"], "--domain x.txt: no such file or folder"),
        (["theory", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["lm-profiles", "--seeds", "2"], "nothing in study 'lm-profiles' is repeated by seeds"),
        (["search", "--seeds", "2"], "nothing in bench 'search' is repeated by seeds"),
        (["theory", "--half", "tuning"], "study 'theory' scores no half of a held-out set"),
        (["sts", "--half", "both"], "--half is 'both'; it is one of tuning, reporting"),
        (["theory", "--list"], "--list shows all experiments"),
        (["--page"], "results: holds no results"),
        (["theory", "--wrong"], "No such option: --wrong"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(here: Path, arguments: list[str], part: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and part in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(here.iterdir())


def test_model_config_and_set_are_laid_together(sources: Path, tmp_path: Path) -> None:
    own = settings(sources / "language", sources / "text.txt", tmp_path / "unused")
    one = made("theory", settings=lambda full: own, full_minutes=1)

    def config_of(**options: Any) -> Any:
        return runner.request_of(one, runner.Options(**options)).config

    config = config_of(model="org/other-1b", overrides=("distillation.steps=7",))
    assert (config.model, config.name, config.distillation.steps) == ("org/other-1b", "other-1b", 7)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**own, "name": "mine"}))
    assert config_of(config=tmp_path / "mine.yaml").name == "mine"
    assert config_of(model=".", overrides=("name=mine",)).name == "mine"
    assert config_of(half="tuning").data.half == "tuning"
    request = runner.request_of(one, runner.Options(half="tuning"))
    assert (request.half, request.work.name) == ("tuning", "theory-tuning")  # the other half's parts are not read
    with pytest.raises(FlexrankError, match="with --config set data.half"):
        config_of(half="tuning", config=tmp_path / "mine.yaml")
    with pytest.raises(FlexrankError, match="with --config, the config says the size"):
        config_of(full=True, config=tmp_path / "mine.yaml")
    with pytest.raises(FlexrankError, match="did you mean 'distillation'"):
        config_of(overrides=("distilation.steps=7",))


@pytest.mark.parametrize("variable", ["assets", ""])
def test_a_study_without_its_assets_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXRANK_ASSETS", variable)
    done = invoke("equal-budget")
    assert done.exit_code == 2 and "stories260k: missing; set FLEXRANK_ASSETS" in done.stderr
    done = invoke("equal-budget", "--model", "org/other")
    assert "tinystories_train_v2.txt: missing; set FLEXRANK_ASSETS to the folder that holds it, or give data.path" in (
        done.stderr
    )
    with pytest.raises(FlexrankError, match="stsb: missing; set FLEXRANK_ASSETS to the folder that holds stsb"):
        assets_directory("stsb")
    done = invoke("ranking")
    assert done.exit_code == 2 and "mnist: missing; set FLEXRANK_ASSETS" in done.stderr
    assert not (tmp_path / "results").exists()


def test_an_interrupted_study_says_how_to_go_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: Request) -> Any:
        raise KeyboardInterrupt

    replace(monkeypatch, run=stop)
    done = invoke("theory")
    assert done.exit_code == 130 and "goes on from the last finished part" in done.stderr
    assert not (here / "results").exists()


def test_of_sizes_that_are_behind_the_farthest_is_named() -> None:
    lost = [(0.8, "rival b", 0.1), (0.5, "rival a", 0.25), (0.2, "rival c", 0.2)]
    assert behind(lost, "nats") == "behind at 0.8 0.5 0.2; most at 0.5, by 0.25 nats to rival a"
