"""States and batches as safetensors files: a tensor with several names is stored once. Nothing is pickled."""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flexrank.data.batches import Batch
from flexrank.errors import FlexrankError
from flexrank.files import clear_write_errors
from flexrank.nn.quantised import is_quantised


def named_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A model's state with every tensor once, and a map of each further name to the name that it is an alias of."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise FlexrankError(f"state {name!r} is a {type(value).__name__}; only tensors are saved")
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and key in owners:
            aliases[name] = owners[key]
        else:
            owners[key], tensors[name] = name, value
    return tensors, aliases


def shared_places(model: nn.Module) -> dict[str, list[str]]:
    """Maps each name of a module that has several to all of that module's names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return {name: places for places in names.values() if len(places) > 1 for name in places}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes tensors as safetensors; views of a shared storage are copied, so each is written separately.

    `notes` go into the file's header.
    """
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    uses = Counter(storages.values())
    apart = {n: contiguous_copy(t) if uses[storages[n]] > 1 else t.contiguous() for n, t in tensors.items()}
    with clear_write_errors(path):
        save_file(apart, path, metadata={**notes, "format": "pt"})


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A copy with the strides that safetensors asks for; `clone` alone keeps those of a transposed tensor."""
    return tensor.clone(memory_format=torch.contiguous_format)


class ShardWriter:
    """Writes tensors as they come, to files of about `limit` bytes: NAME.safetensors, or NAME-00001-of-00002 and so on.

    It holds one file's tensors at a time. The file names are transformers', but the caller keeps the index.
    """

    def __init__(self, directory: Path, name: str, limit: int):
        self._directory, self._name, self._limit = directory, name, limit
        self._tensors: dict[str, Tensor] = {}
        self._bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes this tensor, at once or together with later ones."""
        self._tensors[name] = tensor
        self._bytes += tensor.nbytes
        if self._bytes >= self._limit:
            self._flush()

    def finish(self) -> dict[str, list[str]]:
        """Writes what is left; returns the names of the tensors in each file."""
        if self._tensors or not self._shards:
            self._flush()
        count, files = len(self._shards), {}
        for number, names in enumerate(self._shards, 1):
            whole = f"-{number:05}-of-{count:05}" if count > 1 else ""
            file = f"{self._name}{whole}.safetensors"
            self._part(number).rename(self._directory / file)
            files[file] = names
        return files

    def _flush(self) -> None:
        self._shards.append(list(self._tensors))
        write_tensors(self._part(len(self._shards)), self._tensors)
        self._tensors, self._bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._directory / f"{self._name}.part-{number}"


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file, to be read by name or by slice; raises FlexrankError if it is missing or damaged."""
    if not path.is_file():
        raise FlexrankError(f"{path}: no such file; the artefact is incomplete, so copy it again")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise FlexrankError(f"{path}: truncated, or not a safetensors file ({error}); copy it again") from error


def put_tensors(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], source: Path) -> None:
    """Makes `tensors` the model's state, each under all its names; the model takes their dtype and device.

    Raises FlexrankError, which names `source`, if names or shapes differ from the model's.
    """
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    given = {**tensors, **{alias: tensors[name] for alias, name in aliases.items() if name in tensors}}
    for name in sorted(wanted.keys() ^ given.keys()):
        problem = "is missing" if name in wanted else "has no place there"
        right = "give the architecture that was saved"
        raise FlexrankError(f"{source}: tensor {name!r} of {type(model).__name__} {problem}; {right}")
    for name, value in given.items():
        if value.shape != wanted[name]:
            shapes = f"has shape {tuple(value.shape)}; the model needs {tuple(wanted[name])}"
            raise FlexrankError(f"{source}: tensor {name!r} {shapes}")
    for name, own in model.state_dict(keep_vars=True).items():
        if not own.is_meta and not is_quantised({name: given[name]}):
            own.data = given.pop(name)  # in place, because the model may keep the tensor elsewhere too, as in a list
    model.load_state_dict(given, assign=True, strict=False)
    for alias, name in aliases.items():
        own, other = (functools.reduce(getattr, one.split("."), model) for one in (alias, name))
        if isinstance(own, nn.Parameter) == isinstance(other, nn.Parameter):  # a buffer shares its values alone
            owner, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(owner), leaf, other)


def write_batch(path: Path, batch: Batch) -> None:
    """Writes a batch as safetensors: its tensors, and its structure and plain values as JSON in the header."""
    if isinstance(batch, Mapping):
        kind, items = "mapping", dict(batch)
    else:
        kind, values = ("tensor", [batch]) if isinstance(batch, Tensor) else ("tuple", batch)
        items = {str(index): value for index, value in enumerate(values)}
    tensors = {
        name: contiguous_copy(value.detach().cpu()) for name, value in items.items() if isinstance(value, Tensor)
    }
    plain = {name: value for name, value in items.items() if name not in tensors}
    try:
        structure = json.dumps({"kind": kind, "names": list(items), "plain": plain}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FlexrankError(f"the inputs hold {', '.join(plain)}, not all tensors or plain values: {error}") from error
    with clear_write_errors(path):
        save_file(tensors, path, {"batch": structure})


def read_batch(path: Path, device: torch.device) -> Batch:
    """Reads what `write_batch` wrote, onto `device`; a list comes back as a tuple."""
    with open_tensors(path) as file:
        structure = json.loads(file.metadata()["batch"])
        items = structure["plain"] | {name: file.get_tensor(name).to(device) for name in file.keys()}
    if structure["kind"] == "tensor":
        return items["0"]
    ordered = {name: items[name] for name in structure["names"]}
    return ordered if structure["kind"] == "mapping" else tuple(ordered.values())
