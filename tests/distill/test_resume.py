"""Interruptions of consolidation: a resumed run is the unbroken one to the bit, and a signal loses no step."""

import copy
import json
import math
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from trainings import SETTINGS, SMALL, batches, weights_of

from flexrank import processes
from flexrank.distill import distill_, state
from flexrank.distill.interrupts import shielded
from flexrank.distill.objectives import FeatureObjective
from flexrank.distill.tensors import FILE_BYTES, file_numbers
from flexrank.errors import FlexrankError
from tiny import build, nest

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Calling(FeatureObjective):
    """Does something in one of its calls, counted from 1."""

    def __init__(self, call: int, what: Callable[[], None]) -> None:
        self.__dict__.update(left=call, what=what)

    def loss(self, output, target, batch):
        self.__dict__["left"] -= 1
        if not self.left:
            self.what()
        return super().loss(output, target, batch)

    __repr__ = FeatureObjective.__repr__


def stopped() -> None:
    raise KeyboardInterrupt


def train(path: Path | None, call: int = 0, what: Callable[[], None] = stopped) -> tuple[object, torch.Tensor]:
    """Nine steps of one batch each: the history and the weights."""
    model, teacher, data = nest(build("perceptron")), build("perceptron"), batches("perceptron")
    history = distill_(model, teacher, data, [SMALL], objective=Calling(call, what), steps=9, checkpoint=path)
    return history, weights_of(model)


def handlers() -> list[object]:
    return list(map(signal.getsignal, SIGNALS))


def shuffled(workers: int) -> StatefulDataLoader:
    generator = torch.Generator().manual_seed(3)
    data = batches("perceptron")
    return StatefulDataLoader(data, batch_size=None, shuffle=True, num_workers=workers, generator=generator)


@pytest.mark.parametrize("kind", ["sequence", "iterable", "stateful", "tensors", "torchdata", "torchdata's workers"])
def test_a_resumed_run_equals_the_unbroken_one(kind: str, tmp_path: Path) -> None:
    teacher, profiles = build("perceptron"), [SMALL, {"0": 9, "2": 9, "4": 4}]

    class Loader:
        """Gives its batches again on each pass, from where it is."""

        def __init__(self) -> None:
            self.at = 0

        def __iter__(self):
            for batch in batches("perceptron")[self.at :]:
                self.at = (self.at + 1) % 6
                yield batch

    class Stateful(Loader):
        def state_dict(self) -> dict:
            return {"at": self.at}

        def load_state_dict(self, state: dict) -> None:
            self.at = state["at"]

    class WithTensors(Loader):
        """As torchdata's loaders, whose states hold generators' tensors, and with those of other generators."""

        def state_dict(self) -> dict:
            at = torch.tensor([7, self.at])
            drawn = {
                "numpy": np.random.RandomState(4).get_state(),
                "python": random.Random(3).getstate(),
                "count": np.int64(5),
            }
            more = {"epoch": 1, "name": None, "by_number": {10: "a", 9: "b"}}
            return {"workers": [{"at": at, "again": at}], **drawn, **more}

        def load_state_dict(self, state: dict) -> None:
            assert (state["epoch"], state["name"], state["count"]) == (1, None, 5)
            assert isinstance(state["numpy"][1], np.ndarray)
            drawn = np.random.RandomState(5)
            drawn.set_state(state["numpy"])
            assert drawn.random_sample() == np.random.RandomState(4).random_sample()
            again = random.Random()
            again.setstate(state["python"])
            assert again.random() == random.Random(3).random()
            assert state["by_number"] == {"10": "a", "9": "b"}  # as JSON has it
            seven, self.at = state["workers"][0]["at"].tolist()
            assert seven == 7

    make = {
        "sequence": lambda: batches("perceptron"),
        "iterable": Loader,
        "stateful": Stateful,
        "tensors": WithTensors,
        "torchdata": lambda: shuffled(0),
        "torchdata's workers": lambda: shuffled(2),
    }[kind]

    def run(model: nn.Module, data: object, path: Path | None, stop: int = 0, **settings):
        settings = {"weights": [1, 2], "checkpoint_every": 5, "max_norm": math.inf} | SETTINGS | settings
        steps, objective = [], Calling(stop, stopped)
        settings |= {"objective": objective, "checkpoint": path, "on_step": lambda step: steps.append(step.number)}
        history = distill_(model, teacher, data, profiles, **settings)
        assert steps == list(range(35 if data is remaining else 0, 60))
        return history

    unbroken, remaining = nest(build("perceptron")), make()
    expected = run(unbroken, make(), None)
    broken, path = nest(build("perceptron")), tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        run(broken, make(), path, stop=37)
    resumed = nest(build("perceptron"))
    assert run(resumed, remaining, path) == expected
    assert torch.equal(weights_of(resumed), weights_of(unbroken))
    with pytest.raises(FlexrankError, match="was written with learning_rate=0.01, not 0.1"):
        run(resumed, make(), path, learning_rate=0.1)


@pytest.mark.parametrize(
    "value",
    [b"12", math.inf, np.float64("nan"), np.longdouble(1), np.ones(2, np.longdouble), np.array(["a"]), {1, 2}],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_a_state_that_cannot_be_saved_is_refused_after_the_first_step(value: Any, tmp_path: Path) -> None:
    class Stateful:
        def __iter__(self):
            return iter(batches("perceptron"))

        def state_dict(self) -> dict:
            return {"position": [value]}

    seen = list[int]()
    with pytest.raises(
        FlexrankError, match="the batches' state_dict holds .*; a checkpoint takes finite numbers, text"
    ):
        distill_(
            nest(build("perceptron")), build("perceptron"), Stateful(), [SMALL], steps=9, checkpoint=tmp_path / "state",
            on_step=lambda step: seen.append(step.number),
        )  # fmt: skip
    assert not seen and not (tmp_path / "state").exists()


def test_arrays_of_another_byte_order_are_saved() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": (np.arange(3, dtype=">i4"), np.float32(2.5)), "b": [np.ones((2, 2), bool)]}
    text = json.loads(json.dumps(state._without_tensors(value, tensors)))
    found = state._with_tensors(text, tensors)
    assert found["a"][0].tolist() == [0, 1, 2] and found["a"][0].dtype == np.int32 and found["a"][1] == 2.5
    assert found["b"][0].all() and found["b"][0].dtype == bool and isinstance(found["a"], tuple)


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_signal_ends_training_after_the_step_that_runs_which_is_saved(
    kind: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def twice() -> None:
        signal.raise_signal(kind)
        signal.raise_signal(kind)

    caplog.set_level("INFO", "flexrank")
    before, path = handlers(), tmp_path / "state"
    # In the fourth step; then in the sixth, where the second signal does not wait for its end.
    for call, what in ((4, lambda: signal.raise_signal(kind)), (2, twice)):
        with pytest.raises(KeyboardInterrupt):
            train(path, call, what)
        assert len(json.loads((path / "state.json").read_text())["losses"]) == 4
        assert handlers() == before
        assert "this step is finished and saved first" in caplog.messages[-1]
        caplog.clear()
    (history, weights), (expected, unbroken) = train(path), train(None)
    assert history == expected and torch.equal(weights, unbroken)


class Noting(torch.utils.data.Dataset):
    """Names a file by the process that reads an item and by its group: a name is whole, however the worker ends."""

    def __init__(self, place: Path):
        self.place, self.items = place, batches("perceptron")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        (self.place / f"{os.getpid()} {os.getpgrp()}").touch()
        return self.items[index]


def test_a_signal_to_the_process_group_reaches_no_worker(tmp_path: Path) -> None:
    """torchrun ends its processes so; a worker that ends by SIGTERM makes the loader fail in the middle of a step."""
    own: Callable[[int], Any] = lambda worker: (tmp_path / f"own {worker}").touch()  # noqa: E731
    for kind, name in ((torch.utils.data.DataLoader, "plain"), (StatefulDataLoader, "stateful")):
        (tmp_path / name).mkdir()
        loader = kind(Noting(tmp_path / name), batch_size=None, num_workers=1, worker_init_fn=own)
        model = nest(build("perceptron"))
        distill_(model, build("perceptron"), loader, [SMALL], objective=FeatureObjective(), steps=2)
        readers = [path.name.split() for path in (tmp_path / name).iterdir()]
        assert readers and all(process == group != str(os.getpid()) for process, group in readers)
        assert (tmp_path / "own 0").exists() and loader.worker_init_fn is own
        (tmp_path / "own 0").unlink()
    with shielded(SimpleNamespace(base_dataloader=loader)):  # as accelerate wraps one
        assert loader.worker_init_fn is not own
    assert loader.worker_init_fn is own


def test_torchruns_second_signal_does_not_cut_a_step_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(processes, "count", lambda: 2)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "state", 4, twice)
    assert len(json.loads((tmp_path / "state" / "state.json").read_text())["losses"]) == 4


def test_a_signal_in_the_last_step_ends_training_too_and_nothing_is_left_to_do(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "state", 9, lambda: signal.raise_signal(signal.SIGTERM))
    (history, weights), (expected, unbroken) = train(tmp_path / "state", 1), train(None)  # a call would stop it
    assert history == expected and torch.equal(weights, unbroken)


def test_a_signal_while_the_last_step_is_saved_ends_training_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = state.State.save

    def saved(self: state.State) -> None:
        save(self)
        if self.step == 9:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(state.State, "save", saved)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "state")
    (history, weights), (expected, unbroken) = train(tmp_path / "state", 1), train(None)
    assert history == expected and torch.equal(weights, unbroken)


def test_signals_are_left_alone_where_nothing_is_saved_or_no_signal_arrives(tmp_path: Path) -> None:
    before, seen = handlers(), list[list[object]]()
    train(None, 4, lambda: seen.append(handlers()))
    thread = threading.Thread(target=train, args=(tmp_path / "state", 4, lambda: seen.append(handlers())))
    thread.start()
    thread.join()
    assert seen == [before, before]
    assert len(json.loads((tmp_path / "state" / "state.json").read_text())["losses"]) == 9


def test_a_checkpoint_goes_to_files_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each process; where one tensor is larger than a file, it has its own."""
    monkeypatch.setattr(processes, "_group", processes._Group(0, 2, None, 1.0))
    numbers = FILE_BYTES // 4
    sizes = {"a": numbers, "b": numbers // 2, "c": 4 * numbers, "d": 1}
    files = file_numbers({name: torch.empty(size, device="meta") for name, size in sizes.items()})
    assert files == {"a": 1, "b": 1, "c": 3, "d": 3}


def test_a_whole_models_checkpoint_is_process_0s_which_the_others_wait_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store waits as long as process 0 gives signs of life; a collective ends the run at its time-out."""
    turns = list[bool]()

    def on_first_process(work: Callable[[], object]) -> object:
        before = list(tmp_path.iterdir())
        work()
        turns.append(before == [] and (tmp_path / "checkpoint" / "state.json").is_file())

    monkeypatch.setattr(processes, "on_first_process", on_first_process)
    distill_(nest(build("perceptron")), build("perceptron"), batches("perceptron"), [SMALL], steps=1,
             objective=FeatureObjective(), checkpoint=tmp_path / "checkpoint")  # fmt: skip
    assert turns == [True]


@pytest.mark.parametrize("kind", ["quantised", "offloaded"])
def test_a_teacher_without_plain_weights_has_checkpoints_too(kind: str, tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    teacher, data = build("perceptron"), batches("perceptron")
    if kind == "quantised":
        quantize_(teacher, Int8WeightOnlyConfig())
    else:
        teacher[2].register_parameter("elsewhere", nn.Parameter(torch.empty(2, 2, device="meta")))
    unbroken = distill_(nest(build("perceptron")), teacher, data, [SMALL], steps=4)
    for steps in (2, 4):
        again = distill_(
            nest(build("perceptron")), teacher, data, [SMALL], steps=steps, checkpoint=tmp_path / str(steps)
        )
    assert again.losses == unbroken.losses
    with torch.no_grad():
        other = copy.deepcopy(teacher) if kind == "offloaded" else build("perceptron")
        other[0].weight.mul_(2)
        if kind == "quantised":
            quantize_(other, Int8WeightOnlyConfig())
    with pytest.raises(FlexrankError, match="teacher"):
        distill_(nest(build("perceptron")), other, data, [SMALL], steps=4, checkpoint=tmp_path / "4")
