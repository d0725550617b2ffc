"""The interactive page in a real browser: what it shows of each size is what the run's JSON says."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_report import SHAPES, summary, write
from typer.testing import CliRunner

from flexrank import cli
from flexrank.run import figures, report, tables

PAGE = Path(report.__file__).parent / "page"
pytestmark = pytest.mark.browser


def probed(directory: Path) -> dict[str, Any]:
    """A sensitivity table whose errors halve with every rank."""
    ranks = {name: [8, 16, 24, 32] for name in SHAPES}
    errors = {name: [0.8 / place, 0.4 / place, 0.2 / place, 0.0] for place, name in enumerate(SHAPES, 1)}
    (directory / "sensitivity.json").write_text(json.dumps({"ranks": ranks, "errors": errors}))
    return {"ranks": ranks, "errors": errors}


def written(directory: Path, value: dict[str, Any] | None = None) -> Path:
    probed(directory)
    report.write_comparison([write(directory, value or summary())], directory / "report.html")
    return directory / "report.html"


def facts(page: Any) -> dict[str, tuple[str, str]]:
    """Each fact's value, and what is beside it."""
    pairs = page.eval_on_selector_all(
        "#facts div", "all => all.map(one => ['dt', 'dd', 'small'].map(part => one.querySelector(part).textContent))"
    )
    return {name: (value.removesuffix(more).strip(), more) for name, value, more in pairs}


def tab_to(page: Any, name: str) -> list[str]:
    """Presses Tab until the element of this id has the focus; returns the ids that it passed, and this."""
    passed = list[str]()
    while passed[-1:] != [name]:
        assert len(passed) < 20, passed
        page.keyboard.press("Tab")
        passed.append(page.evaluate("document.activeElement.id"))
    return passed


def table_of(value: dict[str, Any], row: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What a size's row says of all its numbers, and what the base model's has."""
    base = value["base"]

    def share(part: float, whole: float) -> str:
        return f"{math.floor(100 * part / whole + 0.5)} %"

    table = {
        "parameters": (tables.count(row["params_model"]), share(row["params_model"], base["params_model"])),
        "in factorised layers": (
            tables.count(row["params_layers"]),
            share(row["params_layers"], base["params_layers"]),
        ),
        "on disk": (tables.count(row["bytes"]) + "B", share(row["bytes"], base["bytes"])),
        "mean rank": (f"{row['mean_rank']:.0f}", share(row["mean_rank_fraction"], 1)),
        "time": (f"{row['latency_ratio']:.2f}×", "of the base model's"),
    }
    for name, quality in row["quality"].items():
        more = f"{row['quality_before'][name]:.4f} before, base {base['quality'][name]:.4f}"
        table[figures.LABELS[name]] = f"{quality:.4f}", more
    return table


def test_the_slider_shows_each_size(opened: Any, tmp_path: Path) -> None:
    page = opened(written(tmp_path))
    value = json.loads((tmp_path / "summary.json").read_text())
    assert tab_to(page, "slider") == ["slider"]
    page.keyboard.press("Home")
    for row in sorted(value["rows"], key=lambda one: one["budget"]):
        assert page.text_content("#budget") == f"{row['budget']:g}"
        assert facts(page) == table_of(value, row)
        cells = page.eval_on_selector_all(
            "#ranks td[data-share]", "all => all.map(one => [one.title, one.textContent])"
        )
        assert dict(cells) == {f"{name}: rank {rank} of 32": str(rank) for name, rank in row["ranks"].items()} and len(
            cells
        ) == len(SHAPES)
        command = page.text_content("#command")
        assert command == f"flexrank deploy {tmp_path} --budget {row['budget']:g} --output small/"
        assert page.get_attribute("#slider", "aria-valuetext") == f"budget {row['budget']:g}"
        chosen = page.eval_on_selector_all("tr.chosen td:first-child", "all => all.map(one => one.textContent)")
        assert chosen == [f"{row['budget']:g}"]
        page.keyboard.press("ArrowRight")


def test_a_printed_page_has_all_columns(opened: Any, tmp_path: Path) -> None:
    page = opened(written(tmp_path))
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 between its margins
    widths = []
    for media in ("screen", "print"):
        page.emulate_media(media=media)
        widths.append(page.eval_on_selector_all(".wide table", "all => all.map(one => one.offsetWidth)"))
    assert len(widths[1]) == 2 and all(small < 0.85 * wide for wide, small in zip(*widths, strict=True))
    assert page.eval_on_selector(".wide", "one => getComputedStyle(one).overflowX") == "visible"
    assert not page.is_visible("#slider") and page.is_visible("#budget") and page.is_visible("#measure")


def test_every_control_is_reached_by_tab(opened: Any, tmp_path: Path) -> None:
    """In the order of the page, and back; a select and the front follow the keyboard."""
    page = opened(written(tmp_path))
    assert tab_to(page, "axis") == ["slider", "copy", "measure", "axis"]
    page.keyboard.press("ArrowDown")
    assert "bytes on disk" in page.text_content("#front")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "ranks by layer and module"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "all sizes"
    for _ in range(5):
        page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == "slider"


def test_a_finger_moves_the_slider(opened: Any, tmp_path: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    page, rows = opened(written(tmp_path), **phone), {row["budget"]: row for row in summary()["rows"]}
    box = page.locator("#slider").bounding_box()
    assert box["height"] >= 44  # which a finger hits
    for place, budget in ((0.02, 0.5), (0.98, 0.75)):
        page.touchscreen.tap(box["x"] + place * box["width"], box["y"] + box["height"] / 2)
        assert page.text_content("#budget") == f"{budget:g}"
        assert facts(page) == table_of(summary(), rows[budget])
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_copying_says_so_for_a_second(opened: Any, tmp_path: Path) -> None:
    """Where the browser refuses, the command is selected."""
    page = opened(written(tmp_path), permissions=["clipboard-read", "clipboard-write"])
    page.evaluate(
        "window.said = []; new MutationObserver(() => said.push(copied.value)).observe(copied, { childList: true })"
    )
    assert page.get_attribute("#copied", "aria-live") == "polite"
    tab_to(page, "copy")
    page.keyboard.press("Enter")
    page.wait_for_function("said.length == 2")
    assert page.evaluate("said") == ["Copied", ""]
    assert page.evaluate("navigator.clipboard.readText()") == page.text_content("#command")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.keyboard.press("Enter")
    page.wait_for_function("said.length == 3")
    assert page.evaluate("said[2]").startswith("Selected")
    assert page.evaluate("getSelection().toString()") == page.text_content("#command")


def test_a_phone_and_the_dark(opened: Any, tmp_path: Path) -> None:
    page = opened(written(tmp_path), viewport={"width": 360, "height": 740}, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    ground, ink = page.evaluate("(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))")
    assert ground == "rgb(20, 20, 22)" and ink == "rgb(236, 236, 240)"
    light = opened(tmp_path / "report.html", color_scheme="light")
    assert light.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for shown, is_dark in ((page, True), (light, False)):
        cells = shown.eval_on_selector_all(
            "#ranks td[data-share]",
            "all => all.map(one => [getComputedStyle(one).backgroundColor, getComputedStyle(one).color])",
        )
        assert cells and min(contrast(numbers(ground), numbers(ink)) for ground, ink in cells) >= 4.5
        palette = re.findall(r'"(#[0-9a-f]{6})"', (PAGE / "page.js").read_text())
        under = (20, 20, 22) if is_dark else (255, 255, 255)
        assert len(palette) == 9
        assert all(contrast([int(one[at : at + 2], 16) for at in (1, 3, 5)], under) >= 2.9 for one in palette)
    assert page.eval_on_selector_all(".wide", "all => all.map(one => one.tabIndex)") == [0, 0]


def numbers(colour: str) -> list[float]:
    """Red, green and blue from 0 to 255, of `rgb(…)` or `color(srgb …)`."""
    values = [float(one) for one in re.findall(r"[\d.]+", colour)][:3]
    return [255 * one for one in values] if colour.startswith("color(srgb") else values


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Of WCAG 2: the ratio of relative luminances, each .05 more."""
    lights = []
    for colour in (one, other):
        parts = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
        lights.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05)
    return max(lights) / min(lights)


def test_runs_side_by_side(opened: Any, tmp_path: Path) -> None:
    """By the command; runs of one name are told apart by their directories, and Tab and arrows reach all."""
    for name, shift in (("one", 0.0), ("the other", 0.01)):
        value = summary()
        value["rows"] = [
            row | {"quality": {"cosine": row["quality"]["cosine"] - shift, "mrr": 0.4}} for row in value["rows"]
        ]
        (tmp_path / name).mkdir()
        write(tmp_path / name, value)
    directories = [str(tmp_path / name) for name in ("one", "the other")]
    done = CliRunner().invoke(cli.app, ["report", *directories, "--output", str(tmp_path / "both.html"), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["written"] == [str(tmp_path / "both.html")]
    page = opened(tmp_path / "both.html")
    assert [label.strip() for label in page.locator("#runs label").all_inner_texts()] == directories
    assert [caption.strip() for caption in page.locator("caption").all_text_contents()] == directories
    assert facts(page)["cosine to the base model"][0] == "0.9750"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "radio"
    page.keyboard.press("ArrowRight")
    assert facts(page)["cosine to the base model"][0] == "0.9650"
    assert page.locator("#front path.after").count() == page.locator("#front path.before").count() == 2
    strokes = [
        page.eval_on_selector_all(f"#front path.{kind}", "all => all.map(one => getComputedStyle(one).stroke)")
        for kind in ("after", "before")
    ]
    assert strokes[0] == strokes[1] and len(set(strokes[0])) == 2  # a colour for each run
    assert "dashed: before it" in page.text_content("#front-caption")
    assert f"flexrank deploy '{directories[1]}' --budget" in page.text_content("#command")
    refused = CliRunner().invoke(cli.app, ["report", directories[0], "--output", "x.html"])
    assert refused.exit_code != 0


def test_without_a_script_the_table_is_there(opened: Any, tmp_path: Path) -> None:
    page = opened(written(tmp_path), java_script_enabled=False)
    assert page.is_visible("text=0.7500 > 0.9500") and not page.is_visible("#choose")


def test_names_are_no_markup(opened: Any, tmp_path: Path) -> None:
    evil = "</script><script>document.title = 'taken'</script>$title"
    page = opened(written(tmp_path, summary() | {"name": evil, "model": evil}))
    assert page.title() == evil and page.text_content("h1") == evil
