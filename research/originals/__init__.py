"""Rivals' own code as oracles: what their authors' functions give for one tiny model, beside what ours do."""

from research.originals import pifa, slicegpt
from research.originals.original import Original

ORIGINALS: dict[str, Original] = {
    "pifa": Original(
        "https://github.com/biomedical-cybernetics/pivoting-factorization",
        "595a80f9e406f57c4aa12350e0285b92fb9a8b8d",
        pifa.compare,
        pifa.__doc__,
    ),
    "slicegpt": Original(
        "https://github.com/microsoft/TransformerCompression",
        "6b12cdee6ad51791d7c776b3a046bc408b9e77e9",
        slicegpt.compare,
        slicegpt.__doc__,
    ),
}
