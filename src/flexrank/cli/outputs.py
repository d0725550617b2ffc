"""Checks where a verb may write a file."""

from collections.abc import Callable
from pathlib import Path

from flexrank.errors import FlexrankError


def require_output(output: Path, suffix: str, is_own: Callable[[Path], bool] = lambda _: False) -> None:
    """Refuses another suffix, a missing parent directory, and an existing file unless `is_own` accepts it."""
    if output.suffix != suffix or (output.exists() and not is_own(output)):
        raise FlexrankError(f"--output {output}: give a name that ends in {suffix}, of a file that is not there")
    if not output.absolute().parent.is_dir():
        raise FlexrankError(f"--output {output}: no such directory as {output.parent}")
