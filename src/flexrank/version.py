"""The version that is installed."""

from importlib import metadata

#: The version of flexrank, as `flexrank --version` prints it.
__version__: str = metadata.version("flexrank")
