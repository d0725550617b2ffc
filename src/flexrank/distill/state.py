"""The checkpoint of an interrupted consolidation.

`state.safetensors` has the parameters, the optimiser's states and tensors of the data loader's; `state.json` has the
rest, a checksum of itself and one of the tensors' file: a bit that a disk has lost ends the run, and is not trained on.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.distill.optimizer import make_states_, states_of
from flexrank.distill.schedule import Feed
from flexrank.errors import FlexrankError
from flexrank.files import digest_files, directory_aside, read_document, verify_files, write_document

#: Begins the name of a tensor that is a part of a data loader's state; in JSON the name is its stand-in.
LOADER = "//loader/"
STATE, DOCUMENT, KIND = "state.safetensors", "state.json", "checkpoint"


@dataclasses.dataclass
class State:
    """What a resumed run needs; loaded from `path` if there is a checkpoint, and without a path not saved."""

    path: str | Path | None
    settings: dict[str, Any]
    trainable: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    feed: Feed
    losses: list[float] = dataclasses.field(default_factory=list)
    choices: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and Path(self.path).exists():
            self._load(Path(self.path))

    @property
    def step(self) -> int:
        """Steps taken."""
        return len(self.losses)

    def advance(self, loss: float, choice: int) -> None:
        """Adds a step with its loss and the index of its profile."""
        self.losses.append(loss)
        self.choices.append(choice)

    def save(self) -> None:
        """Replaces the checkpoint, whole or not at all; process 0 does, for any number of processes to resume from."""
        if self.path is None or not processes.is_first():
            return
        tensors = {}
        for name, parameter in self.trainable.items():
            tensors[name] = parameter.detach()
            for key, value in states_of(self.optimizer, parameter).items():
                tensors[f"{name}//{key}"] = value
        feed = _without_tensors(self.feed.state(), tensors)
        progress = {"losses": self.losses, "choices": self.choices, "feed": feed}
        with directory_aside(self.path, DOCUMENT) as aside:
            safetensors.torch.save_file(tensors, aside / STATE)
            content = {"settings": self.settings, **progress, "files": digest_files(aside)}
            write_document(aside / DOCUMENT, KIND, content)

    @torch.no_grad()
    def _load(self, path: Path) -> None:
        state = read_document(path / DOCUMENT, KIND, ("settings", "losses", "choices", "feed", "files"))
        for key, value in self.settings.items():
            there = state["settings"].get(key)
            if there != value:
                raise FlexrankError(f"{path}: was written with {key}={there}, not {value}; remove it or change back")
        verify_files(path, state["files"], f"truncated or edited; remove {path} to begin again")
        with safetensors.safe_open(path / STATE, framework="pt") as file:
            keys = {key for key in file.keys() if not key.startswith(LOADER)}  # noqa: SIM118
            state["feed"] = _with_tensors(state["feed"], file)
            for name in {key for key in keys if "//" not in key} ^ self.trainable.keys():
                what = "no trainable parameter" if name in self.trainable else "a parameter not trained here,"
                raise FlexrankError(f"{path}: holds {what} {name!r}; it belongs to another run")
            started = {name for name, separator, _ in (key.partition("//") for key in keys) if separator}
            make_states_(self.optimizer, [self.trainable[name] for name in started])
            for name, parameter in self.trainable.items():
                self._restore(name, parameter, file.get_tensor(name))
                for slot, value in states_of(self.optimizer, parameter).items() if name in started else ():
                    if (key := f"{name}//{slot}") not in keys:
                        raise FlexrankError(f"{path}: {key!r} is missing; another version of the optimiser wrote it")
                    self._restore(name, value, file.get_tensor(key))
        self.losses, self.choices = state["losses"], state["choices"]
        self.feed.restore(state["feed"])

    def _restore(self, name: str, there: Tensor, tensor: Tensor) -> None:
        if tensor.shape != there.shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(there.shape)}"
            raise FlexrankError(f"{self.path}: parameter {name!r} is {shapes}; it belongs to another model")
        there.copy_(tensor)


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value with names in place of its tensors, which are put into `tensors`; keys are texts, as JSON has them."""
    if isinstance(value, Tensor):
        name = f"{LOADER}{len(tensors)}"
        tensors[name] = value.clone()  # safetensors refuses two names of one memory
        return name
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(one, tensors) for key, one in value.items()}
    return [_without_tensors(one, tensors) for one in value] if isinstance(value, list | tuple) else value


def _with_tensors(value: Any, file: Any) -> Any:
    """The inverse of `_without_tensors`; tuples come back as lists."""
    if isinstance(value, str) and value.startswith(LOADER):
        return file.get_tensor(value)
    if isinstance(value, dict):
        return {key: _with_tensors(one, file) for key, one in value.items()}
    return [_with_tensors(one, file) for one in value] if isinstance(value, list) else value
