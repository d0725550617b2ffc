"""The search bench at a tiny size: figures are there, and its verdict follows from them."""

import math

import pytest

from research.benches import search
from research.benches.search import BUDGETS
from research.experiment import Request
from research.result import shown_rows


@pytest.fixture
def tiny(monkeypatch):
    for name, value in {"LAYERS": (4, 7), "LEVELS": (10,), "WIDTH": 64}.items():
        monkeypatch.setattr(search, name, value)
    return monkeypatch


def test_every_figure_is_there_and_the_verdict_follows(tiny, tmp_path):
    result = search.run(Request(tmp_path))
    rows = result["data"]["rows"]
    assert [(row["layers"], row["method"]) for row in rows] == [(n, name) for n in (4, 7) for name in search.METHODS]
    for row in rows:
        assert len(row["above"]) == len(BUDGETS) and min(row["above"]) >= -1e-12
        assert math.isfinite(row["seconds"]) and row["entries"] >= len(BUDGETS)
        assert (row["states"] is None) == (row["gap"] is not None) == row["method"].startswith("joint")
    for fine in (row for row in rows if row["gap"] is not None):
        assert fine["gap"] <= search.METHODS[fine["method"]]["gap"]
        coarse = [row["sum_above"] for row in rows if row["layers"] == fine["layers"] and row["gap"] is None]
        assert fine["sum_above"] <= min(coarse) + 0.011
    assert all(shown_rows(one) for one in result["tables"])
    assert [one["holds"] for one in result["claims"]] == [rows[-1]["gap"] <= search.GAP]
    assert len(search.draw(result["data"]).axes) == 1
    tiny.setattr(search, "SECONDS", 0.0)
    assert search._speed(rows[-1])["holds"] is False


def test_errors_are_given_in_the_order_of_the_budgets(tiny):
    above = search._measure(search.synthetic_table(7, 10), {}, [1.0] * len(BUDGETS))["above"]
    assert above == sorted(above) and list(BUDGETS) == sorted(BUDGETS, reverse=True)


def test_the_printed_algorithm_is_not_run_where_it_would_take_too_long(tiny, tmp_path):
    tiny.setattr(search, "EXPECTED", 0.0)
    result = search.run(Request(tmp_path))
    rows = result["data"]["rows"]
    left_out = {(row["layers"], row["method"]): row["expected"] for row in rows if "seconds" not in row}
    printed = [row for row in rows if row["layers"] == 4 and row["method"].startswith("paper")]
    assert left_out == {(7, row["method"]): row["seconds"] * (7 / 4) ** 3 for row in printed}
    assert any("not run" in cell for row in shown_rows(result["tables"][0]) for cell in row)
    assert search.draw(result["data"]).axes
