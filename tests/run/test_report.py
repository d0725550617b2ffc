"""The table and the pictures hold what the summary says, and need nothing else."""

import importlib.util
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from flexrank.cli.printing import show_report
from flexrank.errors import FlexrankError
from flexrank.run import cards, figures, report, tables
from flexrank.run.config import DecompositionConfig
from tiny_runs import invoke, refused, rerun

SHAPES = {
    f"encoder.layer.{block}.{name}": {"shape": shape}
    for block in (0, 1, 2, 10)
    for name, shape in (("attention.query", [32, 32]), ("output.dense", [32, 64]))
}


def summary(blocks: dict[str, Any] = SHAPES) -> dict[str, Any]:
    dense = sum(m * n for m, n in (layer["shape"] for layer in blocks.values()))
    base = {
        "params_layers": dense, "params_model": dense + 5000, "bytes": 4 * dense + 20000, "mean_rank": 32.0,
        "mean_rank_fraction": 1.0, "quality": {"cosine": 1.0, "mrr": 0.5},
    }  # fmt: skip
    rows = [
        {
            "budget": budget, "relative_size": budget - 0.01, "params_layers": int(dense * (budget - 0.01)),
            "params_model": int(dense * (budget - 0.01)) + 5000, "bytes": int(4 * dense * budget) + 20000,
            "mean_rank": 32 * budget, "mean_rank_fraction": budget, "ranks": dict.fromkeys(blocks, int(32 * budget)),
            "quality": {"cosine": 0.9 + budget / 10, "mrr": 0.4}, "latency_ratio": budget,
            "quality_before": {"cosine": 0.7 + budget / 10, "mrr": 0.3},
        }
        for budget in (0.75, 0.5)
    ]  # fmt: skip
    return {"name": "tiny", "model": "a <model>", "base": base, "rows": rows, "layers": blocks}


def write(directory: Path, value: dict[str, Any]) -> Path:
    (directory / "summary.json").write_text(json.dumps(value))
    return directory


def test_the_table_shows_every_row_before_and_after() -> None:
    console = Console(width=140, file=io.StringIO())
    report.print_table(summary(), console)
    lines = console.file.getvalue().splitlines()
    row = next(line for line in lines if line.strip().startswith("0.5 "))
    assert re.split(r"\s{2,}", row.strip()) == [
        "0.5", "16 (50%)", "6.02k", "11.02k", "44.58kB", "0.7500 > 0.9500", "0.3000 > 0.4000", "0.50x",
    ]  # fmt: skip
    assert any(line.strip().startswith("base") and "1.0000" in line for line in lines)


@pytest.mark.usefixtures("verified_here")
def test_a_table_of_an_earlier_state_is_named(copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = "the table is of an earlier state of this run; `flexrank run` makes it again"

    def is_named() -> bool:
        caplog.clear()
        assert invoke("report", copied).exit_code == 0
        return line in caplog.text

    assert not is_named()
    (copied / "report.html").unlink()  # as someone may who wants it drawn again
    for name, stage in (("summary.json", "report"), ("sensitivity.json", "probe")):
        text = (copied / name).read_text()
        (copied / name).write_text(text + " ")
        assert f"{copied / name}: was edited after `{stage}` wrote it" in refused("report", copied)
        (copied / name).write_text(text)
    rerun(copied, "data.evaluation=8", until="evaluate")
    assert is_named()
    (copied / "summary.json").unlink()  # there is no table, of whatever state
    caplog.clear()
    assert "summary.json: no such file" in refused("report", copied) and line not in caplog.text
    rerun(copied)
    assert not is_named()
    rerun(copied, "distillation.learning_rate=2e-3", until="distill")
    assert is_named()
    rerun(copied)
    assert not is_named()
    rerun(copied, "probe.levels=3", until="probe")
    assert is_named()
    shutil.copytree(copied, tmp_path / "other")
    caplog.clear()
    assert invoke("report", copied, tmp_path / "other", "--output", tmp_path / "both.html").exit_code == 0
    assert caplog.text.count(line) == 2


def test_a_sensitivity_table_of_other_layers_is_left_out_of_the_page(tmp_path: Path) -> None:
    """Of a probe that has run again, with other layers than those of the summary."""
    value = summary()
    names = list(value["layers"])
    for layers, is_shown in ((names, True), (names[1:], False), ([*names, "more"], False)):
        table = {part: {name: [1.0, 0.0] for name in layers} for part in ("ranks", "errors")}
        (tmp_path / "sensitivity.json").write_text(json.dumps(table))
        report.write_comparison([write(tmp_path, value)], tmp_path / "page.html")
        assert ('"sensitivity": null' not in (tmp_path / "page.html").read_text()) == is_shown


def test_no_figure_is_cut_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_report(write(tmp_path, summary()), False, {})
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    cells = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    assert ["0.7500 > 0.9500", "0.3000 > 0.4000", "0.50x"] in [row[-3:] for row in cells] and "…" not in shown


def test_without_consolidation_or_latency_the_table_says_neither() -> None:
    value = summary()
    for row in value["rows"]:
        row["quality_before"] = row["latency_ratio"] = None
    _, rows = report.table_cells(value)
    assert rows[1][-3:] == ["0.9750", "0.4000", "-"]
    assert rows[0][-1] == "-" and report.table_cells(summary())[1][0][-1] == "1.00x"
    assert "consolidation" not in report.note(value) and "latency" not in report.note(value)


def test_layers_are_ordered_by_block_as_the_model_has_them() -> None:
    names = ["embed", "layers.0.q", "layers.1.q", "layers.0.up", "layers.10.q", "layers.2.q", "lm_head"]
    assert tables.ordered_layers(dict.fromkeys(names)) == [
        "embed", "layers.0.q", "layers.0.up", "layers.1.q", "layers.10.q", "layers.2.q", "lm_head",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model.layers.3.mlp.up_proj", ("model.layers.3", "mlp.up_proj")),
        ("lm_head", ("", "lm_head")),
        ("0", ("", "0")),
        ("layer1.0.conv1", ("layer1.0", "conv1")),
    ],
)
def test_a_layers_name_is_its_block_and_the_rest(name: str, parts: tuple[str, str]) -> None:
    assert tables.split_block(name) == parts


@pytest.mark.parametrize(
    ("number", "text"),
    [(950, "950"), (1500, "1.50k"), (22_713_216, "22.71M"), (123_456_789, "123M"), (7e9, "7.00G"), (31.2e15, "31.20P")],
)
def test_counts_are_short(number: int, text: str) -> None:
    assert tables.count(number) == text


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, which other tests' runs leave out."""
    monkeypatch.setattr(report, "draw_figures", figures.draw_figures)


def test_the_page_holds_the_numbers_and_needs_no_other_file(tmp_path: Path, drawn: None) -> None:
    paths = report.write_report(write(tmp_path, summary()))
    assert {path.name for path in paths} == {"quality.png", "ranks.png", "report.md", "report.html"}
    page = (tmp_path / "report.html").read_text()
    assert "a &lt;model&gt;" in page and "0.7500 &gt; 0.9500" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "| 0.5 | 16 (50%) |" in (tmp_path / "report.md").read_text()


def texts(path: Path) -> list[str]:
    """The texts of an SVG: matplotlib writes glyphs as paths, and their text as a comment."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_the_figures_name_their_series_layers_and_ranks(tmp_path: Path, drawn: None) -> None:
    report.write_report(write(tmp_path, summary()))
    quality = texts(tmp_path / "figures" / "quality.svg")
    assert quality.count("consolidated") == quality.count("decomposed only") == 2
    assert "cosine to the base model (higher is better)" in quality
    ranks = texts(tmp_path / "figures" / "ranks.svg")
    assert ranks.count("attention.query") == 4 and ranks.count("encoder.layer.10") == 1
    assert ranks.count("24") == ranks.count("16") == len(SHAPES)


def test_a_quality_that_is_better_lower_is_marked_so(tmp_path: Path, drawn: None) -> None:
    value = summary()
    for holder in (value["base"], *value["rows"]):
        holder["quality"] = {"nats_per_token": 2.0}
    for row in value["rows"]:
        row["quality_before"] = {"nats_per_token": 3.0}
    report.write_report(write(tmp_path, value))
    assert "nats per token (lower is better)" in texts(tmp_path / "figures" / "quality.svg")


def test_many_layers_are_drawn_without_their_names(tmp_path: Path, drawn: None) -> None:
    many = {f"model.layers.{block}.{name}": {"shape": [32, 32]} for block in range(32) for name in "abcdefg"}
    report.write_report(write(tmp_path, summary(many)))
    ranks = texts(tmp_path / "figures" / "ranks.svg")
    assert "model.layers.31" in ranks and "a" not in ranks and "24" not in ranks


def test_the_same_summary_gives_the_same_files(tmp_path: Path, drawn: None) -> None:
    write(tmp_path, summary())
    first = {path: path.read_bytes() for path in report.write_report(tmp_path)}
    assert {path: path.read_bytes() for path in report.write_report(tmp_path)} == first


def test_without_matplotlib_there_is_a_page_and_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    written = report.write_report(write(tmp_path, summary()))
    assert [path.name for path in written] == ["report.md", "report.html"] and not (tmp_path / "figures").exists()
    assert all(path.is_file() for path in written) and "![" not in (tmp_path / "report.md").read_text()
    assert "no figures are drawn: they need matplotlib, pip install 'flexrank[report]'" in caplog.text


def test_a_directory_without_a_summary_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FlexrankError, match="summary.json: no such file; `flexrank run` writes it"):
        report.write_report(tmp_path)
    value = summary()
    del value["rows"]
    with pytest.raises(FlexrankError, match="key 'rows' is missing"):
        report.write_report(write(tmp_path, value))


def test_a_page_of_several_runs_replaces_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But a page that it wrote itself; a text that is all of an earlier page's words but its first is no page."""
    monkeypatch.chdir(tmp_path)
    runs = [Path(name) for name in ("one", "two")]
    for run in runs:
        run.mkdir()
        write(run, summary())
    page = Path("comparison.html")
    assert invoke("report", *runs).stdout == "comparison.html\n" and b"<table>" in (first := page.read_bytes())
    write(runs[1], summary() | {"name": "other"})
    assert invoke("report", *runs, "--output", page).exit_code == 0 and page.read_bytes() != first
    mine = {"corpus.txt": b"my words", "mine.html": b"<!doctype html>\n<html>\n" + b" " * 300 + first}
    for name, content in mine.items():
        Path(name).write_bytes(content)
    Path("folder.html").mkdir()
    for name in (*mine, "new.txt", "folder.html"):
        assert f"--output {name}: give the name of a new file that ends in .html" in refused(
            "report", *runs, "--output", name
        )
    assert "no such directory as nowhere" in refused("report", *runs, "--output", "nowhere/new.html")
    assert {name: Path(name).read_bytes() for name in mine} == mine and not Path("new.txt").exists()
    page.write_text("<p>mine</p>")
    assert "--output comparison.html: give" in refused("report", *runs) and page.read_text() == "<p>mine</p>"


@pytest.mark.parametrize("model, named", [("org/base-1", True), ("package:x/model", False), ("./somewhere", False)])
def test_a_card_names_its_base_model_on_the_hub(model: str, named: bool) -> None:
    facts = {"model": model, "task": "embedding", "allocation": {"method": "joint"}, "distillation": {"steps": 7}}
    facts |= {"decomposition": {"method": "fisher"}}
    text = cards.elastic_card(summary() | facts, {})
    assert ("base_model: org/base-1" in text) == (
        "base_model" in text
    ) == named and "pipeline_tag: feature-extraction" in text
    assert "weighted by the loss's gradients, joint allocation of ranks for all budgets, and 7 steps of distil" in text
    for method, words in (("svd", "plain SVD"), ("datasvd", "DataSVD"), ("paper", "DataSVD as the paper prints it")):
        card_by = cards.elastic_card(summary() | facts | {"decomposition": {"method": method}}, {})
        assert f"Made by {words}, joint" in card_by
    assert cards.DECOMPOSITIONS.keys() == set(get_args(DecompositionConfig.model_fields["method"].annotation))
    assert "import AutoModel\n" in text and "AutoModelForTextEncoding.from" in cards.elastic_card(
        summary() | facts | {"auto_class": "AutoModelForTextEncoding"}, {}
    )
    assert "no training" in cards.elastic_card(summary() | facts | {"distillation": {"steps": 0}}, {})
    export = {"directory": "deployed/0.50", "params_model": 11_020, "params_layers": 6_020, "relative_size": 0.337}

    def card(tuned: int = 0, **limits: float) -> str:
        return cards.deployed_card(summary() | facts, export | limits, {}, tuned)

    assert "with 11.02k parameters, 6.02k of them in its factorised layers: 34%" in card(budget=0.5)
    assert "every size; it is the row 0.5 of the table." in card(budget=0.5)
    assert "every size, then trained by itself for 9 steps; the table is of the others." in card(9, budget=0.5)
    refitted = cards.deployed_card(summary() | facts, export, {}, refitted=True)
    assert "without training; the table is of the others." in refitted
    assert "The others were made by" in refitted and "and 7 steps of distil" in refitted
    assert "# tiny at 0.4\n" in card(budget=0.4) and "the row" not in card(budget=0.4)
    assert "# tiny at 0.337\n" in card() and "layers: 34%" in card(max_params=7)
