"""The run directory: who may write to it, which stage stands, and what a stage left behind.

    RUN/config.yaml           the whole configuration, defaults included
    RUN/stages/STAGE.json     fingerprint and seconds of a finished stage, and checksums of the files it wrote
    RUN/partial/              what an interrupted stage goes on from
    RUN/forms.json            the forms that times chose for each size and machine, so that stages agree

A stage's fingerprint covers the configuration it reads, the files it reads (the version of Python, where its own
documentation is the data), the version of flexrank, and the fingerprints of the stages it needs: a changed key makes
the stages below it run again, and no other.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from flexrank.errors import FlexrankError
from flexrank.files import digest_file, read_json, write_aside, write_json
from flexrank.run.config import RunConfig, load_config, write_config

# Beyond it a file is known by its size and time of change: hashing a 16 GB model would take longer than a skipped run.
HASHED_BYTES = 1 << 30


class RunDirectory:
    """A run's files, by the name of the stage that wrote them."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._has_finished_one = False

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run directory for this process; made if absent.

        The system drops the lock with the process that holds it, so a killed run leaves none that counts.

        Raises:
            FlexrankError: another process holds it, or the path is no directory.
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
                holder = file.read().strip() or "unknown"
                raise FlexrankError(
                    f"{self.path}: process {holder} writes to this run; wait for it, or choose another output"
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)
                if is_new:
                    self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """Leaves no directory behind where a wrong input came to light before anything was made."""
        if {path.name for path in self.path.rglob("*")} <= {"run.lock", "partial", "stages"}:
            shutil.rmtree(self.path)

    @contextlib.contextmanager
    def keep_config(self, config: RunConfig) -> Iterator[None]:
        """Holds the configuration in config.yaml. A wrong input that ends the block before a stage is done undoes it.

        Raises:
            FlexrankError: it holds a run of another name, or one that this version cannot read.
        """
        path, was = self.path / "config.yaml", self.path / "config.yaml.was"
        kept = load_config(self.path) if path.is_file() else None
        if kept is not None and kept.name != config.name:
            raise FlexrankError(f"{self.path}: holds the run {kept.name!r}, not {config.name!r}; choose another output")
        is_new = kept is None or kept.model_copy(update={"output": config.output}) != config
        self._has_finished_one = False
        try:
            if is_new:
                if kept is not None:
                    os.replace(path, was)
                with write_aside(path) as aside:
                    write_config(config, aside)
            yield
        except Exception:
            if is_new and not self._has_finished_one:
                path.unlink(missing_ok=True)
                if kept is not None:
                    os.replace(was, path)  # a renaming needs no room on a full disk
            raise
        finally:
            was.unlink(missing_ok=True)

    def is_finished(self, stage: str, fingerprint: str) -> bool:
        """Whether the stage ran with this fingerprint and all it wrote is there.

        Raises:
            FlexrankError: a file of it was edited or truncated since.
        """
        record_path = self._record(stage)
        if not record_path.is_file():
            return False
        record = read_json(record_path)
        if record.get("fingerprint") != fingerprint or not all((self.path / name).exists() for name in record["files"]):
            return False
        for name, digest in record["files"].items():
            if digest not in (None, _mark(self.path / name)):
                output = self.path / Path(name).parts[0]
                raise FlexrankError(
                    f"{self.path / name}: was edited after `{stage}` wrote it; delete {output} to make it anew"
                )
        return True

    @contextlib.contextmanager
    def replacing(self, stage: str) -> Iterator[None]:
        """Puts the stage's record away while the stage works: what a killed one leaves never counts as finished.

        A stage that fails before it has touched its old results gets their record back.
        """
        path = self._record(stage)
        was = path.with_name(f"{path.name}.was")
        if path.is_file():
            os.replace(path, was)
        try:
            yield
        except BaseException:
            if was.is_file() and self._stands(read_json(was)):
                os.replace(was, path)
            raise
        finally:
            was.unlink(missing_ok=True)

    def _stands(self, record: Mapping[str, Any]) -> bool:
        files = {self.path / name: digest for name, digest in record["files"].items()}
        return all(path.exists() and digest in (None, _mark(path)) for path, digest in files.items())

    def finish(
        self, stage: str, fingerprint: str, outputs: Sequence[str], extras: Sequence[str], seconds: float
    ) -> None:
        """Records a stage that is done, and drops its partial state.

        Args:
            stage: its name.
            fingerprint: of what it read.
            outputs: files and directories that it wrote; from now on they may not be edited.
            extras: what it may have written for eyes alone; missed when gone, but not checked.
            seconds: that it took.
        """
        files = {name: _mark(self.path / name) for name in self._files(outputs)}
        record = {
            "stage": stage,
            "fingerprint": fingerprint,
            "seconds": round(seconds, 3),
            "files": files | dict.fromkeys(self._files(extras)),
        }
        write_json(self._record(stage), record)
        self._drop_partial(stage, keep=None)
        self._has_finished_one = True

    def _files(self, names: Sequence[str]) -> list[str]:
        """The named files that are there, and those in the named directories, relative to the run's."""
        roots = [self.path / name for name in names]
        files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
        return [str(file.relative_to(self.path)) for file in files if file.is_file()]

    def seconds(self) -> dict[str, float]:
        """Seconds of each finished stage."""
        records = [read_json(path) for path in sorted((self.path / "stages").glob("*.json"))]
        return {record["stage"]: record["seconds"] for record in records}

    def partial(self, stage: str, fingerprint: str, ending: str = "") -> Path:
        """Where a stage keeps what it goes on from after an interruption; that of other fingerprints is removed."""
        path = self.path / "partial" / f"{stage}-{fingerprint[:16]}{ending}"
        path.parent.mkdir(exist_ok=True)
        self._drop_partial(stage, keep=path)
        return path

    def _drop_partial(self, stage: str, keep: Path | None) -> None:
        partial = self.path / "partial"
        # The second pattern finds what a killed process was writing aside.
        for path in [*partial.glob(f"{stage}-*"), *partial.glob(f".{stage}-*")]:
            if path == keep:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def forget(self, stage: str) -> None:
        """The stage is done again when it is next wanted."""
        self._record(stage).unlink(missing_ok=True)

    def _record(self, stage: str) -> Path:
        return self.path / "stages" / f"{stage}.json"


def fingerprint(stage: str, config: RunConfig, keys: Sequence[str], needs: Sequence[str], sources: Any = None) -> str:
    """SHA-256 over what a stage depends on.

    Args:
        stage: its name.
        config: the configuration.
        keys: dotted keys, or sections, of the configuration that the stage reads.
        needs: fingerprints of the stages whose files it reads.
        sources: identities of files that it reads, from `identity`.
    """
    read = {key: _value_at(config.model_dump(mode="json"), key) for key in keys}
    parts = {
        "stage": stage, "version": metadata.version("flexrank"), "config": read, "needs": list(needs),
        "sources": sources,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def identity(path: str | Path) -> Any:
    """What tells a file, or the files of a directory, from others; the name itself where nothing is there."""
    path = Path(path)
    if path.is_dir():
        return {str(file.relative_to(path)): identity(file) for file in sorted(path.rglob("*")) if file.is_file()}
    if not path.is_file():
        return str(path)
    stat = path.stat()
    return digest_file(path) if stat.st_size <= HASHED_BYTES else [stat.st_size, stat.st_mtime_ns]


def _mark(path: Path) -> str | int:
    """What tells an output from an edited one, in any copy of the run: its digest, or its size where it is large."""
    size = path.stat().st_size
    return digest_file(path) if size <= HASHED_BYTES else size


def _value_at(value: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        value = value[part]
    return value
