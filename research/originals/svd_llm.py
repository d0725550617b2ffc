"""Their `SVDLLM.profle_svdllm` (sums of X Xᵀ and their Cholesky factors) and `SVDLLM.whitening` are run, on the CPU.

Here the Cholesky factorisation never has to be repeated, because there are more tokens than inputs. Ours adds a ridge
of a millionth of the largest eigenvalue, and theirs computes in float32. Their repository has no code for the ranks of
the second version.
"""

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path

import torch

from flexrank.nn.linalg import Factors
from research.baselines import svd_llm
from research.baselines.statistics import input_moments, next_token_loss
from research.originals.original import RANKS, Row, difference, importing, product, row, tiny_model


def compare(clone: Path) -> list[Row]:
    """Compares the whitening matrices, and the layers at several ratios."""
    model, layers, batches = tiny_model()
    moments = input_moments(model, batches, layers, next_token_loss)
    factors = {name: svd_llm.factors(one.weight.detach().double(), moments[name]) for name, one in layers.items()}
    roots, found = list[float](), list[float]()
    with importing(clone):
        theirs = importlib.import_module("SVDLLM")
        profiles = theirs.profle_svdllm("llama", copy.deepcopy(model), batches, "cpu")
        for number, block in profiles.items():
            for name, root in block.items():
                roots.append(difference(moments[f"model.layers.{number}.{name}"], root @ root.T))
        for rank in RANKS:
            cut = copy.deepcopy(model)
            ratio = rank * (48 + 48) / (48 * 48) + 1e-6  # for square layers; others have the rank that it gives
            theirs.whitening("llama", cut, profiles, ratio, "cpu")
            found += _differences(cut, factors)
    return [
        row("sums of X Xᵀ, from their Cholesky factors", roots, 1e-5),
        row(f"layers, square ones at ranks {RANKS}, others at the same shares", found, 1e-3),
    ]


def _differences(cut: torch.nn.Module, factors: Mapping[str, Factors]) -> list[float]:
    found = []
    for name, one in factors.items():
        place, _, layer = name.rpartition(".")
        kind = layer.removesuffix("_proj")
        module = cut.get_submodule(place)
        u, v = (getattr(module, f"{kind}_{side}_proj").weight for side in "uv")
        found.append(difference(product(one, u.shape[1]), u @ v))
    return found
