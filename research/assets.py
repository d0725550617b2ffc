"""The folder of models and data that experiments read."""

import os
from pathlib import Path

from flexrank.errors import FlexrankError

VARIABLE = "FLEXRANK_ASSETS"


def asset_path(*parts: str) -> Path:
    """Returns a path in the folder that FLEXRANK_ASSETS names, or in `$FLEXRANK_ASSETS` if unset; it need not exist."""
    return Path(os.environ.get(VARIABLE) or f"${VARIABLE}", *parts)


def assets_directory(*needed: str) -> Path:
    """Returns the folder that FLEXRANK_ASSETS names; raises FlexrankError if an entry in `needed` is missing."""
    for name in needed:
        if not asset_path(name).exists():
            raise FlexrankError(f"{asset_path(name)}: missing; set {VARIABLE} to the folder that holds {name}")
    return asset_path()
