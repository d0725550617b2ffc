"""The errors that a user can cause and fix, and how their messages quote other errors and values."""

import sys
from typing import Any


class FlexrankError(ValueError):
    """A wrong input; the message, of one line, names it and says what would be right.

    The command line prints the message alone and exits with 2; a library caller catches it as a `ValueError`.
    """


class DivergedError(FlexrankError):
    """A loss or gradient of training is not finite; a lower learning rate may keep it finite."""


def first_line(error: Exception) -> str:
    """The first line of another library's error message, or the name of the error's class if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def short_repr(value: Any) -> str:
    """The `repr` of a value, on one line of at most sixty characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def is_out_of_memory(error: Exception) -> bool:
    """Whether the GPU or the machine is out of memory; torch's CPU allocator reports the latter as a RuntimeError."""
    of_torch = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    return isinstance(error, (MemoryError, of_torch)) or "DefaultCPUAllocator: " in str(error)
