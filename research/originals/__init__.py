"""Rivals' own code as oracles: what their authors' functions give for one tiny model, beside what ours do.

Nothing of that code is in this repository. The user clones it; `python -m research.originals CLONES` imports functions
from the clones, runs them, and writes docs/baselines.md. Each module here has

    compare(clone) -> rows: what was compared, the largest relative difference, its bound, and whether it holds

A row without a bound is shown and has no verdict.
"""

from research.originals import acip, asvd, lems, pifa, slicegpt, svd_llm
from research.originals.original import Original

ORIGINALS: dict[str, Original] = {
    "asvd": Original(
        "https://github.com/hahnyuan/ASVD4LLM", "863042743edb4c0dcc512a45534dea07df16b140", asvd.compare, asvd.__doc__
    ),
    "svd-llm": Original(
        "https://github.com/AIoT-MLSys-Lab/SVD-LLM",
        "1c1009a99bea54c22c27a4dd5d9fba7116dc456b",
        svd_llm.compare,
        svd_llm.__doc__,
    ),
    "lems": Original(
        "https://github.com/lems-svd/lems", "9eaf26243562f07c6261da8abbc8787ae655146c", lems.compare, lems.__doc__
    ),
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
    "acip": Original(
        "https://github.com/merantix-momentum/acip",
        "8b3d201623d29fb193daa6d77e7c16447de1603a",
        acip.compare,
        acip.__doc__,
    ),
}
