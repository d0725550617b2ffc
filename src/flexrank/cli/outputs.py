"""Checks where a verb may write a file."""

from collections.abc import Callable
from pathlib import Path

from flexrank.errors import FlexrankError


def require_output(output: Path, suffix: str, may_replace: Callable[[Path], bool] = lambda _: False) -> None:
    """Refuses another suffix, a missing parent directory, and an existing file unless `may_replace` accepts it."""
    if output.suffix != suffix or (output.exists() and not may_replace(output)):
        raise FlexrankError(f"--output {output}: give the name of a new file that ends in {suffix}")
    if not output.absolute().parent.is_dir():
        raise FlexrankError(f"--output {output}: no such directory as {output.parent}")
