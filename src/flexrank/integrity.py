"""Checksums, so that a truncated or edited artefact is told from a whole one before it is used."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexrank.errors import FlexrankError
from flexrank.storage import read_json, require_keys, write_json

#: Version of the JSON documents beside the tensors.
FORMAT = 1


def digest_tensor(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes, row-major, in hexadecimal."""
    if tensor.numel() == 0:
        return hashlib.sha256(b"").hexdigest()
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(octets.numpy().data).hexdigest()


def digest_file(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def digest_files(directory: str | Path) -> dict[str, str]:
    """Digests of every file in `directory` and below it, by its path there."""
    directory = Path(directory)
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): digest_file(file) for file in files}


def verify_files(directory: str | Path, digests: Mapping[str, str]) -> None:
    """Checks files against their digests.

    Raises:
        FlexrankError: a file is missing, or its bytes are not those that were written.
    """
    for name, digest in digests.items():
        path = Path(directory) / name
        if not path.is_file():
            raise FlexrankError(f"{path}: no such file; the artefact is incomplete")
        if digest_file(path) != digest:
            raise FlexrankError(
                f"{path}: does not match its checksum; truncated, edited, or saved over (then delete flexrank.json)"
            )


def write_document(path: str | Path, kind: str, content: Mapping[str, Any]) -> None:
    """Writes a JSON document with its kind, format and a checksum of itself."""
    document = {"kind": kind, "format": FORMAT, **content}
    write_json(path, document | {"checksum": _digest_json(document)})


def read_document(path: str | Path, kind: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Reads what `write_document` wrote.

    Raises:
        FlexrankError: the file is missing, of another kind or format, lacks a key, or does not match its checksum.
    """
    document = read_json(path)
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise FlexrankError(f"{path}: not the description of an artefact of kind {kind!r}")
    if document.get("format") != FORMAT:
        raise FlexrankError(
            f"{path}: has format {document.get('format')!r}; this version of flexrank reads format {FORMAT}"
        )
    require_keys(document, (*keys, "checksum"), str(path))
    checksum = document.pop("checksum")
    if _digest_json(document) != checksum:
        raise FlexrankError(f"{path}: does not match its checksum; the file was truncated or edited")
    return document


def _digest_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()
