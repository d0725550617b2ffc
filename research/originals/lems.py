"""Their `KFAC_SVDFactorization._compute_scaling` (its fast form) and `_factorize_matrix` are run, on the CPU.

Their code asks torch for the current GPU and gets the CPU. It whitens the outputs by L_G, where the minimum of the
Kronecker-factored loss needs L_Gᵀ (`research/baselines/kfac_svd.py`). Ours is compared with theirs by their matrix and
by the right one, and so is the loss tr(G (W − W_r) A (W − W_r)ᵀ). In the comparison of rivals each model takes the
matrix that is better on the tuning half. The search of ranks is not run, because it needs gurobipy, PuLP, Optuna and a
GPU.
"""

import contextlib
import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from research.baselines import kfac_svd
from research.baselines.statistics import next_token_loss
from research.originals.original import RANKS, Row, difference, importing, product, row, tiny_model


def compare(clone: Path) -> list[Row]:
    """Compares both moments, and the layers at several ranks."""
    model, layers, batches = tiny_model()
    ours = kfac_svd.moments(model, batches, layers, next_token_loss)
    with importing(clone), _cpu_in_place_of_gpu():
        kind = importlib.import_module("compression.factorization.kfac_svd").KFAC_SVDFactorization
        theirs = kind(vision=False, fast=True, calib_dataset_name="tokens", use_cache=False)
        twin = copy.deepcopy(model)
        theirs._compute_scaling(twin, twin, "", batches, ["head", "norm"])
        products = {(n, r): _product(theirs, n, one.weight.detach(), r) for n, one in layers.items() for r in RANKS}
    same, right, gains = list[float](), list[float](), list[float]()
    for (name, rank), their in products.items():
        weight = layers[name].weight.detach().double()
        same.append(difference(product(kfac_svd.factors(weight, ours[name], as_coded=True), rank), their))
        best = product(kfac_svd.factors(weight, ours[name]), rank)
        right.append(difference(best, their))
        gains.append(_loss(weight - best, ours[name]) / _loss(weight - their.double(), ours[name]) - 1)
    inputs = [difference(ours[name][0], one) for name, one in theirs.column_scaling_dict.items()]
    outputs = [difference(ours[name][1], one) for name, one in theirs.row_scaling_dict.items()]
    return [
        row("sums of x xᵀ", inputs, 1e-5),
        row("sums of g gᵀ, of middle tokens with bounded lengths", outputs, 1e-5),
        row(f"layers at ranks {RANKS}, ours whitened by their L_G", same, 1e-4),
        row(f"layers at ranks {RANKS}, ours whitened by L_Gᵀ", right),
        row("loss of these, ours over theirs less 1, where it is least", [min(gains)]),
        row("loss of these, ours over theirs less 1, where it is largest", gains, 0.0),
    ]


def _product(theirs: Any, name: str, weight: Tensor, rank: int) -> Tensor:
    least = weight.numel() // sum(weight.shape)
    found = theirs._factorize_matrix(weight, least, rank, name, "cpu")
    return found.mat_l @ found.mat_r


def _loss(lost: Tensor, pair: kfac_svd.Moments) -> float:
    inside = kfac_svd.shrunk(pair[0], kfac_svd.INPUT_SHRINKAGE)
    outside = kfac_svd.shrunk(pair[1], kfac_svd.GRADIENT_SHRINKAGE)
    return float((outside @ lost @ inside * lost).sum())


@contextlib.contextmanager
def _cpu_in_place_of_gpu() -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
    ):
        yield
