"""What the probe keeps of both models' outputs, and that the dry run counts it."""

import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest

import tiny
from flexrank.data.batches import call_model
from flexrank.distill import distillation_evaluator
from flexrank.distill.objectives import LogitObjective
from flexrank.errors import FlexrankError
from flexrank.probe import probe_sensitivity
from flexrank.run import run_stages, stages, training
from flexrank.run.config import parse_config
from flexrank.run.dry_run import dry_run
from flexrank.run.runner import fingerprints
from flexrank.run.targets import probe_top_k
from held import Held
from tiny_dry_runs import LENGTH, Build, batch_of, config_of
from tiny_runs import settings

ROWS = 15 * 32  # of the tiny run: samples of the probe, by tokens


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
    assert (
        caplog.text.count(f"{ROWS} rows are kept as its 4 likeliest classes and one of all others, in {36 * ROWS}") == 1
    )
    full, top_k = ([error for one in table.values() for error in one] for table in tables)
    assert full != top_k and all(less <= more + 1e-6 for less, more in zip(top_k, full, strict=True))


def test_only_the_printed_allocation_probes_by_another_loss(sources: Path, tmp_path: Path) -> None:
    """Its candidates may be the same, and its table is another."""
    prints = []
    for method in ("joint", "paper"):
        settings = {"method": method, "min_saving": 0.0}
        config = limited(sources, tmp_path / method, 4096, allocation=settings, deployment={"slack": 0})
        prints.append(fingerprints(config, str(sources / "language")))
    assert prints[0]["decompose"] == prints[1]["decompose"] and prints[0]["probe"] != prints[1]["probe"]


@pytest.mark.parametrize("build", [tiny.llama_untied, tiny.gpt2, tiny.bert, tiny.vit])
def test_the_dry_run_counts_what_the_probe_replays(build: Build, tmp_path: Path) -> None:
    """With room for all, for a block's outputs alone, and for none: 5 samples in batches of 3 and 2."""
    batches = [batch_of(build, rows) for rows in (3, 2)]
    block = 5 * (17 if build is tiny.vit else LENGTH) * 32 * 4
    found = []
    for room in (2**30, block, block - 1):
        student = tiny.nest(build())
        with Held(distillation_evaluator(build(), batches)) as held:
            probe_sensitivity(student, held.evaluate, 2, replay_bytes=room, matrix_bytes=0)
        config = config_of(build, tmp_path, probe={"replay_bytes": room})
        assert dry_run(config)["memory"]["probe"]["replayed"] == held.most <= room
        found.append(held.most)
    assert found[0] > 2 * block and found[1:] == [block, 0]


def test_the_bound_of_what_is_replayed_changes_no_result(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = []
    for name, room in (("all", 2**30), ("none", 0)):
        caplog.clear()
        config = limited(sources, tmp_path / name, 2**30, probe={"levels": 4, "replay_bytes": room})
        with caplog.at_level(logging.INFO, "flexrank"):
            run_stages(config, "probe")
        assert ("take more than replay_bytes, 0;" in caplog.text) == (not room)
        tables.append((tmp_path / name / "sensitivity.json").read_bytes())
    assert tables[0] == tables[1]
    other = limited(sources, tmp_path / "all", 2**30, probe={"levels": 4, "replay_bytes": 1})
    assert run_stages(other, "probe").executed == ()


def test_loss_checks_have_targets_before_training_and_after(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not meanwhile: the dry run counts them where they take more than a step does."""
    made: list[Any] = []

    def remembered(*args: Any) -> Any:
        evaluate = distillation_evaluator(*args)
        made.append(weakref.ref(evaluate))
        return evaluate

    def train(*args: Any) -> Any:
        assert [reference() for reference in made] == [None]
        return training.train_(*args)

    monkeypatch.setattr(training, "distillation_evaluator", remembered)
    monkeypatch.setattr(stages, "train_", train)
    run_stages(limited(sources, tmp_path / "run", 2**30), "distill")
    assert len(made) == 2


def test_the_dry_run_counts_the_targets_of_loss_checks(tmp_path: Path) -> None:
    few, many = (dry_run(config_of(tiny.llama_tied, tmp_path, data={"probe": n}))["memory"] for n in (5, 5000))
    step, check = few["consolidation"], many["consolidation"]
    assert "gradients" in step and check["targets"] == many["probe"]["targets"] == 5000 * 10 * 64 * 4
    assert check.keys() == {"teacher", "student", "targets", "outputs", "all"}
    assert (check["student"], check["outputs"]) == (step["student"], many["probe"]["outputs"])
