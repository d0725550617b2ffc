"""Rivals' own code as oracles: what their authors' functions return for one tiny model, beside what ours return.

None of that code is in this repository. The user clones it; `python -m research.originals CLONES` imports functions
from the clones, runs them, and writes docs/baselines.md. Each module here has

    compare(clone) -> rows: what was compared, the largest relative difference, its bound, and whether it holds

A row without a bound is shown without a verdict.
"""

from types import ModuleType

from research.originals import acip, asvd, lems, pifa, slicegpt, svd_llm
from research.originals.original import Original

#: For each original: its module here, its repository on GitHub, and the commit.
PLACES: dict[str, tuple[ModuleType, str, str]] = {
    "asvd": (asvd, "hahnyuan/ASVD4LLM", "863042743edb4c0dcc512a45534dea07df16b140"),
    "svd-llm": (svd_llm, "AIoT-MLSys-Lab/SVD-LLM", "1c1009a99bea54c22c27a4dd5d9fba7116dc456b"),
    "lems": (lems, "lems-svd/lems", "9eaf26243562f07c6261da8abbc8787ae655146c"),
    "pifa": (pifa, "biomedical-cybernetics/pivoting-factorization", "595a80f9e406f57c4aa12350e0285b92fb9a8b8d"),
    "slicegpt": (slicegpt, "microsoft/TransformerCompression", "6b12cdee6ad51791d7c776b3a046bc408b9e77e9"),
    "acip": (acip, "merantix-momentum/acip", "8b3d201623d29fb193daa6d77e7c16447de1603a"),
}
ORIGINALS: dict[str, Original] = {
    name: Original(f"https://github.com/{place}", commit, module.compare, module.__doc__)
    for name, (module, place, commit) in PLACES.items()
}
