"""Their `PIFA.profle_svdllm_low_resource`, `PIFA.reconstruct` and `PivotLinear.from_linear` are run, on the CPU.

Both sides mix a quarter of the dense model's outputs into the targets, and fit U and then V, as the repository's README
says. Their `dev` and `Tensor.cuda` are replaced by the CPU, and their `dataloader`, which the first function reads as a
global name, by our batches. They compute in float32, so layers whose inputs hardly vary differ by more than the logits
do. They count r more parameters for a layer's indices; the ratios are chosen such that the ranks agree. Pivots may
differ where two are equally good.
"""

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from flexrank.nn.matrix import matrix_shape
from flexrank.nn.switch import nested_layers
from flexrank.profiles.costs import dense_parameters, largest_rank
from research.baselines import pifa
from research.baselines.pivoted import PivotedLinear, pivoted_order
from research.baselines.statistics import next_token_loss
from research.originals.original import RANKS, Row, difference, importing, row, tiny_model

RATIOS = (0.6, 0.4)


def compare(clone: Path) -> list[Row]:
    """Compares layers and logits of the reconstructed models, by ratio, and pivoted layers."""
    model, layers, batches = tiny_model()
    inputs: Any = batches
    parts, logits = list[float](), list[float]()
    with importing(clone), mock.patch.object(Tensor, "cuda", lambda self, *_: self):
        original: Any = importlib.import_module("PIFA")
        original.dev = torch.device("cpu")
        original.dataloader = [(batch["input_ids"],) for batch in inputs]
        for ratio in RATIOS:
            theirs = _reconstructed(original, model, ratio)
            ours: Any = pifa.make_at(model, batches, layers, next_token_loss, _ranks(layers, ratio)).model
            for name, layer in nested_layers(ours).items():
                one = theirs.get_submodule(name)
                assert layer.rank == one.BLinear.weight.shape[0]
                parts.append(difference(layer.matrix, one.ALinear.weight @ one.BLinear.weight))
            with torch.no_grad():
                logits += [difference(ours(**batch).logits, theirs(**batch).logits) for batch in inputs]
        pivoted = [_pivoted(original.PivotLinear, layer, rank) for layer in layers.values() for rank in RANKS]
    return [
        row(f"layers after reconstruction, at shares {RATIOS}", parts, 1e-2),
        row(f"logits after reconstruction, at shares {RATIOS}", logits, 1e-3),
        row(f"pivoted layers at ranks {RANKS}", pivoted, 1e-5),
    ]


def _ranks(layers: Mapping[str, nn.Module], ratio: float) -> dict[str, int]:
    """Returns each layer's largest rank within the ratio; filling the rest, as `pifa.make` does, is ours."""
    shapes = {name: matrix_shape(layer) for name, layer in layers.items()}
    return {name: largest_rank(shape, ratio * dense_parameters(shape)) for name, shape in shapes.items()}


def _reconstructed(original: Any, model: Any, ratio: float) -> Any:
    """Returns their model, with U and V of each layer in an `SVDLinear`."""
    new = copy.deepcopy(model).float()
    new.seqlen = original.dataloader[0][0].shape[1]
    arguments = SimpleNamespace(
        model="llama", DEV="cpu", prune="svd-llm", owl=False, attn_ratio=ratio, overall_ratio=ratio, use_pifa=True,
        old_output_factor=pifa.MIX, reconstruct_step=2,
    )  # fmt: skip
    profile = original.profle_svdllm_low_resource(new, original.dataloader, arguments)
    original.reconstruct(new, original.dataloader, profile, arguments)
    return new


def _pivoted(kind: Any, layer: nn.Linear, rank: int) -> float:
    """Returns the difference of both pivoted forms of one matrix of this rank; they store as many parameters."""
    left, values, right = torch.linalg.svd(layer.weight.detach().double(), full_matrices=False)
    u, v = left[:, :rank] * values[:rank], right[:rank]
    theirs = kind.from_linear((u @ v).float(), None, rank)
    order = pivoted_order(u)
    ours = PivotedLinear(v.shape[1], rank, order, dtype=torch.float64)
    identity = torch.eye(v.shape[1])
    with torch.no_grad():
        ours.latent.weight.copy_(u[order[:rank]] @ v)
        ours.expand.weight.copy_(torch.linalg.solve(u[order[:rank]], u[order[rank:]], left=False))
        counts = [sum(parameter.numel() for parameter in one.parameters()) for one in (ours, theirs)]
        assert counts[0] == counts[1] == rank * (sum(layer.weight.shape) - rank)
        return difference(ours(identity.double()), theirs(identity))
