"""The run directory: who may write to it, which stages are up to date, and what an interrupted stage resumes from.

    RUN/config.yaml           the whole configuration, defaults included
    RUN/stages/STAGE.json     fingerprint and seconds of a finished stage, and checksums of the files it wrote
    RUN/partial/              checkpoints of interrupted stages

A stage's fingerprint covers the configuration and the files it reads, the code of its modules, and the
fingerprints of the stages it needs. A changed key thus reruns its stage and those that depend on it, and no others.
"""

import ast
import contextlib
import fcntl
import functools
import operator
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexrank.data.stream import corpus_files
from flexrank.data.text import text_files
from flexrank.errors import FlexrankError
from flexrank.files import atomic_file, clear_leftovers, digest_file, digest_json, read_json, write_json
from flexrank.hf.companions import CARD
from flexrank.run.config import RunConfig, load_config, write_config
from flexrank.run.data_config import DataConfig
from flexrank.version import __version__

#: Larger files are known by size and modification time: hashing a 16 GB model takes longer than a run without work.
HASHED_BYTES = 1 << 30


class RunDirectory:
    """A run's files, and the records of the stages that wrote them."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._has_finished_a_stage = False

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the run directory, made if absent; the operating system drops the lock of a process that ends.

        Raises:
            FlexrankError: another process holds it, or the path is not a directory.
        """
        if self.path.exists() and not self.path.is_dir():
            raise FlexrankError(f"{self.path}: is a file; the run directory needs another place (key output)")
        is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "run.lock", "a+", encoding="utf8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = f"{self.path}: process {file.read().strip() or 'unknown'} writes to this run"
                raise FlexrankError(f"{holder}; wait for it, or choose another output") from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            self._clear_backups()
            clear_leftovers(self.path)
            for place in filter(Path.is_dir, self.path.iterdir()):
                clear_leftovers(place)
            try:
                yield
            finally:
                file.truncate(0)
                self._remove_what_is_empty(is_new)

    def _clear_backups(self) -> None:
        """Removes what a killed process had put away; its configuration is restored if it had not written its own."""
        for record in (self.path / "stages").glob("*.was"):
            record.unlink()
        config, backup = self.path / "config.yaml", self.path / "config.yaml.was"
        if backup.is_file() and not config.is_file():
            os.replace(backup, config)
        backup.unlink(missing_ok=True)

    def _remove_what_is_empty(self, is_new: bool) -> None:
        """Removes partial/ if empty, and a new directory altogether if a wrong input ended the run before a stage."""
        if is_new and {path.name for path in self.path.rglob("*")} <= {"run.lock", "partial", "stages"}:
            shutil.rmtree(self.path)
        elif self._partial.is_dir() and not any(self._partial.iterdir()):
            self._partial.rmdir()

    @contextlib.contextmanager
    def keep_config(self, config: RunConfig) -> Iterator[RunConfig | None]:
        """Writes config.yaml and yields the old one, which is restored if an error comes before any stage has finished.

        Raises:
            FlexrankError: the directory holds a run of another name, or one that this version cannot read.
        """
        path = self.path / "config.yaml"
        try:
            old = load_config(self.path) if path.is_file() else None
        except FlexrankError as error:
            raise FlexrankError(f"{error}; correct it, remove the run, or choose another output") from error
        if old is not None and old.name != config.name:
            raise FlexrankError(f"{self.path}: holds the run {old.name!r}, not {config.name!r}; choose another output")
        self._has_finished_a_stage = False
        if old is not None and old.model_copy(update={"output": config.output}) == config:
            yield old
            return
        # An interrupted run continues with its new configuration.
        with _put_away(path, lambda error: isinstance(error, Exception) and not self._has_finished_a_stage):
            with atomic_file(path) as aside:
                write_config(config, aside)
            yield old

    def is_finished(self, stage: str, fingerprint: str) -> bool:
        """Whether the stage ran with this fingerprint and all files it wrote are there.

        Raises:
            FlexrankError: one of them was edited or truncated since.
        """
        record = self._read_record(stage)
        if record.get("fingerprint") != fingerprint or not self._is_whole(record):
            return False
        self.require_unedited(stage)
        return True

    def require_unedited(self, stage: str) -> None:
        """Raises FlexrankError if a file that the stage wrote was edited or truncated since; a missing one passes."""
        for name in self._edited(self._read_record(stage)):
            made = f"was edited after `{stage}` wrote it; delete {self.path / Path(name).parts[0]} to make it again"
            raise FlexrankError(f"{self.path / name}: {made}")

    def _is_whole(self, record: Mapping[str, Any]) -> bool:
        return all((self.path / name).exists() for name in record.get("files", ()))

    def _edited(self, record: Mapping[str, Any]) -> list[str]:
        marks = {name: mark for name, mark in record.get("files", {}).items() if (self.path / name).exists()}
        return [name for name, mark in marks.items() if mark not in (None, _mark(self.path / name))]

    @contextlib.contextmanager
    def replacing(self, stage: str) -> Iterator[None]:
        """Sets the stage's record aside during the block, so what a killed stage leaves never counts as finished.

        If a stage fails before it has changed its old results, their record is restored.
        """
        record = self._read_record(stage)
        with _put_away(self._record(stage), lambda _: self._is_whole(record) and not self._edited(record)):
            yield

    def finish(
        self, stage: str, fingerprint: str, code: str, outputs: Sequence[str], extras: Sequence[str], seconds: float
    ) -> None:
        """Records a finished stage, the `code_digest` in its fingerprint too, and removes its checkpoint.

        Its `outputs`, files and directories, must not be edited from now on; its `extras` may be, but not removed.
        """
        files = {name: _mark(self.path / name) for name in self._files(outputs)} | dict.fromkeys(self._files(extras))
        record = {"stage": stage, "fingerprint": fingerprint, "code": code, "seconds": round(seconds, 3)}
        write_json(self._record(stage), record | {"files": files})
        for path in self._partial.glob(f"{stage}-*"):
            _remove(path)
        self._has_finished_a_stage = True

    def _files(self, names: Sequence[str]) -> list[str]:
        """The named files, and all in the named directories except model cards, relative to the run directory."""
        roots = [self.path / name for name in names]
        files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
        is_kept = {file: file.is_file() and (file.name != CARD or file in roots) for file in files}
        return [str(file.relative_to(self.path)) for file in files if is_kept[file]]

    def seconds(self) -> dict[str, float]:
        """The seconds that each finished stage took."""
        return {record["stage"]: record["seconds"] for record in self._records()}

    def partial(self, stage: str, fingerprint: str, ending: str = "") -> Path:
        """The path of the checkpoint from which a stage resumes after an interruption."""
        self._partial.mkdir(exist_ok=True)
        return self._partial / f"{stage}-{fingerprint[:16]}{ending}"

    def fingerprint_of(self, stage: str) -> str | None:
        """The fingerprint that a finished stage was recorded with; None if the stage is not finished."""
        return self._read_record(stage).get("fingerprint")

    def codes(self) -> dict[str, str]:
        """The `code_digest` of each finished stage whose record has one; earlier versions did not keep it."""
        return {record["stage"]: record["code"] for record in self._records() if "code" in record}

    def remove_stale(self, fingerprints: Mapping[str, str], reached: Collection[str]) -> None:
        """Removes all of partial/ except what unfinished stages with these fingerprints resume from.

        A checkpoint of a stage that the command has not `reached` stays, whatever its fingerprint.
        """
        unfinished = {
            f"{stage}-{fingerprint[:16]}"
            for stage, fingerprint in fingerprints.items()
            if self.fingerprint_of(stage) != fingerprint
        }
        skipped = fingerprints.keys() - reached
        for path in self._partial.iterdir() if self._partial.is_dir() else ():
            name = path.name.partition(".")[0]
            stage, _, mark = name.partition("-")
            if name not in unfinished and not (stage in skipped and len(mark) == 16):  # scratch has shorter marks
                _remove(path)

    def forget(self, stage: str) -> None:
        """Makes the stage run again when it is next needed."""
        self._record(stage).unlink(missing_ok=True)

    @property
    def _partial(self) -> Path:
        return self.path / "partial"

    def _records(self) -> list[dict[str, Any]]:
        """The finished stages' records, by name."""
        return [read_json(path) for path in sorted((self.path / "stages").glob("*.json"))]

    def _record(self, stage: str) -> Path:
        return self.path / "stages" / f"{stage}.json"

    def _read_record(self, stage: str) -> dict[str, Any]:
        """A finished stage's record; empty for any other stage."""
        path = self._record(stage)
        return read_json(path) if path.is_file() else {}


def fingerprint(
    stage: str, config: RunConfig, keys: Sequence[str], needs: Sequence[str], code: str, more: Any = None
) -> str:
    """SHA-256 over what a stage depends on.

    That is the configuration's values of the dotted `keys`, the fingerprints of the stages it needs, the `code_digest`
    of what it runs, and what `more` it reads.
    """
    values = config.model_dump(mode="json")
    read = {key: functools.reduce(operator.getitem, key.split("."), values) for key in keys}
    return digest_json({"stage": stage, "config": read, "needs": list(needs), "code": code, "more": more})


def code_digest(modules: Sequence[str]) -> str:
    """SHA-256 of flexrank's version and of the code of its modules and subpackages of these names."""
    return digest_json([__version__, *map(_digest_of, modules)])


@functools.cache
def _digest_of(module: str) -> str:
    root = Path(__file__).parents[1]
    files = [*root.glob(f"{module}.py"), *sorted((root / module).rglob("*.py"))]
    assert files, module
    return files_digest(files)


def files_digest(files: Iterable[Path]) -> str:
    """SHA-256 of the code in these files, without comments, docstrings and layout."""
    return digest_json([_dump(file.read_text(encoding="utf8")) for file in files])


def _dump(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(ast.Constant()), *_] as body:
                del body[0]  # a docstring
    return ast.dump(tree)


def identity(path: str | Path, hashed: int = HASHED_BYTES) -> Any:
    """Identifies the content of a file or directory; returns the path itself if there is neither.

    Files larger than `hashed` bytes are identified by size and modification time.
    """
    path = Path(path)
    if path.is_dir():
        files = (file for file in sorted(path.rglob("*")) if file.is_file())
        return {str(file.relative_to(path)): identity(file, hashed) for file in files}
    if not path.is_file():
        return str(path)
    stat = path.stat()
    return digest_file(path) if stat.st_size <= hashed else [stat.st_size, stat.st_mtime_ns]


def require_apart(config: RunConfig, source: str | Path) -> None:
    """Raises FlexrankError if the run directory is inside what the run reads: its own files would change its data."""
    for key, place in {"model": source, "data.path": config.data.path, "data.held_out": config.data.held_out}.items():
        if place and Path(place).is_dir() and config.directory.resolve().is_relative_to(Path(place).resolve()):
            inside = f"output {str(config.directory)!r} is inside {key} {str(place)!r}"
            raise FlexrankError(f"{inside}, so the run would read its own files; set output to a folder elsewhere")


def model_identity(source: str | Path) -> Any:
    """As `identity`, without a model's card, other .md files and hidden files, on which no result depends."""
    found = identity(source)
    if not isinstance(found, dict):
        return found
    return {name: one for name, one in found.items() if not (name.endswith(".md") or f"/{name}".count("/."))}


def data_identity(data: DataConfig) -> Any:
    """Identifies what a run reads: a file or texts by their content, a stream by its files' size and modification time.

    A stream is never hashed, because that takes as long as a pass over it. Documentation is identified by the version
    of Python, and a data set of the hub by the keys that name it.
    """
    if data.path is None:
        return platform.python_version()
    if data.is_stream:
        return {file: identity(file, hashed=0) for file in corpus_files(data.source, data.path)} or data.path
    return identity(data.path) if data.source == "images" else texts_identity(data.path)


def texts_identity(path: str) -> Any:
    """Identifies a file of texts, or of a folder the files that `read_texts` reads."""
    return {str(file.relative_to(path)): identity(file) for file in text_files(Path(path))}


def _mark(path: Path) -> str | int:
    """The digest of an output, or the size of a large one: in any copy of the run it reveals whether it was edited."""
    size = path.stat().st_size
    return digest_file(path) if size <= HASHED_BYTES else size


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def _put_away(path: Path, is_restored: Callable[[BaseException], bool]) -> Iterator[None]:
    """Renames a file, which needs no space on a full disk; restores it after an error for which `is_restored` holds."""
    backup = path.with_name(f"{path.name}.was")
    if path.is_file():
        os.replace(path, backup)
    try:
        yield
    except BaseException as error:
        if is_restored(error):
            path.unlink(missing_ok=True)
            if backup.is_file():
                os.replace(backup, path)
        raise
    finally:
        backup.unlink(missing_ok=True)
