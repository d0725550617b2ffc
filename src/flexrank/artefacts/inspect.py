"""A summary of what an artefact holds: elastic, deployed, or exported to another runtime."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from flexrank import files
from flexrank.artefacts.deployed import DOCUMENT, KEYS, KIND, STATE
from flexrank.artefacts.elastic import ELASTIC_DOCUMENT, ELASTIC_KIND, read_elastic_document
from flexrank.artefacts.tensors import open_tensors
from flexrank.errors import FlexrankError
from flexrank.nn.specs import require_specs
from flexrank.profiles import ProfileChain

#: The document of what `export --to` wrote; only a directory that has one may be replaced by such an export.
PROGRAM_DOCUMENT, PROGRAM_KIND = "export.json", "export"


def inspect_artefact(directory: str | Path) -> dict[str, Any]:
    """Summarises what a directory holds, reading only its JSON and the headers of its tensors.

    Returns:
        kind (elastic or deployed), library, class, version (of flexrank, None where unknown), dtype, parameters,
        bytes_on_disk, layers (name to form, shape, rank, aligned), and for an elastic one budgets, one row each. For
        what `export --to` wrote: kind (export), to (its format), class, dtype, inputs, error (relative, measured when
        it was written), bound, versions and bytes_on_disk.

    Raises:
        FlexrankError: the directory is not an artefact of flexrank, or a file is missing or damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FlexrankError(f"{directory}: no such directory; give that of an artefact")
    if (directory / PROGRAM_DOCUMENT).is_file():
        return _inspect_export(directory)
    content: dict[str, Any] = {"kind": KIND}
    if (directory / ELASTIC_DOCUMENT).is_file():
        document = read_elastic_document(directory)
        paths = [directory / file for file in document["shards"]]
        chain, deployed = ProfileChain.from_json(document["chain"]), document.get("deployed_dtype")
        chain = chain.counted_in(getattr(torch, deployed).itemsize) if deployed else chain  # as sizes are cut from it
        content = {"kind": ELASTIC_KIND, "budgets": chain.sizes()}
    else:
        document, paths = _deployed_document(directory), _weight_files(directory)
    dtype, values = _header_summary(paths)
    return content | {
        "library": document["library"],
        "class": document["class"],
        "version": document.get("flexrank"),
        "dtype": dtype,
        "parameters": document.get("parameters", values),
        "bytes_on_disk": files.directory_bytes(directory),
        "layers": document["layers"],
    }


def _inspect_export(directory: Path) -> dict[str, Any]:
    keys = ("to", "class", "dtype", "inputs", "bound", "error", "versions")
    document = files.read_document(directory / PROGRAM_DOCUMENT, PROGRAM_KIND, keys)
    stored = {"kind": PROGRAM_KIND, "bytes_on_disk": files.directory_bytes(directory)}
    return stored | {key: document[key] for key in keys}


def _deployed_document(directory: Path) -> dict[str, Any]:
    if (directory / DOCUMENT).is_file():
        return files.read_document(directory / DOCUMENT, KIND, KEYS)
    config = files.read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    specs = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(specs, dict) or specs.get("quant_method") != "flexrank":
        wanted = f"{ELASTIC_DOCUMENT}, {DOCUMENT} and a config.json with flexrank layers"
        if (directory / "elastic" / ELASTIC_DOCUMENT).is_file():
            raise FlexrankError(f"{directory}: a run; its artefacts are {directory}/elastic and those in deployed/")
        raise FlexrankError(f"{directory}: not an artefact of flexrank; it has none of {wanted}")
    if specs.get("is_elastic"):
        right = "save it with fr.save_elastic, or a size of it with fr.deploy"
        raise FlexrankError(f"{directory}: an elastic model written by save_pretrained, which keeps no layers; {right}")
    require_specs(specs.get("layers"))
    names = config.get("architectures") or [None]
    return {"library": "transformers", "class": names[0], "layers": specs["layers"]}


def _weight_files(directory: Path) -> list[Path]:
    """The weight files: one, or the shards that the index names."""
    index = directory / f"{STATE}.index.json"
    if not index.is_file():
        return [directory / STATE]
    content = files.read_json(index)
    files.require_keys(content, ("weight_map",), str(index))
    return [directory / name for name in sorted(set(content["weight_map"].values()))]


def _header_summary(paths: list[Path]) -> tuple[str, int]:
    """The dtype of most stored values, and the number of all values."""
    counts: Counter[str] = Counter()
    for path in paths:
        with open_tensors(path) as file:
            for header in map(file.get_slice, file.keys()):  # reads no values
                counts[header.get_dtype()] += math.prod(header.get_shape())
    if not counts:
        raise FlexrankError(f"{paths[0]}: holds no tensors")
    return counts.most_common(1)[0][0], counts.total()
