"""Logs a run's losses while it trains: always to RUN/losses.jsonl, and to TensorBoard if the configuration says so."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flexrank import processes
from flexrank.distill import TrainingStep
from flexrank.errors import FlexrankError
from flexrank.files import write_text

LOSSES, BOARD = "losses.jsonl", "tensorboard"

Track = Callable[[TrainingStep], None]


@contextlib.contextmanager
def tracked(directory: Path, budgets: Sequence[float], tracking: str | None) -> Iterator[Track | None]:
    """Yields the function for `distill_` to call after each step; None in all processes except the first.

    Each line of losses.jsonl has `step` (from 0), `budget`, `loss` and `learning_rate`. A run that resumes from its
    checkpoint continues after that step, and rewrites the lines beyond it.

    Args:
        directory: the run directory.
        budgets: the budgets of the profiles, in their order.
        tracking: "tensorboard" also writes RUN/tensorboard: a scalar `loss/BUDGET` for each size, and the rate.
    """
    if not processes.is_first():
        yield None
        return
    with contextlib.ExitStack() as stack:
        writers = list[Track]()

        def track(step: TrainingStep) -> None:
            if not writers:  # only now is the first step known
                writers.append(stack.enter_context(_lines(directory / LOSSES, budgets, step.number)))
                if tracking == "tensorboard":
                    writers.append(stack.enter_context(_scalars(directory / BOARD, budgets, step.number)))
            for write in writers:
                write(step)

        yield track


@contextlib.contextmanager
def _lines(path: Path, budgets: Sequence[float], start: int) -> Iterator[Track]:
    before = path.read_text(encoding="utf8") if path.is_file() else ""
    kept = before.splitlines(keepends=True)[:start]
    write_text(path, "".join(kept))
    with open(path, "a", encoding="utf8", buffering=1) as file:

        def write(step: TrainingStep) -> None:
            facts = {"step": step.number, "budget": budgets[step.profile]}
            print(json.dumps(facts | {"loss": step.loss, "learning_rate": step.learning_rate}), file=file)

        try:
            yield write
        except FlexrankError:
            if before and not start:  # after a wrong input a finished run is as it was
                write_text(path, before)
            raise


@contextlib.contextmanager
def _scalars(path: Path, budgets: Sequence[float], start: int) -> Iterator[Track]:
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(os.fspath(path), purge_step=start) as board:

        def write(step: TrainingStep) -> None:
            board.add_scalar(f"loss/{budgets[step.profile]:g}", step.loss, step.number)
            board.add_scalar("learning_rate", step.learning_rate, step.number)

        yield write
