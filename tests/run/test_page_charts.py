"""The charts of the interactive page in a real browser: what is drawn is to scale, and the numbers beside it differ."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_page import probed, written
from test_report import SHAPES, summary

from flexrank.run import report

pytestmark = pytest.mark.browser


def test_the_front_is_drawn_to_scale(opened: Any, tmp_path: Path) -> None:
    """Oracle: equal ratios of distances in the picture and in the numbers, the base model's point among them."""
    page, value = opened(written(tmp_path)), summary()
    for axis in ("params_model", "bytes", "latency_ratio"):
        page.select_option("#axis", axis)
        path = [
            [tuple(map(float, point.split())) for point in line.removeprefix("M").split("L")]
            for line in page.eval_on_selector_all("#front path", "all => all.map(one => one.getAttribute('d'))")
        ]
        base = 1.0 if axis == "latency_ratio" else value["base"][axis]
        rows = sorted(value["rows"], key=lambda one: one["budget"])
        (low, high), before, level = path
        xs = [rows[0][axis], rows[1][axis], base]
        assert (high[0] - low[0]) / (level[1][0] - low[0]) == pytest.approx((xs[1] - xs[0]) / (xs[2] - xs[0]), abs=0.01)
        after = [row["quality"]["cosine"] for row in rows]
        ratio = (after[1] - after[0]) / (1.0 - after[0])
        assert (high[1] - low[1]) / (level[1][1] - low[1]) == pytest.approx(ratio, abs=0.01)
        assert before[0][1] > low[1] > level[0][1]  # lower on the page is worse
    page.select_option("#measure", "mrr")
    titles = page.eval_on_selector_all("#front circle title", "all => all.map(one => one.textContent)")
    assert titles == ["tiny at 0.5: 0.4000", "tiny at 0.75: 0.4000"]
    assert "Higher is better" in page.text_content("#front-caption")


@pytest.mark.parametrize("smallest", [14_210_000, 2_000_000, 95_000_000])
def test_numbers_below_the_front_are_to_scale(smallest: int, opened: Any, tmp_path: Path) -> None:
    """Oracle: a tick's number from its place, between those of the outermost ticks, to as many decimals."""
    value = summary()
    value["base"]["params_model"] = int(1.6 * smallest)
    for row, times in zip(sorted(value["rows"], key=lambda one: one["budget"]), (1.0, 1.3), strict=True):
        row["params_model"] = int(times * smallest)
    page = opened(written(tmp_path, value))
    ticks = page.eval_on_selector_all(
        "#front text[text-anchor=middle]", "all => all.map(one => [Number(one.getAttribute('x')), one.textContent])"
    )[:-1]  # the last says what the numbers are
    numbers = [float(text.removesuffix("M")) for _, text in ticks]
    (first, low), (last, high) = ((ticks[end][0], numbers[end]) for end in (0, -1))
    assert len(ticks) >= 4 and 0.9 * smallest < 1e6 * low < 1e6 * high < 1.7 * smallest
    for (place, text), number in zip(ticks, numbers, strict=True):
        assert number == pytest.approx(low + (high - low) * (place - first) / (last - first), rel=1e-3)
        assert len(text.partition(".")[2]) == len(ticks[0][1].partition(".")[2])


@pytest.mark.parametrize("qualities", [(2.1456, 2.1469), (0.98765, 0.98769), (12.0, 850.0), (-9e3, 2e3)])
def test_numbers_beside_the_front_differ_and_are_to_scale(
    qualities: tuple[float, float], opened: Any, tmp_path: Path
) -> None:
    """Oracle: as below the front. Qualities that are close need more decimals."""
    value = summary()
    for place in (value["base"], *value["rows"]):
        place["quality"] = {"cosine": qualities[0]}
        place.pop("quality_before", None)
    value["rows"][0]["quality"] = {"cosine": qualities[1]}
    page = opened(written(tmp_path, value))
    ticks = page.eval_on_selector_all(
        "#front text[text-anchor=end]", "all => all.map(one => [Number(one.getAttribute('y')), one.textContent])"
    )
    numbers = [float(text.replace("k", "e3")) for _, text in ticks]
    assert 2 <= len(set(numbers)) == len(numbers)
    (first, low), (last, high) = ((ticks[end][0], numbers[end]) for end in (0, -1))
    for (place, _), number in zip(ticks, numbers, strict=True):
        share = (place - first) / (last - first)
        assert number == pytest.approx(low + (high - low) * share, abs=1e-3 * (high - low))


def test_a_table_of_one_error_a_layer_has_dots_alone(opened: Any, tmp_path: Path) -> None:
    """As two levels give it: the least rank's error, and none at full rank. Errors of 0 alone show nothing."""
    written(tmp_path)
    path = tmp_path / "sensitivity.json"
    for error, count in ((0.8, len(SHAPES)), (0.0, 0)):
        table = {"ranks": {name: [8, 32] for name in SHAPES}, "errors": {name: [error, 0.0] for name in SHAPES}}
        path.write_text(json.dumps(table))
        report.write_comparison([tmp_path], tmp_path / "report.html")
        page = opened(tmp_path / "report.html")
        assert page.is_visible("#sensitivity-part") == bool(count)
        places = page.eval_on_selector_all(
            "#sensitivity circle", "all => all.map(one => Number(one.getAttribute('cy')))"
        )
        assert len(places) == count and all(0 < place < 400 for place in places)


def test_a_layer_costs_what_the_probe_found(opened: Any, tmp_path: Path) -> None:
    page = opened(written(tmp_path))
    assert page.locator("#sensitivity path.layer").count() == len(SHAPES)
    titles = page.eval_on_selector_all("#sensitivity circle title", "all => all.map(one => one.textContent)")
    assert titles == [f"{name}: rank 24" for name in SHAPES]
    # errors .2 and .1 of the first two layers lie as far apart as those of .1 and .05 (layers two and four)
    heights = page.eval_on_selector_all("#sensitivity circle", "all => all.map(one => Number(one.getAttribute('cy')))")
    assert heights[1] - heights[0] == pytest.approx(heights[3] - heights[1], abs=0.1) and heights[1] > heights[0]
    levels = page.eval_on_selector_all(
        "#sensitivity text[text-anchor=end]", "all => all.map(one => [Number(one.getAttribute('y')), one.textContent])"
    )
    assert [text for _, text in levels] == ["0.05", "0.1", "0.2", "0.5"]
    assert levels[0][0] - levels[1][0] == pytest.approx(levels[1][0] - levels[2][0], abs=0.1)  # both are halves
    small = {name: [error / 1e4 for error in errors] for name, errors in probed(tmp_path)["errors"].items()}
    (tmp_path / "sensitivity.json").write_text(json.dumps(probed(tmp_path) | {"errors": small}))
    report.write_comparison([tmp_path], tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    texts = page.eval_on_selector_all("#sensitivity text[text-anchor=end]", "all => all.map(one => one.textContent)")
    assert texts == ["5e-6", "1e-5", "2e-5", "5e-5"]  # short enough for the margin
    (tmp_path / "sensitivity.json").unlink()
    report.write_comparison([tmp_path], tmp_path / "report.html")
    assert not opened(tmp_path / "report.html").is_visible("#sensitivity-part")
