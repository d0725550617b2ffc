"""`bench model` on a tiny run: every budget in every situation, a fresh process's peak, and verdicts that follow."""

import shutil
from pathlib import Path

import pytest

from flexrank.benches import model
from flexrank.benches.driver import measure
from flexrank.timing import TimeTable


@pytest.mark.slow
def test_every_budget_is_measured_in_every_situation(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "REPEATS", 1)
    monkeypatch.setattr(model, "NEW_TOKENS", 3)
    monkeypatch.setattr(model, "PROMPT", 4)
    monkeypatch.setattr(model, "in_fresh_process", lambda function, *args: function(*args))
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    result = measure(model.BENCH, run, tmp_path / "out")
    ratios, sizes = result["tables"]
    assert [row[0] for row in ratios["rows"]] == ["base", "0.8", "0.5"]
    assert ratios["columns"][1:] == ["1 texts of 32 tokens", "4 texts of 32 tokens", "3 tokens generated"]
    assert all(ratio == 1 for ratio in ratios["rows"][0][1:])
    assert all(ratio > 0 for row in ratios["rows"] for ratio in row[1:])
    megabytes = [row[1] for row in sizes["rows"]]
    assert megabytes[0] > megabytes[1] > megabytes[2] > 0
    assert all(cell is not None for row in sizes["rows"] for cell in row)
    worst = max(ratio for row in ratios["rows"][1:] for ratio in row[1:])
    assert result["claims"][0]["holds"] == (worst <= model.OVER_BASE)
    assert f"worst {worst:.2f}" in result["claims"][0]["here"]
    assert (tmp_path / "out" / "model.svg").stat().st_size > 500


def test_a_run_with_measured_forms_deploys_what_the_table_says(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every smaller form is slower, the export stands in its smallest forms, and the log says so."""
    import json

    from flexrank import deployment
    from tiny_runs import rerun, verify_here

    monkeypatch.setenv("FLEXRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(deployment, "_run_verification", verify_here)
    asked = []

    def seconds(self: TimeTable, key: object, rank: int, slack: int | None) -> tuple[float, ...]:
        asked.append(key)
        return (1.0,) * 4 if slack is None else (0.5,) * 4

    monkeypatch.setattr(TimeTable, "measure", lambda self, keys: None)
    monkeypatch.setattr(TimeTable, "seconds", seconds)
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    before = json.loads((run / "deployed.json").read_text())
    executed = rerun(run, "deployment.forms=measured")
    assert asked and "deploy" in executed and "distill" not in executed
    after = json.loads((run / "deployed.json").read_text())
    assert [one["params_model"] for one in after] == [one["params_model"] for one in before]
