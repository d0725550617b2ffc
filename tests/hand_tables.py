"""Tables of times that are set by hand, and a small model and its chain to plan with them."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from flexrank.calibrate import collect_moments
from flexrank.decompose import decompose_
from flexrank.deployment import timing
from flexrank.deployment.planning import LayerPlan, form_key
from flexrank.deployment.timing import SHARES, TOKENS, TimeTable
from flexrank.nn.layers import NestedLayer
from flexrank.nn.surgery import nested_layers, select_layers
from flexrank.profiles import ChainEntry, Footprint, ProfileChain, RankProfile
from flexrank.profiles.costs import aligned_parameters, dense_parameters


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    decompose_(model, collect_moments(model, [torch.randn(64, 12)], select_layers(model)), method="datasvd")
    return model


def by_hand(tmp_path: Path, cost: dict[str, float], model: nn.Module) -> TimeTable:
    """A table in which a form's time is its parameters times `cost`, at every number of tokens."""
    table = TimeTable(torch.float32, directory=tmp_path)
    for layer in nested_layers(model).values():
        shape, full = layer.matrix_shape, min(layer.matrix_shape)
        ranks = [max(1, round(share * full)) for share in SHARES]
        aligned = [
            cost["aligned"] * aligned_parameters(shape, r, timing.timed_slack(shape, r, torch.float32)) for r in ranks
        ]
        plain = [cost["plain"] * r * sum(shape) for r in ranks]
        dense = [cost["dense"] * dense_parameters(shape)]
        times = {"dense": dense, "plain": plain, "aligned": aligned}
        table._times[form_key(layer)] = {
            form: [[one * tokens for one in row] for tokens in TOKENS] for form, row in times.items()
        }
    return table


def total(plans: dict[str, LayerPlan], layers: dict[str, NestedLayer], table: TimeTable) -> np.ndarray:
    return sum(
        (np.array(table.seconds(form_key(layers[name]), plan.rank, plan.slack)) for name, plan in plans.items()),
        np.zeros(len(TOKENS)),
    )


def all_dense(layers: dict[str, NestedLayer]) -> dict[str, LayerPlan]:
    return {name: LayerPlan(1, None, dense_parameters(layer.matrix_shape)) for name, layer in layers.items()}


def chain_of(model: nn.Module) -> ProfileChain:
    layers = nested_layers(model)
    entries = []
    for share in np.linspace(0.1, 1, 12):
        ranks = {name: max(1, round(share * layer.max_rank)) for name, layer in layers.items()}
        size = sum(
            min(aligned_parameters(layers[name].matrix_shape, rank), dense_parameters(layers[name].matrix_shape))
            for name, rank in ranks.items()
        )
        entries.append(ChainEntry(RankProfile(ranks), size, 1 - share))
    dense = sum(dense_parameters(layer.matrix_shape) for layer in layers.values())
    return ProfileChain(tuple(entries), dense, Footprint(0, 0, 4), "hand")
