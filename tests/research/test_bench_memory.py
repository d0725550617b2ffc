"""The bench of memory: what is measured is what a stage holds, beside the dry run's own count."""

from pathlib import Path
from typing import Any

import pytest

from flexrank.errors import FlexrankError
from flexrank.run.config import load_config
from flexrank.run.dry_run import dry_run
from research.benches import memory
from research.experiment import Request
from research.peaks import peaks_of
from tiny_runs import settings


def test_every_stage_of_every_model_is_measured_once(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(sources / "language", sources / "text.txt", tmp_path)
    subject: dict[str, Any] = {"task": "language", "model": values["model"], "data": values["data"]}
    subject["evaluation"] = {"latency_batch_size": 1}  # else a size takes more than the base beside which it is judged
    (tmp_path / "pycode5m").mkdir()
    (tmp_path / "pycode5m" / "train_sample.txt").write_text((sources / "text.txt").read_text())
    monkeypatch.setenv("FLEXRANK_ASSETS", str(tmp_path))
    monkeypatch.setattr(memory, "CHARACTERS", 7000)
    monkeypatch.setattr(memory, "SUBJECTS", (memory.Subject("tiny", subject),))
    monkeypatch.setattr(memory, "language", lambda **_: subject)
    seen = []

    def peak(stage: str, *configs: str) -> list[int]:
        seen.append((stage, Path(configs[0]).parent.name, Path(configs[1]).parent.name))
        return [100 * 2**20]

    monkeypatch.setattr(memory, "peaks_of", peak)
    result = memory.run(Request(tmp_path / "work"))
    assert [stage for stage, *_ in seen] == ["decompose", "probe", "distill", "evaluate", "deploy"]
    assert {tuple(places) for _, *places in seen} == {("pycode5m-first", "tiny-run")}
    assert len((tmp_path / "work" / "tiny-run" / "text.txt").read_text()) == 7000
    counts = dry_run(load_config(tmp_path / "work" / "tiny-run" / "config.yaml"))["memory"]
    rows = {row[0]: row for row in result["tables"][0]["rows"]}
    assert rows["tiny, probe"] == [
        "tiny, probe",
        counts["probe"]["all"] / 1e6,
        104.8576,
        pytest.approx(counts["probe"]["all"] / 104857600),
    ]
    # Without what is mapped: blocks that are decomposed, and the base of sizes that are deployed.
    own = [counts[name]["all"] - counts[name]["student"] for name in ("calibration", "decomposition")]
    assert rows["tiny, decomposition"][1] == max(own) / 1e6
    held = counts["deployment"]
    # By hand: of 18,944 numbers in layers four fifths are kept; 2,208 are in embeddings and norms.
    assert held["teacher"] and rows["tiny, deployment"][1] * 1e6 == held["outputs"] + 4 * (15_155 + 2_208)
    assert result["claims"][0]["holds"] is False and "100%" in result["claims"][0]["here"]
    assert memory.run(Request(tmp_path / "work")) == result and len(seen) == 5


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_stage_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("research.peaks.PROGRAM", "raise ValueError('why')")
    with pytest.raises(FlexrankError, match="^measuring the memory of decompose failed: ValueError: why$"):
        peaks_of("decompose", str(tmp_path / "config.yaml"))
