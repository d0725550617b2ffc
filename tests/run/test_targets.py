"""What the probe keeps of the teacher's outputs, and that the dry run counts it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import tiny
from flexrank.data.batches import call_model
from flexrank.distill.objectives import LogitObjective
from flexrank.errors import FlexrankError
from flexrank.run import run_stages
from flexrank.run.config import parse_config
from flexrank.run.dry_run import dry_run
from flexrank.run.runner import fingerprints
from flexrank.run.targets import probe_top_k
from tiny_dry_runs import config_of
from tiny_runs import settings

ROWS = 16 * 32  # of the tiny run: samples of the probe, by tokens


def limited(sources: Path, output: Path, limit: int, **more: Any) -> Any:
    values = settings(sources / "language", sources / "text.txt", output)
    return parse_config(values | {"probe": {"levels": 4, "target_bytes": limit}} | more)


def test_all_classes_are_kept_where_they_fit_else_the_largest_power_of_two(tmp_path: Path) -> None:
    """By hand: 100 rows of 64 float32 take 25,600 bytes; with k classes 400 (2k + 1)."""
    for limit, wanted in ((25_600, None), (25_599, 16), (13_200, 16), (13_199, 8), (1_200, 1)):
        config = config_of(tiny.llama_tied, tmp_path, probe={"target_bytes": limit})
        assert probe_top_k(config, 100, 256) == wanted
    too_small = config_of(tiny.llama_tied, tmp_path, probe={"target_bytes": 1_199})
    with pytest.raises(FlexrankError, match="probe.target_bytes is 1199; the targets of 100 rows take 1200 at least"):
        probe_top_k(too_small, 100, 256)
    assert probe_top_k(too_small, 4, 256) is None
    printed = config_of(tiny.llama_tied, tmp_path, probe={"target_bytes": 1}, allocation={"method": "paper"})
    assert probe_top_k(printed, 100, 256) is None
    assert probe_top_k(config_of(tiny.bert, tmp_path, probe={"target_bytes": 1}), 100, 256) is None


def test_the_dry_run_counts_the_targets_that_a_run_keeps(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rises of what is kept are never above the full divergence's; a run says once that it keeps less."""
    tables = []
    for limit in (2**30, 4 * 9 * ROWS):
        config = limited(sources, tmp_path / str(limit), limit)
        with caplog.at_level(logging.INFO, "flexrank"):
            work = run_stages(config, "distill").workspace
        objective: Any = work.probe_objective
        targets = [objective.target(call_model(work.base, batch), batch) for batch in work.samples.probe]
        assert dry_run(config)["memory"]["probe"]["targets"] == sum(target.nbytes for target in targets) <= limit
        tables.append(json.loads((tmp_path / str(limit) / "sensitivity.json").read_text())["errors"])
    assert objective == LogitObjective(top_k=4)
    assert caplog.text.count(f"{ROWS} rows are kept as its 4 likeliest classes and one of all others, in 18432") == 1
    full, lumped = ([error for one in table.values() for error in one] for table in tables)
    assert full != lumped and all(less <= more + 1e-6 for less, more in zip(lumped, full, strict=True))


def test_only_the_printed_allocation_probes_by_another_loss(sources: Path, tmp_path: Path) -> None:
    """Its candidates may be the same, and its table is another."""
    prints = []
    for method in ("joint", "paper"):
        settings = {"method": method, "min_saving": 0.0}
        config = limited(sources, tmp_path / method, 4096, allocation=settings, deployment={"slack": 0})
        prints.append(fingerprints(config, str(sources / "language")))
    assert prints[0]["decompose"] == prints[1]["decompose"] and prints[0]["probe"] != prints[1]["probe"]
