"""What importing and starting may load: not how long it takes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flexrank
from research.benches import start
from research.experiment import Request


def modules_after(program: str) -> set[str]:
    command = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_loads_nothing_heavy_and_using_public_names_no_more_than_torch() -> None:
    heavy = {"torch", "numpy", "scipy", "transformers", "matplotlib", "pydantic", "rich.progress"}
    assert not modules_after("import flexrank, flexrank.cli") & heavy
    assert not modules_after("import torch; from flexrank import *") & {"transformers", "matplotlib", "scipy.optimize"}


def test_every_public_name_is_there() -> None:
    stub = ast.parse(Path(flexrank.__file__).with_suffix(".pyi").read_text())
    names = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(flexrank.__all__) <= set(dir(flexrank))
    assert all(getattr(flexrank, str(name)) is not None for name in names)
    with pytest.raises(AttributeError):
        flexrank.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_the_bench_measures_what_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start, "REPEATS", 1)
    monkeypatch.setattr(start, "PROGRAMS", dict.fromkeys(start.PROGRAMS, "import time; time.sleep(0.05)"))
    result = start.run(Request(tmp_path))
    assert all(one["holds"] for one in result["claims"])
    assert all(values[0] >= 0.05 for values in result["data"]["seconds"].values())
    monkeypatch.setattr(start, "HELP", 0.01)
    assert [one["holds"] for one in start.run(Request(tmp_path))["claims"]] == [False, True, True]
