"""Deployed models on disk, for any torch module.

A deployed artefact is `model.safetensors` with `flexrank.json`: the gauge-aligned layers' specs, the names of tied
tensors, the factory of the bare architecture, and checksums. A transformers model has its own files beside these.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flexrank.artefacts.cards import write_deployed_card
from flexrank.artefacts.tensors import named_tensors, open_tensors, put_tensors, write_tensors
from flexrank.data.batches import model_device
from flexrank.errors import FlexrankError
from flexrank.files import digest_files, directory_aside, read_document, verify_files, write_document
from flexrank.nn.gauge_aligned import GaugeAlignedLayer
from flexrank.nn.quantised import flatten_quantised, unflatten_quantised
from flexrank.nn.select import replace_layers, require_in_memory, require_merged, unwrapped
from flexrank.nn.specs import build_layer, layer_spec
from flexrank.version import __version__

STATE = "model.safetensors"
DOCUMENT = "flexrank.json"
KIND = "deployed"
KEYS = ("library", "class", "layers", "aliases", "factory", "parameters", "files")

#: "package.module:function", or the function itself: returns the bare architecture, with any weights.
Factory = str | Callable[[], nn.Module]


def save_deployed(small: nn.Module, directory: str | Path, *, factory: Factory | None = None) -> None:
    """Writes a deployed model of any torch class as `model.safetensors`, `flexrank.json` and a model card, or nothing.

    An artefact in `directory` is replaced; a directory with only other files is refused. `factory` builds the bare
    architecture; without it `load_deployed` needs `model=`.
    """
    small = unwrapped(small)
    require_merged(small)
    with directory_aside(directory, DOCUMENT) as aside:
        write_state(small, aside, factory=factory)


def write_state(small: nn.Module, directory: Path, *, factory: Factory | None = None) -> None:
    """Writes the files of `save_deployed` into an existing directory."""
    name = None if factory is None else factory_name(factory)
    modules = small.named_modules()
    specs = {name: layer_spec(module) for name, module in modules if isinstance(module, GaugeAlignedLayer)}
    state, notes = flatten_quantised(small.state_dict())
    tensors, aliases = named_tensors(state)
    write_tensors(directory / STATE, tensors, notes)
    describe_deployed(small, directory, library="torch", layers=specs, aliases=aliases, factory=name)


def describe_deployed(small: nn.Module, directory: Path, **description: Any) -> None:
    """Writes `flexrank.json`, with what `describe` returns and a checksum of every file, and then the model card."""
    content = describe(small, **description) | {"files": digest_files(directory)}
    write_document(directory / DOCUMENT, KIND, content)
    write_deployed_card(directory, content, small)


def describe(
    model: nn.Module, library: str, layers: Mapping[str, Any], aliases: Mapping[str, str], factory: str | None
) -> dict[str, Any]:
    """The content that the documents of elastic and deployed artefacts have in common."""
    return {
        "library": library,
        "class": type(model).__name__,
        "layers": dict(layers),
        "aliases": dict(aliases),
        "factory": factory,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flexrank": __version__,
    }


def load_deployed(directory: str | Path, *, model: nn.Module | None = None) -> nn.Module:
    """Reads what `save_deployed` wrote, bit for bit, in eval mode.

    `model` is the bare architecture, filled in place. By default the recorded factory is imported and called; pass
    `model=` for artefacts whose factories you do not trust.

    Raises:
        FlexrankError: a file is missing, truncated or edited, or the architecture does not fit the state.
    """
    directory = Path(directory)
    if (directory / "elastic.json").is_file():
        raise FlexrankError(f"{directory}: an elastic artefact; read a size of it with load_elastic")
    if (directory / "config.json").is_file() and not (directory / DOCUMENT).is_file():  # by `save_pretrained` alone
        raise FlexrankError(f"{directory}: holds a transformers model; load it with its from_pretrained")
    document = read_document(directory / DOCUMENT, KIND, KEYS)
    if document["library"] != "torch":
        raise FlexrankError(f"{directory}: holds a {document['library']} model; load it with its from_pretrained")
    verify_files(directory, document["files"])
    model = model if model is not None else bare_model(document["factory"], directory)
    with open_tensors(directory / STATE) as file:
        tensors = unflatten_quantised({name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {})
        return fill(model, document["layers"], tensors.items(), document["aliases"], directory)


def fill(
    model: nn.Module,
    layers: Mapping[str, Mapping[str, Any]],
    tensors: Iterable[tuple[str, Tensor]],
    aliases: Mapping[str, str],
    source: Path,
) -> nn.Module:
    """Replaces a bare model's layers by those of the specs, and its state by the tensors; returns it in eval mode.

    Raises FlexrankError if it is another architecture, or not in memory, and then leaves it as it was.
    """
    require_in_memory(model)
    device = model_device(model)
    state = {name: tensor.to(device) for name, tensor in tensors}
    replaced = replace_layers(model, {name: build_layer(spec, device="meta") for name, spec in layers.items()})
    try:
        put_tensors(model, state, aliases, source)
    except FlexrankError:
        replace_layers(model, replaced)
        raise
    return model.eval()


def factory_name(factory: Factory) -> str:
    """The "module:function" by which a fresh process imports the factory; refuses lambda, local and `__main__` ones."""
    if isinstance(factory, str):
        _import_factory(factory)
        return factory
    name = f"{getattr(factory, '__module__', None)}:{getattr(factory, '__qualname__', factory)}"
    if "<" in name or name.startswith("__main__:") or _import_factory(name) is not factory:
        right = "give a function at the top level of a module, or its name, such as 'my_script:build'"
        raise FlexrankError(f"factory {name} cannot be imported by name; {right}")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise FlexrankError(f"factory {name} is called without arguments, and has to have some: {error}") from error
    return name


def bare_model(factory: str | None, directory: str | Path) -> nn.Module:
    """The module that an artefact's factory returns; raises FlexrankError if there is no such factory."""
    if factory is None:
        raise FlexrankError(f"{directory}: names no factory; pass model= with the bare architecture")
    model = _import_factory(factory)()
    if not isinstance(model, nn.Module):
        raise FlexrankError(f"factory {factory} returned {type(model).__name__}; expected a torch module")
    return model


def _import_factory(name: str) -> Callable[[], Any]:
    module, _, path = name.partition(":")
    if not module or not path:
        raise FlexrankError(f"factory {name!r} is not of the form 'package.module:function'")
    try:
        factory: Any = importlib.import_module(module)
        return functools.reduce(getattr, path.split("."), factory)
    except ModuleNotFoundError as error:
        mend = f"put the directory of {error.name} on PYTHONPATH"
        raise FlexrankError(f"factory {name!r} cannot be imported: {error}; {mend}") from error
    except (ImportError, AttributeError) as error:
        raise FlexrankError(f"factory {name!r} cannot be imported: {error}") from error
