"""What a run writes while it trains: a line for each step, and TensorBoard's scalars where they are asked for."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from flexrank.distill.schedule import scheduled_rate
from flexrank.distill.step import Step
from flexrank.run import run_stages
from flexrank.run.config import load_config
from tiny_runs import rerun


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]


def test_each_step_has_a_line(finished: Path) -> None:
    lines, history = lines_of(finished), json.loads((finished / "history.json").read_text())
    assert [line["step"] for line in lines] == list(range(6))
    assert [line["loss"] for line in lines] == history["losses"]
    assert [line["budget"] for line in lines] == history["budgets"]
    assert [line["learning_rate"] for line in lines] == [scheduled_rate(step, 6, 1e-3, 1) for step in range(6)]


def test_an_interrupted_run_goes_on_after_its_checkpoint(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after five steps, with a checkpoint of four: the fifth is taken, and written, again; others are not."""
    whole, take = (copied / "losses.jsonl").read_text(), Step.take
    (copied / "losses.jsonl").write_text("what an earlier run left\n" * 9)
    (copied / "elastic" / "elastic.json").unlink()  # so that it trains again

    def stop(self: Step, items: object, number: int, *mean_loss: object) -> float:
        if number == 5:
            raise MemoryError
        return take(self, items, number, *mean_loss)

    monkeypatch.setattr(Step, "take", stop)
    with pytest.raises(MemoryError):
        rerun(copied, until="distill")
    assert (copied / "losses.jsonl").read_text() == "".join(whole.splitlines(keepends=True)[:5])
    monkeypatch.undo()
    assert rerun(copied, until="distill") == ("distill",)
    assert (copied / "losses.jsonl").read_text() == whole


def test_a_run_that_does_not_train_has_no_losses(copied: Path) -> None:
    rerun(copied, "distillation.steps=0", until="distill")
    assert not (copied / "losses.jsonl").exists()


def test_tensorboard_shows_each_size(copied: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_stages(load_config(copied, ["distillation.tracking=tensorboard"]), "distill")
    assert not (copied / "tensorboard").exists()  # the key changes nothing, so nothing was done
    (copied / "elastic" / "elastic.json").unlink()
    rerun(copied, until="distill")
    board, losses = accumulators.EventAccumulator(str(copied / "tensorboard")), defaultdict(list)
    board.Reload()
    for line in lines_of(copied):
        losses[f"loss/{line['budget']:g}"].append((line["step"], pytest.approx(line["loss"], rel=1e-6)))
    for tag, wanted in losses.items():
        assert [(event.step, event.value) for event in board.Scalars(tag)] == wanted
    assert len(losses) == 2 and [event.step for event in board.Scalars("learning_rate")] == list(range(6))
