"""What `flexrank measure --calibrate-plan` writes replaces what it wrote itself, and nothing else; and the help."""

from pathlib import Path

import pytest

from flexrank.run import rates
from flexrank.run.dry_run.devices import GPUS, find_device
from tiny_runs import invoke, refused

DEVICE = GPUS["h100"]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, bytes]:
    """Files in the current directory: those of others, and the one of a device."""
    monkeypatch.chdir(tmp_path)
    texts = {"plan.json": DEVICE.model_dump_json(), "tiny.json": "{}", "lines.json": "{}\n{}\n", "corpus.txt": "words"}
    for name, text in texts.items():
        Path(name).write_text(text)
    return {path: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "give CONFIG; without one there is --calibrate-plan"),
        (["tiny.json", "--output", "new.json"], "--output belongs to --calibrate-plan"),
        (["tiny.json", "--calibrate-plan"], "--calibrate-plan measures the machine, and takes no CONFIG"),
        (["--calibrate-plan", "--output", "nowhere/plan.json"], "--output nowhere/plan.json: no such directory"),
        (
            ["--calibrate-plan", "--output", "corpus.txt"],
            "--output corpus.txt: give the name of a new file that ends in .json",
        ),
        (
            ["--calibrate-plan", "--output", "new.txt"],
            "--output new.txt: give the name of a new file that ends in .json",
        ),
        (
            ["--calibrate-plan", "--output", "tiny.json"],
            "--output tiny.json: give the name of a new file that ends in .json",
        ),
        (
            ["--calibrate-plan", "--output", "lines.json"],
            "--output lines.json: give the name of a new file that ends in .json",
        ),
        (["--calibrate-plan", "--output", "."], "--output .: give the name of a new file that ends in .json"),
    ],
)
def test_wrong_calls_of_measure_are_one_line(arguments: list[str], part: str, written: dict[Path, bytes]) -> None:
    assert part in refused("measure", *arguments)
    assert {path.absolute(): path.read_bytes() for path in Path().iterdir()} == written


@pytest.mark.usefixtures("written")
def test_a_device_that_was_measured_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = DEVICE.model_copy(update={"disk": 7.0})
    monkeypatch.setattr(rates, "measure_device", lambda _: again)
    assert invoke("measure", "--calibrate-plan").exit_code == 0
    assert find_device("local") == again != DEVICE
    Path("plan.json").write_text('["mine"]')
    assert "--output plan.json: give the name of a new file" in refused("measure", "--calibrate-plan")
    assert Path("plan.json").read_text() == '["mine"]'


def test_without_arguments_the_help_is_printed() -> None:
    result = invoke()
    assert result.exit_code == 2 and "error:" not in result.output
    assert result.output.splitlines() == invoke("--help").output.splitlines()
