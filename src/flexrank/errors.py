"""The one error that a user can cause and mend, and how it quotes others."""

from typing import Any


class FlexrankError(ValueError):
    """A wrong input, in one line that names it and says what would be right.

    The command line prints the message alone and exits with 2; a library caller catches it as a `ValueError`.
    """


def first_line(error: Exception) -> str:
    """The first line of what an error of another library says, or its class where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shown(value: Any) -> str:
    """A value as Python writes it, on one line of at most sixty characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
