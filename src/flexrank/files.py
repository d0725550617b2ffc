"""Writes files and directories completely or not at all, with checksums that reveal a truncated or edited file."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from flexrank.errors import FlexrankError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Version of the JSON documents beside the tensors.
FORMAT = 3
#: How the text of each document begins.
BEGINNING = b'{\n "kind":'
#: Names of what is being written, and of directories moved aside meanwhile: tempfile adds eight characters.
LEFTOVER = re.compile(r"\.(?P<of>.+)\.[a-z0-9_]{8}\.(?P<kind>aside|old)")


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as JSON at `path`, replacing it in one rename (floats keep every bit: `repr` round-trips)."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes text at `path`, replacing it in one rename."""
    with atomic_file(path) as aside:
        aside.write_text(text, encoding="utf8")


def read_json(path: str | Path) -> Any:
    """Returns the content of a JSON file; raises FlexrankError if the file is missing or not JSON.

    A number that is not finite is not JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise FlexrankError(f"{path}: no such file")

    try:
        return json.loads(path.read_text(encoding="utf8"), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # ValueError also for integers with thousands of digits
        raise FlexrankError(f"{path}: not JSON ({error})") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def require_keys(value: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Raises FlexrankError unless the JSON object holds all `keys`; the message names `where`."""
    for key in keys:
        if key not in value:
            raise FlexrankError(f"{where}: key {key!r} is missing; it needs {', '.join(keys)}")


@contextlib.contextmanager
def clear_write_errors(path: str | Path) -> Iterator[None]:
    """Turns safetensors' own error, as on a full disk, into a FlexrankError of one line that names what is written."""
    try:
        yield
    except SafetensorError as error:
        raise FlexrankError(f"{path}: cannot be written ({error})") from error


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a path beside `path` to write a file to; renames it to `path` on success, removes it on failure."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".aside", dir=path.parent)
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        aside.chmod(0o666 & ~_umask())
        _flush(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def directory_aside(path: str | Path, *markers: str) -> Iterator[Path]:
    """Yields an empty directory beside `path`; renames it to `path` on success, removes it on failure.

    An existing directory is replaced only once the new one is complete, and only if it is empty or holds one of the
    files `markers`, which show that it is of the same kind. Files in it that its documents do not name are kept. A
    symbolic link is followed. A directory that cannot be renamed (a mount point, the working directory, or one whose
    parent is not writable) is filled in place, its documents last.
    """
    path = Path(path).resolve()
    others = path.is_dir() and not all(LEFTOVER.fullmatch(entry.name) for entry in path.iterdir())
    if others and not any((path / marker).is_file() for marker in markers):
        raise FlexrankError(f"{path}: holds other files, and no {markers[0]} to replace; remove it, or choose another")
    if path.exists() and not path.is_dir():
        raise FlexrankError(f"{path}: is a file; choose another name for the directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    stays = path.is_dir() and (path == Path.cwd() or path.is_mount() or not os.access(path.parent, os.W_OK))
    allowed = ~_umask()
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".aside", dir=path if stays else path.parent))
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None  # which the user knows
    aside.chmod(path.stat().st_mode & 0o777 if path.is_dir() else 0o777 & allowed)
    try:
        with _held(aside):
            yield aside
            for file in aside.rglob("*"):
                file.chmod((0o777 if file.is_dir() else 0o666) & allowed)  # safetensors' are their owner's alone
                _flush(file)
            if stays:
                _fill_directory(aside, path)
            else:
                _replace_directory(aside, path, markers)
    finally:
        if aside.exists():
            shutil.rmtree(aside)


def _replace_directory(new: Path, path: Path, markers: Collection[str]) -> None:
    """Renames `new` to `path`. An existing directory there is removed, or restored if the renaming fails."""
    if not path.exists():
        os.replace(new, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    try:
        with _held(old):
            os.replace(path, old / path.name)
            os.replace(new, path)
            _keep_others(old / path.name, path, markers)
            shutil.rmtree(old / path.name)
    except BaseException:
        if not path.exists():
            os.replace(old / path.name, path)
        raise
    finally:
        if not any(old.iterdir()):  # otherwise it has what is still to be kept, which `clear_leftovers` does
            old.rmdir()


def _fill_directory(new: Path, path: Path) -> None:
    """Moves everything in `new` into `path`, replacing the artefact that is there; documents come last."""
    documents = documents_of(new)
    remove_artefact(path, keep=True)
    for entry in sorted(new.iterdir(), key=lambda one: one.name in documents):
        if (path / entry.name).is_dir():
            shutil.rmtree(path / entry.name)
        os.replace(entry, path / entry.name)


def _keep_others(old: Path, new: Path, markers: Collection[str] = ()) -> None:
    """Moves to `new` whatever in `old` is not part of the artefact there, unless `new` has an entry of that name."""
    own = {*markers, *_written(old)}
    for path in old.iterdir():
        if path.name not in own and not (new / path.name).exists():
            os.replace(path, new / path.name)


def remove_artefact(path: Path, *, keep: bool = False) -> None:
    """Removes an artefact's documents and what they name, and the directory if it is empty then, unless `keep`."""
    for name in sorted(_written(path)):
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)
    if not keep and not any(path.iterdir()):
        path.rmdir()


def documents_of(directory: Path) -> dict[str, Mapping[str, Any]]:
    """The documents that `write_document` wrote into a directory, by name; a damaged one is empty."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in directory.glob("*.json"):
        with path.open("rb") as file:
            if file.read(len(BEGINNING)) != BEGINNING:
                continue
        found[path.name] = {}
        with contextlib.suppress(FlexrankError):
            found[path.name] = read_json(path)
    return found


def _written(directory: Path) -> set[str]:
    """The entries of a directory that belong to an artefact: its documents, what they name in it, and its card."""
    documents = documents_of(directory)
    names = {Path(name) for one in documents.values() for key in ("files", "shards") for name in one.get(key) or ()}
    inside = {name.parts[0] for name in names if name.parts and not name.is_absolute() and ".." not in name.parts}
    return {*documents, *inside, *["README.md"] * bool(documents)}


def clear_leftovers(directory: Path) -> None:
    """Removes what killed processes left half-written, and restores a directory that one had only moved aside.

    Leftovers are recognised by the names that `atomic_file` and `directory_aside` give, so no other hidden file is
    removed; nor is a directory that a living process writes or replaces. No other process may write single files there.
    """
    for path in directory.iterdir():
        if not (name := LEFTOVER.fullmatch(path.name)) or (path.is_dir() and _is_held(path)):
            continue
        if name["kind"] == "old" and (path / name["of"]).exists() and not (directory / name["of"]).exists():
            os.replace(path / name["of"], directory / name["of"])
        if (path / name["of"]).is_dir() and (directory / name["of"]).is_dir():
            _keep_others(path / name["of"], directory / name["of"])
        if path.is_dir():
            shutil.rmtree(path)
        elif name["kind"] == "aside":
            path.unlink()


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Inside the block `clear_leftovers` of other processes leaves the directory, where the file system has locks.

    The operating system drops the lock of a process that ends.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _is_held(directory: Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:  # its process has just renamed it
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def directory_bytes(path: str | Path) -> int:
    """Bytes of all files under `path`."""
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def _flush(path: Path) -> None:
    """Flushes a file to disk, so a renamed file is not empty after a power cut."""
    if path.is_file():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _umask() -> int:
    """Reads the process's umask from Linux's /proc: `os.umask` returns it only by changing it, for all threads."""
    lines = Path("/proc/self/status").read_text(encoding="utf8").splitlines()
    return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)


def digest_json(value: Any) -> str:
    """SHA-256 of the value as JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def digest_tensor(tensor: "Tensor") -> str:
    """SHA-256 of the tensor's bytes, row-major, in hexadecimal."""
    import torch

    if tensor.numel() == 0:
        return hashlib.sha256(b"").hexdigest()
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(octets.numpy().data).hexdigest()


def digest_file(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(directory: str | Path) -> dict[str, str]:
    """Digests of all files under `directory`, by relative path."""
    directory = Path(directory)
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): digest_file(file) for file in files}


def dtype_name(dtype: "torch.dtype") -> str:
    """The name of a dtype as configurations and documents spell it, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def verify_files(directory: str | Path, digests: Mapping[str, str], reason: str = "truncated or edited") -> None:
    """Raises FlexrankError if a file is missing, or does not match its digest; `reason` explains a mismatch."""
    for name, digest in digests.items():
        path = Path(directory) / name
        if not path.is_file():
            raise FlexrankError(f"{path}: no such file; the artefact is incomplete")
        if digest_file(path) != digest:
            raise FlexrankError(f"{path}: does not match its checksum; {reason}")


def write_document(path: str | Path, kind: str, content: Mapping[str, Any]) -> None:
    """Writes a JSON document with its kind, format and a checksum of itself; all keys must be strings, as in JSON."""
    document = {"kind": kind, "format": FORMAT, **content}
    write_json(path, document | {"checksum": digest_json(document)})


def reads_format(known: int) -> str:
    """The end of the error message for a format that this version, which reads up to `known`, cannot read."""
    return f"this version of flexrank reads formats up to {known}: load it with the version that wrote it, or upgrade"


def read_document(path: str | Path, kind: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Reads what `write_document` wrote; raises FlexrankError if the file is damaged, or of another kind or format."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise FlexrankError(f"{path}: not the description of an artefact of kind {kind!r}; give a directory of one")
    if document.get("format") not in range(1, FORMAT + 1):
        raise FlexrankError(f"{path}: has format {document.get('format')!r}; {reads_format(FORMAT)}")
    require_keys(document, (*keys, "checksum"), str(path))
    checksum = document.pop("checksum")
    if digest_json(document) != checksum:
        raise FlexrankError(f"{path}: does not match its checksum; the file was truncated or edited, so copy it again")
    return document
