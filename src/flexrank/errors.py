"""The one error that a user can cause and mend."""


class FlexrankError(ValueError):
    """A wrong input, in one line that names it and says what would be right.

    The command line prints the message alone and exits with 2; a library caller catches it as a `ValueError`.
    """
