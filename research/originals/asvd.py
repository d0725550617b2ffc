"""Their `act_aware_utils.calib_input_distribution` (`abs_mean`) and `modules.svd_linear.SVDLinear.from_linear` are run.

`from_linear` uses `torch.svd_lowrank`, whose random projection misses the optimum. Ours is compared with theirs as it
is, and with an exact decomposition in its place. They add 1e-6 to the scale; ours has a floor of 1e-6 times the
largest. The search of ranks is not run, because `evaluate_utils` needs an old version of lm-eval.
"""

import contextlib
import importlib
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from research.baselines import asvd
from research.baselines.statistics import mean_magnitudes, next_token_loss
from research.originals.original import RANKS, Row, difference, importing, product, row, tiny_model


def compare(clone: Path) -> list[Row]:
    """Compares the scales, and the layers at several ranks."""
    model, layers, batches = tiny_model()
    ours = mean_magnitudes(model, batches, layers, next_token_loss)
    with importing(clone), tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        Path("cache").mkdir()  # it caches there what it has calibrated
        importlib.import_module("act_aware_utils").calib_input_distribution(model, batches, "abs_mean", False)
        linear = importlib.import_module("modules.svd_linear").SVDLinear
        scales: dict[str, Any] = {name: layer.scaling_diag_matrix for name, layer in layers.items()}
        as_it_is = _differences(linear, layers, ours)
        with mock.patch.object(torch, "svd_lowrank", _exact):
            exactly = _differences(linear, layers, ours)
    return [
        row("scales", [difference(ours[name] * len(batches), scale) for name, scale in scales.items()], 1e-5),
        row(f"layers at ranks {RANKS}, theirs by an exact decomposition", exactly, 1e-4),
        row(f"layers at ranks {RANKS}, theirs by random projection", as_it_is),
    ]


def _differences(linear: Any, layers: dict[str, nn.Linear], magnitudes: dict[str, Tensor]) -> list[float]:
    found = []
    for name, layer in layers.items():
        factors = asvd.factors(layer.weight.detach().double(), magnitudes[name])
        for rank in RANKS:
            ratio = rank * sum(layer.weight.shape) / layer.weight.numel() + 1e-6
            theirs = linear.from_linear(layer, ratio, act_aware=True, alpha=asvd.ALPHA)
            assert theirs.truncation_rank == rank
            found.append(difference(product(factors, rank), theirs.ALinear.weight @ theirs.BLinear.weight))
    return found


def _exact(matrix: Tensor, q: int) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, :q], values[:q], right[:q].T
