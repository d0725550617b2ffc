"""A whole run on a device that is not the CPU, whose tensors may not meet the CPU's (`second_device`)."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tiny_runs import settings, summary_of

PROGRAM = Path(__file__).parents[1] / "second_device.py"


def test_a_run_there_gives_what_a_run_on_the_cpu_gives(sources: Path, finished: Path, tmp_path: Path) -> None:
    values = settings(sources / "language", sources / "text.txt", tmp_path / "run")
    values["distillation"]["autocast"] = "off"
    (config := tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    # torch warns where the random states of all GPUs are kept unasked.
    command = [sys.executable, "-W", "error:SECOND reports", str(PROGRAM), str(config)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, expected = summary_of(tmp_path / "run"), summary_of(finished)
    assert found["base"]["quality"] == pytest.approx(expected["base"]["quality"], rel=1e-6)
    assert len(found["rows"]) == len(expected["rows"])
    for row, same in zip(found["rows"], expected["rows"], strict=True):
        assert row["ranks"] == same["ranks"]
        assert row["quality_before"] == pytest.approx(same["quality_before"], rel=1e-5)
        assert row["quality"] == pytest.approx(same["quality"], rel=2e-3)  # `finished` may have had autocast
