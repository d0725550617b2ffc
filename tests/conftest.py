"""What all tests share: two processes of a thread each, a fixed seed, and the real models and data if there are any."""

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start

import torch

# flexrank is imported by the fixtures alone: its array types are checked only in what is imported after this file.
ASSETS = Path(os.environ.get("FLEXRANK_ASSETS") or Path(__file__).parents[2] / "shared" / "assets")


def pytest_configure(config: pytest.Config) -> None:
    # Two files are tested at once (pyproject.toml); `-n 0` runs all in one process, with two threads.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))
    # Tests never download: a missing file is an error at once, not a wait for the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)  # for what test files draw when they are imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Backwards by name, the longest files are first: one that comes last leaves the other worker without work.
    items.sort(key=lambda item: str(item.path), reverse=True)
    for item in items:
        if "assets" in getattr(item, "fixturenames", ()):
            item.add_marker("assets")
        if item.get_closest_marker("assets") and not ASSETS.is_dir():
            item.add_marker(pytest.mark.skip(reason=f"no assets at {ASSETS}; set FLEXRANK_ASSETS to their directory"))
        if item.get_closest_marker("browser") and shutil.which("chromium") is None:
            item.add_marker(pytest.mark.skip(reason="no Chromium here; Debian's package is chromium"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def pytest_collection_finish() -> None:
    """Garbage is then not looked for among all that large libraries hold, which the suite asks for often."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return  # one file alone would wait longer for these imports than it saves
    import transformers.modeling_utils
    import transformers.trainer  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _seeded_module() -> None:
    torch.manual_seed(0)  # a file's own fixtures draw the same whatever ran before it


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _timed_here() -> None:
    """Tiny models' times mean nothing: a second for each, and a process for all, would be minutes of the suite.

    Nor does anybody look at their figures.
    """
    from flexrank.run import measure, report, sizes, stages
    from tiny_runs import blank_figures, here

    report.draw_figures = blank_figures
    measure.RATIO_SECONDS = 0.0
    stages.in_fresh_process = sizes.in_fresh_process = here


@pytest.fixture
def verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are loaded and run in this process; `test_exports` has the fresh one."""
    from flexrank.deployment import exports
    from tiny_runs import here

    monkeypatch.setattr(exports, "in_fresh_process", here)


@pytest.fixture(scope="session")
def assets() -> Path:
    """The directory of the real models and data; a test that takes it is marked `assets`."""
    return ASSETS


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a tiny model of each of two tasks, to run on."""
    from tiny_runs import TEXT, write_model

    place = tmp_path_factory.mktemp("sources")
    (place / "text.txt").write_text(TEXT)
    for task in ("language", "embedding"):
        write_model(place / task, task)
    (place / "language" / "README.md").write_text("---\nlicense: mit\n---\n")
    return place


@pytest.fixture(scope="session")
def finished(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole language run, verified in this process; not to be changed, copy it."""
    from flexrank.deployment import exports
    from flexrank.run import run_stages, stage_names
    from flexrank.run.config import parse_config
    from tiny_runs import here, settings

    output = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports, "in_fresh_process", here)
        outcome = run_stages(parse_config(settings(sources / "language", sources / "text.txt", output)))
    assert outcome.executed == stage_names()
    return output


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the whole run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def prepared(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a run that one process has done."""
    from flexrank.run import run_stages
    from flexrank.run.config import parse_config
    from tiny_runs import settings

    values = settings(sources / "language", sources / "text.txt", tmp_path_factory.mktemp("runs") / "one")
    values["data"] |= {"calibration": 20}
    values["distillation"] |= {"batch_size": 5, "autocast": "off", "hidden_weight": 4.0}
    values |= {"deployment": {"budgets": []}, "evaluation": {"latency": False}}
    run_stages(parse_config(values))
    return values
