"""Where a verb may write a file of its own."""

from collections.abc import Callable
from pathlib import Path

from flexrank.errors import FlexrankError


def require_output(output: Path, suffix: str, is_own: Callable[[Path], bool] = lambda _: False) -> None:
    """Refuses a place that cannot be written to, and a file that is there but not `is_own`: it may be anything."""
    if output.suffix != suffix or (output.exists() and not is_own(output)):
        raise FlexrankError(f"--output {output}: give a name that ends in {suffix}, of a file that is not there")
    if not output.absolute().parent.is_dir():
        raise FlexrankError(f"--output {output}: no such directory as {output.parent}")
