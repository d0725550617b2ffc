"""The folder of models and data that experiments read."""

import os
from pathlib import Path

from flexrank.errors import FlexrankError

VARIABLE = "FLEXRANK_ASSETS"


def asset_path(*parts: str) -> Path:
    """A path in the folder that FLEXRANK_ASSETS names, which need not exist; where it is not set, the name itself."""
    return Path(os.environ.get(VARIABLE) or f"${VARIABLE}", *parts)


def assets_directory(*needed: str) -> Path:
    """The folder that FLEXRANK_ASSETS names; a needed entry that is missing raises FlexrankError."""
    for name in needed:
        if not asset_path(name).exists():
            raise FlexrankError(f"{asset_path(name)}: missing; set {VARIABLE} to the folder that holds {name}")
    return asset_path()
