"""One elastic artefact for every size, read whole or only up to a budget; and a summary of what an artefact holds.

`elastic.safetensors` stores factors by component, so that a layer's r leading components are the first bytes of its
tensors; a reader with a budget touches no others. `elastic.json` holds the layers' specs, the chain, and a checksum for
each segment between two ranks of the chain, so that a prefix is checked without the rest.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flexrank.artefacts.deployed import DOCUMENT, KEYS, KIND, STATE, Factory, bare_model, factory_name
from flexrank.artefacts.tensors import named_tensors, open_tensors, put_tensors, write_tensors
from flexrank.data.batches import model_device
from flexrank.errors import FlexrankError
from flexrank.files import (
    digest_files,
    digest_tensor,
    directory_aside,
    directory_bytes,
    read_document,
    read_json,
    verify_files,
    write_document,
)
from flexrank.hf import models
from flexrank.nn.select import replace_layer
from flexrank.nn.specs import build_layer, layer_spec
from flexrank.nn.switch import nested_layers
from flexrank.profiles import ProfileChain

ELASTIC_STATE = "elastic.safetensors"
ELASTIC_DOCUMENT = "elastic.json"
ELASTIC_KIND = "elastic"
ELASTIC_KEYS = ("library", "class", "layers", "chain", "aliases", "factory", "parameters", "tensors", "files")


def save_elastic(
    model: nn.Module,
    chain: ProfileChain,
    directory: str | Path,
    *,
    factory: Factory | None = None,
    tokenizer: Any = None,
) -> None:
    """Writes an elastic model and its chain as one artefact, whole or not at all.

    Args:
        model: with elastic layers; all their components are written, whatever the active ranks.
        chain: its profiles.
        directory: an artefact there is replaced; a directory that holds anything else is refused.
        factory: builds the bare architecture of a model that is not transformers'.
        tokenizer: written beside a transformers model.

    Raises:
        FlexrankError: the model has no elastic layers, or the chain names others.
    """
    layers = nested_layers(model)
    _require_same_layers(layers, chain)
    tensors, aliases = named_tensors(model)
    content = {
        "library": "transformers" if models.is_transformers_model(model) else "torch",
        "class": type(model).__name__,
        "factory": None if factory is None else factory_name(factory),
        "flexrank": metadata.version("flexrank"),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": {name: layer_spec(layer) for name, layer in layers.items()},
        "aliases": aliases,
        "chain": chain.to_json(),
        "tensors": _digests(tensors, _segments(chain, layers)),
    }
    with directory_aside(directory, ELASTIC_DOCUMENT, ELASTIC_STATE) as aside:
        if content["library"] == "transformers":
            models.save_config(model, aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        files = digest_files(aside)  # before the tensors, which have digests of their own
        write_tensors(aside / ELASTIC_STATE, tensors)
        write_document(aside / ELASTIC_DOCUMENT, ELASTIC_KIND, content | {"files": files})


def load_elastic(
    directory: str | Path,
    budget: float | None = None,
    *,
    model: nn.Module | None = None,
    max_params: int | None = None,
    max_bytes: int | None = None,
) -> tuple[nn.Module, ProfileChain]:
    """Reads an elastic artefact, in eval mode and at the largest rank read.

    Args:
        directory: what `save_elastic` wrote.
        budget: read only the components of the largest profile within this budget; the chain ends there.
        model: the bare architecture, filled in place; needed where the artefact is neither transformers' nor names a
            factory, or where you do not trust its factory.
        max_params: as `budget`, by the whole model's parameters.
        max_bytes: as `budget`, by the whole model's bytes.

    Raises:
        FlexrankError: a file is missing, truncated or edited, the budget is too small, or the architecture differs.
    """
    directory = Path(directory)
    document = _read_elastic(directory)
    verify_files(directory, document["files"])
    chain = ProfileChain.from_json(document["chain"])
    ranks = {name: spec["rank"] for name, spec in document["layers"].items()}
    if not (budget is None and max_params is None and max_bytes is None):
        entry = chain.entry_at(budget, max_params=max_params, max_bytes=max_bytes)
        ranks = dict(entry.profile)
        chain = dataclasses.replace(chain, entries=chain.entries[: chain.entries.index(entry) + 1])
    if model is None:
        is_transformers = document["library"] == "transformers"
        model = models.skeleton(directory) if is_transformers else bare_model(document["factory"], directory)
    device = model_device(model)
    for name, spec in document["layers"].items():
        replace_layer(model, name, build_layer(spec | {"rank": ranks[name]}, device="meta"))
    tensors = _read_prefixes(directory / ELASTIC_STATE, document["tensors"], ranks)
    put_tensors(model, {name: tensor.to(device) for name, tensor in tensors}, document["aliases"], directory)
    return model.eval(), chain


def inspect_artefact(directory: str | Path) -> dict[str, Any]:
    """What a directory holds, from its JSON and the headers of its tensors alone.

    Returns:
        kind (elastic or deployed), library, class, version (of flexrank, None where unknown), dtype, parameters,
        bytes_on_disk, layers (name to form, shape, rank, aligned), and for an elastic one budgets: a list of budget,
        params_layers, params_model, bytes, mean_rank.

    Raises:
        FlexrankError: it is not an artefact of flexrank, or a file is missing or damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FlexrankError(f"{directory}: no such directory")
    content: dict[str, Any]
    if (directory / ELASTIC_DOCUMENT).is_file():
        document, files = _read_elastic(directory), [directory / ELASTIC_STATE]
        content = {"kind": ELASTIC_KIND, "budgets": _budget_rows(ProfileChain.from_json(document["chain"]))}
    else:
        document, files = _deployed_document(directory), _weight_files(directory)
        content = {"kind": KIND}
    dtype, values = _header_summary(files)
    return content | {
        "library": document["library"],
        "class": document["class"],
        "version": document.get("flexrank"),
        "dtype": dtype,
        "parameters": document.get("parameters", values),
        "bytes_on_disk": directory_bytes(directory),
        "layers": document["layers"],
    }


def _read_elastic(directory: Path) -> dict[str, Any]:
    path = directory / ELASTIC_DOCUMENT
    if not path.is_file():
        raise FlexrankError(f"{directory}: holds no elastic model ({ELASTIC_DOCUMENT} is missing)")
    return read_document(path, ELASTIC_KIND, ELASTIC_KEYS)


def _require_same_layers(layers: Mapping[str, Any], chain: ProfileChain) -> None:
    largest = chain.entries[-1].profile
    for name in largest.keys() ^ layers.keys():
        raise FlexrankError(f"layer {name!r} is not in both the model and the chain; they must name the same layers")
    for name, rank in largest.items():
        if rank > layers[name].max_rank:
            raise FlexrankError(f"layer {name!r}: the chain needs rank {rank}; the layer has {layers[name].max_rank}")


def _segments(chain: ProfileChain, layers: Mapping[str, Any]) -> dict[str, list[int]]:
    """For each factor tensor, the ranks at which a reader may stop, rising."""
    stops: dict[str, list[int]] = {}
    for name, layer in layers.items():
        ranks = sorted({entry.profile[name] for entry in chain.entries} | {layer.max_rank})
        stops |= {f"{name}.u": ranks, f"{name}.v": ranks}
    return stops


def _digests(tensors: Mapping[str, Tensor], stops: Mapping[str, list[int]]) -> dict[str, Any]:
    """Each tensor's digest, or for a factor the pairs [end, digest] of its segments."""
    return {
        name: _segment_digests(tensor, stops[name]) if name in stops else digest_tensor(tensor)
        for name, tensor in tensors.items()
    }


def _segment_digests(tensor: Tensor, ends: list[int]) -> list[list[Any]]:
    return [[end, digest_tensor(tensor[start:end])] for start, end in pairwise([0, *ends])]


def _read_prefixes(path: Path, digests: Mapping[str, Any], ranks: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, factors up to their rank, each checked against its digests."""
    limits = {f"{name}.{factor}": rank for name, rank in ranks.items() for factor in "uv"}
    with open_tensors(path) as file:
        present = set(file.keys())
        for name, digest in digests.items():
            if name not in present:
                raise FlexrankError(f"{path}: tensor {name!r} is missing")
            if name in limits:
                tensor = file.get_slice(name)[: limits[name]]
                wanted = [segment for segment in digest if segment[0] <= limits[name]]
                matches = _segment_digests(tensor, [end for end, _ in wanted]) == wanted
            else:
                tensor = file.get_tensor(name)
                matches = digest_tensor(tensor) == digest
            if not matches:
                raise FlexrankError(f"{path}: tensor {name!r} does not match its checksum; the file was edited")
            yield name, tensor


def _deployed_document(directory: Path) -> dict[str, Any]:
    if (directory / DOCUMENT).is_file():
        return read_document(directory / DOCUMENT, KIND, KEYS)
    config = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    specs = config.get("quantization_config") or {}
    if specs.get("quant_method") != "flexrank":
        raise FlexrankError(
            f"{directory}: not an artefact of flexrank; it has neither {ELASTIC_DOCUMENT} nor {DOCUMENT}, "
            "nor a config.json with flexrank layers"
        )
    names = config.get("architectures") or [None]
    return {"library": "transformers", "class": names[0], "layers": specs.get("layers", {})}


def _weight_files(directory: Path) -> list[Path]:
    """The weight files: one, or the shards that the index names."""
    index = directory / f"{STATE}.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else [STATE]
    return [directory / name for name in names]


def _header_summary(files: list[Path]) -> tuple[str, int]:
    """The dtype of most stored values, and the number of values."""
    counts: Counter[str] = Counter()
    for path in files:
        with open_tensors(path):  # checks that the file is as long as its header says
            content = _header(path)
        for name, entry in content.items():
            if name != "__metadata__":
                counts[entry["dtype"]] += math.prod(entry["shape"])
    if not counts:
        raise FlexrankError(f"{files[0]}: holds no tensors")
    return counts.most_common(1)[0][0], counts.total()


def _header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def _budget_rows(chain: ProfileChain) -> list[dict[str, Any]]:
    return [
        {
            "budget": entry.requested,
            "params_layers": entry.parameters,
            "params_model": chain.model_parameters(entry),
            "bytes": chain.model_bytes(entry),
            "mean_rank": sum(entry.profile.values()) / len(entry.profile),
        }
        for entry in chain.requested
    ]
