"""The checkpoint of an interrupted consolidation.

safetensors files hold the parameters, the optimiser's states and the tensors of the data loader's state:
`state.safetensors`, or for a sharded model each process's part, by torch.distributed.checkpoint. `state.json` holds the
rest, a checksum of itself and one of each file: a corrupted bit ends the run instead of being trained on. Any number of
processes can resume from the checkpoint of any other number, sharded or not.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexrank import processes
from flexrank.distill.optimizer import make_states_, states_of
from flexrank.distill.schedule import Feed
from flexrank.distill.tensors import read_tensors, stored_tensors, write_parts, write_whole
from flexrank.errors import FlexrankError, short_repr
from flexrank.files import LEFTOVER, digest_files, directory_aside, read_document, verify_files, write_document
from flexrank.nn.sharding import ShardDim, as_global

#: Prefix of the name of a tensor in a data loader's state; in the JSON the name stands for the tensor.
LOADER = "//loader/"
#: The only keys of mappings that stand for a NumPy array, whose name follows, and for a tuple.
ARRAY, TUPLE = "//array", "//tuple"
DOCUMENT, KIND = "state.json", "checkpoint"


@dataclasses.dataclass
class State:
    """What a resumed run needs; loaded from `path` if that has a checkpoint, and not saved if `path` is None."""

    path: str | Path | None
    settings: dict[str, Any]
    trainable: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    feed: Feed
    sharded: Mapping[nn.Parameter, ShardDim] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    choices: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        path = None if self.path is None else Path(self.path)
        is_empty = path is not None and path.is_dir() and all(LEFTOVER.fullmatch(one.name) for one in path.iterdir())
        if path is not None and path.exists() and not is_empty:
            if not (path / DOCUMENT).is_file():
                raise FlexrankError(f"{path}: holds no checkpoint; choose another directory, or remove it")
            self._load(path)

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return len(self.losses)

    def advance(self, loss: float, choice: int) -> None:
        """Adds a step with its loss and the index of its profile.

        Raises FlexrankError after the first step if the batches have a state that no checkpoint can hold.
        """
        self.losses.append(loss)
        self.choices.append(choice)
        if self.path is not None and self.step == 1:
            _without_tensors(self.feed.state(), {})

    def save(self) -> None:
        """Replaces the checkpoint atomically; process 0 writes it, or all processes if the model is sharded.

        While process 0 writes, the others wait as long as the disk takes. Where all write, none may take longer than
        the others by FLEXRANK_TIMEOUT.
        """
        if self.path is None:
            return
        if not self.sharded:
            processes.on_first_process(self._save_whole)
            return
        tensors, progress = self._contents()
        with contextlib.ExitStack() as stack:
            aside = Path(processes.on_first_process(lambda: str(self._aside(stack))))
            digests = processes.gather_merged({processes.number(): write_parts(aside, tensors)})
            everything = {name: digest for own in digests.values() for name, digest in own.items()}

            def finish() -> None:
                self._describe(aside, progress, everything)
                stack.close()

            processes.on_first_process(finish)

    def _save_whole(self) -> None:
        tensors, progress = self._contents()
        with contextlib.ExitStack() as stack:
            write_whole(aside := self._aside(stack), tensors)
            self._describe(aside, progress, digest_files(aside))

    def _contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors by name, and the other contents of a checkpoint."""
        tensors = dict(self._tensors())
        feed = _without_tensors(self.feed.state(), tensors)
        return tensors, {"losses": self.losses, "choices": self.choices, "feed": feed}

    def _aside(self, stack: contextlib.ExitStack) -> Path:
        assert self.path is not None
        return stack.enter_context(directory_aside(self.path, DOCUMENT))

    def _describe(self, directory: Path, progress: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        write_document(directory / DOCUMENT, KIND, {"settings": self.settings, **progress, "files": dict(digests)})

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and their optimiser states by name; sharded ones are shards of the full tensor."""
        for name, parameter in self.trainable.items():
            shard_dim = self.sharded.get(parameter)
            for key, value in {name: parameter.detach(), **self._states(name, parameter)}.items():
                yield key, value if shard_dim is None or value.shape != parameter.shape else as_global(value, shard_dim)

    def _states(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {f"{name}//{slot}": value for slot, value in states_of(self.optimizer, parameter).items()}

    @torch.no_grad()
    def _load(self, path: Path) -> None:
        state = read_document(path / DOCUMENT, KIND, ("settings", "losses", "choices", "feed", "files"))
        for key, value in self.settings.items():
            there = state["settings"].get(key)
            if there != value:
                raise FlexrankError(f"{path}: was written with {key}={there}, not {value}; remove it or change back")
        files = [sorted(state["files"].items())[number] for number in processes.share(len(state["files"]))]
        verify_files(path, dict(files), f"truncated or edited; remove {path} to begin again")
        stored = stored_tensors(path)
        self._require_fitting(path, set(stored))
        tensors = dict(self._tensors())
        for key in tensors.keys() - stored.keys():
            raise FlexrankError(f"{path}: {key!r} is missing; another version of the optimiser wrote it; remove {path}")
        for key, tensor in tensors.items():
            if tensor.shape != stored[key].size:
                shapes = f"{tuple(stored[key].size)}, not {tuple(tensor.shape)}"
                raise FlexrankError(f"{path}: parameter {key!r} is {shapes}; of another model; remove {path}")
        loader = {key: one for key, one in stored.items() if key.startswith(LOADER)}
        tensors |= {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in loader.items()}
        read_tensors(path, tensors)
        self.losses.extend(state["losses"])
        self.choices = state["choices"]
        self.feed.restore(_with_tensors(state["feed"], tensors))

    def _require_fitting(self, path: Path, keys: set[str]) -> None:
        """Raises FlexrankError unless the checkpoint's parameters are those trained here; creates the states it has."""
        keys = {key for key in keys if not key.startswith(LOADER)}
        for name in {key for key in keys if "//" not in key} ^ self.trainable.keys():
            what = "no trainable parameter" if name in self.trainable else "a parameter not trained here,"
            raise FlexrankError(f"{path}: holds {what} {name!r}; it belongs to another run; remove {path}")
        started = {name for name, separator, _ in (key.partition("//") for key in keys) if separator}
        make_states_(self.optimizer, [self.trainable[name] for name in started])


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON, with names in place of its tensors and arrays, which go into `tensors`.

    Keys become strings, as in JSON. Raises FlexrankError for a value that neither JSON nor safetensors holds.
    """
    if isinstance(value, Tensor):
        name = f"{LOADER}{len(tensors)}"
        tensors[name] = value.clone()  # safetensors refuses two names for the same memory
        return name
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        own = value.astype(value.dtype.newbyteorder("="))  # a copy that torch can read
        return {ARRAY: _without_tensors(torch.from_numpy(own), tensors)}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _without_tensors(value.item(), tensors)
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(one, tensors) for key, one in value.items()}
    if isinstance(value, tuple):
        return {TUPLE: [_without_tensors(one, tensors) for one in value]}
    if isinstance(value, list):
        return [_without_tensors(one, tensors) for one in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    kinds = "finite numbers, text, tensors and arrays of numbers, in lists, tuples and mappings"
    raise FlexrankError(f"the batches' state_dict holds {short_repr(value)}; a checkpoint takes {kinds}")


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_without_tensors`, but for keys, which stay text, and named tuples, which are tuples."""
    if isinstance(value, str) and value.startswith(LOADER):
        return tensors[value]
    if isinstance(value, list):
        return [_with_tensors(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {ARRAY}:
        return tensors[value[ARRAY]].numpy()
    if value.keys() == {TUPLE}:
        return tuple(_with_tensors(one, tensors) for one in value[TUPLE])
    return {key: _with_tensors(one, tensors) for key, one in value.items()}
