"""The run directory: who may write to it, which stage stands, and what a stage left behind.

    RUN/config.yaml           the whole configuration, defaults included
    RUN/stages/STAGE.json     fingerprint, seconds and checksums of a finished stage
    RUN/partial/              what an interrupted stage goes on from; empty after a whole run

A stage's fingerprint covers the configuration it reads, the files it reads, the version of flexrank, and the
fingerprints of the stages it needs: a changed key makes the stages below it run again, and no other.
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

from flexrank.config import RunConfig, load_config, write_config
from flexrank.errors import FlexrankError
from flexrank.integrity import digest_file
from flexrank.storage import read_json, write_aside, write_json

# Beyond it a file is known by its size and time of change: hashing a 16 GB model would take longer than a skipped run.
HASHED_BYTES = 1 << 30


class RunDirectory:
    """A run's files, by the name of the stage that wrote them."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

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

    def keep_config(self, config: RunConfig) -> None:
        """Writes config.yaml unless it holds this configuration already.

        Raises:
            FlexrankError: it holds a run of another name, which would be written over.
        """
        path = self.path / "config.yaml"
        kept = _kept_config(self.path)
        if kept is not None and kept.name != config.name:
            raise FlexrankError(f"{self.path}: holds the run {kept.name!r}, not {config.name!r}; choose another output")
        if kept is not None and kept.model_copy(update={"output": config.output}) == config:
            return
        with write_aside(path) as aside:
            write_config(config, aside)

    def is_finished(self, stage: str, fingerprint: str, outputs: Sequence[str]) -> bool:
        """Whether the stage ran with this fingerprint and all it wrote is there.

        Raises:
            FlexrankError: a JSON file of it was edited since.
        """
        record_path = self._record(stage)
        if not record_path.is_file():
            return False
        record = read_json(record_path)
        if record.get("fingerprint") != fingerprint or not all((self.path / name).exists() for name in outputs):
            return False
        for name, digest in record["files"].items():
            if digest_file(self.path / name) != digest:
                raise FlexrankError(
                    f"{self.path / name}: was edited after `{stage}` wrote it; delete it to make it anew"
                )
        return True

    def forget(self, stage: str) -> None:
        """Removes the stage's record, before it writes: what an interrupted stage leaves never counts as finished."""
        self._record(stage).unlink(missing_ok=True)

    def finish(self, stage: str, fingerprint: str, outputs: Sequence[str], seconds: float) -> None:
        """Records a stage that is done, and drops its partial state."""
        files = [name for name in outputs if (self.path / name).is_file()]
        record = {
            "stage": stage,
            "fingerprint": fingerprint,
            "seconds": round(seconds, 3),
            "outputs": list(outputs),
            "files": {name: digest_file(self.path / name) for name in files},
        }
        write_json(self._record(stage), record)
        self._drop_partial(stage, keep=None)

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

    def _record(self, stage: str) -> Path:
        return self.path / "stages" / f"{stage}.json"


def _kept_config(directory: Path) -> RunConfig | None:
    """The configuration in a run directory; None where it holds none that this version reads."""
    try:
        return load_config(directory)
    except FlexrankError:
        return None


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


def _value_at(value: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        value = value[part]
    return value
