"""States on disk: safetensors beside a JSON document, for any torch module. Nothing is pickled.

A deployed artefact is `model.safetensors` with `flexrank.json`: the gauge-aligned layers' specs, the names that share
one tensor, the factory of the bare architecture, and checksums. A transformers model has its own files beside it.
"""

import contextlib
import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flexrank.data.batches import Batch, model_device
from flexrank.errors import FlexrankError
from flexrank.files import digest_files, directory_aside, read_document, verify_files, write_document
from flexrank.nn.layers import GaugeAlignedLayer
from flexrank.nn.specs import build_layer, layer_spec
from flexrank.nn.surgery import replace_layer

STATE = "model.safetensors"
DOCUMENT = "flexrank.json"
KIND = "deployed"
KEYS = ("library", "class", "layers", "aliases", "factory", "parameters", "files")

#: "package.module:function", or the function itself: returns the bare architecture, with any weights.
Factory = str | Callable[[], nn.Module]


def save_deployed(small: nn.Module, directory: str | Path, *, factory: Factory | None = None) -> None:
    """Writes a deployed model of any torch class: `model.safetensors` and `flexrank.json`, whole or not at all.

    Args:
        small: what `deploy` returned.
        directory: an artefact there is replaced; a directory that holds anything else is refused.
        factory: how to build the bare architecture; without it `load_deployed` needs `model=`.

    Raises:
        FlexrankError: the factory cannot be imported by name, or the state cannot be written.
    """
    with directory_aside(directory, DOCUMENT) as aside:
        write_state(small, aside, factory=factory)


def write_state(small: nn.Module, directory: Path, *, factory: Factory | None = None) -> None:
    """Writes the two files of `save_deployed` into an existing directory."""
    name = None if factory is None else factory_name(factory)
    tensors, aliases = named_tensors(small)
    write_tensors(directory / STATE, tensors)
    describe_deployed(small, directory, library="torch", layers=aligned_specs(small), aliases=aliases, factory=name)


def describe_deployed(
    small: nn.Module,
    directory: Path,
    *,
    library: str,
    layers: Mapping[str, Any],
    aliases: Mapping[str, str],
    factory: str | None,
) -> None:
    """Writes `flexrank.json` beside what the directory holds, with a checksum of every file."""
    content = {
        "library": library,
        "class": type(small).__name__,
        "layers": dict(layers),
        "aliases": dict(aliases),
        "factory": factory,
        "parameters": sum(parameter.numel() for parameter in small.parameters()),
        "files": digest_files(directory),
        "flexrank": metadata.version("flexrank"),
    }
    write_document(directory / DOCUMENT, KIND, content)


def load_deployed(directory: str | Path, *, model: nn.Module | None = None) -> nn.Module:
    """Reads what `save_deployed` wrote, to the same bits, in eval mode.

    Args:
        directory: the artefact.
        model: the bare architecture, filled in place; by default the recorded factory is imported and called, so
            read artefacts of others with `model=` if their factories are not to be run.

    Raises:
        FlexrankError: a file is missing, truncated or edited, or the architecture does not fit the state.
    """
    directory = Path(directory)
    document = read_document(directory / DOCUMENT, KIND, KEYS)
    if document["library"] != "torch":
        raise FlexrankError(f"{directory}: holds a {document['library']} model; load it with its from_pretrained")
    verify_files(directory, document["files"])
    model = model if model is not None else bare_model(document["factory"], directory)
    device = model_device(model)
    for name, spec in document["layers"].items():
        replace_layer(model, name, build_layer(spec, device="meta"))
    with open_tensors(directory / STATE) as file:
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}
    put_tensors(model, tensors, document["aliases"], directory)
    return model.eval()


def aligned_specs(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Specs of the gauge-aligned layers by name; every other layer is as its architecture builds it."""
    modules = model.named_modules()
    return {name: layer_spec(module) for name, module in modules if isinstance(module, GaugeAlignedLayer)}


def factory_name(factory: Factory) -> str:
    """The "module:function" under which a fresh process finds the factory.

    Raises:
        FlexrankError: it is not importable by name (a lambda, a local function, one of `__main__`).
    """
    if isinstance(factory, str):
        _import_factory(factory)
        return factory
    name = f"{getattr(factory, '__module__', None)}:{getattr(factory, '__qualname__', factory)}"
    if "<" in name or name.startswith("__main__:") or _import_factory(name) is not factory:
        raise FlexrankError(f"factory {name} cannot be imported by name; give a function at a module's top level")
    return name


def bare_model(factory: str | None, directory: str | Path) -> nn.Module:
    """Calls the factory that an artefact names.

    Raises:
        FlexrankError: it names none, it cannot be imported, or it returns no module.
    """
    if factory is None:
        raise FlexrankError(f"{directory}: names no factory; pass model= with the bare architecture")
    model = _import_factory(factory)()
    if not isinstance(model, nn.Module):
        raise FlexrankError(f"factory {factory} returned {type(model).__name__}; expected a torch module")
    return model


def _import_factory(name: str) -> Callable[[], Any]:
    module_name, separator, path = name.partition(":")
    if not separator or not module_name or not path:
        raise FlexrankError(f"factory {name!r} is not of the form 'package.module:function'")
    try:
        found: Any = importlib.import_module(module_name)
        return functools.reduce(getattr, path.split("."), found)
    except (ImportError, AttributeError) as error:
        raise FlexrankError(f"factory {name!r} cannot be imported: {error}") from error


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's state with every tensor once, and the other names of those that have several.

    Raises:
        FlexrankError: the state holds something that is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise FlexrankError(f"state {name!r} is a {type(value).__name__}; only tensors are saved")
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and key in owners:
            aliases[name] = owners[key]
            continue
        owners[key] = name
        tensors[name] = value
    return tensors, aliases


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors as safetensors; views into a shared storage are written each for itself.

    Raises:
        FlexrankError: the file cannot be written.
    """
    storages: dict[int, int] = {}
    for tensor in tensors.values():
        storages[tensor.untyped_storage().data_ptr()] = storages.get(tensor.untyped_storage().data_ptr(), 0) + 1
    apart = {
        name: tensor.clone() if storages[tensor.untyped_storage().data_ptr()] > 1 else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    try:
        save_file(apart, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise FlexrankError(f"{path}: cannot be written ({error})") from error


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """An open safetensors file, read by name or by slice.

    Raises:
        FlexrankError: it is missing, truncated, or no safetensors file.
    """
    if not path.is_file():
        raise FlexrankError(f"{path}: no such file; the artefact is incomplete")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise FlexrankError(f"{path}: truncated, or not a safetensors file ({error})") from error


def put_tensors(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], where: object) -> None:
    """Makes `tensors` the model's state, each under all its names; the model takes their dtype and device.

    Raises:
        FlexrankError: a name is missing or unexpected, or a shape differs; `where` tells the source.
    """
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    given = {**tensors, **{alias: tensors[name] for alias, name in aliases.items() if name in tensors}}
    for name in wanted.keys() - given.keys():
        raise FlexrankError(f"{where}: tensor {name!r} of {type(model).__name__} is missing")
    for name in given.keys() - wanted.keys():
        raise FlexrankError(f"{where}: tensor {name!r} has no place in {type(model).__name__}")
    for name, value in given.items():
        if value.shape != wanted[name]:
            raise FlexrankError(
                f"{where}: tensor {name!r} has shape {tuple(value.shape)}; the model needs {tuple(wanted[name])}"
            )
    model.load_state_dict(given, assign=True)
    for alias, name in aliases.items():
        owner, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(owner), leaf, functools.reduce(getattr, name.split("."), model))


def write_batch(path: Path, batch: Batch) -> None:
    """Writes a batch as safetensors: its tensors, and its structure and plain values as JSON in the header.

    Raises:
        FlexrankError: it holds a value that is neither a tensor nor plain JSON.
    """
    if isinstance(batch, Tensor):
        kind, items = "tensor", {"0": batch}
    elif isinstance(batch, Mapping):
        kind, items = "mapping", dict(batch)
    else:
        kind, items = "tuple", {str(index): value for index, value in enumerate(batch)}
    tensors = {name: value for name, value in items.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in items.items() if not isinstance(value, Tensor)}
    try:
        structure = json.dumps({"kind": kind, "names": list(items), "plain": plain}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FlexrankError(f"the inputs hold {', '.join(plain)}, not all tensors or plain values: {error}") from error
    save_file({name: value.detach().cpu().clone() for name, value in tensors.items()}, path, {"batch": structure})


def read_batch(path: Path, device: torch.device) -> Batch:
    """Reads what `write_batch` wrote, onto `device`; a list comes back as a tuple."""
    with open_tensors(path) as file:
        structure = json.loads(file.metadata()["batch"])
        items = structure["plain"] | {name: file.get_tensor(name).to(device) for name in file.keys()}
    if structure["kind"] == "tensor":
        return items["0"]
    ordered = {name: items[name] for name in structure["names"]}
    return ordered if structure["kind"] == "mapping" else tuple(ordered.values())
